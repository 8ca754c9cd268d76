"""Recordings: requests and recorded answers in token ids, as they are replayed without a model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.examples import MissingDataError, in_data, read_rows
from ragaccel.decoding.request import Reference

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

SETS = (
    "llma_msmarco_davinci003", "clapnq_dev", "mtrag_un", "pubmedqa_long", "sum_scitldr_dev",
)  # fmt: skip
FITTED = {
    "sum_qmsum_valtest_goldspan": range(300),
    "mtrag_human_answers": range(300),
    "mtrag_un": range(150, 450),
    "pubmedqa_long": range(150, 450),
    "sum_scitldr_dev": range(150, 450),
}
"""The rows that what a match is worth to our trees was fitted to (``eval.fit_evidence``)."""
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
    """Whether our trees' weights were fitted to some of so many first rows of a set."""
    return name in FITTED and num_rows > FITTED[name].start


def add_set_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which recorded answers are replayed, in whose tokens."""
    add = parser.add_argument
    add("--data", type=Path, help="data folder; also the variable RAGACCEL_DATA")
    add("--sets", default=",".join(SETS), help="files of rag/ in the data folder")
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
    """Lay out one row; None where its prompt is too long.

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
