"""Training of the reader: batches of examples of similar length, checkpoints, logged metrics."""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import BertLMHeadModel

from recipes.minilm_reader.examples import Example, ExampleMaker
from recipes.minilm_reader.network import TrainingForward
from recipes.minilm_reader.vocabulary import MAX_POSITIONS

BATCH_TOKENS = 4096
SORTED_EXAMPLES = 512  # so many are sorted by length, so that rows of a batch need little padding
COPIED_SHARE = 0.4  # of the examples with their answer; the others end where it is chosen
SHIFTED_SHARE = 0.1  # of the batches at later positions, which long prompts use
RELEVANCE_WEIGHT, COPY_WEIGHT = 0.5, 0.5  # of the losses beside that of the choice
# Of the layers, of the embeddings, and of the heads. At 3e-4 and 1e-3 the layers forgot what they
# knew: after 0.9M tokens the choice was no better than the order of the sentences.
LEARNING_RATE, EMBEDDING_RATE, HEAD_RATE = 1e-4, 2e-4, 1e-3
WARM_UP_STEPS, DECAY_SHARE = 60, 0.7


@dataclass(frozen=True, slots=True)
class Batch:
    """Examples as tensors, right-padded. Shapes: B rows, T tokens, S sentences, C copied tokens.

    Attributes:
        token_ids: [B, T].
        start: [B], where the answer is chosen.
        chosen: [B], the marker that is right.
        ends: [B, S], the closing markers; padded with 0.
        end_mask: [B, S], false where padded.
        gold: [B], which of them is right.
        copied: [C], flat indices of the answers' tokens whose successor is ``copies``.
        copies: [C].
    """

    token_ids: Tensor
    start: Tensor
    chosen: Tensor
    ends: Tensor
    end_mask: Tensor
    gold: Tensor
    copied: Tensor
    copies: Tensor


def batched(examples: list[Example], padding: int, rng: random.Random | None = None) -> Batch:
    """Return a batch; with ``rng``, a share of the answers is cut off after their first token."""
    rows = []
    for example in examples:
        is_cut = rng is not None and rng.random() >= COPIED_SHARE
        rows.append(
            example.token_ids[: example.answer_start + 1 + (not is_cut) * len(example.token_ids)]
        )
    length = max(map(len, rows))
    count = max(len(example.sentence_ends) for example in examples)
    ends = [e.sentence_ends + [0] * (count - len(e.sentence_ends)) for e in examples]
    copied, copies = [], []
    for at, (row, example) in enumerate(zip(rows, examples, strict=True)):
        for place in range(example.answer_start + 1, len(row) - 1):
            copied.append(at * length + place)
            copies.append(row[place + 1])
    return Batch(
        torch.tensor([row + [padding] * (length - len(row)) for row in rows]),
        torch.tensor([example.answer_start for example in examples]),
        torch.tensor([example.token_ids[example.answer_start + 1] for example in examples]),
        torch.tensor(ends),
        torch.tensor([[i < len(e.sentence_ends) for i in range(count)] for e in examples]),
        torch.tensor([example.gold for example in examples]),
        torch.tensor(copied, dtype=torch.long),
        torch.tensor(copies, dtype=torch.long),
    )


