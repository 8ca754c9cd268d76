"""Retrieval: a folder of files in, the passages that bear on a question out."""
