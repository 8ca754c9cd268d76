"""Does the whole chain answer: ``python -m eval.questions``, the demo's questions on its documents.

An answer is right when it holds the sentence that answers, or, in a table, a piece of the right row
of at least 40 characters; white space and citations aside. An unanswerable question is right when
refused. ``cited``: the citation names a passage of the right file. ``right_nearest``: right, or
refused with the sentence that answers among the nearest three that are shown then.

With ``--held-out``, people's questions on the XQuAD articles that the reader was not trained on, a
file an article: ``python -m eval.questions --held-out --data FOLDER``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.ledger import write_whole
from eval.script import measured, new_parser, result
from ragaccel import LLM, RAG, Retriever, Store, index_folder, load_embedder
from ragaccel.retrieval.compression import CompressingRetriever
from recipes.reader.corpus import load_questions

if TYPE_CHECKING:
    from collections.abc import Iterable

REFUSAL = "The passages do not tell."

DEMOS = Path(__file__).parents[1] / "demos"


def plain(text: str) -> str:
    """Text as it is compared: one line, citations left out."""
    return " ".join(re.sub(r" ?\[\d+\]", "", text).split())


def is_right(answer: str, expected: str | None) -> bool:
    """Whether an answer says what the question's line expects."""
    said = plain(answer)
    if expected is None:
        return said == REFUSAL
    wanted = plain(expected)
    return wanted in said or (len(said) >= 40 and said in wanted)


def read_questions(path: Path) -> list[dict[str, str | None]]:
    """Read questions, one a line: ``question``, ``answer`` (null: unanswerable) and ``file``."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def write_held_out(data: Path, folder: Path) -> list[dict[str, str | None]]:
    """Write each held-out XQuAD article as a file; return the questions asked about them."""
    articles: dict[str, dict[str, None]] = {}
    questions: list[dict[str, str | None]] = []
    for asked in load_questions(data):
        if not asked.held_out or asked.source != "squad":
            continue
        file = re.sub(r"\W+", "-", asked.title) + ".txt"
        articles.setdefault(file, {})[" ".join(asked.sentences)] = None
        answer = asked.sentences[asked.gold]
        questions.append(
            {"question": asked.question, "answer": answer, "file": file, "words": asked.answer}
        )
    for file, passages in articles.items():
        (folder / file).write_text("\n\n".join(passages) + "\n", encoding="utf-8")
    return questions


def main() -> None:
    options = read_options()
    if options.held_out and not (Path(options.data) / "rag").is_dir():
        sys.exit("error: the question sets were not found: pass --data FOLDER or set RAGACCEL_DATA")
    print(json.dumps(measured("questions", measure, options)["figures"]))


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser("questions", __doc__ or "")
    parser.add_argument(
        "--held-out", action="store_true", help="ask about held-out XQuAD articles instead"
    )
    parser.add_argument("--data", default=os.environ.get("RAGACCEL_DATA", ""))
    parser.add_argument("--model", help="folder or hub name; without one, the bundled reader")
    parser.add_argument("--questions", type=Path, default=DEMOS / "questions.jsonl")
    parser.add_argument("--folder", type=Path, default=DEMOS / "documents")
    parser.add_argument("-k", type=int, default=6, help="passages a question")
    parser.add_argument(
        "--sentences", type=int, default=1, help="sentences a passage is cut to; 0: whole passages"
    )
    parser.add_argument(
        "--margin", type=float, default=0.05, help="passages that score lower by more are left out"
    )
    parser.add_argument(
        "--unchecked", action="store_true", help="what the bundled reader says, quote or not"
    )
    parser.add_argument("--out", type=Path, help="result file; the answers stand beside it")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Ask the questions that the options choose, on their documents, and count."""
    rows = answers_to_all(options)
    if options.out:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        write_whole(options.out.with_suffix(".rows.jsonl"), "".join(lines))
    given = ("held_out", "model", "k", "sentences", "margin", "unchecked")
    settings = {name: getattr(options, name) for name in given}
    return result("questions", settings, figures=figures_of(rows))


def answers_to_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Ask the questions that the options choose, on their documents."""
    with tempfile.TemporaryDirectory() as folder:
        documents = options.folder
        if options.held_out:
            documents = Path(folder)
            questions = write_held_out(Path(options.data), documents)
        else:
            questions = read_questions(options.questions)
        return ask_all(
            questions,
            documents,
            model=options.model,
            k=options.k,
            sentences=options.sentences,
            margin=options.margin,
            check_quotes=not options.unchecked,
        )


def figures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Count what became of the questions that have an answer, and of those that have none."""
    answerable = [row for row in rows if row["expected"] is not None]
    refusable = [row for row in rows if row["expected"] is None]
    return {
        "right": sum(row["right"] for row in answerable),
        "wrong": sum(not row["right"] and row["answered"] for row in answerable),
        "right_nearest": sum(row["right"] or row["nearest"] for row in answerable),
        "cited": sum(row["cited"] for row in answerable),
        "retrieved": sum(row["retrieved"] for row in answerable),
        "answerable": len(answerable),
        "refused": sum(row["right"] for row in refusable),
        "unanswerable": len(refusable),
        "acceptance_length": round(
            sum(row["tokens"] for row in rows) / sum(row["passes"] for row in rows), 2
        ),
    }


def ask_all(
    questions: Iterable[dict[str, str | None]],
    documents: Path,
    *,
    model: str | None = None,
    k: int = 6,
    sentences: int = 1,
    margin: float = 0.05,
    check_quotes: bool = True,
) -> list[dict[str, Any]]:
    """Index a folder and answer questions on it by the chain of ``ragaccel ask``; see :func:`ask`.

    Args:
        questions: As :func:`read_questions` gives them.
        documents: The folder.
        model: Folder or hub name; None: the bundled reader.
        k: Passages a question.
        sentences: How many of its sentences a passage is cut to; 0: whole passages.
        margin: Passages whose score is lower than the best one's by more are left out.
        check_quotes: As for ``RAG``.
    """
    embedder = load_embedder()
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "index.db") as store:
        index_folder(store, embedder, documents)
        retriever = Retriever(store, embedder)
        compressed = CompressingRetriever(retriever, sentences=sentences or 1, margin=margin)
        source = compressed if sentences else retriever
        rag = RAG(LLM.load(model), source, k=k, check_quotes=check_quotes)
        return [ask(rag, question) for question in questions]


def ask(rag: RAG, question: dict[str, str | None]) -> dict[str, Any]:
    """One question's answer and what is to be said about it; ``words``: the short answer."""
    answer = rag.ask(str(question["question"]))
    right = is_right(answer.text, question["answer"])
    print(f"{'ok ' if right else 'BAD'} {question['question']}\n    {answer.text}", file=sys.stderr)
    file = question.get("file")
    return {
        "question": question["question"],
        "answer": answer.text,
        "expected": question["answer"],
        "words": question.get("words"),
        "right": right,
        "answered": answer.answered,
        "refusal": answer.refusal or None,
        "nearest": any(is_right(one.text, question["answer"]) for one in answer.nearest),
        "cited": any(passage.path == file for passage in answer.cited_passages),
        "retrieved": any(
            plain(str(question["answer"])) in plain(passage.text) for passage in answer.passages
        ),
        "tokens": answer.stats.new_tokens,
        "passes": answer.stats.verify_passes,
    }


if __name__ == "__main__":
    main()
