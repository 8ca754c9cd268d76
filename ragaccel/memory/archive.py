"""Archives: a header and named arrays in one file, written whole or not at all, never unpickled.

The file is an uncompressed ``.npz``: a zip of ``.npy`` members, each with its checksum.
"""

from __future__ import annotations

import io
import json
import math
import os
import stat
import zipfile
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from ragaccel.replacing import replacing

if TYPE_CHECKING:
    from pathlib import Path

    from ragaccel.draft.restoring import State

Header = dict[str, Any]
"""What JSON can say of an archive."""
_HEADER = "header"
_NPY_VERSION = (1, 0)


class UnusableError(ValueError):
    """A file that is not taken in; the message says why and stands after its path."""


def write_archive(path: Path, header: Header, arrays: State) -> None:
    """Write an archive in the place of what stands at ``path``, which stays whole if this fails.

    Its folder is made where it is missing. Only its owner may read the file: it holds what was
    asked and answered.

    Raises:
        OSError: no permission, a full disk, a folder at ``path``.
    """
    text = json.dumps(header).encode("ascii")
    members = {_HEADER: np.frombuffer(text, np.uint8), **arrays}
    with replacing(path, private=True) as file:
        _write_members(file, members)


def read_archive(path: Path, most_bytes: int) -> tuple[Header, State] | None:
    """Read an archive of at most so many bytes; None where there is no file.

    Raises:
        UnusableError: no archive, or too large a one.
        OSError: no permission.
        Exception: whatever a damaged zip makes the standard library raise.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):  # reading a pipe would wait for ever
        raise UnusableError("it is no file" + " but a folder" * stat.S_ISDIR(found.st_mode))
    if found.st_size > most_bytes:
        raise UnusableError(f"it is larger than the {most_bytes} bytes that may be taken in")
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        arrays = _read_members(archive, most_bytes)
    if _HEADER not in arrays:
        raise UnusableError("it has no header")
    header = json.loads(arrays.pop(_HEADER).tobytes())
    if not isinstance(header, dict):
        raise UnusableError("its header is not an object")
    return header, arrays


def _write_members(file: IO[bytes], arrays: State) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            # a ZipInfo has a fixed date: equal contents make equal files
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                npy.write_array(
                    member, np.ascontiguousarray(array), version=_NPY_VERSION, allow_pickle=False
                )


def _read_members(archive: zipfile.ZipFile, most_bytes: int) -> State:
    members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise UnusableError("it is compressed, which ragaccel's files are not")  # or might swell
    if sum(member.file_size for member in members) > most_bytes:
        raise UnusableError(f"it declares more than the {most_bytes} bytes that may be taken in")
    return {
        member.filename.removesuffix(".npy"): _array(archive.read(member)) for member in members
    }


def _array(data: bytes) -> npt.NDArray[Any]:
    """Read one ``.npy`` member; what its header declares must be what is there."""
    file = io.BytesIO(data)
    if npy.read_magic(file) != _NPY_VERSION:
        raise UnusableError("an array in it is of another version")
    shape, _, dtype = npy.read_array_header_1_0(file)
    if dtype.hasobject:
        raise UnusableError("it holds Python objects")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data) - file.tell():
        raise UnusableError("an array in it is not of the size that it declares")
    # not read_array, which makes room for whatever size is declared before it reads
    return np.frombuffer(data, dtype, offset=file.tell()).reshape(shape)
