"""Drafters: they propose the tokens that a verification pass checks. They need no torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
