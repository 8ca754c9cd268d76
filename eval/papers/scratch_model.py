"""A model from nothing: a language model of a named shape, trained for some minutes."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eval.ledger import write_whole
from eval.random_models import read_shape
from eval.script import note
from eval.targets import DTYPES

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor

    from eval.papers.scratch_text import Documents, Text
    from ragaccel.models.tokenizer import Tokenizer

TINY = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
TRAINING = "training.json"
_MULTIPLE = 64  # that the number of logits is rounded up to
_NOTE_EVERY = 15.0  # seconds
_JUDGED = 16  # windows that the loss is told of


@dataclass(frozen=True, slots=True)
class Schooling:
    """How a model is trained: for how long, on windows of how many tokens, how many a step.

    ``most_steps`` ends it sooner; without it the minutes alone do.
    """

    minutes: float
    most_steps: int | None = None
    window: int = 1024
    rows: int = 32
    rate: float = 1.5e-3
    rising: int = 100
    seed: int = 0


def new_model(shape: str, tokenizer: Tokenizer, seed: int = 0) -> Any:
    """Make an untrained model of a shape's size with logits for a tokenizer's ids.

    Raises:
        FileNotFoundError: no such shape; names those there are.
    """
    config = TINY if shape == "tiny" else read_shape(shape)["config"]
    size = -(-len(tokenizer) // _MULTIPLE) * _MULTIPLE
    end = sorted(tokenizer.eos_ids)[0]
    torch.manual_seed(seed)
    made = AutoConfig.for_model(
        **{**config, "vocab_size": size, "bos_token_id": end, "eos_token_id": end}
    )
    return AutoModelForCausalLM.from_config(made, dtype=torch.float32)  # type: ignore[no-untyped-call]


def train(
    model: Any, text: Text, schooling: Schooling, *, device: str, dtype: str
) -> dict[str, Any]:
    """Train until the minutes are over; return what it took and came to.

    Computes in ``dtype``, with weights and steps in float32. The rate rises, then falls with the
    time that is left.
    """
    model.to(device).train()
    tokens = torch.tensor([token for ids in text.held_in for token in ids])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=schooling.rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    generator = torch.Generator().manual_seed(schooling.seed)
    started = told = perf_counter()
    steps, done = 0, 0.0
    while done < 1.0 or not steps:
        share = min(1.0, (steps + 1) / schooling.rising) * (
            0.05 + 0.475 * (1 + math.cos(math.pi * min(1.0, done)))
        )
        for group in optimizer.param_groups:
            group["lr"] = schooling.rate * share
        batch = windows(tokens, schooling, generator).to(device)
        with computing(device, dtype):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps, value = steps + 1, float(loss.detach())  # which waits for the device
        now = perf_counter()
        done = (now - started) / (60.0 * schooling.minutes)
        if schooling.most_steps is not None:
            done = max(done, steps / schooling.most_steps)
        if now - told > _NOTE_EVERY:
            told = now
            note(f"the model: {100 * min(1.0, done):.0f} %, step {steps}, loss {value:.3f}")
    seconds = perf_counter() - started
    model.eval()
    return {
        "minutes": schooling.minutes,
        "seconds": round(seconds, 1),
        "steps": steps,
        "text": text.kinds,
        "text_tokens": text.num_tokens,
        "tokens_seen": steps * schooling.rows * min(schooling.window, len(tokens) - 1),
        "held_in_loss": judge(model, text.held_in, schooling, device=device, dtype=dtype),
        "held_out_loss": judge(model, text.held_out, schooling, device=device, dtype=dtype),
    }


def windows(tokens: Tensor, schooling: Schooling, generator: torch.Generator) -> Tensor:
    """Draw windows of a text [N]: [rows, window], shorter where the text is."""
    length = min(schooling.window, len(tokens) - 1)
    starts = torch.randint(len(tokens) - length, (schooling.rows, 1), generator=generator)
    found: Tensor = tokens[starts + torch.arange(length)]
    return found


def computing(device: str, dtype: str) -> AbstractContextManager[Any]:
    """Compute in a shorter type, where one is wanted."""
    if dtype == "float32":
        return nullcontext()
    return torch.autocast(torch.device(device).type, DTYPES[dtype])


@torch.no_grad()
def judge(
    model: Any, documents: Documents, schooling: Schooling, *, device: str, dtype: str
) -> float:
    """The mean loss over some windows of documents, in nats a token; the same ones every time."""
    tokens = torch.tensor([token for ids in documents for token in ids])
    generator = torch.Generator().manual_seed(schooling.seed + 1)
    losses = []
    for _ in range(max(1, _JUDGED // schooling.rows)):
        batch = windows(tokens, schooling, generator).to(device)
        with computing(device, dtype):
            losses.append(float(model(input_ids=batch, labels=batch, use_cache=False).loss))
    return round(sum(losses) / len(losses), 4)


def save(model: Any, tokenizer: Tokenizer, folder: Path, dtype: str, trained: Any) -> None:
    """Write a model's folder, what it was trained by beside its weights; the latter come last."""
    model.to(DTYPES[dtype]).save_pretrained(folder)
    words: Any = tokenizer.tokenizer
    words.save_pretrained(folder)
    write_whole(folder / TRAINING, json.dumps(trained, indent=1) + "\n")


def saved(folder: Path) -> dict[str, Any] | None:
    """What a saved model was trained by; None where none was saved whole."""
    file = folder / TRAINING
    if not file.exists():
        return None
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
