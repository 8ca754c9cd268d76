"""The command line, which answers questions from a folder of documents; see ``main.py``."""
