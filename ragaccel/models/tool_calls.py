"""Tool calls: how a model's answers spell them, and reading them back out of an answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ragaccel.models.tool_messages import as_tools
from ragaccel.models.tool_syntax import MalformedCallError, Schemas, ToolCall, read_call

__all__ = ["ToolCall", "ToolFormat"]

Tools = Sequence[Mapping[str, Any]]
Span = tuple[int, int, list[ToolCall]]

_THOUGHT = r"(?P<thought><think>.*?(?:</think>|\Z))"
_THOUGHT_END = "</think>"
_LINE = r"(?P<line>^[ \t]*(?=[{\[]))"
_FENCE = r"(?P<fence>^[ \t]*```(?:json|tool_calls?|tool_code)[ \t]*\n)"
_FENCE_END = re.compile(r"\s*```[ \t]*$", re.MULTILINE)
_BEGUN_FENCE = re.compile(r"^[ \t]*`{1,3}[a-z_]*[ \t]*\Z", re.MULTILINE)
_LEAD, _SPACE = re.compile(r"[\s\[]*"), re.compile(r"\s*")
_GAP, _LIST_END = re.compile(r"\s*[,;]?\s*"), re.compile(r"\s*\]")
_KEYS = "name|tool_name|function|type|arguments|parameters|args|id|tool_call_id|call_id"
_LIKELY = re.compile(rf'[\s\[]{{0,64}}\{{\s*"(?:{_KEYS})"\s*:|\s*\[\s*[A-Za-z_][\w.]*\(')
_HAS_ARGUMENTS = re.compile(r'"(?:arguments|parameters|args)"\s*:')
# A name, at times an identifier, and what stands before arguments in JSON; Mistral's.
MISTRAL_SEPARATOR = r'(?P<name>[^\s\[\]{}()<>"]+)(?:\[CALL_ID\](?P<id>\w+))?\s*\[ARGS\]\s*'
_MOST_BROKEN = 32  # in one answer: each may be sought to the end of the text
# What bare calls begin with, as far as they have been written.
_MAY_BEGIN = re.compile(
    rf'[\s\[]{{0,64}}(?:\{{\s*(?:"(?:\w*|(?:{_KEYS})".*))?|[A-Za-z_][\w.]*(?:\(.*)?)?\Z', re.DOTALL
)
# What calls in a fence begin with besides: tags, braces, pairs, and a name before JSON.
_MAY_BE_TAGGED = re.compile(r"\s*(?:<.*|[^\s<>{}\[\]()]+\s*(?:[<\[{].*)?)?\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model's answers spell tool calls; ``tool_format`` reads it off a chat template.

    Markers are often special tokens, which ``Answer.text`` leaves out. So what is parsed is
    ``llm.tokenizer.decode(answer.token_ids, skip_special_tokens=False)``.

    Args:
        markers: texts one of which announces calls.
        closers: texts that may stand behind a call.
        is_bare: whether calls stand without markers as well.
        name_opening: what an answer begins with, up to the name of the tool it calls.
        arguments_opening: what stands between that name and the arguments.
        separator: a pattern of name and ``arguments_opening``, where JSON follows that.
        special_tokens: texts that are no content.
    """

    markers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    is_bare: bool = False
    name_opening: str = '{"name": "'
    arguments_opening: str = '", "arguments":'
    separator: str = MISTRAL_SEPARATOR
    special_tokens: tuple[str, ...] = ()

    def opening(self, name: str | None = None) -> str:
        """What an answer must begin with to call a tool: any, or the one named.

        Encode it behind the prompt (``tokenizer.encode``, which reads the special tokens in it)
        to force a call, and put it before the answer's text when that is parsed.
        """
        if name is None:
            return self.name_opening
        return self.name_opening + name + self.arguments_opening

    def parse(self, text: str, tools: Tools | None = None) -> tuple[str, tuple[ToolCall, ...]]:
        """Split an answer into its content and the calls in it, in order; never raises.

        ``tools`` are those that the model was given. With them, values that tags hold get the
        types of their parameters, and JSON without the format's markers, bare or in a code fence,
        counts as a call of a tool it names. What thoughts (``<think>``) mention is content.

        A call that is cut off or malformed is there with its ``error``, and nothing of it is
        made up.
        """
        schemas = _schemas(tools)
        spans = list(self._marked(text, schemas))
        spans = spans or list(self._bare(text, schemas)) or list(self._fenced(text, schemas))
        calls = tuple(call for _, _, some in spans for call in some)
        return self._content(text, spans), calls

    def settled(self, text: str) -> str:
        """The beginning of a growing answer that is content, whatever may follow.

        For streaming: what may turn out to be a call is held back, and so is the space before it.
        """
        end = len(text) - self._begun_token(text)
        if (fence := _BEGUN_FENCE.search(text)) is not None:
            end = min(end, fence.start())
        for spot in self._spots(text, self._marker(), _LINE, _FENCE):
            begins = _MAY_BEGIN.match(text, spot.end())
            if spot.lastgroup == "fence":
                begins = begins or _MAY_BE_TAGGED.match(text, spot.end())
            if spot.lastgroup == "marker" or begins:
                end = min(end, spot.start())
                break
        return self._cleaned(text[:end]).rstrip("\ufffd").rstrip()  # half a character waits

    def _marked(self, text: str, schemas: Schemas) -> Iterator[Span]:
        """The calls that a marker announces: whatever cannot be read there is a malformed one."""
        at, broken = 0, 0
        for spot in self._spots(text, self._marker()):
            if spot.start() < at:
                continue
            if broken == _MOST_BROKEN:  # what follows is nothing that was meant
                error = f"there are more than {broken} malformed calls before it"
                rest = ToolCall("", error=error, text=text[spot.end() :])
                yield spot.start(), len(text), [rest]
                return
            end, calls = self._calls(text, spot.end(), schemas)
            broken += not calls[-1].is_valid
            yield spot.start(), end, calls
            at = end

    def _bare(self, text: str, schemas: Schemas) -> Iterator[Span]:
        """The calls that begin a line, if they look like nothing else."""
        if not self.is_bare and not schemas:
            return
        at, broken = 0, 0
        first = _after(_SPACE, text, 0)
        for spot in self._spots(text, _LINE):
            if spot.start() < at or not _LIKELY.match(text, spot.end()):
                continue
            if broken == _MOST_BROKEN:
                return
            end, calls = self._calls(text, spot.end(), schemas)
            if all(_is_plausible(call, schemas, spot.start() <= first) for call in calls):
                yield spot.start(), end, calls
                at = end
            else:
                broken += 1

    def _fenced(self, text: str, schemas: Schemas) -> Iterator[Span]:
        """The calls that fill a code fence."""
        broken = 0
        for spot in self._spots(text, _FENCE):
            end, calls = self._calls(text, spot.end(), schemas)
            closing = _FENCE_END.match(text, end)
            if closing is not None and all(_is_plausible(call, schemas) for call in calls):
                yield spot.start(), closing.end(), calls
            elif (broken := broken + 1) == _MOST_BROKEN:
                return

    def _calls(self, text: str, at: int, schemas: Schemas) -> tuple[int, list[ToolCall]]:
        """Read one call after another; return where they end, with their closers."""
        calls: list[ToolCall] = []
        end = at
        at = _after(_LEAD, text, at)
        while True:
            try:
                found = read_call(text, at, schemas, _compiled(self.separator))
                if found is None and not calls:
                    raise MalformedCallError("there is no call to be read")
            except MalformedCallError as error:
                end = self._stop(text, at)
                calls.append(ToolCall(error.name, error=str(error), text=text[at:end]))
                return self._after_closers(text, end), calls
            if found is None:
                end = at if not text[at:].strip() else end
                return self._after_closers(text, end), calls
            call, end = found
            calls.append(replace(call, text=text[at:end]))
            at = _after(_GAP, text, end)
            if not self._goes_on(text, end, at):
                return self._after_closers(text, end), calls

    def _goes_on(self, text: str, end: int, at: int) -> bool:
        """Whether another call may follow: behind a comma, or on a new line of a closed list."""
        gap = text[end:at]
        return text.startswith("{", at) or bool(gap.strip()) or bool(self.closers and "\n" in gap)

    def _stop(self, text: str, at: int) -> int:
        """Where a malformed call ends: at what could close it, or begin the next."""
        ends = (*self.closers, *self.markers, *self.special_tokens)
        found = [place for end in ends if (place := text.find(end, at)) >= 0]
        return min(found, default=len(text))

    def _after_closers(self, text: str, at: int) -> int:
        at = _after(_LIST_END, text, at)
        again = True
        while again:
            again = False
            inside = _after(_SPACE, text, at)
            for closer in self.closers:
                if text.startswith(closer, inside):
                    at, again = inside + len(closer), True
                    break
        return at

    def _content(self, text: str, spans: Sequence[Span]) -> str:
        """What is left beside the calls."""
        if not spans:
            return self._cleaned(text)
        starts, ends = [0, *(end for _, end, _ in spans)], [*(start for start, _, _ in spans), None]
        first, *others = [
            self._cleaned(text[start:end]) for start, end in zip(starts, ends, strict=True)
        ]
        return "\n".join([first.rstrip(), *(other.strip() for other in others if other.strip())])

    def _cleaned(self, text: str) -> str:
        return _compiled("|".join(map(re.escape, self.special_tokens)) or "(?!)").sub("", text)

    def _spots(self, text: str, *patterns: str) -> Iterator[re.Match[str]]:
        """Where one of some patterns holds outside of thoughts, in order."""
        at = 0
        thought, marker = text.find(_THOUGHT_END), _compiled(self._marker()).search(text)
        if (
            thought >= 0
            and "<think>" not in text[:thought]
            and (not marker or marker.start() > thought)
        ):
            at = thought + len(_THOUGHT_END)  # the prompt began it
        for spot in _compiled("|".join((_THOUGHT, *patterns))).finditer(text, at):
            if spot.lastgroup != "thought":
                yield spot

    def _marker(self) -> str:
        """The markers as a pattern that does not mind their spaces."""
        spelled = [r"\s*".join(map(re.escape, marker.split())) for marker in self.markers]
        return f"(?P<marker>{'|'.join(sorted(spelled, key=len, reverse=True)) or '(?!)'})"

    def _begun_token(self, text: str) -> int:
        """How much of the text's end may be the beginning of a marker or a special token."""
        sizes = [
            size
            for token in {*self.markers, *self.special_tokens}
            for size in range(1, len(token))
            if text.endswith(token[:size])
        ]
        return max(sizes, default=0)


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL | re.MULTILINE)


def _after(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _schemas(tools: Tools | None) -> Schemas:
    """The properties of every tool's parameters, by name."""
    functions = [tool["function"] for tool in as_tools(tools) or ()]
    return {
        function["name"]: (function.get("parameters") or {}).get("properties") or {}
        for function in functions
    }


def _is_plausible(call: ToolCall, schemas: Schemas, may_be_broken: bool = False) -> bool:
    """Whether something without markers is meant as a call: it names a tool, and arguments."""
    if not call.is_valid and not may_be_broken:
        return False
    if schemas:
        return call.name in schemas
    return bool(call.name and (_HAS_ARGUMENTS.search(call.text) or call.text[:1] != "{"))
