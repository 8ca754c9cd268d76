"""Answer questions from your own documents with a local model, faster, with the same tokens.

>>> from ragaccel import LLM
>>> llm = LLM.load()
>>> answer = llm.generate("…", references=["…"])

Names are loaded when they are first used: importing this package loads neither torch nor
transformers.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
