"""Retrieval: documents to passages, an index over them, and the search."""
