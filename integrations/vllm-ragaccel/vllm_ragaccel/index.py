"""The text around the passages that a prompt quotes, from an index."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ragaccel.decoding import Reference
from ragaccel.errors import ConfigurationError
from ragaccel.frameworks import ReferenceRegistry
from ragaccel.retrieval import Store

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_BYTES = 512 << 20
"""Memory for the passages of an index: about 80 MB of text."""
MAX_PROMPT_TOKENS = 16_384
"""Tokens at the end of a prompt that are searched for passages."""
BATCH = 1000
"""Passages that are read at a time."""
FULL = 0.95
"""Share of the memory from which on no more passages are read: else new ones displace old ones."""
WEIGHT = 0.005  # of text that the prompt does not hold: of equal matches the prompt's are copied

logger = logging.getLogger("ragaccel")


class Tokenizer(Protocol):
    """What is used of the served model's tokenizer."""

    def decode(self, ids: Sequence[int], /) -> str:
        """Return the text of token ids."""
        ...

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text."""
        ...


class IndexReferences:
    """The passages of an index, which finds those near a prompt's own.

    All passages are read once; what changes in the file later is not seen.

    Args:
        path: the index file that ``ragaccel index`` made.
        tokenizer: the served model's.
        max_bytes: the maximum memory. Passages that do not fit are not searched, which is logged.

    Raises:
        RagaccelError: there is no index at ``path``, it is damaged, or it has no passages.
    """

    def __init__(self, path: str, tokenizer: Tokenizer, *, max_bytes: int = MAX_BYTES) -> None:
        self._tokenizer = tokenizer
        self._registry = ReferenceRegistry(max_bytes=max_bytes)
        with Store(Path(path)) as store, store.reading():
            keys = store.keys().tolist()
            if not keys:
                raise ConfigurationError(
                    f"the index {path} has no passages: index documents with `ragaccel index "
                    f"FOLDER --index {path}`"
                )
            num_read = self._read(store, keys)
        if num_read < len(keys):
            logger.warning(
                "the index %s needs more than %d MB of memory: of its %d passages, %d are not "
                "looked for in prompts",
                path, max_bytes >> 20, len(keys), len(keys) - num_read,
            )  # fmt: skip

    def _read(self, store: Store, keys: Sequence[int]) -> int:
        """Register passages until the memory is full, and return how many there were."""
        num_read = 0
        for first in range(0, len(keys), BATCH):
            for stored in store.passages(keys[first : first + BATCH]).values():
                if self._registry.num_bytes > FULL * self._registry.max_bytes:
                    return num_read
                self._registry.register(stored.passage)
                num_read += 1
        return num_read

    def references(self, prompt_ids: Sequence[int]) -> list[Reference]:
        """Return the passages beside those that occur in a prompt, the nearest ones first."""
        text = self._tokenizer.decode(prompt_ids[-MAX_PROMPT_TOKENS:])
        passages = [match.passage for match in self._registry.match(text)]
        return [
            Reference(tuple(ids), WEIGHT, near.passage_id)
            for near in self._registry.adjacent_chunks(passages)
            if (ids := self._tokenizer.encode(near.text, add_special_tokens=False))
        ]
