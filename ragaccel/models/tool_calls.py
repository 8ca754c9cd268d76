"""Tool calls: normalize messages for templates, and parse calls in answers.

Formats differ in the text around a call (see ``detect_tool_format``). The calls themselves have one
of five forms: a JSON object, a function name before JSON, a Python call, tags, or Gemma's braces.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from ragaccel.errors import ConfigurationError

SENTINEL_TOOL, SENTINEL_KEY = "sentinel_tool_7", "sentinel_key_7"
SENTINEL_VALUE = "sentinel value 7"
SENTINEL_ID = "sentinel7"  # some templates accept only ids of nine letters and digits
SENTINEL_TOOLS: tuple[Mapping[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": SENTINEL_TOOL,
            "description": "Sentinel.",
            "parameters": {
                "type": "object",
                "properties": {SENTINEL_KEY: {"type": "string", "description": "Sentinel."}},
                "required": [SENTINEL_KEY],
            },
        },
    },
)
SENTINEL_QUESTION: Mapping[str, Any] = {"role": "user", "content": "?"}
SENTINEL_CALL: Mapping[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "type": "function",
            "id": SENTINEL_ID,
            "function": {"name": SENTINEL_TOOL, "arguments": {SENTINEL_KEY: SENTINEL_VALUE}},
        }
    ],
}
SENTINEL_RESULT: Mapping[str, Any] = {
    "role": "tool",
    "name": SENTINEL_TOOL,
    "tool_call_id": SENTINEL_ID,
    "content": "sentinel result 7",
}


def normalize_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Convert tools to the form ``{"type": "function", "function": {"name": ...}}``.

    A bare function (``{"name": ..., "parameters": ...}``) is wrapped; an empty list becomes None.

    Raises:
        ConfigurationError: an item is not a tool, or two tools have the same name.
    """
    made = [_normalize_tool(tool) for tool in tools or ()]
    names = [tool["function"]["name"] for tool in made]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(f"two tools are named {twice[0]!r}: give each its own name")
    return made or None


def normalize_calls(calls: Sequence[Any], *, arguments_as_text: bool) -> list[dict[str, Any]]:
    """Convert a message's calls to the form that chat templates read.

    Arguments become a dict, or JSON text with ``arguments_as_text``. Arguments that are not a JSON
    object stay unchanged.
    """
    return [_normalize_call(call, arguments_as_text) for call in calls]


def _normalize_tool(tool: Any) -> dict[str, Any]:
    whole, _ = _function_of(
        tool,
        'a tool must be a dict like {"type": "function", "function": {"name": ..., '
        '"description": ..., "parameters": {...}}}',
    )
    return {"type": "function", **whole}


