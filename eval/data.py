"""Examples, jobs, recordings and question sets, as text and in token ids.

A set is one collection: every question is searched for among all passages of its set. ``squad``,
``nq`` and ``clapnq``: each question has one relevant passage, the one it was written on; another
passage that answers it too counts as wrong, so the figures are lower bounds. ``msmarco``: the ten
passages that a search engine returned for a question are all taken as relevant, since no judgement
of them is recorded: the figures tell whether they are told from the other questions' passages, not
whether they answer. ``demo``: the passages of ``demos/documents`` that hold a question's answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragaccel.decoding import Reference
from ragaccel.errors import CapacityError
from ragaccel.passage import Document, Passage
from ragaccel.prompt import build_prompt
from ragaccel.retrieval import index_passages, list_folder, split_document
from ragaccel.retrieval.loaders import read_document

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from eval.models import Target
    from ragaccel.models import Tokenizer
    from ragaccel.prompt import Message
    from ragaccel.retrieval import Embedder, Store

    Draw = Callable[[Sequence[int]], tuple[tuple[int, ...], tuple[int, ...]]]


DATA_VARIABLE = "RAGACCEL_DATA"


class MissingDataError(FileNotFoundError):
    """A corpus that does not ship and is not where the data folder should be."""


@dataclass(frozen=True, slots=True)
class Example:
    """One question. ``history`` holds earlier messages, ``answer`` is empty if none is recorded.

    Where no passages are asked about, there is no question either but a ``prompt``, to be continued
    as it stands; or ``turns``, what the user of a chat says: first this, then, when it is answered,
    that; or ``draw``, which makes prompt and answer in token ids out of those there are.
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
    """Read a file of objects as ``eval.tasks.load_task`` takes them, one a line."""
    return [_example(row) for row in islice(read_rows(path), limit)]


def has_data(data: Path | None = None) -> bool:
    """Return whether a data folder is named, as an option or in the variable RAGACCEL_DATA.

    Raises:
        MissingDataError: one is named, but it is none.
    """
    if data is None and DATA_VARIABLE not in os.environ:
        return False
    in_data("rag", data)
    return True


def in_data(name: str, data: Path | None = None) -> Path:
    """Find a file of the data folder: ``data``, or what the variable RAGACCEL_DATA names.

    Raises:
        MissingDataError: says what is missing and how to give it.
    """
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
    """Read a file of JSON objects, one a line."""
    with path.open(encoding="utf-8", newline="\n") as file:  # other separators stand in strings
        for line in file:
            if line.strip():
                yield json.loads(line)


def without_answers_of(rows: Iterable[Example], measured: Sequence[Example]) -> list[Example]:
    """Leave out of some rows those that would tell a measured one's answer to who remembers them.

    Such are the measured rows themselves (a task may spread its few over the whole file), rows of
    the same answer, and later turns of a conversation, whose history quotes the earlier answers.
    """
    ids = {one.example_id for one in measured}
    answers = {one.answer for one in measured if one.answer}

    def tells(row: Example) -> bool:
        said = (row.answer, row.prompt, *(message["content"] for message in row.history))
        return row.example_id in ids or any(answer in text for text in said for answer in answers)

    return [row for row in rows if not tells(row)]


def alternate(
    rows: Iterable[dict[str, Any]], kind: Callable[[dict[str, Any]], str], limit: int | None = None
) -> list[dict[str, Any]]:
    """Take the rows of each kind in turn, so that any few of them cover all kinds."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(kind(row), []).append(row)
    turns = chain.from_iterable(zip_longest(*kinds.values()))
    return list(islice((row for row in turns if row is not None), limit))


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
    answer = row.get("answer", "").strip()
    return Example(
        str(row["id"]),
        row["question"].strip(),
        passages,
        answer,
        as_messages(row.get("history", ())),
    )


def as_messages(turns: Iterable[dict[str, str]]) -> tuple[dict[str, str], ...]:
    """The turns of a unified row as a chat's messages: whoever is not the user is the assistant."""
    return tuple(
        {"role": "assistant" if turn["role"] != "user" else "user", "content": turn["text"]}
        for turn in turns
    )


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
        ValueError: two examples have the same id, which names their measurements.
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
    """Lay out each question for a target: in its tokens, and in as many as it reads."""
    limit = target.ours.max_positions
    return make_jobs(examples, target.tokenizer, max_new_tokens=max_new_tokens, max_tokens=limit)


def fitting_jobs(target: Target, examples: Iterable[Example], max_new_tokens: int) -> list[Job]:
    """Lay out the questions for a target, but those of which not one passage fits."""
    jobs: list[Job] = []
    for example in examples:
        with suppress(CapacityError):
            jobs += jobs_for(target, [example], max_new_tokens)
    return _require_distinct_ids(jobs)


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
"""The rows that what a match is worth to our trees was fitted to (``eval fit_evidence``)."""
MAX_PASSAGE, MAX_PROMPT, MAX_ANSWER = 768, 6_000, 512  # tokens
_HEAD = "docs:\n"


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request and its answer in token ids; ``apart`` are its passages tokenized alone."""

    prompt_ids: tuple[int, ...]
    references: tuple[Reference, ...]
    apart: tuple[Reference, ...]
    answer_ids: tuple[int, ...]


def is_fitted_to(name: str, num_rows: int) -> bool:
    """Return whether our trees' weights were fitted to some of so many first rows of a set."""
    return name in FITTED and num_rows > FITTED[name].start


