"""Shielding: special tokens that a text merely spells, kept from becoming special tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

_FIRST_MARK = 0x10F800  # private use, and no text's own
_GUARD = chr(0x10FFF0)

Offsets = list[tuple[int, int]]


class Shield:
    """Marks special tokens in text that others wrote, so that a prompt can hold it as text.

    ``hide`` puts a mark in place of the first character of every special token a text spells;
    what a chat template makes of it has the same length and is turned back by ``reveal``. A mark
    counts only where the rest of a special token follows it.
    """

    def __init__(self, special_tokens: Iterable[str]) -> None:
        tokens = sorted(filter(None, set(special_tokens)), key=len, reverse=True)
        firsts = sorted({token[0] for token in tokens})
        self._mark_of = {first: chr(_FIRST_MARK + i) for i, first in enumerate(firsts)}
        self._first_of = {mark: first for first, mark in self._mark_of.items()}
        # Looked at from every character, since occurrences may overlap; nothing matches (?!).
        heads = [re.escape(token[0]) + f"(?={re.escape(token[1:])})" for token in tokens]
        marks = [self._mark_of[token[0]] + f"(?={self._either_way(token[1:])})" for token in tokens]
        self._spelled = re.compile("|".join(heads) or "(?!)")
        self._marked = re.compile("|".join(marks) or "(?!)")

    def hide(self, text: str) -> str:
        """Mark every special token that a text spells; the length stays."""
        return self._spelled.sub(lambda found: self._mark_of[found.group()], text)

    def hide_in(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Mark all text of a message, at whatever depth; its role stays."""
        return {
            key: value if key == "role" else self.hide_below(value)
            for key, value in message.items()
        }

    def hide_below(self, value: Any) -> Any:
        """Mark all text in a value, at whatever depth: in the keys of its mappings as well.

        Names of arguments are written by others as much as what they stand for.
        """
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, Mapping):
            return {self.hide_below(key): self.hide_below(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide_below(item) for item in value]
        return value

    def reveal(self, text: str) -> str:
        """Turn a marked text back."""
        return self._marked.sub(lambda found: self._first_of[found.group()], text)

    def is_marked(self, text: str) -> bool:
        """Whether a text holds marks."""
        return self._marked.search(text) is not None

    def _either_way(self, rest: str) -> str:
        """The rest of a token, where an overlapping one may have been marked in its midst."""
        return "".join(
            f"[{re.escape(char)}{self._mark_of[char]}]" if char in self._mark_of
            else re.escape(char)
            for char in rest
        )  # fmt: skip


class PlainEncoder:
    """A fast tokenizer that sees no special tokens, for the stretches that hold marks.

    Args:
        backend: the tokenizer of the ``tokenizers`` library; copied, as its settings are changed.
        special_ids: tokens that must not come out of text.
    """

    def __init__(self, backend: Any, special_ids: frozenset[int]) -> None:
        self._special_ids = special_ids
        self._backend = deepcopy(backend)
        # An added token that is not special is still told apart: text behind it is tokenized as
        # text behind a special token is, without the space that some put before a whole text.
        self._backend.add_tokens([_GUARD])
        self._backend.encode_special_tokens = True

    def replace(
        self, marked: str, shield: Shield, ids: list[int], spans: Offsets
    ) -> tuple[list[int], Offsets]:
        """Tokenize the marked stretches between the special tokens of a text again, as text.

        ``ids`` and ``spans`` are those of the marked text. Where the tokenizer's own vocabulary
        would make special tokens of plain text, the mark stays.
        """
        new_ids: list[int] = []
        new_spans: Offsets = []
        at = start = 0
        for i in range(len(ids) + 1):
            if i < len(ids) and ids[i] not in self._special_ids:
                continue
            end = spans[i][0] if i < len(ids) else len(marked)
            stretch, between = marked[at:end], slice(start, i)
            again = self._encode(shield.reveal(stretch), at) if shield.is_marked(stretch) else None
            own_ids, own_spans = again or (ids[between], spans[between])
            new_ids += own_ids
            new_spans += own_spans
            if i < len(ids):
                new_ids.append(ids[i])
                new_spans.append(spans[i])
                at, start = max(at, spans[i][1]), i + 1
        return new_ids, new_spans

    def _encode(self, text: str, at: int) -> tuple[list[int], Offsets] | None:
        guard = _GUARD if at else ""
        encoding = self._backend.encode(guard + text, add_special_tokens=False)
        first = len(guard)
        ids = list(encoding.ids[first:])
        if not self._special_ids.isdisjoint(ids):
            return None
        shift = at - first
        return ids, [(start + shift, end + shift) for start, end in encoding.offsets[first:]]
