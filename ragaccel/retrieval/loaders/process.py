"""The reading process: a separate process that reads files with bounded time and memory.

A file of a format with compression, nesting or references to itself can take memory of a million
times its size. One process per run reads such files, limited by the operating system if it supports
that, else by a watchdog thread. Files and texts travel through pipes; nothing is unpickled, and
nothing is imported from the working directory, which may be untrusted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ragaccel.errors import DocumentError, MissingExtraError
from ragaccel.passage import Document

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterable

    from typing_extensions import Self

    Read = Callable[[bytes, str], Document]

MAX_SECONDS = 30
MAX_MEMORY_BYTES = 1_000_000_000
MAX_TEXT_BYTES = 100_000_000
MAX_LINES = 4_000_000
_WALL_FACTOR = 10  # wall-clock limit over CPU limit, for busy machines
_OUT_OF_MEMORY = 86  # an exit status
_SIGPROF, _SIGKILL = getattr(signal, "SIGPROF", 27), getattr(signal, "SIGKILL", 9)  # not on Windows
_POLL_SECONDS = 0.02
_ON_LINUX = sys.platform == "linux"
_START_FAILED = "the process that reads such files does not start"
_KEPT_VARIABLES = (
    "PATH SYSTEMROOT LANG LC_ALL TMPDIR TEMP TMP LD_LIBRARY_PATH DYLD_LIBRARY_PATH"
).split()
_VARIABLES = {
    # numpy, which openpyxl imports, would reserve memory for one thread per core
    **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")},
    "MALLOC_ARENA_MAX": "1",  # the heap of a second thread would reserve 64 MB or more
}
_COMMAND = """
import sys
watchdog, seconds, memory, modules, *sys.path = sys.argv[1:]
from ragaccel.retrieval.loaders import document_from_bytes
from ragaccel.retrieval.loaders.process import serve
serve(document_from_bytes, int(seconds), int(memory), watchdog == "watchdog", modules.split())
"""


class ReaderStartError(DocumentError):
    """The error that the reading process cannot start, whatever the file."""


class ReaderProcess:
    """A separate process that reads files; ``close`` ends it.

    The process starts with the first file, or with ``prepare``. Threads may share it, one file
    at a time; a forked process starts its own. The process ends when its parent does, since its
    input pipe closes. ``seconds`` is the CPU time of the last document.

    Args:
        max_seconds: The maximum CPU time of one file.
        max_memory: The maximum memory of the process in bytes.
        watchdog: Limit the memory by a thread even if the operating system could.
    """

    def __init__(
        self,
        max_seconds: int = MAX_SECONDS,
        max_memory: int = MAX_MEMORY_BYTES,
        *,
        watchdog: bool = False,
    ) -> None:
        self.max_seconds = max_seconds
        self.max_memory = max_memory
        self.watchdog = watchdog
        self.seconds = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process after its current file; reading another file starts a new process."""
        if self._owner == os.getpid():
            with self._lock:
                self._stop()

    def prepare(self, modules: Iterable[str] = ()) -> None:
        """Start the process without waiting for it; let it import modules in the background.

        Errors are reported when a file is read: if the process has ended by then, the file is read
        in a new one, which imports no modules early.
        """
        self._reset_after_fork()
        with self._lock, suppress(ReaderStartError):  # the first file reports it
            if self._process is None:
                self._start(modules)

    def read(self, data: bytes, name: str) -> Document:
        """Read a file's bytes as a document.

        Raises:
            DocumentError: The file is broken, or takes more time or memory than allowed.
            ReaderStartError: The process cannot start.
            MissingExtraError: The format needs an optional dependency.
        """
        self._reset_after_fork()
        with self._lock:
            is_fresh = self._process is None
            try:
                return self._read(data, name)
            except _ReadError as error:
                if is_fresh or error.is_final:
                    raise
            # again in a new process: memory left over from earlier files must not count
            return self._read(data, name)

    def _reset_after_fork(self) -> None:
        if self._owner != os.getpid():  # after a fork, the process belongs to the parent
            self._process, self._lock, self._owner = None, threading.Lock(), os.getpid()

    def _read(self, data: bytes, name: str) -> Document:
        process = self._process or self._start()
        self._wait_until_ready(process)
        timer = threading.Timer(self.max_seconds * _WALL_FACTOR, process.kill)
        timer.daemon = True
        timer.start()
        try:
            _write(process.stdin, {"name": name}, data)
            reply, text = _read(process.stdout)
        except (OSError, EOFError, ValueError):
            timed_out = not timer.is_alive()
            raise self._exit_error(timed_out) from None
        except BaseException:  # after an interrupt, a late reply would be taken for the next file's
            self._stop()
            raise
        finally:
            timer.cancel()
        return self._document(reply, text.decode("utf-8", "surrogatepass"))

    def _document(self, reply: dict[str, Any], text: str) -> Document:
        error, message = reply.get("error"), reply.get("message", "")
        if error == "memory":
            self._stop()
            raise _ReadError(self._memory_message())
        if error == "extra":
            raise MissingExtraError(message, reply["extra"])
        if error:
            raise DocumentError(message)
        self.seconds = reply["seconds"]
        pages, lines = map(tuple, (reply["page_starts"], reply["line_numbers"]))
        return Document(reply["path"], text, reply["title"], pages, reply["markup"], lines)

    def _start(self, modules: Iterable[str] = ()) -> subprocess.Popen[bytes]:
        from subprocess import DEVNULL, PIPE, Popen

        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        watchdog = "watchdog" if self.watchdog else ""
        limits = [watchdog, str(self.max_seconds), str(self.max_memory)]
        flags = ["-I", *(["-B"] if sys.dont_write_bytecode else [])]
        try:
            self._process = Popen(
                [_python(), *flags, "-c", _COMMAND, *limits, " ".join(modules), *_module_folders()],
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,
                cwd=Path(__file__).parent,
                env={**_VARIABLES, **kept},
            )
        except OSError as error:
            raise ReaderStartError(f"{_START_FAILED}: {error}") from None
        self._is_ready = False
        return self._process

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        if self._is_ready:
            return
        try:
            _read(process.stdout)
        except (OSError, EOFError, ValueError) as error:
            self._stop()
            raise ReaderStartError(f"{_START_FAILED}: {str(error) or 'it ended'}") from None
        except BaseException:
            self._stop()
            raise
        self._is_ready = True

    def _exit_error(self, timed_out: bool) -> _ReadError:
        """Return the error that says why the process ended while it read a file."""
        process = self._process
        assert process is not None
        with suppress(Exception):  # it may have closed its pipes but not exited yet
            process.wait(1)
        status = process.poll()
        self._stop()
        if timed_out or status == -_SIGPROF:
            return _ReadError(f"takes more than {self.max_seconds} s to read", is_final=True)
        if status in (_OUT_OF_MEMORY, -_SIGKILL):
            return _ReadError(self._memory_message())
        return _ReadError("the library that reads this format crashes on it")

    def _memory_message(self) -> str:
        return f"takes more than {self.max_memory / 1e9:.3g} GB of memory to read"

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):  # unwritten data has no reader any more
                    if pipe is not None:
                        pipe.close()
            process.wait()