def _function_of(item: Any, wanted: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return a tool or a call with its function, which may be given alone."""
    whole = item if isinstance(item, Mapping) and "function" in item else {"function": item}
    function = whole["function"]
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigurationError(f"{wanted}, not {item!r}")
    return whole, function


def _normalize_call(call: Any, arguments_as_text: bool) -> dict[str, Any]:
    whole, function = _function_of(
        call,
        'a tool call must be a dict like {"type": "function", "id": ..., "function": {"name": ..., '
        '"arguments": {...}}}',
    )
    arguments = function.get("arguments", {})
    arguments = _dump_arguments(arguments) if arguments_as_text else _parse_arguments(arguments)
    return {"type": "function", **whole, "function": {**function, "arguments": arguments}}


def _parse_arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        read = json.loads(arguments or "{}")
    except ValueError:
        return arguments
    return read if isinstance(read, dict) else arguments


def _dump_arguments(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


Schemas = Mapping[str, Mapping[str, Any]]
"""The properties of each tool's parameters, by the tool's name."""

_NAME_KEYS = ("name", "tool_name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters", "args")
_ID_KEYS = ("id", "tool_call_id", "call_id")

_DECODER = json.JSONDecoder(strict=False)  # models write line breaks into strings
_NAMED = re.compile(r'"(?:name|tool_name|function)"\s*:\s*"([^"\\]+)"')
_OBJECT = re.compile(r"(?=\{)")
_PYTHON = re.compile(r"(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\s*\(")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_PYTHON_ESCAPES = frozenset("\\'\"abfnrtvxuUN01234567\n")
_TAGS = re.compile(r'<(?P<tag>function|invoke)(?:=|\s+name=)"?(?P<name>[^">\s]+)"?\s*>')
_PARAMETER = re.compile(r'\s*<parameter(?:=|\s+name=)"?([^">]+?)"?\s*>(.*?)</parameter>', re.DOTALL)
_PAIRED = re.compile(r"(?P<name>[^\s<>{}\[\]()]+)\s*(?=<arg_key>)")
_PAIR = re.compile(
    r"\s*<arg_key>((?:(?!</arg_key>).)*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL
)
_BRACED = re.compile(r"call:(?P<name>[^\s{}]+)\{")
_BRACE_TOKEN = re.compile(
    r'<\|"\|>(?P<string>.*?)<\|"\|>|<escape>(?P<escaped>.*?)<escape>|(?P<json>"(?:[^"\\]|\\.)*")'
    r"|(?P<mark>[{}\[\],:])|(?P<word>[^\s{}\[\],:]+)",
    re.DOTALL,
)
_LITERAL = re.compile(r"true|false|null|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_PYTHON_TOKEN = re.compile(
    r"""\"\"\"(?:[^\\]|\\.)*?\"\"\"|'''(?:[^\\]|\\.)*?'''|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|[()\[\]{}]""",
    re.DOTALL,
)
_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")
_JSON_NAMES = {"true": True, "false": False, "null": None}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the model.

    A call that cannot be parsed has an ``error``, no arguments, and a name only if that could be
    parsed. ``text`` is the text of the call as the model wrote it.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    call_id: str = ""
    error: str = ""
    text: str = ""

    @property
    def is_valid(self) -> bool:
        """Whether the call was parsed without an error."""
        return not self.error


class MalformedCallError(ValueError):
    """Raised for text that begins like a call and cannot be parsed."""

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


Read = tuple[ToolCall, int]
Reader = Callable[[re.Match[str], Schemas], Read]


def read_call(text: str, at: int, schemas: Schemas, separator: re.Pattern[str]) -> Read | None:
    """Parse the call that begins at character ``at``; return it and the position after it.

    Return None if the text there does not look like a call. ``separator`` matches a name and the
    text between it and its JSON arguments.

    Raises:
        MalformedCallError: the text begins like a call and cannot be parsed.
    """
    forms: tuple[tuple[re.Pattern[str], Reader], ...] = (
        (_OBJECT, _read_json),
        (_TAGS, _read_tags),
        (_PAIRED, _read_pairs),
        (_BRACED, _read_braces),
        (separator, _read_named),
        (_PYTHON, _read_python),
    )
    for begins, read in forms:
        if (found := begins.match(text, at)) is not None:
            return read(found, schemas)
    return None


def parse_call(value: Any) -> ToolCall:
    """Convert a parsed JSON value to a call.

    Raises:
        MalformedCallError: the value does not name a function, or its arguments are not an object.
    """
    if not isinstance(value, Mapping):
        raise MalformedCallError("the call is not a JSON object")
    inner = value.get("function")
    fields = {**value, **inner} if isinstance(inner, Mapping) else value
    names = [fields[key] for key in _NAME_KEYS if isinstance(fields.get(key), str)]
    if not names or not names[0]:
        raise MalformedCallError("the call names no function")
    given = [fields[key] for key in _ARGUMENT_KEYS if key in fields]
    ids = [fields[key] for key in _ID_KEYS if isinstance(fields.get(key), str)]
    arguments = _check_arguments(given[0] if given else {}, names[0])
    return ToolCall(names[0], arguments, ids[0] if ids else "")


