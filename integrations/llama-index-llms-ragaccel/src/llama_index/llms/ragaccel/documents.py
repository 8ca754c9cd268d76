"""Documents: prompts for a model that reads passages only where its chat template puts documents.

Such a template, as the bundled reader's, shows the last message alone: what stands in a system
message or in the framework's own question prompts would be left out, or taken for the question.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llama_index.core.llms import ChatMessage, MessageRole

from ragaccel import ConfigurationError, Passage, build_prompt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llama_index.llms.ragaccel.messages import Turn
    from ragaccel import LLM, Prompt

_CONTEXT, _QUESTION = "context_str", "query_str"  # what the framework's prompts call them
_PROBE = "Probe of earlier messages."


def reads_documents_only(tokenizer: Any) -> bool:
    """Whether earlier messages are left out of a prompt, and documents are not."""
    if not tokenizer.has_chat_template or not tokenizer.takes_documents:
        return False
    turns = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "?"}]
    try:
        return _PROBE not in tokenizer.chat_text(turns)
    except ConfigurationError:
        return False


def question_and_context(fields: Mapping[str, Any]) -> list[ChatMessage] | None:
    """What fills a prompt template as a question behind its context; None if it is no such one."""
    if not {_CONTEXT, _QUESTION} <= fields.keys():
        return None
    return [
        ChatMessage(role=MessageRole.SYSTEM, content=str(fields[_CONTEXT])),
        ChatMessage(role=MessageRole.USER, content=str(fields[_QUESTION])),
    ]


def prompt_of_documents(
    llm: LLM, turns: Sequence[Turn], references: Sequence[Any], max_new_tokens: int
) -> Prompt:
    """The last message as a question about the passages that the earlier ones hold.

    Where none is known among them, their text itself is what is asked about.
    """
    earlier = "\n\n".join(turn["content"] for turn in turns[:-1])
    passages = [one for one in references if isinstance(one, Passage)]
    if not passages and earlier.strip():
        passages = [Passage("messages", earlier, end=len(earlier))]
    room = None if llm.context_length is None else llm.context_length - max_new_tokens
    return build_prompt(llm.tokenizer, turns[-1]["content"], passages, max_tokens=room)
