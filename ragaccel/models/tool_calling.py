"""Tool calling: which format a model's template has, and answers that may call tools."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ragaccel.errors import ConfigurationError
from ragaccel.models.tool_calls import (
    MISTRAL_SEPARATOR,
    SENTINEL_CALL,
    SENTINEL_ID,
    SENTINEL_KEY,
    SENTINEL_QUESTION,
    SENTINEL_TOOL,
    SENTINEL_TOOLS,
    SENTINEL_VALUE,
    MalformedCallError,
    ToolFormat,
    read_call,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ragaccel.models.tokenizer import Tokenizer
    from ragaccel.models.tool_calls import ToolCall


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ragaccel.models.tokenizer import Tokenizer

    Message = Mapping[str, Any]

_SENTINEL_ARGUMENTS = {SENTINEL_KEY: SENTINEL_VALUE}
_SENTINEL_TEXT = "probe answer 7"
_SENTINEL_REPLY: Message = {"role": "assistant", "content": _SENTINEL_TEXT}
_SENTINEL_CALLS: Message = {**SENTINEL_CALL, "tool_calls": [*SENTINEL_CALL["tool_calls"]] * 2}
_THOUGHT_END = "</think>"
# Special tokens round bare calls that templates leave to the model: Llama's.
_UNWRITTEN_MARKERS = ("<|python_tag|>", "<|python_start|>")
_UNWRITTEN_CLOSERS = ("<|python_end|>",)
_COMMON_FORMAT = ToolFormat(
    markers=("<tool_call>", "<|tool_call|>", "<|tool_call>", "[TOOL_CALLS]", *_UNWRITTEN_MARKERS),
    closers=("</tool_call>", "<|/tool_call|>", "<tool_call|>", *_UNWRITTEN_CLOSERS),
    is_bare=True,
)


def detect_tool_format(tokenizer: Tokenizer) -> ToolFormat | None:
    """Find how a model's answers spell tool calls; None if its template takes no tools.

    A call that nobody made is laid out by the template: what stands around its name and its
    arguments is the format, and no table of models is needed. One that takes tools and writes no
    calls is read by the common formats. Takes milliseconds: keep what it returns.
    """
    if not tokenizer.takes_tools:
        return None
    special = tuple(sorted(tokenizer.special_tokens, key=len, reverse=True))
    written = _render_answer(tokenizer, SENTINEL_CALL)
    body = None if written is None else _RenderedCall.find(written.text)
    if written is None or body is None:
        return replace(_COMMON_FORMAT, special_tokens=special)
    lead = body.before.rpartition(_THOUGHT_END)[2].lstrip()
    again, between = _read_second_call(tokenizer, lead)
    core = _without_list_bracket(lead)
    closer = _cut_before(body.after, (written.tail.strip(), *tokenizer.eos_tokens))
    closer = closer.strip().removeprefix("]").strip()
    return ToolFormat(
        markers=_longest_first(core, again, *_intersection(_UNWRITTEN_MARKERS, special)),
        closers=_longest_first(
            closer,
            between,
            closer.removeprefix(between),
            *_intersection(_UNWRITTEN_CLOSERS, special),
        ),
        is_bare=not core,
        name_opening=_thought_closing(tokenizer) + lead + body.name_opening,
        arguments_opening=body.arguments_opening,
        separator=body.separator or MISTRAL_SEPARATOR,
        special_tokens=special,
    )


@dataclass(frozen=True, slots=True)
class _RenderedAnswer:
    """What a template writes of an answer, and what it writes behind one of plain text."""

    text: str
    tail: str


@dataclass(frozen=True, slots=True)
class _RenderedCall:
    """The probe's call itself, in what a template wrote."""

    before: str
    text: str
    after: str
    separator: str = ""

    @classmethod
    def find(cls, written: str) -> _RenderedCall | None:
        """The leftmost stretch that reads as the call; None if none does."""
        name_at = written.find(SENTINEL_TOOL)
        separator = _separator(written, name_at + len(SENTINEL_TOOL))
        for start in range(name_at + 1):
            try:
                found = read_call(written, start, {}, re.compile(separator or MISTRAL_SEPARATOR))
            except MalformedCallError:
                continue
            if (
                found is not None
                and found[0].name == SENTINEL_TOOL
                and found[0].arguments == _SENTINEL_ARGUMENTS
            ):
                end = found[1]
                own = separator if start == name_at else ""
                return cls(written[:start], written[start:end], written[end:], own)
        return None

    @property
    def name_opening(self) -> str:
        """What stands before the name; the name first, wherever the template puts it."""
        before = self.text.partition(SENTINEL_TOOL)[0]
        return _COMMON_FORMAT.name_opening if SENTINEL_VALUE in before else before

    @property
    def arguments_opening(self) -> str:
        """What stands between the name and the arguments, without these' own first character."""
        before, _, behind = self.text.partition(SENTINEL_TOOL)
        if SENTINEL_VALUE in before:
            return _COMMON_FORMAT.arguments_opening
        behind = behind.partition(SENTINEL_KEY)[0].partition(SENTINEL_ID)[0]
        if "{" in behind or self.separator:
            return behind.partition("{")[0].rstrip()
        if behind.startswith(("(", ">", '">')):
            return behind[: behind.index(">") + 1] if ">" in behind else "("
        return behind.partition("<")[0].rstrip()


