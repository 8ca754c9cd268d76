"""Tool calling: one answer that may call tools, from the choice of a tool to the calls it made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ragaccel.errors import ConfigurationError
from ragaccel.models.tool_probing import tool_format

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ragaccel.models.tokenizer import Tokenizer
    from ragaccel.models.tool_calls import ToolCall, ToolFormat

_FORCED = ("any", "required", True)
_FORMATS: WeakKeyDictionary[Tokenizer, ToolFormat] = WeakKeyDictionary()


def choose_tool(tools: Sequence[Mapping[str, Any]], choice: Any) -> str | None:
    """Check a choice of tools: None where the model decides, "" for any, "none", or a name.

    A name is given as such or as ``{"type": "function", "function": {"name": ...}}``.

    Raises:
        ConfigurationError: there is no tool of that name.
    """
    if choice in (None, False, "auto"):
        return None
    names = [tool["function"]["name"] for tool in tools]
    if choice == "none":
        return "none"
    if choice in _FORCED:
        return names[0] if len(names) == 1 else ""
    named = choice.get("function", choice) if isinstance(choice, dict) else choice
    named = named.get("name") if isinstance(named, dict) else named
    if named not in names:
        raise ConfigurationError(
            f"tool_choice={choice!r} names no tool: there are {', '.join(names)}, auto, any, none"
        )
    return str(named)


@dataclass(frozen=True, slots=True)
class ToolCalling:
    """What one answer may call, and how its calls are spelled.

    Attributes:
        opening: what the answer is made to begin with; empty where the model decides.
        stop: the stop strings of the request, at the first of which the answer ends.
        parallel: whether more than the first call of an answer counts.
    """

    tokenizer: Tokenizer
    format: ToolFormat
    tools: list[dict[str, Any]]
    opening: str = ""
    stop: tuple[str, ...] = ()
    parallel: bool = True

    @property
    def opening_ids(self) -> list[int]:
        """The opening as tokens, special ones read as such: they go behind the prompt."""
        return list(self.tokenizer.encode(self.opening)) if self.opening else []

    def settled(self, token_ids: Sequence[int]) -> str:
        """Return what of an unfinished answer is content, whatever may follow."""
        text = self._text(token_ids)
        begun = [
            size for stop in self.stop for size in range(1, len(stop)) if text.endswith(stop[:size])
        ]
        return self.format.settled(text[: len(text) - max(begun, default=0)])

    def told_next(self, told: str, token_ids: Sequence[int]) -> str:
        """Return what a stream may tell of an unfinished answer beyond what it has told."""
        settled = self.settled(token_ids)
        return settled[len(told) :] if settled.startswith(told) else ""

    def read(self, text: str, token_ids: Sequence[int]) -> tuple[str, list[ToolCall]]:
        """Return the content of a whole answer, and the calls in it.

        ``text`` is the answer's own, without special tokens: the content where it calls nothing.
        """
        content, calls = self.format.parse(self._text(token_ids), self.tools)
        if not calls:
            return text, []
        return content, list(calls if self.parallel else calls[:1])

    def _text(self, token_ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        ends = [at for stop in self.stop if (at := text.find(stop)) >= 0]
        return self.opening + text[: min(ends, default=len(text))]


def tool_calling(
    tokenizer: Tokenizer,
    tools: list[dict[str, Any]],
    choice: str | None = None,
    *,
    stop: Sequence[str] | None = None,
    parallel: bool = True,
) -> ToolCalling:
    """Prepare an answer that may call tools; ``choice`` is what ``choose_tool`` returned.

    Raises:
        ConfigurationError: the model's chat template has no place for tools.
    """
    format_ = _FORMATS.get(tokenizer) or tool_format(tokenizer)
    if format_ is None:
        raise ConfigurationError(
            "this model's chat template has no place for tools: load a model that was trained to "
            "call them, or ask for JSON in the prompt's own words"
        )
    _FORMATS[tokenizer] = format_
    opening = "" if choice in (None, "none") else format_.opening(choice or None)
    return ToolCalling(tokenizer, format_, tools, opening, tuple(stop or ()), parallel)
