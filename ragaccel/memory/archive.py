"""Archives: a header and named arrays in one safetensors file, written whole or not at all.

The header is JSON in the file's metadata, beside a checksum of it and of the arrays.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load, save

from ragaccel.replacing import replacing

if TYPE_CHECKING:
    from pathlib import Path

    from ragaccel.draft.restoring import State

Header = dict[str, Any]
"""What JSON can say of an archive."""
_KEY = "ragaccel"  # the one key of the metadata: safetensors keeps several in no order


class UnusableError(ValueError):
    """A file that is not taken in; the message says why and stands after its path."""


def write_archive(path: Path, header: Header, arrays: State) -> None:
    """Write an archive in the place of what stands at ``path``, which stays whole if this fails.

    Its folder is made where it is missing. Only its owner may read the file: it holds what was
    asked and answered.

    Raises:
        OSError: no permission, a full disk, a folder at ``path``.
        Exception: whatever safetensors raises for arrays that it cannot hold.
    """
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    told = {"crc32": _checksum(header, arrays), "header": header}
    contents = save(arrays, {_KEY: json.dumps(told)})
    with replacing(path, private=True) as file:
        file.write(contents)


def read_archive(path: Path, most_bytes: int) -> tuple[Header, State] | None:
    """Read an archive of at most so many bytes; None where there is no file.

    Raises:
        UnusableError: no archive, or too large a one.
        OSError: no permission.
        Exception: whatever a damaged file makes safetensors or numpy raise.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):  # reading a pipe would wait for ever
        raise UnusableError("it is no file" + " but a folder" * stat.S_ISDIR(found.st_mode))
    if found.st_size > most_bytes:
        raise UnusableError(f"it is larger than the {most_bytes} bytes that may be taken in")
    with open(path, "rb") as file:  # not mapped: another process may cut the file off
        contents = file.read(found.st_size)
    arrays: State = load(contents)
    told = _told(contents)
    header = told.get("header")
    if not isinstance(header, dict):
        raise UnusableError("its header is not an object")
    if told.get("crc32") != _checksum(header, arrays):
        raise UnusableError("it is damaged: its checksum is that of other contents")
    return header, arrays


def _told(contents: bytes) -> dict[str, Any]:
    """Read the JSON in the metadata of a safetensors file that has been loaded before."""
    size = int.from_bytes(contents[:8], "little")
    metadata = json.loads(contents[8 : 8 + size]).get("__metadata__", {})
    if _KEY not in metadata:
        raise UnusableError("it has no header")
    told = json.loads(metadata[_KEY])
    return told if isinstance(told, dict) else {}


def _checksum(header: Header, arrays: State) -> int:
    checksum = zlib.crc32(json.dumps(header).encode("ascii"))
    for name in sorted(arrays):
        checksum = zlib.crc32(arrays[name].data, checksum)
    return checksum
