"""Examples, jobs, recordings and question sets, as text and in token ids.

A question set is one collection: each question searches all passages of its set. In ``squad``,
``nq`` and ``clapnq`` each question has one relevant passage, the one it was written about; another
passage that also answers it counts as wrong, so the figures are lower bounds. In ``msmarco`` all
ten passages that a search engine returned for a question count as relevant, since no judgement of
them is recorded: the figures say whether a search separates them from the passages of other
questions, not whether they answer. In ``demo`` the passages of ``demos/documents`` that contain
the answer are relevant.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragaccel.decoding import Reference
from ragaccel.errors import CapacityError
from ragaccel.models import Tokenizer
from ragaccel.passage import Document, Passage
from ragaccel.prompt import Message, build_prompt
from ragaccel.retrieval import Embedder, Store, index_passages, list_folder, split_document
from ragaccel.retrieval.loaders import read_document

if TYPE_CHECKING:
    from eval.models import Target

Draw = Callable[[Sequence[int]], tuple[tuple[int, ...], tuple[int, ...]]]

DATA_VARIABLE = "RAGACCEL_DATA"


class MissingDataError(FileNotFoundError):
    """A file that does not ship with the project is not in the data folder, or none is given."""


@dataclass(frozen=True, slots=True)
class Example:
    """One question on passages, or something else to continue.

    ``history`` contains earlier messages. ``answer`` is empty if no answer is recorded. An example
    without passages has no question but one of three other fields: ``prompt``, a text to continue
    unchanged; ``turns``, the successive messages of a chat's user; or ``draw``, a function from
    the vocabulary's token ids to the token ids of a prompt and an answer.
    """

    example_id: str
    question: str = ""
    passages: tuple[Passage, ...] = ()
    answer: str = ""
    history: tuple[dict[str, str], ...] = ()
    prompt: str = ""
    turns: tuple[str, ...] = ()
    draw: Draw | None = None


def read_unified(path: Path, limit: int | None = None) -> list[Example]:
    """Read examples from JSON lines in the format that ``eval.tasks.load_task`` describes."""
    return [_example(row) for row in islice(read_rows(path), limit)]


def has_data(data: Path | None = None) -> bool:
    """Return whether a data folder is given, as ``data`` or in the variable RAGACCEL_DATA."""
    if data is None and DATA_VARIABLE not in os.environ:
        return False
    in_data("rag", data)
    return True


def in_data(name: str, data: Path | None = None) -> Path:
    """Return the path of a file in the data folder ``data``, by default that of RAGACCEL_DATA."""
    folder = data or (Path(os.environ[DATA_VARIABLE]) if DATA_VARIABLE in os.environ else None)
    if folder is None:
        raise MissingDataError(
            f"{name} does not ship with the project: give its folder with --data or in the "
            f"variable {DATA_VARIABLE}, or take a task that ships (--task demo)"
        )
    path = folder / name
    if not path.exists():
        raise MissingDataError(f"the data folder {folder} holds no {name}")
    return path


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file."""
    with path.open(encoding="utf-8", newline="\n") as file:  # strings may hold others
        for line in file:
            if line.strip():
                yield json.loads(line)


def without_answers_of(rows: Iterable[Example], measured: Sequence[Example]) -> list[Example]:
    """Return the rows that do not contain the answer of a ``measured`` example.

    A decoder that remembers earlier requests may see these first. Dropped are the measured examples
    themselves (a task may spread its examples over the whole file), rows with the same answer, and
    later turns of a conversation, whose history quotes earlier answers.
    """
    ids = {one.example_id for one in measured}
    answers = {one.answer for one in measured if one.answer}

    def tells(row: Example) -> bool:
        said = (row.answer, row.prompt, *(message["content"] for message in row.history))
        return row.example_id in ids or any(answer in text for text in said for answer in answers)

    return [row for row in rows if not tells(row)]


