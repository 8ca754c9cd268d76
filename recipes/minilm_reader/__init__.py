"""A trial recipe: a reader on the layers of the embedding model, not trained to an end."""
