"""Tasks by name: their files and the functions that read them.

The demo has 24 questions (``demo.jsonl``). The handbook has 24 tasks with answers of several
sentences: summaries, lists of steps, comparisons, quotations and three conversations of three
turns, written by the project's authors (``handbook.jsonl``; ``handbook_answers.jsonl`` has three
answers each to six of them). The passages that were found when these files were written are kept
in them, so that a run needs neither FAISS nor an embedder and is the same on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from eval.data import DEMOS, Example, in_data, read_rows, read_unified
from ragaccel.passage import Passage

FOLDER = Path(__file__).parent
SUMMARIZED = (
    "incidents/2018-grounding-of-the-petrel.md",
    "history/keepers-remembered.txt",
    "equipment/diesel-generators.md",
    "incidents/2022-storm-hilda.md",
    "island/birds-and-seals.md",
    "procedures/landing-by-boat.txt",
    "history/the-lightvessel-constance.md",
    "incidents/2020-lantern-fire-at-wether-holm.txt",
)
_JOINED_CHARACTERS = 400  # more than 100 tokens of Llama 2 or Qwen
_XQUAD_FIRST = 2910  # the lines before hold SQuAD questions
_XQUAD_OTHERS = 3
_XQUAD_APART = 97  # distance in examples from a question to its other paragraphs
_RANDOM_NUM, _RANDOM_PROMPT, _RANDOM_ANSWER = 100, 256, 128


@dataclass(frozen=True, slots=True)
class Task:
    """A set of examples: its file and the function that reads it.

    ``file`` is a name in the data folder, or the path of a file that ships.
    """

    file: str | Path
    read: Callable[[Path, int | None], list[Example]] = read_unified

    def load(self, limit: int | None, data: Path | None) -> list[Example]:
        """Read the first ``limit`` examples; ``data`` is the folder of files that do not ship."""
        path = self.file if isinstance(self.file, Path) else in_data(self.file, data)
        return self.read(path, limit)


def load_task(name: str, limit: int | None = None, data: Path | None = None) -> list[Example]:
    """Load the examples of a task by its name in ``TASKS``, or of a JSONL file.

    Each line of a JSONL file is an object ``{id, question, passages: [{title, text}], answer}``,
    ``{id, prompt, answer}`` or ``{id, turns}``.
    """
    if name.endswith(".jsonl"):
        return read_unified(Path(name), limit)
    if name in TASKS:
        return TASKS[name].load(limit, data)
    raise FileNotFoundError(
        f"no task {name!r}: take one of {', '.join(sorted(TASKS))}, or a .jsonl file"
    )


def read_gsm8k(path: Path, limit: int | None) -> list[Example]:
    """Read word problems with step-by-step solutions, which copy little except numbers."""
    return [
        Example(
            f"gsm8k-{number}",
            prompt=f"Question: {row['question']}\nAnswer:",
            answer=row["answer"],
        )
        for number, row in enumerate(islice(read_rows(path), limit), start=1)
    ]


def read_humaneval(path: Path, limit: int | None) -> list[Example]:
    """Read Python functions with their descriptions, which copy little; join consecutive ones.

    Most solutions are short, so prompts are joined with prompts and solutions with solutions until
    the solutions have 400 characters: 54 requests of more than 100 tokens each. A shorter rest at
    the end is dropped.
    """
    examples: list[Example] = []
    together: list[dict[str, Any]] = []
    for row in read_rows(path):
        together.append(row)
        answer = "".join(part["canonical_solution"] for part in together)
        if len(answer) >= _JOINED_CHARACTERS and (limit is None or len(examples) < limit):
            prompt = "\n\n".join(part["prompt"] for part in together)
            examples.append(Example(together[0]["task_id"], prompt=prompt, answer=answer))
            together = []
    return examples


def read_humaneval_x(path: Path, limit: int | None) -> list[Example]:
    """Read one function per request, as SPACE's authors do."""
    return [
        Example(row["task_id"], prompt=row["prompt"], answer=row["canonical_solution"])
        for row in islice(read_rows(path), limit)
    ]