def _example(row: dict[str, Any]) -> Example:
    if "prompt" in row:
        return Example(str(row["id"]), prompt=row["prompt"], answer=row.get("answer", ""))
    if "turns" in row:
        return Example(str(row["id"]), turns=tuple(row["turns"]))
    passages = tuple(
        Passage(f"{row['id']}/{number}", part["text"], part.get("title", ""), end=len(part["text"]))
        for number, part in enumerate(row["passages"], start=1)
        if part["text"].strip()
    )
    roles = {"user": "user"}  # every other is the assistant
    history = tuple(
        {"role": roles.get(turn["role"], "assistant"), "content": turn["text"]}
        for turn in row.get("history", ())
    )
    answer = row.get("answer", "").strip()
    return Example(str(row["id"]), row["question"].strip(), passages, answer, history)


@dataclass(frozen=True, slots=True)
class Job:
    """One generation to time.

    ``references`` are the passages as slices of the prompt's token ids; ``apart`` are the same
    passages tokenized alone, as LLMA does. ``answer_ids`` is the recorded answer with an end token,
    cut at ``max_new_tokens``; it is empty if no answer is recorded.
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
    """Build each example's prompt as the library does, with at most ``max_tokens`` with its answer.

    Passages that do not fit are dropped, the last ones first. Ready-made prompts do not change. A
    chat's prompt contains its first turn only.
    """
    room = None if max_tokens is None else max_tokens - max_new_tokens
    jobs = []
    for example in examples:
        if example.prompt or example.draw:
            jobs.append(_continuation(example, tokenizer, max_new_tokens))
        else:
            jobs.append(_job(example, tokenizer, max_new_tokens, room))
    return _require_distinct_ids(jobs)


def _require_distinct_ids(jobs: list[Job]) -> list[Job]:
    ((most, times),) = Counter(job.job_id for job in jobs).most_common(1) or [("", 0)]
    if times > 1:
        raise ValueError(f"{times} examples have the id {most!r}: each needs one of its own")
    return jobs


def jobs_for(target: Target, examples: Iterable[Example], max_new_tokens: int) -> list[Job]:
    """Return the jobs of examples with a target's tokenizer and within its maximum length."""
    limit = target.ours.max_positions
    return make_jobs(examples, target.tokenizer, max_new_tokens=max_new_tokens, max_tokens=limit)


def fitting_jobs(target: Target, examples: Iterable[Example], max_new_tokens: int) -> list[Job]:
    """Return the jobs of examples for a target, without those in which not one passage fits."""
    jobs: list[Job] = []
    for example in examples:
        with suppress(CapacityError):
            jobs += jobs_for(target, [example], max_new_tokens)
    return _require_distinct_ids(jobs)


def under_task(task: str, jobs: Iterable[Job]) -> list[Job]:
    """Return the jobs with the task's name before their ids, so that ids of tasks differ."""
    return [replace(job, job_id=f"{task}/{job.job_id}") for job in jobs]


def as_recorded(job: Job) -> Job:
    """Return the job with the length of its recorded answer as ``max_new_tokens``."""
    return replace(job, max_new_tokens=len(job.answer_ids))


def shortened(job: Job, num_tokens: int) -> Job:
    """Return the job with its recorded answer and ``max_new_tokens`` cut to ``num_tokens``."""
    return as_recorded(replace(job, answer_ids=job.answer_ids[:num_tokens]))


def _continuation(example: Example, tokenizer: Tokenizer, max_new_tokens: int) -> Job:
    """Return the job of an example without passages: its given prompt, or drawn token ids."""
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
    """Return a chat's messages, or plain text if the tokenizer has no chat template."""
    messages = [*history, {"role": "user", "content": said}]
    if tokenizer.has_chat_template:
        return messages
    return "".join(f"{turn['role']}: {turn['content']}\n\n" for turn in messages) + "assistant:"


