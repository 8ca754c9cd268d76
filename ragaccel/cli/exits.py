"""Exit codes: what a script can tell from how a command ended."""

from __future__ import annotations

import errno
from enum import IntEnum

from ragaccel.errors import (
    CapacityError,
    ConfigurationError,
    NothingIndexedError,
    RagaccelError,
)


class ExitCode(IntEnum):
    """How a command ended; the numbers are part of the interface."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOTHING = 3
    PARTIAL = 4
    NOT_ANSWERED = 5
    INTERRUPTED = 130


class UsageError(ConfigurationError):
    """A command line that cannot be carried out as it was typed."""


def exit_code_of(error: BaseException) -> ExitCode:
    """The exit code that an error ends the command with."""
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    if isinstance(error, NothingIndexedError):
        return ExitCode.NOTHING
    if isinstance(error, ConfigurationError) and not isinstance(error, CapacityError):
        return ExitCode.USAGE
    return ExitCode.FAILED


def explain(error: BaseException) -> str:
    """Say in one line what went wrong and what to do about it.

    An error of this package says so itself; the few that the machine raises are put into words
    here; anything else is a defect and is named with its type.
    """
    import sqlite3  # here, for no command that goes well needs it

    message = " ".join(str(error).split())
    if isinstance(error, RagaccelError):
        return message or type(error).__name__
    if _is_full_disk(error):
        return "the disk is full: free some space and run this again; what was saved is kept"
    if isinstance(error, sqlite3.OperationalError) and "locked" in message:
        return "another process is using the index: wait for it to finish, then run this again"
    if isinstance(error, sqlite3.OperationalError) and (
        "readonly" in message or "unable to open" in message
    ):
        return f"the index cannot be written ({message}): give --index PATH in a folder of yours"
    if isinstance(error, PermissionError):
        return f"no permission: {error.filename or message}"
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"a name is too long for this file system: {str(error.filename)[:60]}…"
    if isinstance(error, FileNotFoundError):
        return f"no such file or folder: {error.filename or message}"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out of memory: use a smaller --model, -k or --max-tokens"
    return f"{type(error).__name__}: {message} (--debug shows where)"


def _is_full_disk(error: BaseException) -> bool:
    import sqlite3

    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, sqlite3.OperationalError) and "disk is full" in str(error)