@dataclass(slots=True)
class Progress:
    """The state of training; saved with every checkpoint."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    log: list[dict[str, float]] = field(default_factory=list)


class Fit:
    """A training run of the reader, which resumes from the checkpoint in its folder.

    The order of examples depends on ``seed`` alone: a resumed run skips those that it has seen.
    """

    def __init__(
        self,
        model: BertLMHeadModel,
        maker: ExampleMaker,
        folder: Path,
        *,
        tokens: int,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.model, self.folder, self.tokens, self.device = model, folder, tokens, device
        self.network = TrainingForward(model).to(device)
        self.padding = int(model.config.pad_token_id or 0)
        self.rng = random.Random(seed)
        self.examples = maker.shuffled(seed)
        layers = list(model.bert.encoder.parameters())
        embeddings = list(model.bert.embeddings.parameters())
        known = set(map(id, [*layers, *embeddings]))
        heads = [p for p in self.network.parameters() if id(p) not in known]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": layers, "rate": LEARNING_RATE},
                {"params": embeddings, "rate": EMBEDDING_RATE},
                {"params": heads, "rate": HEAD_RATE},
            ],
            betas=(0.9, 0.98),
            weight_decay=0.01,
            fused=True,
        )
        self.progress = Progress()
        self._resume()

    def run(self) -> None:
        """Train on all tokens; save a checkpoint every three minutes and at the end."""
        last_saved = time.perf_counter()
        self.network.train()
        for batch in self._batches():
            if self.progress.tokens >= self.tokens:
                break
            self._step(batch)
            if time.perf_counter() - last_saved > 180:
                self.save()
                last_saved = time.perf_counter()
        self.save()

    def _batches(self) -> Iterator[Batch]:
        seen, skipped = 0, self.progress.steps
        while True:
            some = sorted(
                itertools.islice(self.examples, SORTED_EXAMPLES), key=lambda e: len(e.token_ids)
            )
            groups: list[list[Example]] = []
            while some:
                rows = max(1, BATCH_TOKENS // len(some[-1].token_ids))
                groups.append(some[-rows:])
                del some[-rows:]
            self.rng.shuffle(groups)
            for group in groups:
                batch = batched(group, self.padding, self.rng)
                seen += 1
                if seen > skipped:
                    yield batch

    def _step(self, batch: Batch) -> None:
        started = time.perf_counter()
        self._set_rate(self.progress.tokens / self.tokens)
        metrics = self._losses(batch)
        metrics["loss"].backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        progress = self.progress
        progress.steps += 1
        progress.tokens += batch.token_ids.numel()
        progress.seconds += time.perf_counter() - started
        progress.log.append(
            {"tokens": progress.tokens, **{name: value.item() for name, value in metrics.items()}}
        )
        if progress.steps % 20 == 0:
            self._report()

    def _losses(self, batch: Batch) -> dict[str, Tensor]:
        batch = Batch(*(getattr(batch, name).to(self.device) for name in Batch.__slots__))
        room = MAX_POSITIONS - batch.token_ids.shape[1]
        is_shifted = self.rng.random() < SHIFTED_SHARE
        hidden, scores = self.network(batch.token_ids, self.rng.randrange(room) * is_shifted)
        rows = torch.arange(len(batch.start), device=self.device)
        first = self.model.cls(hidden[rows, batch.start])
        choice = F.cross_entropy(first, batch.chosen)
        at_ends = scores.gather(1, batch.ends).masked_fill(~batch.end_mask, -1e9)
        relevance = F.cross_entropy(at_ends, batch.gold)
        loss = choice + RELEVANCE_WEIGHT * relevance
        metrics = {
            "choice": choice,
            "right": (first.argmax(-1) == batch.chosen).float().mean(),
            "relevant": (at_ends.argmax(-1) == batch.gold).float().mean(),
            "first": (batch.gold == 0).float().mean(),
        }
        if len(batch.copied):
            copied = self.model.cls(hidden.flatten(0, 1)[batch.copied])
            copy = F.cross_entropy(copied, batch.copies)
            loss = loss + COPY_WEIGHT * copy
            metrics["copied"] = (copied.argmax(-1) == batch.copies).float().mean()
        return {"loss": loss, **metrics}

    def _set_rate(self, done: float) -> None:
        warm = min(1.0, (self.progress.steps + 1) / WARM_UP_STEPS)
        scale = warm * min(1.0, max(0.02, (1.0 - done) / DECAY_SHARE))
        for group in self.optimizer.param_groups:
            group["lr"] = group["rate"] * scale

    def _report(self) -> None:
        progress = self.progress
        last = progress.log[-100:]
        names = ("loss", "choice", "right", "first", "relevant", "copied")
        known = {name: [row[name] for row in last if name in row] for name in names}
        line = " ".join(f"{n} {sum(v) / max(1, len(v)):.3f}" for n, v in known.items())
        rate = progress.tokens / max(progress.seconds, 1e-9)
        print(
            f"{progress.seconds / 60:6.1f} min  {progress.tokens / 1e6:6.2f}M tokens  "
            f"{rate:,.0f}/s  {line}",
            file=sys.stderr,
            flush=True,
        )

    def save(self) -> None:
        """Write weights, optimizer and progress; replace the old checkpoint atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": [self.progress.steps, self.progress.tokens, self.progress.seconds],
        }
        temporary = self.folder / "checkpoint.tmp"
        temporary.write_text(json.dumps(self.progress.log))
        temporary.replace(self.folder / "log.json")
        torch.save(state, temporary)
        temporary.replace(self.folder / "checkpoint.pt")

    def _resume(self) -> None:
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress.steps, self.progress.tokens, self.progress.seconds = state["progress"]
        self.progress.log = json.loads((self.folder / "log.json").read_text())
        print(f"resumed after {self.progress.tokens / 1e6:.1f}M tokens", file=sys.stderr)