def _answer_ids(
    prompt: str, prompt_ids: tuple[int, ...], answer: str, tokenizer: Tokenizer
) -> list[int]:
    """Tokenize an answer as a continuation of the prompt and append an end token."""
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


RECORDED_SETS = (
    "llma_msmarco_davinci003", "clapnq_dev", "mtrag_un", "pubmedqa_long", "sum_scitldr_dev",
)  # fmt: skip
FITTED = {
    "sum_qmsum_valtest_goldspan": range(300),
    "mtrag_human_answers": range(300),
    "mtrag_un": range(150, 450),
    "pubmedqa_long": range(150, 450),
    "sum_scitldr_dev": range(150, 450),
}
"""The rows, by set, to which the match weights of our trees were fitted (``eval fit_evidence``)."""
MAX_PASSAGE, MAX_PROMPT, MAX_ANSWER = 768, 6_000, 512  # tokens
_HEAD = "docs:\n"


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request and its recorded answer in token ids.

    ``references`` are passages as slices of the prompt; ``apart`` are passages tokenized alone.
    """

    prompt_ids: tuple[int, ...]
    references: tuple[Reference, ...]
    apart: tuple[Reference, ...]
    answer_ids: tuple[int, ...]


def is_fitted_to(name: str, num_rows: int) -> bool:
    """Return whether our trees' weights were fitted to any of a set's first ``num_rows`` rows."""
    return name in FITTED and num_rows > FITTED[name].start


def set_files(names: Sequence[str], data: Path | None) -> list[Path]:
    """Return the files of recorded sets in the data folder; a missing one is an error."""
    return [in_data(f"rag/{name}.jsonl", data) for name in names]


def read_recorded(
    path: Path, tokenizer: Any, limit: int | None, skip: int = 0
) -> Iterator[Recorded]:
    """Yield a file's rows from ``skip`` to ``limit`` as requests in the LLMA paper's format.

    Rows whose prompts are too long are skipped.
    """
    for row in islice(read_rows(path), skip, limit):
        recorded = lay_out(row, tokenizer)
        if recorded is not None:
            yield recorded


def lay_out(row: dict[str, Any], tokenizer: Any) -> Recorded | None:
    """Convert one row to a request in token ids; return None if its prompt is too long.

    A row has the unified schema or that of LLMA's own file, ``{query, docs, result}``. LLMA's
    answers are not changed: they keep the blank at their start.
    """
    if "result" in row:
        row = {"question": row["query"], "passages": [{"text": text} for text in row["docs"]]} | row
        written = row["result"]["text"]
    else:
        written = row["answer"].strip()
    texts = [_shortened(passage["text"], tokenizer) for passage in row["passages"]]
    turns = "".join(f"{turn['role']}: {turn['text']}\n" for turn in row.get("history", ()))
    head = "".join([_HEAD, *(f"{text}\n" for text in texts)]) if texts else ""
    encoded = tokenizer(
        f"{head}{turns}query: {row['question']}\nanswer:", return_offsets_mapping=True
    )
    ids = tuple(encoded["input_ids"])
    if len(ids) >= MAX_PROMPT:
        return None
    answer = encode_apart(written, tokenizer)[:MAX_ANSWER]
    apart = [encode_apart(text, tokenizer) for text in texts]
    return Recorded(
        ids,
        tuple(_inside(ids, encoded["offset_mapping"], texts)),
        tuple(Reference(part, passage_id=str(i)) for i, part in enumerate(apart)),
        (*answer, tokenizer.eos_token_id or 0),
    )


def encode_apart(text: str, tokenizer: Any) -> tuple[int, ...]:
    """Tokenize a text by itself, as LLMA does its references."""
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _shortened(text: str, tokenizer: Any) -> str:
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ends = [end for _, end in offsets["offset_mapping"]]
    return text if len(ends) <= MAX_PASSAGE else text[: ends[MAX_PASSAGE - 1]]


def _inside(
    ids: Sequence[int], offsets: Sequence[tuple[int, int]], texts: Sequence[str]
) -> Iterator[Reference]:
    """Yield the passages as slices of the prompt's token ids, found by character offsets."""
    start = len(_HEAD)
    for number, text in enumerate(texts):
        end = start + len(text)
        own = [i for i, (low, high) in enumerate(offsets) if start < high <= end and low < high]
        if own:
            yield Reference(tuple(ids[own[0] : own[-1] + 1]), passage_id=str(number))
        start = end + 1


