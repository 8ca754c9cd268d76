"""Convert LangChain messages and documents to prompts and references."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from ragaccel import ConfigurationError, Passage, Prompt, Reference, build_prompt
from ragaccel.frameworks import gather_references, parse_prompt
from ragaccel.prompt import adapt_messages

from langchain_ragaccel.base import DEFAULT_MAX_TOKENS, as_list
from langchain_ragaccel.documents import as_passage, content_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ragaccel import LLM
    from ragaccel.frameworks import SharedModel

    from langchain_ragaccel.base import CallOptions


TemplateMessage = dict[str, Any]

_ROLES: dict[type[BaseMessage], str] = {
    SystemMessage: "system",
    HumanMessage: "user",
    AIMessage: "assistant",
    ToolMessage: "tool",
    FunctionMessage: "tool",
}
_TEXT_BLOCKS = frozenset({"text", "text-plain"})
_SKIPPED_BLOCKS = frozenset({
    "tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "function_call",
    "reasoning", "thinking", "redacted_thinking", "reasoning_content",
})  # fmt: skip
"""Blocks that are skipped: ``tool_calls`` holds the calls, and thoughts are not repeated."""


def as_template_messages(messages: Sequence[BaseMessage]) -> list[TemplateMessage]:
    """Convert messages to the dicts that chat templates take.

    Raises:
        ConfigurationError: There are no messages, or one has no text or no role.
    """
    if not messages:
        raise ConfigurationError("there is no message to answer: pass at least one")
    return [_as_template_message(message) for message in messages]


def text_of(messages: Sequence[BaseMessage]) -> str:
    """Return the text of all messages, in which references are searched."""
    return "\n\n".join(filter(None, (_text(message) for message in messages)))


def _as_template_message(message: BaseMessage) -> TemplateMessage:
    template_message: TemplateMessage = {"role": _role(message), "content": _text(message)}
    if message.name:
        template_message["name"] = message.name
    if isinstance(message, AIMessage) and message.tool_calls:
        template_message["tool_calls"] = [
            {
                "type": "function",
                "id": call["id"],
                "function": {"name": call["name"], "arguments": call["args"]},
            }
            for call in message.tool_calls
        ]
    if isinstance(message, ToolMessage):
        template_message["tool_call_id"] = message.tool_call_id
    return template_message


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in _ROLES.items():
        if isinstance(message, kind):
            return role
    raise ConfigurationError(f"a {type(message).__name__} cannot be part of a prompt: leave it out")


def _text(message: BaseMessage) -> str:
    content = message.content
    return content if isinstance(content, str) else "".join(map(_text_of_block, content))


def _text_of_block(block: str | Mapping[str, Any]) -> str:
    if isinstance(block, str):
        return block
    kind = block.get("type")
    if kind in _TEXT_BLOCKS:
        return str(block.get("text") or "")
    if kind in _SKIPPED_BLOCKS:
        return ""
    raise ConfigurationError(
        f"a message contains a block of type {kind!r}, but this model reads text only: leave it "
        "out or describe it in words"
    )


AnyReference = str | Passage | Reference


def as_references(values: Iterable[Any]) -> list[AnyReference]:
    """Convert a caller's objects to references.

    Raises:
        ConfigurationError: An object is not a str, Document, Passage or Reference.
    """
    made: list[AnyReference] = []
    for one in values:
        if isinstance(one, Document):
            made.append(as_passage(one))
        elif isinstance(one, AnyReference):
            made.append(one)
        else:
            raise ConfigurationError(
                "a reference must be a str, Document, Passage or Reference, not "
                + type(one).__name__
            )
    return made


def as_passages(documents: Any) -> tuple[Passage, ...]:
    """Convert the ``documents=`` of a call to passages.

    Raises:
        ConfigurationError: The value is not a list, or an item has no text.
    """
    made = [
        Passage(content_id(one), one, end=len(one)) if isinstance(one, str) else one
        for one in as_references(as_list(documents, "documents"))
    ]
    passages = tuple(one for one in made if isinstance(one, Passage))
    if len(passages) < len(made):
        raise ConfigurationError(
            "a document must be a str, Document or Passage: a Reference has no text, so pass it as "
            "references="
        )
    return passages


def explicit_references(messages: Iterable[BaseMessage]) -> list[AnyReference]:
    """Return the references in human messages' ``additional_kwargs``."""
    found: list[AnyReference] = []
    for message in messages:
        if isinstance(message, HumanMessage):
            given = message.additional_kwargs.get("references")
            found += as_references(as_list(given, "references"))
    return found


def tool_references(messages: Sequence[BaseMessage]) -> list[AnyReference]:
    """Return the documents in tool messages' artifacts, those of the latest tool first.

    Skip artifacts of other types.
    """
    found: list[AnyReference] = []
    for message in reversed(messages):
        if isinstance(message, ToolMessage):
            artifact = message.artifact
            parts = artifact if isinstance(artifact, list | tuple) else [artifact]
            found += as_references(
                part for part in parts if isinstance(part, Document | Passage | Reference)
            )
    return found


