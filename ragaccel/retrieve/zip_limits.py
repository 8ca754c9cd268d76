"""Zip archives: how large one may become when it is unpacked."""

from __future__ import annotations

import io
import zipfile

from ragaccel.errors import DocumentError

MAX_UNPACKED_BYTES = 200_000_000
_OLD_OFFICE = b"\xd0\xcf\x11\xe0"  # what Office wraps what is encrypted in, too


def require_modest(data: bytes) -> None:
    """Refuse an archive that unpacks to more than 200 MB, before any of it is unpacked.

    What its directory says is enough: no member is read beyond the size given there.
    """
    if data.startswith(_OLD_OFFICE):
        raise DocumentError("is encrypted, or of a format before 2007: save a copy without either")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        size = sum(member.file_size for member in archive.infolist())
    if size > MAX_UNPACKED_BYTES:
        raise DocumentError(f"unpacks to more than {MAX_UNPACKED_BYTES / 1e6:.0f} MB")
