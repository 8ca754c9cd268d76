"""The command line: ask a folder of documents; ``commands.py`` lists what it can do."""
