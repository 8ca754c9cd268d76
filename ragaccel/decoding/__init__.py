"""The decoding loop over token ids: requests, draft trees, sessions. It needs no torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
