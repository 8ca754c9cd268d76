"""Tool syntax: the ways in which models spell one call, and reading a call back.

Formats differ in what stands around a call (``tool_format``), and share these few spellings: a
JSON object, a function name before JSON, a call of Python, tags, and Gemma's braces.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]
"""The properties of every tool's parameters, by the tool's name."""

_NAME_KEYS = ("name", "tool_name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters", "args")
_ID_KEYS = ("id", "tool_call_id", "call_id")

_DECODER = json.JSONDecoder(strict=False)  # models write line breaks into strings
_NAMED = re.compile(r'"(?:name|tool_name|function)"\s*:\s*"([^"\\]+)"')
_PYTHON = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\s*\(")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_PYTHON_ESCAPES = frozenset("\\'\"abfnrtvxuUN01234567\n")
_TAGS = re.compile(r'<(function|invoke)(?:=|\s+name=)"?([^">\s]+)"?\s*>')
_PARAMETER = re.compile(r'\s*<parameter(?:=|\s+name=)"?([^">]+?)"?\s*>(.*?)</parameter>', re.DOTALL)
_PAIRED = re.compile(r"([^\s<>{}\[\]()]+)\s*(?=<arg_key>)")
_PAIR = re.compile(
    r"\s*<arg_key>((?:(?!</arg_key>).)*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL
)
_BRACED = re.compile(r"call:([^\s{}]+)\{")
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
    """A tool that the model calls.

    One that cannot be read whole has an ``error``, no arguments, and a name only if that could be
    read; ``text`` is what the model wrote.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    call_id: str = ""
    error: str = ""
    text: str = ""

    @property
    def is_valid(self) -> bool:
        """Whether it could be read whole."""
        return not self.error


class MalformedCallError(ValueError):
    """What begins as a call and cannot be read as one."""

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


Read = tuple[ToolCall, int]
Reader = Callable[[str, int, Schemas], "Read | None"]


def read_call(
    text: str, at: int, schemas: Schemas, separator: re.Pattern[str] | None
) -> Read | None:
    """Read the call that begins at a character; return it and where it ends.

    None if nothing there looks like a call. ``separator`` stands between a name and JSON.

    Raises:
        MalformedCallError: it begins like one and cannot be read.
    """
    for reader in (_read_json, _read_tags, _read_pairs, _read_braces):
        if (found := reader(text, at, schemas)) is not None:
            return found
    if separator is not None and (found := _read_named(text, at, separator)) is not None:
        return found
    return _read_python(text, at, schemas)


def as_call(value: Any) -> ToolCall:
    """Turn what JSON holds into a call.

    Raises:
        MalformedCallError: it names no function, or its arguments are no object.
    """
    if not isinstance(value, Mapping):
        raise MalformedCallError("a call is a JSON object")
    inner = value.get("function")
    fields = {**value, **inner} if isinstance(inner, Mapping) else value
    names = [fields[key] for key in _NAME_KEYS if isinstance(fields.get(key), str)]
    if not names or not names[0]:
        raise MalformedCallError("the call names no function")
    given = [fields[key] for key in _ARGUMENT_KEYS if key in fields]
    ids = [fields[key] for key in _ID_KEYS if isinstance(fields.get(key), str)]
    arguments = _as_arguments(given[0] if given else {}, names[0])
    return ToolCall(names[0], arguments, ids[0] if ids else "")


def _as_arguments(value: Any, name: str) -> dict[str, Any]:
    """Arguments as an object that JSON can hold; its text is read."""
    try:
        if isinstance(value, str):
            value = _DECODER.decode(value or "{}")
        value = json.loads(json.dumps(value if value is not None else {}, allow_nan=False))
    except (ValueError, TypeError, RecursionError) as error:
        raise MalformedCallError(f"its arguments are no JSON: {error}", name) from None
    if not isinstance(value, dict):
        raise MalformedCallError("its arguments are no JSON object", name)
    return value


def _decode(text: str, at: int, name: str = "") -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        named = _NAMED.search(text, at)
        found = name or (named.group(1) if named else "")
        raise MalformedCallError(f"it is no JSON: {error}", found) from None


def _read_json(text: str, at: int, _: Schemas) -> Read | None:
    if not text.startswith("{", at):
        return None
    value, end = _decode(text, at)
    return as_call(value), end


