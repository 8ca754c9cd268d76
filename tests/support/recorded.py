"""A tiny random target, a recorded answer to follow, and a folder with both for a whole run."""

from __future__ import annotations

import json

from tiny_llm import tiny_tokenizer
from tiny_models import tiny_model

from eval.data import Job
from eval.models import Target
from ragaccel.decoding import Reference
from ragaccel.models import HuggingFaceModel, Tokenizer

EOS = 1
PASSAGE = (*range(20, 60), *range(30, 50))
# Copied from the passage, but for a word of its own and a wrong turn inside a copied run.
ANSWER = (*range(24, 40), 77, 78, *range(42, 50), 13, *range(50, 56), EOS)


def make_target(family="llama", **kwargs):
    """Make a target with its own tiny model."""
    model = tiny_model(family, **kwargs)
    return Target(model, HuggingFaceModel(model), Tokenizer(tiny_tokenizer()), is_random=True)


def make_job(answer=ANSWER, **changes):
    """Make a job whose recorded answer copies most of its passage."""
    reference = Reference(PASSAGE, passage_id="a")
    fields = {
        "job_id": "1",
        "prompt_ids": (0, *PASSAGE, 5, 6, 23),
        "references": (reference,),
        "apart": (reference,),
        "answer_ids": tuple(answer),
        "max_new_tokens": len(answer),
        "eos_ids": frozenset({EOS}),
    }
    return Job(**{**fields, **changes})


SHAPE = {
    "tokenizer": "words",
    "config": {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 400,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
}
SENTENCE = "Its keeper trims the wick at dusk, and again at midnight."


def write_inputs(folder, num_examples=3):
    """Write a shape, a data folder with its tokenizer, and a task; return their arguments."""
    (folder / "tiny.json").write_text(json.dumps(SHAPE))
    tiny_tokenizer().save_pretrained(folder / "data" / "tokenizers" / "words")
    row = {
        "question": "Who trims the wick?",
        "passages": [{"title": "The lamp", "text": f"The lamp burns oil. {SENTENCE}"}],
        "answer": SENTENCE,
    }
    lines = [json.dumps({"id": str(i), **row}) for i in range(num_examples)]
    (folder / "task.jsonl").write_text("\n".join(lines) + "\n")
    return [
        f"--model=random:{folder / 'tiny.json'}",
        f"--data={folder / 'data'}",
        f"--task={folder / 'task.jsonl'}",
    ]
