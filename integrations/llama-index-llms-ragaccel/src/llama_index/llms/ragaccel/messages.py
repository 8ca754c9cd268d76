"""Convert LlamaIndex messages, tools and tool calls to prompts and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from llama_index.core.base.llms.generic_utils import messages_to_prompt as plain_prompt
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.llms.llm import ToolSelection

from ragaccel import ConfigurationError
from ragaccel.prompt import adapt_messages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.frameworks import SharedModel
    from ragaccel.models import ToolCall


TOOL_CALLS, INVALID_CALLS = "tool_calls", "invalid_tool_calls"
"""Keys of a message's ``additional_kwargs``: its tool calls, and the unreadable ones."""

TOOL_NAMES = ("tools", "tool_choice", "parallel_tool_calls")


def read_tool_calls(message: ChatMessage) -> list[ToolSelection]:
    """Return the tool calls of a message of any model."""
    written = message.additional_kwargs.get(TOOL_CALLS)
    if isinstance(written, list) and written:
        return [_selection(call) for call in written]
    blocks = [block for block in message.blocks if block.block_type == "tool_call"]
    return [
        ToolSelection(
            tool_id=block.tool_call_id or _new_call_id(),
            tool_name=block.tool_name,
            tool_kwargs=_as_object(block.tool_kwargs),
        )
        for block in blocks
    ]