def _read_named(text: str, at: int, separator: re.Pattern[str]) -> Read | None:
    found = separator.match(text, at)
    if found is None:
        return None
    name = found["name"]
    value, end = _decode(text, found.end(), name)
    return ToolCall(name, _as_arguments(value, name), found["id"] or ""), end


def _read_tags(text: str, at: int, schemas: Schemas) -> Read | None:
    found = _TAGS.match(text, at)
    if found is None:
        return None
    tag, name = found.groups()
    return _read_values(text, found.end(), name, schemas, _PARAMETER, f"</{tag}>")


def _read_pairs(text: str, at: int, schemas: Schemas) -> Read | None:
    found = _PAIRED.match(text, at)
    if found is None:
        return None
    return _read_values(text, found.end(), found.group(1), schemas, _PAIR, "")


def _read_values(
    text: str, at: int, name: str, schemas: Schemas, pair: re.Pattern[str], closing: str
) -> Read:  # fmt: skip
    arguments = {}
    while (found := pair.match(text, at)) is not None:
        key, value = found.groups()
        arguments[key.strip()] = _typed(value, schemas.get(name, {}).get(key.strip()))
        at = found.end()
    rest = re.compile(r"\s*").match(text, at)
    at = rest.end() if rest else at
    if not text.startswith(closing or "</", at):
        raise MalformedCallError("it does not end", name)
    return ToolCall(name, _as_arguments(arguments, name)), at + len(closing)


def _typed(value: str, schema: Any) -> Any:
    """What a tag's text stands for: a text if the schema says so, else JSON if it is some."""
    value = value.removeprefix("\n").removesuffix("\n")
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _read_braces(text: str, at: int, _: Schemas) -> Read | None:
    found = _BRACED.match(text, at)
    if found is None:
        return None
    name, depth, written = found.group(1), 0, list[str]()
    for token in _BRACE_TOKEN.finditer(text, found.end() - 1):
        kind, value = token.lastgroup, token[token.lastgroup or 0]
        if kind == "mark":
            depth += (value in "{[") - (value in "}]")
        is_text = kind in ("string", "escaped") or (
            kind == "word" and not _LITERAL.fullmatch(value)
        )
        written.append(json.dumps(value) if is_text else value)
        if depth == 0:
            value, _end = _decode("".join(written), 0, name)
            return ToolCall(name, _as_arguments(value, name)), token.end()
    raise MalformedCallError("it does not end", name)


def _read_python(text: str, at: int, schemas: Schemas) -> Read | None:
    found = _PYTHON.match(text, at)
    if found is None:
        return None
    name = found.group(1).removesuffix(".call")  # how Llama calls the tools it was born with
    end = _closing_parenthesis(text, found.end(), name)
    source = _ESCAPE.sub(_doubled, f"f{text[found.end() - 1 : end]}")
    try:
        call = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedCallError(f"it is no call of Python: {error}", name) from None
    assert isinstance(call, ast.Call)
    names = list(schemas.get(name, {}))
    if len(call.args) > len(names) or any(keyword.arg is None for keyword in call.keywords):
        raise MalformedCallError("its arguments have no names", name)
    given = [*zip(names, call.args, strict=False)]
    given += [(str(keyword.arg), keyword.value) for keyword in call.keywords]
    arguments = {key: _literal(value, name) for key, value in given}
    if len(arguments) < len(given):
        raise MalformedCallError("an argument is given twice", name)
    return ToolCall(name, _as_arguments(arguments, name)), end


def _literal(node: ast.expr, name: str) -> Any:
    """The value of a literal; JSON's names for it are fine as well."""
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
        raise MalformedCallError("its arguments are no literals", name) from None


def _closing_parenthesis(text: str, at: int, name: str) -> int:
    """Where the call ends whose arguments begin at a character; brackets in strings are text."""
    depth = 1
    for token in _PYTHON_TOKEN.finditer(text, at):
        depth += (token[0] in _OPENING) - (token[0] in _CLOSING)
        if depth == 0:
            return token.end()
    raise MalformedCallError("it does not end", name)


def _doubled(escape: re.Match[str]) -> str:
    """Keep a backslash that escapes nothing, which Python only warns of."""
    return escape[0] if escape[1] in _PYTHON_ESCAPES else "\\" + escape[0]