def _render_answer(tokenizer: Tokenizer, message: Message) -> _RenderedAnswer | None:
    """Lay out a message behind a question; None if the template rejects it."""

    def rendered(answer: Message) -> str:
        return tokenizer.chat_text(
            [SENTINEL_QUESTION, answer], add_generation_prompt=False, tools=SENTINEL_TOOLS
        )

    try:
        plain, text = rendered(_SENTINEL_REPLY), rendered(message)
    except ConfigurationError:
        return None
    return _RenderedAnswer(
        text[_common_prefix_length(plain, text) :], plain.rpartition(_SENTINEL_TEXT)[2]
    )


def _separator(written: str, at: int) -> str:
    """A pattern of a name and what stands between it and a JSON object; "" if none follows."""
    between, brace, _ = written[at:].partition("{")
    if not brace or not between.strip():
        return ""
    pieces = [re.escape(piece).replace(SENTINEL_ID, r"(?P<id>\w+)", 1) for piece in between.split()]
    pattern = r'(?P<name>[^\s\[\]{}()<>"]+)\s*' + r"\s*".join(pieces) + r"\s*"
    return pattern if "(?P<id>" in pattern else pattern + "(?P<id>)"


def _read_second_call(tokenizer: Tokenizer, lead: str) -> tuple[str, str]:
    """What begins a second call and what ends the first, where two are written."""
    written = _render_answer(tokenizer, _SENTINEL_CALLS)
    first = None if written is None else _RenderedCall.find(written.text)
    second = None if first is None else _RenderedCall.find(first.after)
    if second is None:
        return "", ""
    shared = _common_prefix_length(lead[::-1], second.before[::-1])
    partial = re.search(r"[<\[].*", lead[len(lead) - shared :], re.DOTALL)
    again = partial.group() if partial else ""
    return _without_list_bracket(again), second.before.removesuffix(again).strip(" \n,;")


def _thought_closing(tokenizer: Tokenizer) -> str:
    """What ends the thoughts that the template has an answer begin with."""
    prompt = tokenizer.chat_text([SENTINEL_QUESTION], tools=SENTINEL_TOOLS)
    return f"\n{_THOUGHT_END}\n\n" if prompt.rstrip().endswith("<think>") else ""


def _common_prefix_length(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _without_list_bracket(opening: str) -> str:
    """What announces calls, without the bracket of a list of them."""
    return opening.strip().removesuffix("[").rstrip()


def _cut_before(text: str, ends: Sequence[str]) -> str:
    return text[: min((text.find(end) for end in ends if end and end in text), default=len(text))]


def _intersection(tokens: Sequence[str], special: Sequence[str]) -> list[str]:
    return [token for token in tokens if token in special]


def _longest_first(*texts: str) -> tuple[str, ...]:
    """Those that are not empty, once each, the longest first."""
    return tuple(sorted({text.strip() for text in texts if text.strip()}, key=len, reverse=True))


_FORCED = ("any", "required", True)
_FORMATS: WeakKeyDictionary[Tokenizer, ToolFormat] = WeakKeyDictionary()


def resolve_tool_choice(tools: Sequence[Mapping[str, Any]], choice: Any) -> str | None:
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

    def stable_content(self, token_ids: Sequence[int]) -> str:
        """Return what of an unfinished answer is content, whatever may follow."""
        text = self._text(token_ids)
        partial = [
            size for stop in self.stop for size in range(1, len(stop)) if text.endswith(stop[:size])
        ]
        return self.format.stable_content(text[: len(text) - max(partial, default=0)])

    def next_content(self, emitted: str, token_ids: Sequence[int]) -> str:
        """Return what a stream may tell of an unfinished answer beyond what it has told."""
        stable_content = self.stable_content(token_ids)
        return stable_content[len(emitted) :] if stable_content.startswith(emitted) else ""

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


def resolve_tool_calling(
    tokenizer: Tokenizer,
    tools: list[dict[str, Any]],
    choice: str | None = None,
    *,
    stop: Sequence[str] | None = None,
    parallel: bool = True,
) -> ToolCalling:
    """Prepare an answer that may call tools; ``choice`` is what ``resolve_tool_choice`` returned.

    Raises:
        ConfigurationError: the model's chat template has no place for tools.
    """
    format_ = _FORMATS.get(tokenizer) or detect_tool_format(tokenizer)
    if format_ is None:
        raise ConfigurationError(
            "this model's chat template has no place for tools: load a model that was trained to "
            "call them, or ask for JSON in the prompt's own words"
        )
    _FORMATS[tokenizer] = format_
    opening = "" if choice in (None, "none") else format_.opening(choice or None)
    return ToolCalling(tokenizer, format_, tools, opening, tuple(stop or ()), parallel)