def read_chats(path: Path, limit: int | None) -> list[Example]:
    """Read chats without recorded answers, categories in turn; ids begin with the category."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in read_rows(path):
        kinds.setdefault(row["category"], []).append(row)
    turns = chain.from_iterable(zip_longest(*kinds.values()))
    return [
        Example(f"{row['category']}-{row['question_id']}", turns=tuple(row["turns"]))
        for row in islice(filter(None, turns), limit)
    ]


def read_xquad(path: Path, limit: int | None) -> list[Example]:
    """Read people's questions on Wikipedia paragraphs, each with three paragraphs of others.

    The questions are spread over the articles. The paragraph with the answer is first, second,
    third and fourth in turn.
    """
    rows = read_unified(path)[_XQUAD_FIRST:]
    count = len(rows) if limit is None else min(limit, len(rows))
    chosen = [number * len(rows) // count for number in range(count)]
    return [_among_others(rows, number, turn) for turn, number in enumerate(chosen)]


def _among_others(rows: list[Example], number: int, turn: int) -> Example:
    example = rows[number]
    texts = {passage.text for passage in example.passages}
    others: list[Passage] = []
    at = number
    while len(others) < _XQUAD_OTHERS:
        at += _XQUAD_APART
        other = rows[at % len(rows)].passages[0]
        if other.text not in texts:
            texts.add(other.text)
            others.append(other)
    place = turn % (_XQUAD_OTHERS + 1)
    return replace(example, passages=(*others[:place], *example.passages, *others[place:]))


def read_summaries(folder: Path, limit: int | None) -> list[Example]:
    """Return requests to summarize whole documents; no summary is recorded."""
    return [_summary(folder / name) for name in SUMMARIZED[:limit]]


def _summary(path: Path) -> Example:
    text = path.read_text(encoding="utf-8").strip()
    title = path.stem.replace("-", " ")
    return Example(
        f"summary-{path.stem}",
        "Summarize this document in about five sentences.",
        (Passage(f"{path.stem}/1", text, title, end=len(text)),),
    )


def random_tokens(_folder: Path, limit: int | None) -> list[Example]:
    """Return prompts and answers of independent random tokens, which nothing can draft."""
    num = _RANDOM_NUM if limit is None else min(limit, _RANDOM_NUM)
    return [Example(f"random-{seed}", draw=partial(_drawn, seed)) for seed in range(1, num + 1)]


def _drawn(seed: int, token_ids: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw a prompt and an answer from token ids, with a fixed seed."""
    rng = random.Random(seed)
    prompt = tuple(rng.choices(token_ids, k=_RANDOM_PROMPT))
    return prompt, tuple(rng.choices(token_ids, k=_RANDOM_ANSWER))


TASKS = {
    # shipped with the project
    "demo": Task(FOLDER / "demo.jsonl"),  # 24 questions on the handbook under demos/
    "handbook": Task(FOLDER / "handbook.jsonl"),  # 24 tasks on it, answers of several sentences
    "handbook_answers": Task(FOLDER / "handbook_answers.jsonl"),  # three answers to six of those
    "code": Task(FOLDER / "code.jsonl"),
    "chat": Task(FOLDER / "chat.jsonl"),
    "summaries": Task(DEMOS / "documents", read_summaries),
    "random_tokens": Task(FOLDER, random_tokens),
    # LLMA's search questions, ten web passages each, answers by text-davinci-003
    "llma": Task("rag/llma_msmarco_davinci003.jsonl"),
    # one Wikipedia passage, long answers by people that stay close to it
    "clapnq": Task("rag/clapnq_dev.jsonl"),
    # turns of conversations on about three passages, answers by mixtral-8x7b
    "mtrag": Task("rag/mtrag_un.jsonl"),
    # three answers to each turn, by people, llama-3.1-405b and gpt-4o; answers to one task stand
    # together, their ids ``conversation<::>turn/who answered``
    "mtrag_answers": Task("rag/mtrag_human_answers.jsonl"),
    # sections of one abstract, its authors' conclusion in words of their own
    "pubmedqa": Task("rag/pubmedqa_long.jsonl"),
    # a question on a meeting, the part of its transcript, a summary by people
    "qmsum": Task("rag/sum_qmsum_valtest_goldspan.jsonl"),
    # one abstract each, a summary of one sentence by people
    "scitldr": Task("rag/sum_scitldr_dev.jsonl"),
    "xquad": Task("rag/squad_like.jsonl", read_xquad),
    "gsm8k": Task("prompts/gsm8k_test.jsonl", read_gsm8k),
    "humaneval": Task("prompts/humaneval.jsonl", read_humaneval),
    "humaneval_x": Task("prompts/humaneval_x_python.jsonl", read_humaneval_x),
    # chats of two turns, eight categories in turn
    "mt_bench": Task("prompts/mt_bench.jsonl", read_chats),
}