class _ReadError(DocumentError):
    """The error that the process ended over a file; if ``is_final``, a new one would, too."""

    def __init__(self, reason: str, *, is_final: bool = False) -> None:
        super().__init__(reason)
        self.is_final = is_final


def _python() -> str:
    """Return the Python interpreter; ``sys.executable`` may be a program that embeds Python."""
    beside = [Path(sys.exec_prefix, *parts) for parts in (("bin", "python3"), ("python.exe",))]
    for path in (Path(sys.executable or ""), *beside):
        if "python" in path.name.lower() and path.is_file() and not hasattr(sys, "frozen"):
            return str(path)
    raise OSError("no Python interpreter is found")


def _module_folders() -> list[str]:
    """Return ``sys.path`` without the working directory, plus this package's folder."""
    try:
        here = os.path.realpath(os.curdir)
    except FileNotFoundError:  # the working directory was deleted
        here = ""
    own = str(Path(__file__).parents[3])
    found = [path for path in sys.path if os.path.isabs(path) and os.path.realpath(path) != here]
    return [*found, *([] if own in found else [own])]


def _write(pipe: IO[bytes] | None, message: dict[str, Any], data: bytes = b"") -> None:
    """Write a message as a line of JSON, and the bytes that belong to it."""
    assert pipe is not None
    pipe.write(json.dumps({**message, "size": len(data)}).encode() + b"\n")
    pipe.write(data)
    pipe.flush()


def _read(pipe: IO[bytes] | None) -> tuple[dict[str, Any], bytes]:
    """Return the next message and its bytes."""
    assert pipe is not None
    line = pipe.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    message = json.loads(line)
    data = pipe.read(message["size"])
    if len(data) < message["size"]:
        raise EOFError
    return message, data


