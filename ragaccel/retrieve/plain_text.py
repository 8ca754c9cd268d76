"""Plain text: bytes to characters, whatever the encoding, and never a binary taken for text."""

from __future__ import annotations

import codecs
import re
from contextlib import suppress
from pathlib import PurePath

from ragaccel.retrieve.encodings import guess_encoding

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_UNICODE = ("utf-8", *(name for _, name in _MARKS), "utf-16-le", "utf-16-be")
_SAMPLE_BYTES = 1 << 16
_ESCAPE = b"\x1b$"  # to Japanese, in text of seven bits; in UTF-8 it is the start of no more
_CONTROLS = bytes(byte for byte in range(32) if byte not in b"\t\n\r\f\x0b\x1b\x1a")


def looks_binary(data: bytes) -> bool:
    """Whether the bytes are no text in any encoding that :func:`decode_text` knows."""
    sample = data[:_SAMPLE_BYTES]
    if _marked_encoding(sample) or _unmarked_utf16(sample):
        return False
    if b"\0" in sample:
        return True
    return len(sample) - len(sample.translate(None, _CONTROLS)) > len(sample) // 50


def decode_text(data: bytes) -> tuple[str, str]:
    """Decode a text file; return (text, encoding), every line end a single newline.

    A byte order mark decides; without one UTF-8, then UTF-16 by its zero bytes, then what
    :func:`guess_encoding` takes it for: in Western text Windows-1252 (a superset of Latin-1's
    letters), or Latin-1, which decodes anything.
    """
    text, encoding, _ = _decoded(data)
    return _unix_lines(text), encoding


def encoding_doubt(data: bytes) -> str:
    """Why the text of :func:`decode_text` may be wrong, for people; empty where it is not."""
    text, encoding, is_certain = _decoded(data)
    name = encoding.replace("_", "-")
    if not is_certain:
        return f"read as {name}, which is a guess: save it as UTF-8 if its text looks wrong"
    broken = text.count("\ufffd") if encoding not in _UNICODE else 0
    if broken:
        return f"read as {name}, in which {broken:,} of its characters are none: save it as UTF-8"
    return ""


def _decoded(data: bytes) -> tuple[str, str, bool]:
    """The text, its encoding, and whether that is certain."""
    encoding = _marked_encoding(data) or _unmarked_utf16(data[:_SAMPLE_BYTES])
    for name in (encoding or "utf-8", "utf-8"):
        with suppress(UnicodeDecodeError):
            text = data.decode(name)
            if not (data.isascii() and _ESCAPE in data[:_SAMPLE_BYTES]):
                return text, name, True
    guess = guess_encoding(data)
    if guess.encoding == "ascii":
        return data.decode("ascii"), "utf-8", True
    return data.decode(guess.encoding, "replace"), guess.encoding, guess.is_certain


def spoken_name(path: str) -> str:
    """The name of a file as a title: ``notes/list-of_lights.csv`` is "list of lights"."""
    stem = PurePath(path).stem
    return re.sub(r"[-_\s]+", " ", stem).strip() or PurePath(path).name


def _marked_encoding(data: bytes) -> str | None:
    return next((name for mark, name in _MARKS if data.startswith(mark)), None)


def _unmarked_utf16(sample: bytes) -> str | None:
    """UTF-16 without a mark: in Western text every other byte is zero, always on the same side."""
    if len(sample) < 4 or b"\0" not in sample:
        return None
    even, odd = sample[0::2].count(0), sample[1::2].count(0)
    half = len(sample) // 2
    if odd > 0.6 * half and even < 0.02 * half:
        return "utf-16-le"
    if even > 0.6 * half and odd < 0.02 * half:
        return "utf-16-be"
    return None


def _unix_lines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")
