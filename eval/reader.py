"""How good is the bundled reader on unseen documents: ``python -m eval.reader --data FOLDER``.

Two kinds of prompt: four whole passages, the right one among them (or none, for the unanswerable
twelfth), in half of the cases ordered by shared words, else at random, with distractors that share
an article or words with the question; and six passages as the default retriever finds them, each
cut to the sentence nearest the question, the right one always among them.

``made``: questions made from sentences of held-out documents; ``squad``: XQuAD articles not trained
on; ``nq``: Natural Questions on passages not trained on; ``clapnq``: CLAP NQ, where the right
sentence is the one most repeated by the recorded long answer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragaccel.passage import split_sentences
from ragaccel.retrieval.embedder import load_embedder
from recipes.reader.corpus import (
    HumanQuestion,
    detokenized,
    load_articles,
    load_questions,
    rows_of,
)
from recipes.reader.evaluate import evaluate
from recipes.reader.examples import ExampleMaker

READER = Path(__file__).parents[1] / "ragaccel" / "models" / "reader"


def clapnq_questions(data: Path) -> list[HumanQuestion]:
    """CLAP NQ's questions, the sentence that its long answer repeats most as the right one."""
    questions = []
    for row in rows_of(data / "rag" / "clapnq_dev.jsonl"):
        passage = row["passages"][0]
        sentences = tuple(split_sentences(detokenized(passage["text"])))
        said = set(re.findall(r"\w+", row["answer"].lower()))
        shares = []
        for sentence in sentences:
            words = re.findall(r"\w+", sentence.lower())
            repeated = sum(word in said for word in words)
            shares.append(repeated * repeated / max(1, len(words)))
        if sentences:
            gold = shares.index(max(shares))
            questions.append(
                HumanQuestion(row["question"], passage["title"], sentences, gold, "clapnq", True)
            )
    return questions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", default=os.environ.get("RAGACCEL_DATA", ""))
    parser.add_argument("--reader", default=str(READER), help="folder of the reader")
    parser.add_argument("--examples", type=int, default=400, help="questions of each kind")
    parser.add_argument("--out", help="write the figures there too")
    options = parser.parse_args()
    data = Path(options.data)
    if not (data / "text").is_dir():
        sys.exit("error: the question sets were not found: pass --data FOLDER or set RAGACCEL_DATA")
    tokenizer = AutoTokenizer.from_pretrained(options.reader)
    model = AutoModelForCausalLM.from_pretrained(options.reader)
    articles = [article for article in load_articles(data) if article.held_out]
    questions = [question for question in load_questions(data) if question.held_out]
    questions += clapnq_questions(data)
    maker = ExampleMaker(articles, questions, tokenizer, seed=1, embedder=load_embedder())
    result = {
        "figures": evaluate(model, maker, examples=options.examples),
        "parameters": sum(p.numel() for p in model.parameters()),
        "command": ("python -m eval.reader " + " ".join(sys.argv[1:])).replace(
            str(options.data), "DATA"
        ),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "machine": platform.machine(),
    }
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["figures"]))


if __name__ == "__main__":
    main()