_QUESTION_FILES = {
    "squad": "rag/squad_like.jsonl",
    "nq": "rag/nq_open_oracle.jsonl",
    "clapnq": "rag/clapnq_dev.jsonl",
    "msmarco": "rag/llma_msmarco_davinci003.jsonl",
}
QUESTION_SETS = (*_QUESTION_FILES, "demo")
DEMOS = Path(__file__).parents[1] / "demos"


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the ids of its relevant passages, and the name of its article."""

    text: str
    relevant: frozenset[str]
    group: str


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Questions and all passages that their searches go through."""

    name: str
    passages: tuple[Passage, ...]
    questions: tuple[Question, ...]

    def index(self, store: Store, embedder: Embedder, folder: Path) -> None:
        """Index the passages in ``store``, from a file that is written into ``folder``."""
        path = folder / f"{self.name}.jsonl"
        rows = ({"id": p.passage_id, "title": p.title, "text": p.text} for p in self.passages)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        path.write_text(text, encoding="utf-8")
        index_passages(store, embedder, path)


def load_set(
    name: str, embedder: Embedder, data: Path | None = None, limit: int | None = None
) -> QuestionSet:
    """Load a question set by name; ``limit`` cuts its questions, not its passages."""
    if name != "demo":
        passages, questions = _question_pairs(name, data)
    else:
        documents = demo_documents()
        passages = [p for one in documents for p in split_document(one, embedder.count_tokens)]
        questions = demo_questions(passages)
    return QuestionSet(name, tuple(passages), tuple(questions[:limit]))


def _question_pairs(name: str, data: Path | None) -> tuple[list[Passage], list[Question]]:
    """Return a data file's distinct passages, and its distinct questions with their passages."""
    ids: dict[tuple[str, str], str] = {}
    asked: dict[tuple[str, frozenset[str]], Question] = {}
    for row in read_rows(in_data(_QUESTION_FILES[name], data)):
        texts = [(spoken_title(part["title"]), part["text"]) for part in row["passages"]]
        own = frozenset(ids.setdefault(text, f"p{len(ids)}") for text in texts)
        question = row["question"]
        group = texts[0][0] or question
        asked.setdefault((question, own), Question(question.strip(), own, group))
    passages = [Passage(key, text, title, end=len(text)) for (title, text), key in ids.items()]
    return passages, list(asked.values())


def spoken_title(title: str) -> str:
    """Convert a Wikipedia title from a URL to plain text."""
    return title.replace("_", " ").strip()


def demo_documents() -> list[Document]:
    """Read the documents under ``demos/documents`` as an index does."""
    files = list_folder(DEMOS / "documents").files
    return [read_document(file.path, name=file.name) for file in files]


def demo_questions(passages: Sequence[Passage]) -> list[Question]:
    """Return the demo's answerable questions with the ids of the passages that answer them."""
    questions = []
    for asked in read_rows(DEMOS / "questions.jsonl"):
        if asked["answer"] is None:
            continue
        wanted, file = plain(str(asked["answer"])), str(asked["file"])
        own = (p.passage_id for p in passages if p.path == file and wanted in plain(p.text))
        questions.append(Question(str(asked["question"]), frozenset(own), file))
    return questions


def plain(text: str) -> str:
    """Return text for comparisons: on one line and without citations."""
    return " ".join(re.sub(r" ?\[\d+\]", "", text).split())
