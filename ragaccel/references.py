"""References: texts an answer is likely to repeat, as token ids of the prompt where it has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragaccel import checks
from ragaccel.decoding.request import Reference
from ragaccel.errors import ConfigurationError
from ragaccel.passage import Passage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragaccel.models.tokenizer import Tokenizer

# What a spaced variant keeps behind the point where both variants agree: enough to be found again.
_TAIL_TOKENS = 16
TURN_WEIGHT = 0.5
_LEAD_TOKENS = 16  # of the prompt, before a predicted answer: as long as matches are told apart


@dataclass(frozen=True, slots=True)
class EncodedText:
    """A text with its token ids and the characters [start, end) that each token stands for."""

    text: str
    token_ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]

    def cut(self, start: int, end: int, margin: int = 0) -> tuple[int, ...]:
        """The ids of the tokens that share a character with [start, end), and ``margin`` beside."""
        inside = [i for i, (a, b) in enumerate(self.offsets) if a < end and b > start and a < b]
        if not inside:
            return ()
        return self.token_ids[max(0, inside[0] - margin) : inside[-1] + 1 + margin]


def encode_text(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> EncodedText:
    """Tokenize a text, with the characters of every token, or none if the tokenizer cannot say.

    What is marked in it (``Tokenizer.shield``) is tokenized as text, and stands there unmarked.
    """
    try:
        ids, offsets = tokenizer.encode_with_offsets(text, add_special_tokens=add_special_tokens)
    except ConfigurationError:
        ids, offsets = tokenizer.encode(text, add_special_tokens=add_special_tokens), []
    return EncodedText(tokenizer.shield.reveal(text), tuple(ids), tuple(offsets))


def rank_weights(passages: Sequence[Passage]) -> list[float]:
    """Weights in (0, 1] from retrieval scores, or from ranks where there are no scores."""
    best = max((passage.score for passage in passages), default=0.0)
    if best <= 0.0:
        return [1.0 / rank for rank in range(1, len(passages) + 1)]
    return [max(passage.score / best, 0.01) for passage in passages]


def as_passages(references: Iterable[str | Passage | Reference]) -> list[Passage]:
    """The references that have a text, as passages; strings are named by their number."""
    passages: list[Passage] = []
    for number, reference in enumerate(references, start=1):
        if isinstance(reference, str):
            passages.append(Passage(f"reference-{number}", reference, end=len(reference)))
        elif isinstance(reference, Passage):
            passages.append(reference)
    return passages


def require_references(references: Sequence[str | Passage | Reference]) -> None:
    """Refuse what is no list of references.

    Raises:
        ConfigurationError: something that is neither str, Passage nor Reference.
    """
    for reference in listed_references(references):
        if isinstance(reference, Passage):
            check_passage(reference)
        elif not isinstance(reference, str | Reference):
            raise ConfigurationError(
                f"a reference is a str, Passage or Reference, not {type(reference).__name__}"
            )


def listed_references(references: Any, name: str = "references") -> Sequence[Any]:
    """Return references that can be read more than once: those of an iterator as a tuple.

    Raises:
        ConfigurationError: it is no list.
    """
    if isinstance(references, str | Passage | Reference):
        raise ConfigurationError(f"{name} is a list: put this one between brackets")
    if isinstance(references, bytes | Mapping) or not isinstance(references, Iterable):
        raise ConfigurationError(f"{name} is a list, not {checks.shown(references)}")
    try:
        return references if isinstance(references, list | tuple) else tuple(references)
    except Exception as error:  # an iterable of the caller's that breaks
        raise ConfigurationError(f"{name} cannot be read as a list: {error}") from error


def check_passage(passage: Any) -> None:
    """Refuse what is no passage, and one whose fields are not what they are said to be.

    Raises:
        ConfigurationError: with the field.
    """
    if not isinstance(passage, Passage):
        raise ConfigurationError(f"a passage is a Passage, not {checks.shown(passage)}")
    for name in ("passage_id", "text", "title", "path"):
        if not isinstance(getattr(passage, name), str):
            raise ConfigurationError(
                f"a passage's {name} is a string, not {checks.shown(getattr(passage, name))}"
            )
    checks.number("a passage's score", passage.score)


def make_references(
    references: Sequence[str | Passage | Reference],
    tokenizer: Tokenizer,
    prompt: EncodedText | None,
) -> list[Reference]:
    """Turn what a caller gives into references, cut from the prompt's own ids where it holds them.

    Tokens at a passage's borders differ when it is tokenized apart, and matches would break there.

    Raises:
        ConfigurationError: something that is neither str, Passage nor Reference.
    """
    require_references(references)
    made = [reference for reference in references if isinstance(reference, Reference)]
    retrieved = [reference for reference in references if isinstance(reference, Passage)]
    weight_of = dict(zip(map(id, retrieved), rank_weights(retrieved), strict=True))
    for passage in as_passages(references):
        weight = weight_of.get(id(passage), 1.0)
        made += refer(passage.text, tokenizer, prompt, weight=weight, passage_id=passage.passage_id)
    return made


def refer(
    text: str,
    tokenizer: Tokenizer,
    prompt: EncodedText | None = None,
    *,
    weight: float = 1.0,
    passage_id: str = "",
) -> list[Reference]:
    """One text as references: cut from the prompt if it stands there, else tokenized apart.

    Apart, the text is taken with and without a space before it, since either may be how the model
    writes its first word. Halves of characters, as broken PDFs hold them, stop no answer.
    """
    text = text.strip()
    if not text:
        return []
    at = prompt.text.find(text) if prompt is not None else -1
    own = prompt.cut(at, at + len(text)) if prompt is not None and at >= 0 else ()
    if own:
        return [Reference(own, weight, passage_id)]
    text = tokenizer.shield.hide(text.encode(errors="replace").decode())
    plain = tuple(tokenizer.encode(text, add_special_tokens=False))
    spaced = tuple(tokenizer.encode(" " + text, add_special_tokens=False))
    variants = [plain, _head_of_variant(spaced, plain)]
    return [Reference(ids, weight, passage_id) for ids in variants if ids]


def predicted_answers(
    texts: Sequence[str], tokenizer: Tokenizer, prompt_ids: Sequence[int]
) -> list[Reference]:
    """Texts that may be the answer, as references that begin with the prompt's last tokens.

    So the very first token of the answer finds them: the prompt's end matches.
    """
    lead = tuple(prompt_ids[-_LEAD_TOKENS:])
    return [
        Reference((*lead, *reference.token_ids), passage_id="prediction")
        for text in texts
        for reference in refer(text, tokenizer)
    ]


def _head_of_variant(variant: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """The part of a variant up to where both agree to the end, and a few tokens more."""
    if variant == other:
        return ()
    same = 0
    for a, b in zip(reversed(variant), reversed(other), strict=False):
        if a != b:
            break
        same += 1
    return variant[: len(variant) - same + _TAIL_TOKENS]
