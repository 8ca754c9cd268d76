"""The loader of e-mail messages."""

from __future__ import annotations

from contextlib import suppress
from email import message_from_bytes
from email.header import decode_header, make_header
from typing import TYPE_CHECKING

from ragaccel.passage import Document
from ragaccel.retrieval.loaders import (
    BinaryFileError,
    collapse_spaces,
    decode_text,
    document_from_bytes,
    looks_binary,
)

if TYPE_CHECKING:
    from email.message import Message

_HEADERS = "From", "To", "Cc", "Date", "Subject"
_TEXTS = "text/plain", "text/html"
_HEADER_CHARACTERS = 2000  # what follows is cut off: a list of receivers may be long


def read_eml(data: bytes, name: str) -> Document:
    """Read a message: its headers, names of attachments, and text, without the attachments."""
    if looks_binary(data):
        raise BinaryFileError("a binary file")
    # Not by the newer policy, whose parser of headers takes minutes for long ones.
    message = message_from_bytes(data)
    parts = [part for part in message.walk() if not part.is_multipart()]
    attached = [part.get_filename() for part in parts]
    known = {header: _decoded(str(message.get(header, ""))) for header in _HEADERS}
    known["Attachments"] = ", ".join(_decoded(file) for file in attached if file)
    lines = [f"{header}: {text}" for header, text in known.items() if text]
    own = [part for part, file in zip(parts, attached, strict=True) if not file]
    texts = [part for kind in _TEXTS for part in own if part.get_content_type() == kind]
    body = _text(texts[0]) if texts else ""
    return Document(name, "\n".join([*lines, "", body]), known["Subject"])


def _decoded(header: str) -> str:
    header = header[:_HEADER_CHARACTERS]
    with suppress(LookupError, ValueError):  # broken, or in an encoding that nobody knows
        header = str(make_header(decode_header(header)))
    return collapse_spaces(header)


def _text(part: Message) -> str:
    data = part.get_payload(decode=True)
    assert isinstance(data, bytes)  # of a part that has no parts
    try:
        text = data.decode(part.get_content_charset("utf-8"))
    except (LookupError, ValueError):
        text = decode_text(data)[0]
    text = text.replace("\r\n", "\n")
    if part.get_content_type() == "text/html":
        text = document_from_bytes(text.encode(errors="replace"), "body.html").text
    return text.strip()
