"""Errors: the few that a user can act on; each message says what to do."""

from __future__ import annotations


class RagaccelError(Exception):
    """Any error of this package that a user can act on."""


class ConfigurationError(RagaccelError, ValueError):
    """A setting or argument that cannot work; raised at the start of a request."""


class UnknownArgumentError(RagaccelError, TypeError):
    """An argument that a class or a call does not take; the message says what to use instead."""


class CapacityError(ConfigurationError):
    """A prompt and its answer do not fit the model's context."""


class MissingExtraError(RagaccelError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} is not installed: pip install 'ragaccel[{extra}]'")
        self.what = what
        self.extra = extra


class ModelNotFoundError(RagaccelError):
    """No model of that name: neither a folder, nor in the local cache, nor on the hub."""


class ModelRefusedError(RagaccelError):
    """A model that cannot be decoded exactly; the message names the cause."""


class ForkError(RagaccelError):
    """A model in a process that was forked from one that had already used a model."""


class DocumentError(RagaccelError):
    """A file that cannot be read as a document."""


class NothingIndexedError(RagaccelError):
    """There is no passage to answer from."""


class IndexMismatchError(RagaccelError):
    """An index made with other settings; the message carries the command that rebuilds it."""


class IndexCorruptError(RagaccelError):
    """An index file that is damaged; the message carries the command that rebuilds it."""


class IndexBusyError(RagaccelError):
    """Another process is writing to the index."""


class IndexWriteError(RagaccelError):
    """An index that cannot be written: the disk is full or permission is missing."""


class MemoryWriteError(RagaccelError):
    """A memory's file that cannot be written; what was saved before is whole."""