def exclude_shown(prompt: Any, references: Sequence[AnyReference]) -> list[AnyReference]:
    """Return the references that are not passages of the prompt itself.

    Passages are compared by id and text, since two may have the same id.
    """
    own = {_passage_key(one) for one in prompt.passages} if isinstance(prompt, Prompt) else set()
    return [
        one for one in references if not isinstance(one, Passage) or _passage_key(one) not in own
    ]


def _passage_key(passage: Passage) -> tuple[str, str]:
    return passage.passage_id, passage.text


def find_references(
    llm: LLM,
    call: CallOptions,
    text: str,
    given: Sequence[AnyReference] = (),
    *,
    retrieved: Sequence[AnyReference] = (),
) -> list[AnyReference]:
    """Return all references for an answer, the most certain first.

    Args:
        llm: The LLM that answers.
        call: The options of the call, with its own references and registry.
        text: The prompt's text, in which registered passages are searched.
        given: References passed with the messages; these come first.
        retrieved: Documents returned by tools; these rank like registered passages.
    """
    explicit, retrieved = [*as_references(call.references), *given], list(retrieved)
    if call.uses_run_tree:
        from langchain_ragaccel.callbacks import retrieved_documents

        retrieved += map(as_passage, retrieved_documents(call.caller.run))
    visible = call.visible_references
    if visible is None and not explicit:
        return []
    return gather_references(
        text,
        explicit,
        retrieved=retrieved,
        registry=visible,
        namespace=call.namespace,
        tokenizer=llm.tokenizer,
        adjacent_chunks=call.adjacent_chunks,
        max_tokens=call.max_reference_tokens,
    )


@dataclass(frozen=True, slots=True)
class Conversation:
    """The arguments of a chat template."""

    messages: list[TemplateMessage]
    documents: tuple[Passage, ...] = ()
    tools: list[dict[str, Any]] | None = None
    template_options: dict[str, Any] = field(default_factory=dict)


def render_prompt(model: SharedModel, call: CallOptions, conversation: str | Conversation) -> Any:
    """Render a text or a conversation as a prompt for ``LLM.generate``.

    Return a text unchanged, and render a conversation with the chat template. Documents go to the
    template's own field, or numbered into the last message; those that do not fit are dropped. For
    a documents-only template, such as the bundled reader's, parse the prompt into the given or
    registered passages that it contains, and its question.

    Raises:
        ConfigurationError: The chat template does not support tools, documents or a message.
        CapacityError: Not even one document fits.
    """
    llm = model.load()
    if isinstance(conversation, str):
        return (
            _documents_only_prompt(llm, call, conversation)
            if model.is_documents_only
            else conversation
        )
    if not conversation.tools and not conversation.template_options:
        if conversation.documents:
            return _prompt_with_documents(llm, call, conversation)
        if model.is_documents_only:
            return _documents_only_prompt(llm, call, conversation.messages)
    messages, inputs = _template_inputs(model, conversation)
    return llm.tokenizer.chat(messages, **inputs) if inputs else messages


def count_tokens(model: SharedModel, conversation: Conversation) -> int:
    """Return the number of tokens of a rendered conversation."""
    messages, inputs = _template_inputs(model, conversation)
    return len(model.tokenizer.chat(messages, **inputs))


def _documents_only_prompt(
    llm: LLM, call: CallOptions, conversation: str | list[TemplateMessage]
) -> Any:
    return parse_prompt(
        conversation,
        llm.tokenizer,
        call.visible_references,
        given=as_references(call.references),
        namespace=call.namespace,
        max_tokens=_max_prompt_tokens(llm, call),
    )


def _prompt_with_documents(llm: LLM, call: CallOptions, conversation: Conversation) -> Any:
    *history, last = conversation.messages
    if last["role"] != "user":
        raise ConfigurationError("documents= needs a question: end with a human message")
    return build_prompt(
        llm.tokenizer,
        last["content"],
        conversation.documents,
        history=history,
        max_tokens=_max_prompt_tokens(llm, call),
    )


def _max_prompt_tokens(llm: LLM, call: CallOptions) -> int | None:
    """Return the maximum length of the prompt in tokens, or None if there is no limit."""
    if llm.context_length is None:
        return None
    answer: int = call.settings.get("max_new_tokens", DEFAULT_MAX_TOKENS)
    return llm.context_length - answer


def _template_inputs(
    model: SharedModel, conversation: Conversation
) -> tuple[list[TemplateMessage], dict[str, Any]]:
    """Return messages that the chat template accepts, and its further arguments."""
    inputs = _template_arguments(model, conversation)
    messages = adapt_messages(
        conversation.messages, lambda some: model.tokenizer.chat_text(some, **inputs)
    )
    return messages, inputs


def _template_arguments(model: SharedModel, conversation: Conversation) -> dict[str, Any]:
    inputs: dict[str, Any] = {}
    if conversation.documents:
        if not model.tokenizer.takes_documents:
            raise ConfigurationError(
                "this model's chat template cannot take documents together with tools or template "
                "options: write the documents into a message"
            )
        inputs["documents"] = [_as_document(passage) for passage in conversation.documents]
    if conversation.tools:
        inputs["tools"] = conversation.tools
    if conversation.template_options:
        inputs["template_options"] = conversation.template_options
    return inputs


def _as_document(passage: Passage) -> dict[str, str]:
    return {"title": passage.title, "text": passage.text}
