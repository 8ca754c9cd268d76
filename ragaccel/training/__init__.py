"""SPACE training (arXiv 2402.11809): adapters that draft from mask tokens."""
