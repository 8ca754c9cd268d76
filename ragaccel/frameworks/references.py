"""References of a prompt: what was retrieved and stands in it, gathered for a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragaccel.decoding.request import Reference
from ragaccel.passage import Passage
from ragaccel.prompt import check_references, references_from_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.frameworks.registry import Lookup
    from ragaccel.models.tokenizer import Tokenizer


MAX_TOKENS = 8192
_ADJACENT_WEIGHT = 0.005  # below all that stands in the prompt
_BYTES_PER_TOKEN = 4  # of UTF-8, in most languages and vocabularies, about


def gather_references(
    text: str,
    given: Sequence[str | Passage | Reference] = (),
    *,
    retrieved: Sequence[str | Passage | Reference] = (),
    registry: Lookup | None,
    namespace: str = "",
    tokenizer: Tokenizer,
    adjacent_chunks: bool = True,
    max_tokens: int = MAX_TOKENS,
) -> list[str | Passage | Reference]:
    """Collect a prompt's references: those given, then the registered passages that stand in it.

    >>> llm.generate(prompt, references=gather_references(
    ...     prompt, registry=default_registry(), tokenizer=llm.tokenizer))

    The passages are in the prompt's order, behind them what is known to be ``retrieved`` for this
    prompt though it may not show it. With ``adjacent_chunks`` they are followed by what was
    registered of the same documents near them, as token ids: an answer may copy from those, and
    never cites them. Of a passage that the prompt holds in part that part is cited, and the whole
    of it is such a neighbour. The same content comes once, whitespace aside. What is given always
    stays; of the rest there is as much as ``max_tokens`` leave room for, by an estimate, each whole
    or not at all, the neighbours last. Without a registry there is only what is given.

    Args:
        text: the prompt.
        given: references of the caller's own.
        retrieved: what is known to belong to this prompt, shown in it or not.
        registry: where to look: a registry, or ``visible_references()`` for what is known here.
        namespace: whose registered passages count.
        tokenizer: the model's.
        adjacent_chunks: whether to add what stands near those in the same documents.
        max_tokens: most tokens of all that is not given.

    Raises:
        ConfigurationError: something given that is neither str, Passage nor Reference.
    """
    check_references(given)
    check_references(retrieved)
    contents = _Contents(max_tokens)
    gathered: list[str | Passage | Reference] = [item for item in given if contents.add(item)]
    if registry is None:
        return gathered
    matched = [match.passage for match in registry.match(text, namespace)]
    gathered += [item for item in (*matched, *retrieved) if contents.add_if_fits(item)]
    if adjacent_chunks:
        for near in registry.adjacent_chunks(
            matched, namespace, max_characters=contents.bytes_left
        ):
            if contents.add_if_fits(near):
                name = near.passage_id
                gathered += references_from_text(
                    near.text, tokenizer, weight=_ADJACENT_WEIGHT, passage_id=name
                )
    return gathered


class _Contents:
    """Different contents, and the room that is left for more, in bytes of UTF-8."""

    def __init__(self, max_tokens: int) -> None:
        self.bytes_left = max_tokens * _BYTES_PER_TOKEN
        self._seen: set[str | tuple[int, ...]] = set()

    def add(self, item: str | Passage | Reference) -> bool:
        """Take a content, unless it was taken before."""
        content = _content(item)
        is_new = content not in self._seen
        if is_new:
            self._seen.add(content)
            self.bytes_left -= _num_bytes(content)
        return is_new

    def add_if_fits(self, item: str | Passage | Reference) -> bool:
        """Take a content there is room for, unless it was taken before."""
        return _num_bytes(_content(item)) <= self.bytes_left and self.add(item)


def _content(item: str | Passage | Reference) -> str | tuple[int, ...]:
    if isinstance(item, Reference):
        return item.token_ids
    return " ".join((item if isinstance(item, str) else item.text).split())


def _num_bytes(content: str | tuple[int, ...]) -> int:
    if isinstance(content, tuple):
        return _BYTES_PER_TOKEN * len(content)
    return len(content.encode("utf-8", "surrogatepass"))
