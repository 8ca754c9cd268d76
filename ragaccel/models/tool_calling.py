"""Tool calling: detect the format of a model's tool calls, and read calls in answers."""

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

    Message = Mapping[str, Any]

_SENTINEL_ARGUMENTS = {SENTINEL_KEY: SENTINEL_VALUE}
_SENTINEL_TEXT = "sentinel answer 7"
_SENTINEL_REPLY: Message = {"role": "assistant", "content": _SENTINEL_TEXT}
_SENTINEL_CALLS: Message = {**SENTINEL_CALL, "tool_calls": [*SENTINEL_CALL["tool_calls"]] * 2}
_THOUGHT_END = "</think>"
# Special tokens around bare calls that Llama's models write and its templates do not.
_UNWRITTEN_MARKERS = ("<|python_tag|>", "<|python_start|>")
_UNWRITTEN_CLOSERS = ("<|python_end|>",)
_COMMON_FORMAT = ToolFormat(
    markers=("<tool_call>", "<|tool_call|>", "<|tool_call>", "[TOOL_CALLS]", *_UNWRITTEN_MARKERS),
    closers=("</tool_call>", "<|/tool_call|>", "<tool_call|>", *_UNWRITTEN_CLOSERS),
    is_bare=True,
)


def detect_tool_format(tokenizer: Tokenizer) -> ToolFormat | None:
    """Detect how a model writes tool calls; return None if its template has no tools.

    The template renders a sentinel call, and the text around the call's name and arguments is the
    format. A template that reads tools but writes no calls gets a set of common formats. This
    takes milliseconds, so keep the result.
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
    """A rendered answer, and the text that the template writes after a plain answer."""

    text: str
    tail: str


@dataclass(frozen=True, slots=True)
class _RenderedCall:
    """The sentinel call in a rendered answer, with the text before and after it."""

    before: str
    text: str
    after: str
    separator: str = ""

    @classmethod
    def find(cls, written: str) -> _RenderedCall | None:
        """Return the leftmost text that parses as the sentinel call, or None."""
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
        """The call's text before the name; a common one if the template writes arguments first."""
        before = self.text.partition(SENTINEL_TOOL)[0]
        return _COMMON_FORMAT.name_opening if SENTINEL_VALUE in before else before

    @property
    def arguments_opening(self) -> str:
        """The call's text between the name and the first character of the arguments."""
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
    """Render a message after a question; return None if the template rejects it."""

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
    """Return a pattern for a name and the text from ``at`` to its JSON arguments, or ""."""
    between, brace, _ = written[at:].partition("{")
    if not brace or not between.strip():
        return ""
    pieces = [re.escape(piece).replace(SENTINEL_ID, r"(?P<id>\w+)", 1) for piece in between.split()]
    pattern = r'(?P<name>[^\s\[\]{}()<>"]+)\s*' + r"\s*".join(pieces) + r"\s*"
    return pattern if "(?P<id>" in pattern else pattern + "(?P<id>)"


def _read_second_call(tokenizer: Tokenizer, lead: str) -> tuple[str, str]:
    """Return the marker of a second call and the closer of the first; both may be empty."""
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
    """Return the text that closes a thought if the template's prompt opens one; else ""."""
    prompt = tokenizer.chat_text([SENTINEL_QUESTION], tools=SENTINEL_TOOLS)
    return f"\n{_THOUGHT_END}\n\n" if prompt.rstrip().endswith("<think>") else ""


def _common_prefix_length(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _without_list_bracket(opening: str) -> str:
    """Return the marker that opens calls, without the "[" of a list of calls."""
    return opening.strip().removesuffix("[").rstrip()


def _cut_before(text: str, ends: Sequence[str]) -> str:
    return text[: min((text.find(end) for end in ends if end and end in text), default=len(text))]


def _intersection(tokens: Sequence[str], special: Sequence[str]) -> list[str]:
    return [token for token in tokens if token in special]


def _longest_first(*texts: str) -> tuple[str, ...]:
    """Return the distinct non-empty texts, longest first."""
    return tuple(sorted({text.strip() for text in texts if text.strip()}, key=len, reverse=True))


_FORCED = ("any", "required", True)
_FORMATS: WeakKeyDictionary[Tokenizer, ToolFormat] = WeakKeyDictionary()


def resolve_tool_choice(tools: Sequence[Mapping[str, Any]], choice: Any) -> str | None:
    """Normalize a tool choice: None (the model decides), "" (any tool), "none", or a name.

    Args:
        tools: the tools of the request.
        choice: a keyword, a name, or ``{"type": "function", "function": {"name": ...}}``.

    Raises:
        ConfigurationError: the choice is invalid, or names a tool that is not in ``tools``.
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
            f"tool_choice={choice!r} is not one of the tools: choose one of {', '.join(names)}, "
            "auto, any, none"
        )
    return str(named)


@dataclass(frozen=True, slots=True)
class ToolCalling:
    """The tools of one request, and the format of its calls.

    Attributes:
        opening: text that the answer is forced to begin with; empty if the model decides.
        stop: the request's stop strings.
        parallel: return all calls of an answer, not only the first.
    """

    tokenizer: Tokenizer
    format: ToolFormat
    tools: list[dict[str, Any]]
    opening: str = ""
    stop: tuple[str, ...] = ()
    parallel: bool = True

    @property
    def opening_ids(self) -> list[int]:
        """Token ids of the opening, special tokens included, to append to the prompt."""
        return list(self.tokenizer.encode(self.opening)) if self.opening else []

    def stable_content(self, token_ids: Sequence[int]) -> str:
        """Return the content of an unfinished answer that no later token can change."""
        text = self._text(token_ids)
        partial = [
            size for stop in self.stop for size in range(1, len(stop)) if text.endswith(stop[:size])
        ]
        return self.format.stable_content(text[: len(text) - max(partial, default=0)])

    def next_content(self, emitted: str, token_ids: Sequence[int]) -> str:
        """Return the stable content of an unfinished answer that follows the text ``emitted``."""
        stable_content = self.stable_content(token_ids)
        return stable_content[len(emitted) :] if stable_content.startswith(emitted) else ""

    def read(self, text: str, token_ids: Sequence[int]) -> tuple[str, list[ToolCall]]:
        """Return the content of a finished answer, and its calls.

        ``text`` is the answer without special tokens, which is the content if there are no calls.
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
    """Return the tool calling of one request; ``choice`` comes from ``resolve_tool_choice``.

    Raises:
        ConfigurationError: the model's chat template does not support tools.
    """
    format_ = _FORMATS.get(tokenizer) or detect_tool_format(tokenizer)
    if format_ is None:
        raise ConfigurationError(
            "this model's chat template does not support tools: load a model that was trained to "
            "call them, or ask for JSON in the prompt"
        )
    _FORMATS[tokenizer] = format_
    opening = "" if choice in (None, "none") else format_.opening(choice or None)
    return ToolCalling(tokenizer, format_, tools, opening, tuple(stop or ()), parallel)
