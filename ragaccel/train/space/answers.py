"""Own answers: a model's own greedy answers in place of the recorded ones.

A decoder guesses what the model itself would say, so that is what mask tokens are best taught.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ragaccel.answer import Answer
    from ragaccel.train.space.samples import Sample

_AT_ONCE = 16


class Answering(Protocol):
    """What is asked of a language model here."""

    @property
    def context_length(self) -> int | None:
        """Most tokens of a prompt with its answer."""

    def generate(self, prompt: list[list[int]], *, max_new_tokens: int) -> list[Answer]:
        """Answer a batch greedily."""


def answer_samples(
    llm: Answering,
    samples: Sequence[Sample],
    path: Path,
    *,
    max_new_tokens: int = 256,
    report: Callable[[int, int], None] | None = None,
) -> None:
    """Have the model answer prompts; each batch is kept, and not asked for again.

    Args:
        llm: the model.
        samples: prompts with any answers.
        path: the file that keeps the answers, JSON lines in the samples' order.
        max_new_tokens: longest answer; what the model's context has no room for is cut.
        report: is told how many are done, of how many.

    Raises:
        ConfigurationError: the file keeps answers to other prompts.
        CapacityError: a prompt that leaves no room for an answer.
    """
    tell = report or (lambda *_: None)
    done = len(kept_answers(path, samples))
    path.parent.mkdir(parents=True, exist_ok=True)
    tell(done, len(samples))
    with open(path, "ab") as file:
        while done < len(samples):
            batch = samples[done : done + _AT_ONCE]
            most = _room(llm, batch, max_new_tokens)
            found = llm.generate([list(s.prompt_ids) for s in batch], max_new_tokens=most)
            for sample, answer in zip(batch, found, strict=True):
                row = {"prompt_ids": sample.prompt_ids, "answer_ids": answer.token_ids}
                file.write((json.dumps(row) + "\n").encode())
            file.flush()
            done += len(batch)
            tell(done, len(samples))


def _room(llm: Answering, batch: Sequence[Sample], wanted: int) -> int:
    """How long the answers of a batch may be: no longer than the longest prompt leaves room for."""
    if llm.context_length is None:
        return wanted
    return max(1, min(wanted, llm.context_length - max(len(s.prompt_ids) for s in batch)))


def kept_answers(path: Path, samples: Sequence[Sample]) -> list[Sample]:
    """The first samples with the answers that are kept; a line cut off is dropped from the file.

    Raises:
        ConfigurationError: the file keeps answers to other prompts.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    lines = whole.decode().splitlines()
    answers = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            prompt, answer = tuple(row["prompt_ids"]), tuple(row["answer_ids"])
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigurationError(f"{path}, line {number} is no answer: delete it") from error
        if number > len(samples) or prompt != samples[number - 1].prompt_ids:
            raise ConfigurationError(f"{path} keeps answers to other prompts: delete it")
        answers.append(replace(samples[number - 1], answer_ids=answer))
    return answers
