"""The decoding loop: its types and its four verbs over token ids, standard library only."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
