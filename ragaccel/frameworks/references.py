"""Gather the references of a prompt: given ones, and registered passages that occur in it."""

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
_ADJACENT_WEIGHT = 0.005  # below the weight of every passage in the prompt
_BYTES_PER_TOKEN = 4  # an estimate in UTF-8, about right for most languages and vocabularies


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
    """Return a prompt's references: those given, then the registered passages that occur in it.

    >>> llm.generate(prompt, references=gather_references(
    ...     prompt, registry=default_registry(), tokenizer=llm.tokenizer))

    Registered passages come in the prompt's order, then the ``retrieved`` ones. If
    ``adjacent_chunks`` is true, nearby passages of the same documents follow as token ids: an
    answer may copy from them but does not cite them. Of a passage that occurs in part, the part is
    cited and the whole passage is an adjacent chunk. Equal contents, apart from whitespace, come
    once. Given references are always kept; the others are added whole, in this order, while they
    fit in ``max_tokens`` by an estimate. Without a registry only the given ones are returned.

    Args:
        text: the prompt.
        given: the caller's references.
        retrieved: references known to belong to this prompt, whether they occur in it or not.
        registry: a registry, or ``visible_references()`` for the passages visible here.
        namespace: the namespace that is searched in the registry.
        tokenizer: the model's tokenizer.
        adjacent_chunks: whether to add nearby passages of the same documents.
        max_tokens: the maximum number of tokens of all references that are not given.

    Raises:
        ConfigurationError: a reference is not a str, Passage or Reference.
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
    """The contents of references gathered so far, and how many bytes of UTF-8 still fit."""

    def __init__(self, max_tokens: int) -> None:
        self.bytes_left = max_tokens * _BYTES_PER_TOKEN
        self._seen: set[str | tuple[int, ...]] = set()

    def add(self, item: str | Passage | Reference) -> bool:
        """Add the content of an item, even if it does not fit; return False if already present."""
        content = _content(item)
        is_new = content not in self._seen
        if is_new:
            self._seen.add(content)
            self.bytes_left -= _num_bytes(content)
        return is_new

    def add_if_fits(self, item: str | Passage | Reference) -> bool:
        """Add the content of an item; return False if it does not fit or is already present."""
        return _num_bytes(_content(item)) <= self.bytes_left and self.add(item)


def _content(item: str | Passage | Reference) -> str | tuple[int, ...]:
    if isinstance(item, Reference):
        return item.token_ids
    return " ".join((item if isinstance(item, str) else item.text).split())


def _num_bytes(content: str | tuple[int, ...]) -> int:
    if isinstance(content, tuple):
        return _BYTES_PER_TOKEN * len(content)
    return len(content.encode("utf-8", "surrogatepass"))
