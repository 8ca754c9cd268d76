"""SPACE training (arXiv 2402.11809) of adapters, which draft tokens by mask tokens."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
