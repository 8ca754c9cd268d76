"""Streaming: decode token ids piece by piece, and end answers at stop strings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ragaccel.models.tokenizer import Tokenizer


_REPLACEMENT = "�"
# Transformers' space cleaning reads at most this many characters back.
_CLEANUP_REACH = 8
_WINDOW = 48


class IncrementalDecoder:
    """A decoder of a growing answer into text, piece by piece.

    A piece is returned once no later token can change it. An incomplete character waits for its
    remaining bytes. A run of byte tokens waits for its end, because invalid UTF-8 changes all of
    it. If the tokenizer cleans up spaces, a space waits for the text after it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # a window of the last tokens, enough to decode the next ones
        self._num_emitted = 0  # characters of the window's text that were returned

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; return the text that no later token can change."""
        self._ids.extend(token_ids)
        stable = self._ids[: len(self._ids) - self._count_open_bytes()]
        text = self._tokenizer.decode(stable)
        end = self._stable_end(text)
        piece = text[self._num_emitted : end]
        self._num_emitted = max(self._num_emitted, end)
        if len(self._ids) > 2 * _WINDOW:
            self._drop_old_tokens()
        return piece

    def finish(self) -> str:
        """Return the rest of the text; incomplete characters become replacement characters."""
        text = self._tokenizer.decode(self._ids)
        piece = text[self._num_emitted :]
        self._num_emitted = max(self._num_emitted, len(text))
        return piece

    def _count_open_bytes(self) -> int:
        count = 0
        while count < len(self._ids) and self._ids[-1 - count] in self._tokenizer.byte_ids:
            count += 1
        return count

    def _stable_end(self, text: str) -> int:
        end = len(text)
        while end and text[end - 1] == _REPLACEMENT:
            end -= 1
        if self._tokenizer.cleans_spaces:
            space = text.find(" ", max(0, end - _CLEANUP_REACH), end)
            if space >= 0:
                end = space
        return end

    def _drop_old_tokens(self) -> None:
        """Drop old tokens if the remaining ones decode to the end of the whole text."""
        text = self._tokenizer.decode(self._ids)
        for start in range(len(self._ids) - _WINDOW, len(self._ids) - _WINDOW // 2):
            shorter = self._tokenizer.decode(self._ids[start:])
            dropped = len(text) - len(shorter)
            whole = text.endswith(shorter) and not shorter.startswith((" ", _REPLACEMENT))
            if whole and shorter and dropped < self._num_emitted:
                del self._ids[:start]
                self._num_emitted -= dropped
                return


def decode_tail(tokenizer: Tokenizer, token_ids: Sequence[int], num_chars: int) -> str:
    """Decode the last tokens, so that at least the last ``num_chars`` characters are correct.

    The window of tokens widens as needed, because special tokens have no text.
    """
    width = num_chars + 16
    while True:
        text = tokenizer.decode(token_ids[-width:])
        if width >= len(token_ids) or len(text) >= num_chars + 8:
            return text
        width *= 2


class TextStopRule:
    """Stop rule: end an answer with the first token that completes one of several strings.

    ``trim`` and ``StopStringFilter`` remove the string and the text after it. A string may span
    tokens without text, such as special tokens, and may contain special tokens itself.

    Args:
        strings: one string or several.
        tokenizer: decodes the tokens.
        after: a prompt in whose end a string may begin, as in ``generate(stop_strings=...)``; the
            default searches the answer alone.

    Raises:
        ConfigurationError: a string is empty.
    """

    def __init__(
        self, strings: Sequence[str] | str, tokenizer: Tokenizer, *, after: Sequence[int] = ()
    ) -> None:
        self.strings = (strings,) if isinstance(strings, str) else tuple(strings)
        if not all(self.strings):
            raise ConfigurationError("an empty stop string would end every answer at once")
        self._tokenizer = tokenizer
        self._longest = max((len(string) for string in self.strings), default=0)
        self._prompt_ids = tuple(after) if self.strings else ()
        # Strings to search in the text with special tokens: all of generate's, else those that
        # contain one.
        special = tokenizer.special_tokens
        self._special_strings = tuple(
            string for string in self.strings if after or any(one in string for one in special)
        )

    def cut(self, token_ids: Sequence[int], start: int) -> int | None:
        """Return the number of tokens up to the one that completes a stop string, or None.

        Each token from ``start`` on is checked as if it were the last, so that the answer does not
        depend on how many tokens come at a time.
        """
        if not self.strings:
            return None
        for end in range(start + 1, len(token_ids) + 1):
            # Earlier text was checked with earlier tokens; this token's own text may be long.
            own = len(self._tokenizer.decode(token_ids[end - 1 : end]))
            text = decode_tail(self._tokenizer, token_ids[:end], self._longest + own)
            if any(string in text for string in self.strings) or (
                len(text) < self._longest + own and self._starts_in_prompt(token_ids[:end])
            ):
                return end
            if self._special_strings and self._matches_special(token_ids[:end]):
                return end
        return None

    def _matches_special(self, token_ids: Sequence[int]) -> bool:
        """Return whether the last token completes a string in the text with special tokens."""
        own = self._tokenizer.decode(token_ids[-1:], skip_special_tokens=False)
        width = self._longest + len(own)  # every token of a match has at least one character
        text = self._tokenizer.decode(token_ids[-width:], skip_special_tokens=False)
        return any(string in text[-width:] for string in self._special_strings)

    def _starts_in_prompt(self, token_ids: Sequence[int]) -> bool:
        """Return whether an answer completes a string that begins in the prompt."""
        if not self._prompt_ids:
            return False
        tail = self._prompt_ids[-self._longest :]
        before = self._tokenizer.decode(tail, skip_special_tokens=False)
        text = self._tokenizer.decode((*tail, *token_ids), skip_special_tokens=False)
        return any(
            text.find(string, max(0, len(before) - len(string) + 1)) >= 0 for string in self.strings
        )

    def trim(self, text: str) -> str:
        """Return a finished text up to its first stop string."""
        found = [at for string in self.strings if (at := text.find(string)) >= 0]
        return text[: min(found)] if found else text

    def make_filter(self) -> StopStringFilter:
        """Return a filter for streaming the answer."""
        return StopStringFilter(self.strings)


class StopStringFilter:
    """A filter that removes stop strings from streamed text.

    Text that may begin a stop string is kept until later text shows whether it does.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._pending = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """Add text; return the part that cannot belong to a stop string."""
        if self.stopped:
            return ""
        text = self._pending + piece
        found = [at for string in self._strings if (at := text.find(string)) >= 0]
        if found:
            self.stopped, self._pending = True, ""
            return text[: min(found)]
        pending = max((_overlap(text, string) for string in self._strings), default=0)
        self._pending = text[len(text) - pending :]
        return text[: len(text) - pending]

    def finish(self) -> str:
        """Return the text kept so far, at the end of an answer without a stop string."""
        pending, self._pending = self._pending, ""
        return pending


def _overlap(text: str, string: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``string``."""
    for size in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:size]):
            return size
    return 0