def check_text_size(size: int) -> None:
    """Raise DocumentError if a document's text is too large."""
    if size > MAX_TEXT_BYTES:
        raise DocumentError(
            f"holds more than {MAX_TEXT_BYTES / 1e6:.0f} MB of text: split the file"
        )


# The functions below run inside the process.


def serve(
    read: Read, max_seconds: int, max_memory: int, watchdog: bool, modules: Iterable[str] = ()
) -> None:
    """Read files from standard input until it ends; import modules in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)  # a library's prints must not mix with replies
    _limit_memory(max_memory, watchdog)
    with suppress(EOFError, BrokenPipeError):
        _write(replies, {})
        if modules:
            threading.Thread(target=_import, args=(modules,), daemon=True).start()
        while True:
            request, data = _read(requests)
            _limit_time(max_seconds)
            reply, text = _reply(read, data, request["name"])
            _limit_time(0)  # before the reply: ending later would be blamed on the next file
            _write(replies, reply, text)


def _import(modules: Iterable[str]) -> None:
    for module in modules:
        with suppress(Exception):  # the file that needs the module reports it
            import_module(module)


def _reply(read: Read, data: bytes, name: str) -> tuple[dict[str, Any], bytes]:
    """Read a file; return the reply and the document's text."""
    began = time.process_time()
    try:
        document = read(data, name)
        text = document.text.encode("utf-8", "surrogatepass")
        check_text_size(len(text))
        if max(len(document.line_numbers), len(document.page_starts)) > MAX_LINES:
            raise DocumentError(f"holds more than {MAX_LINES:,} lines: split the file")
    except MissingExtraError as error:
        return {"error": "extra", "message": error.what, "extra": error.extra}, b""
    except DocumentError as error:
        return {"error": "document", "message": str(error)}, b""
    except MemoryError:
        return {"error": "memory"}, b""
    kept = ("path", "title", "markup", "page_starts", "line_numbers")
    fields = {field: getattr(document, field) for field in kept}
    return {**fields, "seconds": time.process_time() - began}, text


def _limit_memory(max_memory: int, watchdog: bool) -> None:
    if os.name == "posix":
        _set_limit("RLIMIT_CORE", 0)  # a core dump would hold the user's document
    # macOS accepts a memory limit but does not enforce it; Windows has none
    if _ON_LINUX and not watchdog:
        _set_limit("RLIMIT_AS", max_memory)
    else:
        threading.Thread(target=_watch_memory, args=(max_memory,), daemon=True).start()


def _watch_memory(max_memory: int) -> None:
    while _peak_memory() <= max_memory:
        time.sleep(_POLL_SECONDS)
    os._exit(_OUT_OF_MEMORY)


def _limit_time(seconds: int) -> None:
    """End this process after so many seconds of CPU time; 0: lift the limit.

    Windows has no such timer; there the parent's limit of clock time ends the process.
    """
    if os.name == "posix":
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _set_limit(name: str, value: int) -> None:
    """Set a resource limit of this process, at most to the highest allowed value."""
    import resource

    which = getattr(resource, name)
    _, hard_limit = resource.getrlimit(which)
    if hard_limit != resource.RLIM_INFINITY:
        value = min(value, hard_limit)
    resource.setrlimit(which, (value, hard_limit))


def _peak_memory() -> int:
    """Return the peak memory of this process in bytes."""
    if sys.platform == "win32":
        return _windows_peak_memory()
    if _ON_LINUX:  # getrusage would include the parent's peak from before exec
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split(None, 1)[0]) * 1024
    import resource

    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


def _windows_peak_memory() -> int:
    import ctypes

    class Counters(ctypes.Structure):
        _fields_ = [("size", ctypes.c_uint32), ("faults", ctypes.c_uint32)] + [
            (f"size_{i}", ctypes.c_size_t) for i in range(8)
        ]

    counters = Counters()
    counters.size = ctypes.sizeof(Counters)
    windows: Any = ctypes.windll  # type: ignore[attr-defined, unused-ignore]
    process = windows.kernel32.GetCurrentProcess
    process.restype = ctypes.c_void_p
    get_memory_info = windows.kernel32.K32GetProcessMemoryInfo
    get_memory_info.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32]
    get_memory_info(process(), ctypes.byref(counters), counters.size)
    return int(counters.size_0)  # the peak of the working set
