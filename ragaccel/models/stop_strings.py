"""Stop strings: at the level of text, across token boundaries and inside accepted blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragaccel.errors import ConfigurationError
from ragaccel.models.detokenizer import decode_tail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.models.tokenizer import Tokenizer


class TextStopRule:
    """Ends an answer with the first token that completes one of several strings.

    A stop rule over tokens; ``trim`` and ``HeldBackText`` keep the string itself, and what the
    same token spells after it, out of the text. Tokens without text, as special ones are, do not
    part a string: the text that is shown would hold it. A string may name special tokens as well.

    Args:
        strings: one string or several.
        tokenizer: turns tokens into text.
        after: a prompt in whose end a string may begin, as for ``generate(stop_strings=...)``;
            without it they are looked for in the answer alone.

    Raises:
        ConfigurationError: for an empty string.
    """

    def __init__(
        self, strings: Sequence[str] | str, tokenizer: Tokenizer, *, after: Sequence[int] = ()
    ) -> None:
        self.strings = (strings,) if isinstance(strings, str) else tuple(strings)
        if not all(self.strings):
            raise ConfigurationError("an empty stop string would end every answer at once")
        self._tokenizer = tokenizer
        self._longest = max((len(string) for string in self.strings), default=0)
        self._before = tuple(after) if self.strings else ()
        # What generate looks for in the text with its special tokens, callers where they name one.
        special = tokenizer.special_tokens
        self._spelled = tuple(
            string for string in self.strings if after or any(one in string for one in special)
        )

    def cut(self, token_ids: Sequence[int], start: int) -> int | None:
        """Return how many tokens to keep, the one that completes a stop string included.

        Each token of the block is judged as if it were the last, so that the answer does not
        depend on how it was cut into blocks.
        """
        if not self.strings:
            return None
        for end in range(start + 1, len(token_ids) + 1):
            # What stood before this token was judged with it; its own text may be long.
            own = len(self._tokenizer.decode(token_ids[end - 1 : end]))
            text = decode_tail(self._tokenizer, token_ids[:end], self._longest + own)
            if any(string in text for string in self.strings) or (
                len(text) < self._longest + own and self._began_before(token_ids[:end])
            ):
                return end
            if self._spelled and self._spells(token_ids[:end]):
                return end
        return None

    def _spells(self, token_ids: Sequence[int]) -> bool:
        """Whether the last token completes a string, special tokens being text like others."""
        own = self._tokenizer.decode(token_ids[-1:], skip_special_tokens=False)
        width = self._longest + len(own)  # no token of those that make up a string is empty
        text = self._tokenizer.decode(token_ids[-width:], skip_special_tokens=False)
        return any(string in text[-width:] for string in self._spelled)

    def _began_before(self, token_ids: Sequence[int]) -> bool:
        """Whether an answer completes a string that began in the prompt."""
        if not self._before:
            return False
        tail = self._before[-self._longest :]
        before = self._tokenizer.decode(tail, skip_special_tokens=False)
        text = self._tokenizer.decode((*tail, *token_ids), skip_special_tokens=False)
        return any(
            text.find(string, max(0, len(before) - len(string) + 1)) >= 0 for string in self.strings
        )

    def trim(self, text: str) -> str:
        """Cut a finished text before the first stop string in it."""
        found = [at for string in self.strings if (at := text.find(string)) >= 0]
        return text[: min(found)] if found else text

    def hold_back(self) -> HeldBackText:
        """Return a filter for streaming this rule's answer."""
        return HeldBackText(self.strings)


class HeldBackText:
    """Streamed text without stop strings: what may be the start of one waits."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """Add text; return what is certainly no part of a stop string."""
        if self.stopped:
            return ""
        text = self._held + piece
        found = [at for string in self._strings if (at := text.find(string)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        held = max((_overlap(text, string) for string in self._strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Return what was held back: the answer ended without completing a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """Measure the longest end of ``text`` that begins ``string`` without completing it."""
    for size in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:size]):
            return size
    return 0