def add_set_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which recorded answers are replayed, in whose tokens."""
    add = parser.add_argument
    add("--data", type=Path, help="data folder; also the variable RAGACCEL_DATA")
    add("--sets", default=",".join(RECORDED_SETS), help="files of rag/ in the data folder")
    add("--tokenizer", default="llama2", help="of the data folder, or a folder")
    add("--limit", type=int, default=150, help="rows of each file")


def set_files(names: Sequence[str], data: Path | None) -> list[Path]:
    """Find sets of the data folder.

    Raises:
        MissingDataError: the first that is missing.
    """
    return [in_data(f"rag/{name}.jsonl", data) for name in names]


def set_tokenizer(name: str, data: Path | None) -> Any:
    """Load a tokenizer of the data folder, or else a folder or hub name."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(in_data(f"tokenizers/{name}", data))
    except MissingDataError:
        return AutoTokenizer.from_pretrained(name)


def read_recorded(
    path: Path, tokenizer: Any, limit: int | None, skip: int = 0
) -> Iterator[Recorded]:
    """Lay out a file's rows as the LLMA paper does, but the first ``skip``, up to row ``limit``.

    Prompts that are too long are left out.
    """
    for row in islice(read_rows(path), skip, limit):
        recorded = lay_out(row, tokenizer)
        if recorded is not None:
            yield recorded


def lay_out(row: dict[str, Any], tokenizer: Any) -> Recorded | None:
    """Lay out one row; return None if its prompt is too long.

    A row is of the unified schema, or of that of LLMA's own file, ``{query, docs, result}``. There
    the answer stays as it was recorded, with the blank it begins with.
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
    """The passages as they stand in the prompt's own ids."""
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
    """A question, the ids of the passages that answer it, and the article that it is about."""

    text: str
    relevant: frozenset[str]
    group: str

    @property
    def is_held_out(self) -> bool:
        """Return whether the question is in the half that judges settings, not in the other.

        The article's name alone decides, so that no passage is on both sides.
        """
        return hashlib.sha256(self.group.encode()).digest()[0] % 2 == 1


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Questions and all passages that are searched for them."""

    name: str
    passages: tuple[Passage, ...]
    questions: tuple[Question, ...]

    @property
    def digest(self) -> str:
        """A hash of the passages."""
        texts = "\0".join(f"{p.passage_id}\0{p.title}\0{p.text}" for p in self.passages)
        return hashlib.sha256(texts.encode()).hexdigest()[:16]

    def index(self, store: Store, embedder: Embedder, folder: Path) -> None:
        """Bring the passages into an index, by a file of them that is written into a folder.

        An index that was begun is gone on with; of one that is whole nothing is embedded again.
        """
        write_passages(self.passages, folder / f"{self.name}.jsonl")
        index_passages(store, embedder, folder / f"{self.name}.jsonl")


def write_passages(passages: Iterable[Passage], path: Path) -> None:
    """Write passages as a collection that ``index_passages`` reads, unless they are there."""
    rows = ({"id": p.passage_id, "title": p.title, "text": p.text} for p in passages)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def load_set(
    name: str, embedder: Embedder, data: Path | None = None, limit: int | None = None
) -> QuestionSet:
    """Load a set, or its first ``limit`` questions with all of its passages.

    Raises:
        MissingDataError: Its corpus is not at hand; says how to point at it.
    """
    if name != "demo":
        passages, questions = _question_pairs(name, data)
    else:
        documents = demo_documents()
        passages = [p for one in documents for p in split_document(one, embedder.count_tokens)]
        questions = demo_questions(passages)
    return QuestionSet(name, tuple(passages), tuple(questions[:limit]))


def _question_pairs(name: str, data: Path | None) -> tuple[list[Passage], list[Question]]:
    """Every distinct passage once, and every distinct pair of question and passages."""
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
    """A Wikipedia article's title as it is read."""
    return title.replace("_", " ").strip()


def demo_documents() -> list[Document]:
    """The documents that ship, as an index reads them."""
    files = list_folder(DEMOS / "documents").files
    return [read_document(file.path, name=file.name) for file in files]


def demo_questions(passages: Sequence[Passage]) -> list[Question]:
    """The demo's answerable questions, and which of its documents' passages answer them."""
    questions = []
    for asked in read_questions(DEMOS / "questions.jsonl"):
        if asked["answer"] is None:
            continue
        wanted, file = plain(str(asked["answer"])), str(asked["file"])
        own = (p.passage_id for p in passages if p.path == file and wanted in plain(p.text))
        questions.append(Question(str(asked["question"]), frozenset(own), file))
    return questions


def plain(text: str) -> str:
    """Text as it is compared: one line, citations left out."""
    return " ".join(re.sub(r" ?\[\d+\]", "", text).split())


def read_questions(path: Path) -> list[dict[str, str | None]]:
    """Read questions, one a line: ``question``, ``answer`` (null: unanswerable) and ``file``."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]
