"""ragaccel for LangChain: chat models, LLMs, retrievers and vector stores.

>>> from langchain_ragaccel import ChatRagaccel
>>> ChatRagaccel().invoke("…")

Classes are imported at first use. Importing the package registers one callback handler, which
collects the documents of every retriever so that answers can copy and cite them.
"""

import lazy_loader

from langchain_ragaccel.callbacks import install as _install

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]

_install()
