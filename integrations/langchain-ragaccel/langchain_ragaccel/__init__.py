"""ragaccel in LangChain."""

__version__ = "0.1.0"