def tool_call_kwargs(calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Return the ``additional_kwargs`` of a message with these calls; empty without calls."""
    valid = [
        {
            "id": call.call_id or _new_call_id(),
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.dumps(call.arguments, ensure_ascii=False),
            },
        }
        for call in calls
        if call.is_valid
    ]
    invalid = [
        {"name": call.name, "text": call.text, "error": call.error}
        for call in calls
        if not call.is_valid
    ]
    return {
        **({TOOL_CALLS: valid} if valid else {}),
        **({INVALID_CALLS: invalid} if invalid else {}),
    }


def append_invalid_calls(
    content: str,
    calls: list[ToolCall],
    _: str,
) -> tuple[str, list[ToolCall]]:
    """Append the text of unreadable calls to an answer's text, so that none is lost."""
    texts = (content, *(call.text for call in calls if not call.is_valid))
    return "\n".join(filter(None, texts)), calls


def explain_missing_call(message: ChatMessage, finish_reason: str) -> str:
    """Return an error message for an answer that should call a tool but does not."""
    invalid = message.additional_kwargs.get(INVALID_CALLS) or []
    errors = "; ".join(
        f"{call['name'] or 'a call'} cannot be read: {call['error']}" for call in invalid
    )
    length = "the answer was cut off at its length, so increase max_new_tokens"
    reasons = [errors, length if finish_reason == "length" else ""]
    return "the model called no tool" + "".join(f": {one}" for one in reasons if one)


def as_tool(tool: Any) -> dict[str, Any]:
    """Convert a LlamaIndex tool or a dict to the chat templates' format.

    Raises:
        ConfigurationError: The object is neither.
    """
    metadata = getattr(tool, "metadata", None)
    made = tool if metadata is None else metadata.to_openai_tool(skip_length_check=True)
    if not isinstance(made, Mapping) or "name" not in (made.get("function") or made):
        raise ConfigurationError(
            f"a tool must be a LlamaIndex tool, such as FunctionTool.from_defaults(fn), or a dict "
            f"of name, description and parameters, not {tool!r}"
        )
    return dict(made) if "function" in made else {"type": "function", "function": dict(made)}


def _selection(call: Any) -> ToolSelection:
    """Convert a tool call in OpenAI's format, a dict or an object, to a ``ToolSelection``."""
    function = _field(call, "function")
    return ToolSelection(
        tool_id=str(_field(call, "id") or _new_call_id()),
        tool_name=str(_field(function, "name") or ""),
        tool_kwargs=_as_object(_field(function, "arguments")),
    )


def _field(call: Any, name: str) -> Any:
    return call.get(name) if isinstance(call, Mapping) else getattr(call, name, None)


def _as_object(arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            arguments = None
    return dict(arguments) if isinstance(arguments, Mapping) else {}


def _new_call_id() -> str:
    return uuid4().hex[:9]  # nine letters: some templates require that


TemplateMessage = dict[str, Any]

# A tool's result becomes a user message if the model's template does not support tools.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
    "function": "user",
    "tool": "user",
}
_RESULT_ROLES = frozenset({"tool", "function"})
_SKIPPED_BLOCKS = frozenset({"thinking", "cache", "tool_call"})
_NESTED_BLOCKS = {"citable": "content", "citation": "cited_content"}


class TemplatePrompt:
    """The default ``messages_to_prompt``: the model's chat template, or plain lines."""

    def __init__(self, model: SharedModel) -> None:
        self.model = model

    def __call__(self, messages: Sequence[ChatMessage]) -> str:
        """Render messages as the text of the prompt."""
        rendered = render_messages(messages, self, self.model)
        if isinstance(rendered, str):
            return rendered
        render = self.model.tokenizer.chat_text
        return render(adapt_messages(rendered, render))


def messages_for_model(
    model: SharedModel, messages: Sequence[ChatMessage], tools: list[dict[str, Any]] | None = None
) -> list[TemplateMessage]:
    """Convert messages to the dicts that a model's chat template takes.

    Tool calls and results become text if the template does not support them.
    """
    template_messages = as_template_messages(messages)
    is_plain = all(
        message.role.value not in _RESULT_ROLES and not read_tool_calls(message)
        for message in messages
    )
    if is_plain or not model.is_chat_model or not model.takes_tools:
        return template_messages
    native = _messages_with_calls(messages)
    try:
        return adapt_messages(
            native, lambda some: model.tokenizer.chat_text(some, tools=tools or None)
        )
    except ConfigurationError:
        return template_messages


def as_template_messages(messages: Sequence[ChatMessage]) -> list[TemplateMessage]:
    """Convert messages to dicts of role and text; tool calls and results become text.

    Raises:
        ConfigurationError: There are no messages, an object is not a message, or a message
            contains something other than text.
    """
    if not messages:
        raise ConfigurationError("there is no message to answer: pass at least one")
    for message in messages:
        if not isinstance(message, ChatMessage):
            raise ConfigurationError(
                f"chat takes ChatMessages, not {type(message).__name__}: use "
                "ChatMessage(role=..., content=...), or pass a text to complete"
            )
    return [
        {
            "role": _ROLES[message.role.value],
            "content": "\n".join(filter(None, (_text(message), *_calls_as_text(message)))),
        }
        for message in messages
    ]


def render_messages(
    messages: Sequence[ChatMessage],
    to_prompt: Any,
    model: SharedModel,
    tools: list[dict[str, Any]] | None = None,
) -> str | list[TemplateMessage]:
    """Render messages with the caller's function, or convert them for the model's template.

    Raises:
        ConfigurationError: There are tools, which the caller's function cannot render.
    """
    if not uses_model_template(to_prompt):
        if tools:
            raise ConfigurationError(
                "a custom messages_to_prompt cannot render tools: leave it out to use the model's "
                "chat template"
            )
        written: str = to_prompt(messages)
        return written
    if not model.is_chat_model:
        return plain_text(as_template_messages(messages))
    return messages_for_model(model, messages, tools)


def uses_model_template(to_prompt: Any) -> bool:
    """Return whether the model's own chat template renders messages, not a custom function."""
    return to_prompt is None or isinstance(to_prompt, TemplatePrompt)


def plain_text(template_messages: Sequence[TemplateMessage]) -> str:
    """Render messages as plain lines for a model without a chat template."""
    return plain_prompt(
        [
            ChatMessage(
                role=MessageRole(template_message["role"]), content=template_message["content"]
            )
            for template_message in template_messages
        ]
    )


def _messages_with_calls(messages: Sequence[ChatMessage]) -> list[TemplateMessage]:
    """Convert messages and put calls and results in the templates' own fields."""
    template_messages: list[TemplateMessage] = []
    names: dict[str, str] = {}
    for message in messages:
        template_message: TemplateMessage = {
            "role": _ROLES[message.role.value],
            "content": _text(message),
        }
        if calls := read_tool_calls(message):
            template_message["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.tool_id,
                    "function": {"name": call.tool_name, "arguments": call.tool_kwargs},
                }
                for call in calls
            ]
            names.update((call.tool_id, call.tool_name) for call in calls)
        if message.role.value in _RESULT_ROLES:
            extra = message.additional_kwargs
            call_id = str(extra.get("tool_call_id") or "")
            template_message |= {"role": "tool", "tool_call_id": call_id or None}
            template_message["name"] = extra.get("name") or names.get(call_id)
        template_messages.append(template_message)
    return template_messages


def _calls_as_text(message: ChatMessage) -> list[str]:
    return [
        f"{call.tool_name}({json.dumps(call.tool_kwargs, default=str)})"
        for call in read_tool_calls(message)
    ]


def _text(message: ChatMessage) -> str:
    return "\n".join(filter(None, map(_text_of_block, message.blocks)))


def _text_of_block(block: Any) -> str:
    kind = block.block_type
    if kind == "text":
        return str(block.text)
    if kind in _SKIPPED_BLOCKS:
        return ""
    if kind in _NESTED_BLOCKS:
        inner = getattr(block, _NESTED_BLOCKS[kind])
        parts = inner if isinstance(inner, list) else [inner]
        return "\n".join(filter(None, map(_text_of_block, parts)))
    raise ConfigurationError(
        f"a message contains a block of type {kind!r}, but this model reads text only: leave it "
        "out or describe it in words"
    )
