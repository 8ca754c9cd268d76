"""The loader of e-mail messages."""

from __future__ import annotations

from contextlib import suppress
from email import message_from_bytes
from email.header import decode_header, make_header
from typing import TYPE_CHECKING, cast

from ragaccel.passage import Document
from ragaccel.retrieval.loaders import BinaryFileError, collapse_spaces, decode_text, looks_binary
from ragaccel.retrieval.loaders.html import page_document, read_html
from ragaccel.retrieval.loaders.markdown import without_quote_marks

if TYPE_CHECKING:
    from email.message import Message

_HEADERS = "From", "To", "Cc", "Date", "Subject"
_HEADER_CHARACTERS = 2000  # what follows is cut off; parsing parameters takes quadratic time


def read_eml(data: bytes, name: str) -> Document:
    """Read a message: its headers, names of attachments and text; so of forwarded ones in it.

    Of several versions of a text the first one that is not blank counts, a plain one if there is.
    """
    if looks_binary(data):
        raise BinaryFileError("a binary file")
    if not data.isascii():
        data = (
            decode_text(data)[0].encode() if b"\0" in data else data.removeprefix(b"\xef\xbb\xbf")
        )
    # Not by the newer policy, whose parser of headers takes minutes for long ones.
    message = message_from_bytes(data.lstrip(b"\r\n"))
    attached: list[str] = []
    text = _text_of(message, attached)
    lines = _header_lines(message)
    lines += [f"Attachments: {', '.join(attached)}"] if attached else []
    return Document(name, "\n".join([*lines, "", text]), _header(message, "Subject"))


def _header_lines(message: Message) -> list[str]:
    known = {name: _header(message, name) for name in _HEADERS}
    return [f"{name}: {text}" for name, text in known.items() if text]


def _header(message: Message, name: str) -> str:
    """Return a decoded header, "" if there is none."""
    found = [value for known, value in message.raw_items() if known.lower() == name.lower()]
    raw = str(found[0] if found else "")[:_HEADER_CHARACTERS]
    return _decoded(decode_text(raw.encode("utf-8", "surrogateescape"))[0])


def _decoded(header: str) -> str:
    with suppress(LookupError, ValueError):  # broken, or in an encoding that nobody knows
        header = str(make_header(decode_header(header)))
    return collapse_spaces(header)


def _text_of(message: Message, attached: list[str]) -> str:
    """Return the text of a message or of one of its parts; add names to ``attached``."""
    for header in ("Content-Type", "Content-Disposition"):
        if len(str(message.get(header, ""))) > _HEADER_CHARACTERS:
            del message[header]
    kind = message.get_content_type()
    if message.is_multipart():
        payload = cast("list[Message]", message.get_payload())
        if kind == "multipart/alternative":
            payload.sort(key=lambda part: part.get_content_type() != "text/plain")
        texts = [_text_of(part, attached) for part in payload]
        if kind == "message/rfc822":
            texts = ["\n".join(_header_lines(part)) for part in payload] + texts
        told = [text for text in texts if text]
        return "\n\n".join(told[:1] if kind == "multipart/alternative" else told)
    file = message.get_filename()
    if message.get_content_disposition() == "attachment" or not kind.startswith("text/"):
        attached += [_decoded(file)] if file else []
        return ""
    return _text(message, is_page=kind == "text/html").replace("\r\n", "\n").strip()


def _text(part: Message, *, is_page: bool) -> str:
    data = part.get_payload(decode=True)
    assert isinstance(data, bytes)  # of a part that has no parts
    charset = part.get_content_charset()
    if is_page and not charset:
        return read_html(data, "body.html").text
    try:
        text = data.decode(charset or "utf-8")
    except (LookupError, ValueError):
        text = decode_text(data)[0]
    return page_document(text, "body.html").text if is_page else without_quote_marks(text)