def _check_arguments(value: Any, name: str) -> dict[str, Any]:
    """Return arguments as a JSON object; parse them if they are text."""
    try:
        if isinstance(value, str):
            value = _DECODER.decode(value or "{}")
        value = json.loads(json.dumps(value if value is not None else {}, allow_nan=False))
    except (ValueError, TypeError, RecursionError) as error:
        raise MalformedCallError(f"its arguments are not JSON: {error}", name) from None
    if not isinstance(value, dict):
        raise MalformedCallError("its arguments are not a JSON object", name)
    return value


def _decode(text: str, at: int, name: str = "") -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        named = _NAMED.search(text, at)
        found = name or (named.group(1) if named else "")
        raise MalformedCallError(f"it is not JSON: {error}", found) from None


def _read_json(begin: re.Match[str], _: Schemas) -> Read:
    value, end = _decode(begin.string, begin.start())
    return parse_call(value), end


def _read_named(begin: re.Match[str], _: Schemas) -> Read:
    name = begin["name"]
    value, end = _decode(begin.string, begin.end(), name)
    return ToolCall(name, _check_arguments(value, name), begin["id"] or ""), end


def _read_tags(begin: re.Match[str], schemas: Schemas) -> Read:
    return _read_values(begin, schemas, _PARAMETER, f"</{begin['tag']}>")


def _read_pairs(begin: re.Match[str], schemas: Schemas) -> Read:
    return _read_values(begin, schemas, _PAIR, "")


def _read_values(
    begin: re.Match[str], schemas: Schemas, pair: re.Pattern[str], closing: str
) -> Read:
    text, at, name, arguments = begin.string, begin.end(), begin["name"], {}
    while (found := pair.match(text, at)) is not None:
        key, value = found.groups()
        arguments[key.strip()] = _parse_value(value, schemas.get(name, {}).get(key.strip()))
        at = found.end()
    at = _end_of_match(_SPACE, text, at)
    if not text.startswith(closing or "</", at):
        raise MalformedCallError("its end is missing", name)
    return ToolCall(name, _check_arguments(arguments, name)), at + len(closing)


def _parse_value(value: str, schema: Any) -> Any:
    """Return a tag's text as a string if the schema says so; else parse it as JSON if valid."""
    value = value.removeprefix("\n").removesuffix("\n")
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _read_braces(begin: re.Match[str], _: Schemas) -> Read:
    name, depth, written = begin["name"], 0, list[str]()
    for token in _BRACE_TOKEN.finditer(begin.string, begin.end() - 1):
        kind, value = token.lastgroup, token[token.lastgroup or 0]
        if kind == "mark":
            depth += (value in "{[") - (value in "}]")
        is_text = kind in ("string", "escaped") or (
            kind == "word" and not _LITERAL.fullmatch(value)
        )
        written.append(json.dumps(value) if is_text else value)
        if depth == 0:
            value, _end = _decode("".join(written), 0, name)
            return ToolCall(name, _check_arguments(value, name)), token.end()
    raise MalformedCallError("its end is missing", name)


def _read_python(begin: re.Match[str], schemas: Schemas) -> Read:
    name = begin["name"].removesuffix(".call")  # Llama's form for its built-in tools
    end = _closing_parenthesis(begin.string, begin.end(), name)
    source = _ESCAPE.sub(_double_backslash, f"f{begin.string[begin.end() - 1 : end]}")
    try:
        call = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedCallError(f"it is not a Python call: {error}", name) from None
    assert isinstance(call, ast.Call)
    names = list(schemas.get(name, {}))
    if len(call.args) > len(names) or any(keyword.arg is None for keyword in call.keywords):
        raise MalformedCallError("its arguments have no names", name)
    given = [*zip(names, call.args, strict=False)]
    given += [(str(keyword.arg), keyword.value) for keyword in call.keywords]
    arguments = {key: _literal(value, name) for key, value in given}
    if len(arguments) < len(given):
        raise MalformedCallError("an argument is given twice", name)
    return ToolCall(name, _check_arguments(arguments, name)), end


