"""Inputs: what a caller may give as a prompt, told apart, checked and turned into token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ragaccel.decoding.request import Reference
from ragaccel.errors import ConfigurationError
from ragaccel.passage import Passage
from ragaccel.prompt import Message, Prompt
from ragaccel.references import EncodedText, as_passages, encode_text, make_references

if TYPE_CHECKING:
    from ragaccel.models.tokenizer import Tokenizer

OnePrompt = str | Prompt | Sequence[int] | Sequence[Message]
Batch = (
    list[str] | list[Prompt] | list[list[int]] | list[list[Message]] | list[list[dict[str, Any]]]
)
AnyReference = str | Passage | Reference

_KINDS = "a str, a list of messages, a list of token ids, a Prompt, or a list of those"


def is_batch(prompt: Any) -> bool:
    """Whether a prompt is a list of prompts.

    Raises:
        ConfigurationError: it is empty, mixed, or no prompt at all.
    """
    if isinstance(prompt, str | Prompt):
        return False
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        hint = ": pass token ids as a list, ids.tolist()" if hasattr(prompt, "tolist") else ""
        raise ConfigurationError(f"a prompt is {_KINDS}, not {type(prompt).__name__}{hint}")
    if not prompt:
        raise ConfigurationError("the prompt is an empty list")
    kinds = {_kind_of_item(item) for item in prompt}
    if kinds & {"bool"} or (len(kinds) > 1 and kinds != {"prompt", "list"}):
        raise ConfigurationError(
            f"a list of {' and '.join(sorted(kinds))} items is no prompt: a prompt is {_KINDS}"
        )
    return not kinds <= {"int", "message"}


def read_prompt(
    prompt: OnePrompt,
    references: Sequence[AnyReference],
    tokenizer: Tokenizer,
    vocab_size: int,
) -> Prompt:
    """Turn one prompt of any kind and its references into token ids.

    Raises:
        ConfigurationError: the prompt is empty, has ids outside the vocabulary, or messages for
            a model without a chat template.
    """
    if is_batch(prompt):
        raise ConfigurationError("a list of lists of prompts is no prompt: give them in one list")
    if isinstance(prompt, Prompt):
        _check_ids(prompt.token_ids, vocab_size)
        encoded = _encoded_ids(prompt.token_ids, references, tokenizer)
        more = make_references(references, tokenizer, encoded)
        return Prompt(
            prompt.token_ids,
            (*prompt.references, *more),
            (*prompt.passages, *as_passages(references)),
            prompt.dropped,
            prompt.text,
            prompt.dropped_turns,
        )
    ids, encoded = _encode(prompt, references, tokenizer)
    _check_ids(ids, vocab_size)
    made = make_references(references, tokenizer, encoded)
    text = encoded.text if encoded is not None else ""
    return Prompt(ids, tuple(made), tuple(as_passages(references)), text=text)


def as_texts(setting: str, given: str | Sequence[str]) -> tuple[str, ...]:
    """The texts of a setting that takes one or several.

    Raises:
        ConfigurationError: something that is no text, or an empty one.
    """
    texts = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else (*given,)
    if not all(isinstance(text, str) and text for text in texts):
        raise ConfigurationError(f"{setting} is a string or a list of strings, none of them empty")
    return texts


def references_of_each(references: Any, num_prompts: int) -> list[Sequence[Any]]:
    """The references of every prompt of a batch: a list for each, or the same for all."""
    if isinstance(references, str | Mapping) or not isinstance(references, Sequence):
        raise ConfigurationError("references is a list of texts, passages or References")
    nested = [isinstance(one, Sequence) and not isinstance(one, str) for one in references]
    if not any(nested):
        return [references] * num_prompts
    if not all(nested) or len(references) != num_prompts:
        raise ConfigurationError(
            f"references for a batch are one list for all {num_prompts} prompts, or "
            f"{num_prompts} lists"
        )
    return list(references)


def _encode(
    prompt: Any, references: Sequence[Any], tokenizer: Tokenizer
) -> tuple[tuple[int, ...], EncodedText | None]:
    """A prompt's ids; with its text and offsets if there are references to cut from it."""
    if not isinstance(prompt, str) and not isinstance(prompt[0], Mapping):
        ids = tuple(int(i) for i in prompt)
        return ids, _encoded_ids(ids, references, tokenizer)
    is_plain = isinstance(prompt, str)
    text = prompt if is_plain else _chat_text(prompt, tokenizer)
    if not text:
        raise ConfigurationError("the prompt is empty")
    if not references:
        return tuple(tokenizer.encode(text, add_special_tokens=is_plain)), None
    encoded = encode_text(tokenizer, text, add_special_tokens=is_plain)
    return encoded.token_ids, encoded


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    if not ids:
        raise ConfigurationError("the prompt is empty")
    wrong = [i for i in ids if not 0 <= i < vocab_size]
    if wrong:
        raise ConfigurationError(
            f"token id {wrong[0]} is outside the model's vocabulary of {vocab_size:,}"
        )


def _chat_text(messages: Sequence[Message], tokenizer: Tokenizer) -> str:
    """Messages by the chat template; only the template writes special tokens, no message does."""
    return tokenizer.chat_text([tokenizer.shield.hide_in(message) for message in messages])


def _encoded_ids(
    ids: tuple[int, ...], references: Sequence[Any], tokenizer: Tokenizer
) -> EncodedText | None:
    """Ids with their text, so that references can be cut from them; None if that is not sure."""
    if not references:
        return None
    text: str = tokenizer.tokenizer.decode(list(ids), skip_special_tokens=False)
    encoded = encode_text(tokenizer, text, add_special_tokens=False)
    return encoded if encoded.token_ids == ids else None


def _kind_of_item(item: Any) -> str:
    if isinstance(item, bool):
        return "bool"
    if hasattr(item, "__index__"):
        return "int"
    if isinstance(item, Mapping):
        if "role" not in item or "content" not in item:
            raise ConfigurationError("a message has a role and a content")
        return "message"
    if isinstance(item, str | Prompt):
        return "prompt"
    if isinstance(item, Sequence) and not isinstance(item, bytes):
        return "list"
    raise ConfigurationError(f"a prompt is {_KINDS}, not a list of {type(item).__name__}")
