"""Incremental detokenizing: ids in, pieces of text out, together exactly the text of all ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ragaccel.models.tokenizer import Tokenizer

_REPLACEMENT = "�"
# No rule of transformers' space cleaning reads further back than this.
_CLEANED = 8
_WINDOW = 48


class IncrementalDecoder:
    """Turns a growing answer into text, piece by piece.

    A piece is given out once no later token can change it: half of a character waits for its
    other half, a run of byte tokens for its end (should it turn out not to be UTF-8, all of it
    reads differently), and a space for what follows it where the tokenizer cleans up spaces.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # those of the window: enough to decode what comes next
        self._given = 0  # characters of the window's text given out

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; return the text that is now certain."""
        self._ids.extend(token_ids)
        stable = self._ids[: len(self._ids) - self._open_bytes()]
        text = self._tokenizer.decode(stable)
        end = self._certain_end(text)
        piece = text[self._given : end]
        self._given = max(self._given, end)
        if len(self._ids) > 2 * _WINDOW:
            self._slide()
        return piece

    def finish(self) -> str:
        """Return the rest of the text, half characters included as replacement characters."""
        text = self._tokenizer.decode(self._ids)
        piece = text[self._given :]
        self._given = max(self._given, len(text))
        return piece

    def _open_bytes(self) -> int:
        count = 0
        while count < len(self._ids) and self._ids[-1 - count] in self._tokenizer.byte_ids:
            count += 1
        return count

    def _certain_end(self, text: str) -> int:
        end = len(text)
        while end and text[end - 1] == _REPLACEMENT:
            end -= 1
        if self._tokenizer.cleans_spaces:
            space = text.find(" ", max(0, end - _CLEANED), end)
            if space >= 0:
                end = space
        return end

    def _slide(self) -> None:
        """Forget old tokens, where the text of the others is the end of the text of all."""
        text = self._tokenizer.decode(self._ids)
        for start in range(len(self._ids) - _WINDOW, len(self._ids) - _WINDOW // 2):
            shorter = self._tokenizer.decode(self._ids[start:])
            dropped = len(text) - len(shorter)
            whole = text.endswith(shorter) and not shorter.startswith((" ", _REPLACEMENT))
            if whole and shorter and dropped < self._given:
                del self._ids[:start]
                self._given -= dropped
                return


def decode_tail(tokenizer: Tokenizer, token_ids: Sequence[int], num_chars: int) -> str:
    """Decode enough of the last tokens that at least ``num_chars`` characters are right.

    Depends on the tokens alone. Special tokens have no text, so the window widens as needed.
    """
    width = num_chars + 16
    while True:
        text = tokenizer.decode(token_ids[-width:])
        if width >= len(token_ids) or len(text) >= num_chars + 8:
            return text
        width *= 2
