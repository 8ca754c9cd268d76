"""Functions that numba compiles, and their compilation in the background.

Without numba, or where it is switched off, they run as plain Python.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import subprocess
import sys
from contextlib import suppress
from functools import cache, wraps
from pathlib import Path
from threading import Event, Lock, RLock, Thread
from typing import TYPE_CHECKING, Any, TypeVar

from ragaccel.paths import PerProcess

if TYPE_CHECKING:
    from collections.abc import Callable


Function = TypeVar("Function", bound="Callable[..., Any]")

_NUMBA_SETTINGS = ".numba_config.yaml"
# Methods of numba's dispatcher that resolve the types of new arguments and compile for them.
_DISPATCHER_METHODS = ("typeof_pyval", "_compile_for_args")


def compiled(function: Function) -> Function:
    """Return a compiled function of numbers and arrays; without numba, the plain function.

    The compiled code is cached beside the source, once per version of its folder. The plain
    function stays available as ``py_func``, so that tests can compare the two.
    """
    return _compiled(function, "never")


def inlined(function: Function) -> Function:
    """Return a compiled function that is inlined into its callers.

    Use it for inner loops if it is measurably faster: the cost of a call is mostly reference
    counting of its array arguments.
    """
    return _compiled(function, "always")


def _compiled(function: Function, inline: str) -> Function:
    try:
        numba = _import_numba()
    except ImportError:
        function.py_func = function  # type: ignore[attr-defined]
        return function
    try:
        made: Any = numba.njit(cache=True, nogil=True, inline=inline)(function)
    except RuntimeError:  # there is no writable cache folder
        made = numba.njit(nogil=True, inline=inline)(function)
    if numba.config.DISABLE_JIT:
        made.py_func = function
    else:
        if not _invalidate_with_sources(made, function):
            made = numba.njit(nogil=True, inline=inline)(function)
        _serialize_loading(made)
    kept: Function = made
    return kept


def callback(function: Callable[..., None], signature: Any) -> Any:
    """Compile a function for native code, which calls it at the result's ``address``.

    The compiled code is cached as that of ``compiled``.
    """
    _import_numba()
    from numba.core.ccallback import CFunc
    from numba.core.sigutils import normalize_signature

    def made(*, is_cached: bool) -> Any:
        # A division by zero must not raise an error, which would end the function half-way.
        options = {"error_model": "numpy"}
        found = CFunc(function, normalize_signature(signature), locals={}, options=options)
        if is_cached:
            found.enable_caching()
            if not _invalidate_with_sources(found, function):
                return made(is_cached=False)
        found.compile()
        return found

    with _COMPILE_LOCK.get():
        try:
            return made(is_cached=True)
        except Exception:  # there is no writable cache folder, or the cached code is damaged
            return made(is_cached=False)


_COMPILE_LOCK = PerProcess(RLock)  # held while functions are compiled or loaded


def _serialize_loading(made: Any) -> None:
    """Let one thread at a time resolve a function's types and load its code.

    The first function that a process calls adds types to numba's table, which other threads may be
    reading. Calls whose code is loaded take no lock, because they call neither method.
    """

    def in_turn(asked: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(asked)
        def wait(*args: Any, **kwargs: Any) -> Any:
            with _COMPILE_LOCK.get():
                return asked(*args, **kwargs)

        return wait

    for name in _DISPATCHER_METHODS:
        setattr(made, name, in_turn(getattr(made, name)))


def _import_numba() -> Any:
    """Import numba so that it never reads a settings file of the current folder.

    That folder may belong to someone else, and the file can set where compiled functions are cached
    and unpickled from. A program that has imported numba before is left as it is.
    """
    with _COMPILE_LOCK.get():
        if "numba" not in sys.modules:
            exists = os.path.exists
            os.path.exists = lambda path: path != _NUMBA_SETTINGS and exists(path)
            try:
                from numba.core import config

                config._config_fname = ""
            finally:
                os.path.exists = exists
        import numba

        return numba


def is_jit_disabled() -> bool:
    """Return whether functions run as plain, slow Python."""
    try:
        numba = _import_numba()
    except ImportError:
        return True
    return bool(numba.config.DISABLE_JIT)


def is_uncompiled(function: Any) -> bool:
    """Return whether a function is not compiled yet, and its code can be cached on this machine."""
    try:
        return not function._cache._cache_file._load_index()
    except (AttributeError, OSError):  # there is no writable cache folder
        return False


def _invalidate_with_sources(made: Any, function: Callable[..., Any]) -> bool:
    """Tie a function's cache to all sources of its folder; return whether there is one.

    numba drops cached code if the file of the function changes, but not if the file of a function
    that it calls does: it would continue to call the old one.
    """
    try:
        kept = made._cache._cache_file  # a NullCache has no such attribute
        # Compared before the rest of the index is read, which may name types that are gone.
        kept._version = kept._version, _sources(Path(function.__code__.co_filename).parent)
    except AttributeError:
        return False
    save = made._cache.save_overload

    def save_if_possible(*compiled: Any) -> None:
        with suppress(OSError):  # of a full disk: this process can use the code all the same
            save(*compiled)

    made._cache.save_overload = save_if_possible
    return True


@cache
def _sources(folder: Path) -> str:
    """Return a digest of a folder's sources."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