def _literal(node: ast.expr, name: str) -> Any:
    """Return the value of a Python literal; JSON's true, false and null count as well."""
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item, name) for item in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return {_literal(key, name): _literal(value, name) for key, value in pairs if key}
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise MalformedCallError("its arguments are not literals", name) from None


def _closing_parenthesis(text: str, at: int, name: str) -> int:
    """Return the end of a call whose arguments begin at ``at``; skip brackets in strings."""
    depth = 1
    for token in _PYTHON_TOKEN.finditer(text, at):
        depth += (token[0] in _OPENING) - (token[0] in _CLOSING)
        if depth == 0:
            return token.end()
    raise MalformedCallError("its end is missing", name)


def _double_backslash(escape: re.Match[str]) -> str:
    """Double a backslash that does not start an escape sequence; Python would warn about it."""
    return escape[0] if escape[1] in _PYTHON_ESCAPES else "\\" + escape[0]


__all__ = ["ToolCall", "ToolFormat"]

Tools = Sequence[Mapping[str, Any]]
Span = tuple[int, int, list[ToolCall]]

_THOUGHT = r"(?P<thought><think>.*?(?:</think>|\Z))"
_THOUGHT_END = "</think>"
_LINE = r"(?P<line>^[ \t]*(?=[{\[]))"
_FENCE = r"(?P<fence>^[ \t]*```(?:json|tool_calls?|tool_code)[ \t]*\n)"
_FENCE_END = re.compile(r"\s*```[ \t]*$", re.MULTILINE)
_PARTIAL_FENCE = re.compile(r"^[ \t]*`{1,3}[a-z_]*[ \t]*\Z", re.MULTILINE)
_LEAD, _SPACE = re.compile(r"[\s\[]*"), re.compile(r"\s*")
_GAP = re.compile(r"\s*[,;]?\s*")
_KEYS = "name|tool_name|function|type|arguments|parameters|args|id|tool_call_id|call_id"
_LIKELY = re.compile(rf'[\s\[]{{0,64}}\{{\s*"(?:{_KEYS})"\s*:|\s*\[\s*[A-Za-z_][\w.]*\(')
_HAS_ARGUMENTS = re.compile(r'"(?:arguments|parameters|args)"\s*:')
# Mistral's form: a name, an optional identifier, and a marker before arguments in JSON.
MISTRAL_SEPARATOR = r'(?P<name>[^\s\[\]{}()<>"]+)(?:\[CALL_ID\](?P<id>\w+))?\s*\[ARGS\]\s*'
_MAX_MALFORMED = 32  # in one answer: parsing each may read the text to its end
# A possible beginning of a bare call at the end of an unfinished answer.
_MAY_BEGIN = re.compile(
    rf'[\s\[]{{0,64}}(?:\{{\s*(?:"(?:\w*|(?:{_KEYS})".*))?|[A-Za-z_][\w.]*(?:\(.*)?)?\Z', re.DOTALL
)
# The same in a code fence, which may also hold tags, braces, pairs, and a name before JSON.
_MAY_BE_TAGGED = re.compile(r"\s*(?:<.*|[^\s<>{}\[\]()]+\s*(?:[<\[{].*)?)?\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format of a model's tool calls; ``detect_tool_format`` reads it from a chat template.

    Markers are often special tokens, which ``Answer.text`` leaves out. So parse
    ``llm.tokenizer.decode(answer.token_ids, skip_special_tokens=False)``.

    Args:
        markers: texts that announce calls.
        closers: texts that may follow a call.
        is_bare: calls also occur without markers.
        name_opening: the beginning of an answer that calls a tool, up to the tool's name.
        arguments_opening: the text between that name and the arguments.
        separator: a pattern of the name and ``arguments_opening`` before JSON arguments.
        special_tokens: texts to remove from the content.
    """

    markers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    is_bare: bool = False
    name_opening: str = '{"name": "'
    arguments_opening: str = '", "arguments":'
    separator: str = MISTRAL_SEPARATOR
    special_tokens: tuple[str, ...] = ()

    def opening(self, name: str | None = None) -> str:
        """Return the text that an answer must begin with to call any tool, or the named one.

        To force a call, append its tokens to the prompt (``tokenizer.encode`` reads the special
        tokens in it), and prepend the text to the answer before parsing.
        """
        if name is None:
            return self.name_opening
        return self.name_opening + name + self.arguments_opening

    def parse(self, text: str, tools: Tools | None = None) -> tuple[str, tuple[ToolCall, ...]]:
        """Split an answer into its content and its calls, in order; never raise.

        With the model's ``tools``, values in tags get the types of their parameters, and JSON
        without markers, bare or in a code fence, counts as a call if it names one of the tools.
        Calls in thoughts (``<think>``) are content.

        A truncated or malformed call is returned with its ``error`` and without arguments.
        """
        schemas = _schemas(tools)
        spans = list(self._marked(text, schemas))
        spans = spans or list(self._bare(text, schemas)) or list(self._fenced(text, schemas))
        calls = tuple(call for _, _, some in spans for call in some)
        return self._content(text, spans), calls

    def stable_content(self, text: str) -> str:
        """Return the beginning of an unfinished answer that stays content whatever follows.

        It is for streaming: text that may become a call is left out, with the space before it.
        """
        end = len(text) - self._partial_token_length(text)
        if (fence := _PARTIAL_FENCE.search(text)) is not None:
            end = min(end, fence.start())
        for spot in self._find_spots(text, self._marker(), _LINE, _FENCE):
            begins = _MAY_BEGIN.match(text, spot.end())
            if spot.lastgroup == "fence":
                begins = begins or _MAY_BE_TAGGED.match(text, spot.end())
            if spot.lastgroup == "marker" or begins:
                end = min(end, spot.start())
                break
        content = self._remove_special_tokens(text[:end])
        return content.rstrip("\ufffd").rstrip()  # leave out an incomplete character

    def _marked(self, text: str, schemas: Schemas) -> Iterator[Span]:
        """Yield calls after markers; text that cannot be parsed there becomes a malformed call."""
        at, num_malformed = 0, 0
        for spot in self._find_spots(text, self._marker()):
            if spot.start() < at:
                continue
            if num_malformed == _MAX_MALFORMED:  # the rest is unlikely to be calls
                error = f"there are more than {num_malformed} malformed calls before it"
                rest = ToolCall("", error=error, text=text[spot.end() :])
                yield spot.start(), len(text), [rest]
                return
            end, calls = self._calls(text, spot.end(), schemas)
            num_malformed += not calls[-1].is_valid
            yield spot.start(), end, calls
            at = end

    def _bare(self, text: str, schemas: Schemas) -> Iterator[Span]:
        """Yield calls without markers that begin a line, if they are plausible."""
        if not self.is_bare and not schemas:
            return
        at, num_malformed = 0, 0
        first = _end_of_match(_SPACE, text, 0)
        for spot in self._find_spots(text, _LINE):
            if spot.start() < at or not _LIKELY.match(text, spot.end()):
                continue
            if num_malformed == _MAX_MALFORMED:
                return
            end, calls = self._calls(text, spot.end(), schemas)
            if all(_is_plausible(call, schemas, spot.start() <= first) for call in calls):
                yield spot.start(), end, calls
                at = end
            else:
                num_malformed += 1

    def _fenced(self, text: str, schemas: Schemas) -> Iterator[Span]:
        """Yield calls that fill a code fence."""
        num_malformed = 0
        for spot in self._find_spots(text, _FENCE):
            end, calls = self._calls(text, spot.end(), schemas)
            closing = _FENCE_END.match(text, end)
            if closing is not None and all(_is_plausible(call, schemas) for call in calls):
                yield spot.start(), closing.end(), calls
            elif (num_malformed := num_malformed + 1) == _MAX_MALFORMED:
                return

    def _calls(self, text: str, at: int, schemas: Schemas) -> tuple[int, list[ToolCall]]:
        """Parse consecutive calls; return them and the position after their closers."""
        calls: list[ToolCall] = []
        end = at
        at = _end_of_match(_LEAD, text, at)
        while True:
            try:
                found = read_call(text, at, schemas, _compiled(self.separator))
                if found is None and not calls:
                    raise MalformedCallError("it holds no call")
            except MalformedCallError as error:
                end = self._find_malformed_end(text, at)
                calls.append(ToolCall(error.name, error=str(error), text=text[at:end]))
                return self._after_closers(text, end), calls
            if found is None:
                end = at if not text[at:].strip() else end
                return self._after_closers(text, end), calls
            call, end = found
            calls.append(replace(call, text=text[at:end]))
            at = _end_of_match(_GAP, text, end)
            if not self._continues(text, end, at):
                return self._after_closers(text, end), calls

    def _continues(self, text: str, end: int, at: int) -> bool:
        """Return whether another call may follow at ``at``, after the call that ends at ``end``.

        It may after a comma, or on a new line if the format has closers.
        """
        gap = text[end:at]
        return text.startswith("{", at) or bool(gap.strip()) or bool(self.closers and "\n" in gap)

    def _find_malformed_end(self, text: str, at: int) -> int:
        """Return the end of a malformed call: the next closer, marker or special token."""
        ends = (*self.closers, *self.markers, *self.special_tokens)
        found = [place for end in ends if (place := text.find(end, at)) >= 0]
        return min(found, default=len(text))

    def _after_closers(self, text: str, at: int) -> int:
        closers = "|".join(map(re.escape, self.closers)) or "(?!)"
        return _end_of_match(_compiled(rf"(?:\s*\])?(?:\s*(?:{closers}))*"), text, at)

    def _content(self, text: str, spans: Sequence[Span]) -> str:
        """Return the text without the calls."""
        if not spans:
            return self._remove_special_tokens(text)
        starts, ends = [0, *(end for _, end, _ in spans)], [*(start for start, _, _ in spans), None]
        first, *others = [
            self._remove_special_tokens(text[start:end])
            for start, end in zip(starts, ends, strict=True)
        ]
        return "\n".join([first.rstrip(), *(other.strip() for other in others if other.strip())])

    def _remove_special_tokens(self, text: str) -> str:
        return _compiled("|".join(map(re.escape, self.special_tokens)) or "(?!)").sub("", text)

    def _find_spots(self, text: str, *patterns: str) -> Iterator[re.Match[str]]:
        """Yield matches of any of the patterns outside of thoughts, in order."""
        at = 0
        thought, marker = text.find(_THOUGHT_END), _compiled(self._marker()).search(text)
        is_marked = marker is not None and marker.start() < thought
        if thought >= 0 and "<think>" not in text[:thought] and not is_marked:
            at = thought + len(_THOUGHT_END)  # the prompt may have opened the thought
        for spot in _compiled("|".join((_THOUGHT, *patterns))).finditer(text, at):
            if spot.lastgroup != "thought":
                yield spot

    def _marker(self) -> str:
        """Return a pattern of the markers that allows any whitespace in them."""
        spelled = [r"\s*".join(map(re.escape, marker.split())) for marker in self.markers]
        return f"(?P<marker>{'|'.join(sorted(spelled, key=len, reverse=True)) or '(?!)'})"

    def _partial_token_length(self, text: str) -> int:
        """Return how many characters at the end may begin a marker or a special token."""
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


def _end_of_match(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _schemas(tools: Tools | None) -> Schemas:
    """Return the properties of each tool's parameters, by the tool's name."""
    functions = [tool["function"] for tool in normalize_tools(tools) or ()]
    return {
        function["name"]: (function.get("parameters") or {}).get("properties") or {}
        for function in functions
    }


def _is_plausible(call: ToolCall, schemas: Schemas, may_be_malformed: bool = False) -> bool:
    """Return whether text without markers is a call: it names a known tool, or has arguments."""
    if not call.is_valid and not may_be_malformed:
        return False
    if schemas:
        return call.name in schemas
    return bool(call.name and (_HAS_ARGUMENTS.search(call.text) or call.text[:1] != "{"))
