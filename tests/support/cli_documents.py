"""What the documents of the command line's tests say."""

HUT = "The hut sleeps fourteen people in two rooms."
KEY = "The key hangs behind the water tank on the north side."
QUESTION = "Where does the key hang?"