_COMPILE_TIMEOUT = 300.0  # seconds; compiling takes about ten
# Use this process's paths: otherwise Python would first import from the current folder.
_COMMAND = (
    "import sys; function, *sys.path[:] = sys.argv[1:]; "
    "from ragaccel.jit import find; find(function)()"
)

logger = logging.getLogger("ragaccel")


class JitWarmup:
    """The compilation of some functions, in the background.

    The first time on a machine a subprocess compiles them, in about ten seconds: a thread of this
    process would slow down decoding. Later they load from numba's cache in well under a second.

    Args:
        function: "module:name" of a function that calls all of them.
        last: "module:name" of the one that it compiles last.
    """

    def __init__(self, function: str, last: str) -> None:
        self._function, self._last = function, last
        self._lock = Lock()
        self._thread: Thread | None = None
        self._ready = Event()

    def start(self) -> None:
        """Start compiling in a background thread, unless already started."""
        with self._lock:
            if self._thread is None:
                self._thread = Thread(target=self._run, name="ragaccel-jit-warmup", daemon=True)
                self._thread.start()

    def is_ready(self) -> bool:
        """Return whether the functions are compiled."""
        return self._ready.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Start compiling if needed and wait for its end; return whether all is compiled."""
        self.start()
        if self._thread is not None:
            self._thread.join(seconds)
        return self.is_ready()

    def _run(self) -> None:
        try:
            if is_jit_disabled():
                return
            if is_uncompiled(find(self._last)) and _can_start_python():
                _compile_in_subprocess(self._function)
            find(self._function)()
        except Exception as error:  # answers do not need it; they only come more slowly
            logger.warning(
                "cannot compile functions; answers stay the same, but are slower: %s", error
            )
        else:
            self._ready.set()


def find(function: str) -> Callable[..., Any]:
    """Import a function by its "module:name"."""
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _can_start_python() -> bool:
    """Return whether ``sys.executable`` is a Python interpreter, not a program that embeds one."""
    return "python" in Path(sys.executable or "").name.lower() and not hasattr(sys, "frozen")


def _compile_in_subprocess(function: str) -> None:
    """Compile in a process that finishes even if this one is interrupted or ends."""
    folder = str(Path(__file__).parents[1])
    with suppress(OSError, subprocess.SubprocessError):  # this process compiles instead
        subprocess.run(
            [sys.executable, "-c", _COMMAND, function, folder, *filter(None, sys.path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_COMPILE_TIMEOUT,
            start_new_session=True,
            check=False,
        )
