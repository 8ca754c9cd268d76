"""Jobs: examples in token ids, as every contender of a run is given them."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ragaccel.decoding.request import Reference
from ragaccel.errors import CapacityError
from ragaccel.prompt import build_prompt

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from eval.examples import Example
    from eval.targets import Target
    from ragaccel.models.tokenizer import Tokenizer
    from ragaccel.passage import Passage
    from ragaccel.prompt import Message


@dataclass(frozen=True, slots=True)
class Job:
    """One generation to be timed.

    ``references`` are the passages as they stand in the prompt's own ids; ``apart`` are the same
    tokenized by themselves, as LLMA does. ``answer_ids`` is the recorded answer with its end token,
    or its first ``max_new_tokens`` tokens.
    """

    job_id: str
    prompt_ids: tuple[int, ...]
    references: tuple[Reference, ...]
    apart: tuple[Reference, ...]
    answer_ids: tuple[int, ...]
    max_new_tokens: int
    eos_ids: frozenset[int]


def make_jobs(
    examples: Iterable[Example],
    tokenizer: Tokenizer,
    *,
    max_new_tokens: int,
    max_tokens: int | None = None,
) -> list[Job]:
    """Lay out each question as the library itself would, in at most ``max_tokens`` with its answer.

    Passages that do not fit are left out, the last ones first. Ready-made prompts stay as they are.
    Of a chat's turns the first is asked.

    Raises:
        ValueError: two examples of the same id, by which their measurements are told apart.
    """
    room = None if max_tokens is None else max_tokens - max_new_tokens
    jobs = []
    for example in examples:
        if example.prompt or example.draw:
            jobs.append(_continuation(example, tokenizer, max_new_tokens))
        else:
            jobs.append(_job(example, tokenizer, max_new_tokens, room))
    return _told_apart(jobs)


def _told_apart(jobs: list[Job]) -> list[Job]:
    ((most, times),) = Counter(job.job_id for job in jobs).most_common(1) or [("", 0)]
    if times > 1:
        raise ValueError(f"{times} examples have the id {most!r}: each needs one of its own")
    return jobs


def jobs_for(target: Target, examples: Iterable[Example], max_new_tokens: int) -> list[Job]:
    """Lay out each question for a target: in its tokens, and in as many as it reads."""
    limit = target.ours.max_positions
    return make_jobs(examples, target.tokenizer, max_new_tokens=max_new_tokens, max_tokens=limit)


def fitting_jobs(target: Target, examples: Iterable[Example], max_new_tokens: int) -> list[Job]:
    """Lay out the questions for a target, but those of which not one passage fits."""
    jobs: list[Job] = []
    for example in examples:
        with suppress(CapacityError):
            jobs += jobs_for(target, [example], max_new_tokens)
    return _told_apart(jobs)


def under_task(task: str, jobs: Iterable[Job]) -> list[Job]:
    """The same jobs, with ids that tell them from those of other tasks."""
    return [replace(job, job_id=f"{task}/{job.job_id}") for job in jobs]


def as_recorded(job: Job) -> Job:
    """The same job, to be followed to the end of its recorded answer and no further."""
    return replace(job, max_new_tokens=len(job.answer_ids))


def shortened(job: Job, num_tokens: int) -> Job:
    """The same job with the first tokens of its recorded answer alone, to be followed to there."""
    return as_recorded(replace(job, answer_ids=job.answer_ids[:num_tokens]))


def _continuation(example: Example, tokenizer: Tokenizer, max_new_tokens: int) -> Job:
    """A job without passages: its prompt as it was given, or token ids as they are drawn."""
    if example.draw:
        special = {*tokenizer.tokenizer.all_special_ids, *tokenizer.eos_ids}
        prompt_ids, ids = example.draw([i for i in range(len(tokenizer)) if i not in special])
    else:
        prompt_ids = tuple(tokenizer.encode(example.prompt, add_special_tokens=True))
        ids = tuple(_answer_ids(example.prompt, prompt_ids, example.answer, tokenizer))
    return Job(
        job_id=example.example_id,
        prompt_ids=prompt_ids,
        references=(),
        apart=(),
        answer_ids=ids[:max_new_tokens],
        max_new_tokens=max_new_tokens,
        eos_ids=tokenizer.eos_ids,
    )


def _job(example: Example, tokenizer: Tokenizer, max_new_tokens: int, room: int | None) -> Job:
    prompt = build_prompt(
        tokenizer,
        example.turns[0] if example.turns else example.question,
        example.passages,
        history=example.history,
        template=partial(_as_chat, tokenizer) if example.turns else None,
        max_tokens=room,
    )
    apart = [
        Reference(tuple(tokenizer.encode(passage.text)), passage_id=passage.passage_id)
        for passage in prompt.passages
    ]
    ids = _answer_ids(prompt.text, prompt.token_ids, example.answer, tokenizer)
    return Job(
        job_id=example.example_id,
        prompt_ids=prompt.token_ids,
        references=prompt.references,
        apart=tuple(apart),
        answer_ids=tuple(ids[:max_new_tokens]),
        max_new_tokens=max_new_tokens,
        eos_ids=tokenizer.eos_ids,
    )


def _as_chat(
    tokenizer: Tokenizer, said: str, _passages: Sequence[Passage], history: Sequence[Message]
) -> str | Sequence[Message]:
    """A turn of a chat that is about no passages, by the chat template if there is one."""
    messages = [*history, {"role": "user", "content": said}]
    if tokenizer.has_chat_template:
        return messages
    return "".join(f"{turn['role']}: {turn['content']}\n\n" for turn in messages) + "assistant:"


def _answer_ids(
    prompt: str, prompt_ids: tuple[int, ...], answer: str, tokenizer: Tokenizer
) -> list[int]:
    """Tokenize an answer as it would be written right after the prompt, and end it."""
    if not answer:
        return []
    gap = "" if prompt[-1:].isspace() else " "
    known = len(prompt_ids)
    for begins in (True, False):
        whole = tokenizer.encode(prompt + gap + answer, add_special_tokens=begins)
        if tuple(whole[:known]) == prompt_ids:
            break
    else:
        whole, known = tokenizer.encode(answer), 0
    return [*whole[known:], *sorted(tokenizer.eos_ids)[:1]]
