"""Models: Hugging Face models and tokenizers as what the engine and the face ask for."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
