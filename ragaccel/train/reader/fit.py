"""Fitting the reader: a curriculum of growing examples, checkpoints that resume, figures."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from ragaccel.train.reader.examples import Example, ExampleMaker, Shape
from ragaccel.train.reader.network import TrainingForward

# (share of the time at which it starts, shape, rows a batch): about 8k tokens a step throughout
CURRICULUM = (
    (0.00, Shape(192, 2, 75), 42),
    (0.18, Shape(256, 3, 90), 32),
    (0.38, Shape(384, 4, 110), 22),
    (0.55, Shape(640, 6, 130), 13),
    (0.65, Shape(640, 6, 130, human_share=0.4), 13),
    (0.88, Shape(1024, 6, 160, human_share=0.4), 8),
)
RELEVANCE_WEIGHT, MATCH_WEIGHT = 1.0, 1.0


@dataclass(slots=True)
class Progress:
    """Where training stands; saved with every checkpoint."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    log: list[dict[str, float]] = field(default_factory=list)


@dataclass(slots=True)
class Batch:
    """Examples side by side, right-padded: positions index the flattened [B * T]."""

    token_ids: Tensor  # [B, T]
    positions: Tensor  # [P] where a next token is predicted
    next_ids: Tensor  # [P]
    weights: Tensor  # [P]
    first: Tensor  # [P] bool, the choice of the answer's marker
    ends: Tensor  # [B, S] positions of closing markers, padded with 0
    end_mask: Tensor  # [B, S] bool
    gold: Tensor  # [B] index into S
    sentence_tokens: Tensor  # [W] positions of the sentences' tokens
    matches: Tensor  # [W] 1.0 where the question has the token's word


def collate(examples: list[Example], length: int, pad_id: int) -> Batch:
    """Lay examples out as tensors of one length."""
    tokens = torch.full((len(examples), length), pad_id)
    widest = max(len(e.sentence_ends) for e in examples)
    ends = torch.zeros(len(examples), widest, dtype=torch.long)
    mask = torch.zeros(len(examples), widest, dtype=torch.bool)
    positions, next_ids, weights, first, sentence_tokens = [], [], [], [], []
    matches: list[bool] = []
    for row, example in enumerate(examples):
        ids = example.token_ids
        tokens[row, : len(ids)] = torch.tensor(ids)
        ends[row, : len(example.sentence_ends)] = torch.tensor(example.sentence_ends)
        mask[row, : len(example.sentence_ends)] = True
        for position, weight in example.targets.items():
            positions.append(row * length + position)
            next_ids.append(ids[position + 1])
            weights.append(weight)
            first.append(position == example.answer_start)
        sentence_tokens += [row * length + position for position in example.matches]
        matches += example.matches.values()
    return Batch(
        tokens, torch.tensor(positions), torch.tensor(next_ids), torch.tensor(weights),
        torch.tensor(first), ends, mask, torch.tensor([e.gold_end for e in examples]),
        torch.tensor(sentence_tokens), torch.tensor(matches, dtype=torch.float),
    )  # fmt: skip


class Fit:
    """One training run, resumable from its folder."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        maker: ExampleMaker,
        folder: Path,
        *,
        minutes: float,
        learning_rate: float = 2.5e-3,
        device: str = "cpu",
        compiled: bool = True,
    ) -> None:
        self.maker, self.folder = maker, folder
        self.minutes, self.learning_rate, self.device = minutes, learning_rate, device
        self.network = TrainingForward(model).to(device)
        self.model = model
        self.pad_id = model.config.pad_token_id or 0
        self.forward = torch.compile(self.network, dynamic=False) if compiled else self.network
        matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
        chosen = {id(p) for p in matrices}
        others = [p for p in self.network.parameters() if id(p) not in chosen]
        # Muon for the matrices of the layers (Jordan et al. 2024), AdamW for embeddings and norms
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=learning_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(
                others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
            ),
        ]
        self.progress = Progress()

    def run(self) -> None:
        """Train until the minutes are used up; a checkpoint every two minutes and at the end."""
        self._resume()
        last_saved = time.perf_counter()
        while self.progress.seconds < self.minutes * 60:
            self._step()
            if time.perf_counter() - last_saved > 120:
                self.save()
                last_saved = time.perf_counter()
        self.save()

    def _step(self) -> None:
        started = time.perf_counter()
        done = self.progress.seconds / (self.minutes * 60)
        shape, rows = next((s, r) for at, s, r in reversed(CURRICULUM) if done >= at)
        batch = collate([self.maker.make(shape) for _ in range(rows)], shape.length, self.pad_id)
        self._set_rate(done)
        figures = self._losses(batch)
        torch.autograd.backward(figures["loss"])
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        progress = self.progress
        progress.steps += 1
        progress.tokens += batch.token_ids.numel()
        progress.seconds += time.perf_counter() - started
        if progress.steps % 20 == 0:
            self._report({k: v.item() for k, v in figures.items()}, shape)

    def _losses(self, batch: Batch) -> dict[str, Tensor]:
        with torch.autocast(self.device, dtype=torch.bfloat16):
            hidden, matches, scores = self.forward(batch.token_ids.to(self.device))
            chosen = hidden.flatten(0, 1)[batch.positions.to(self.device)]
            logits = F.linear(chosen, self.model.lm_head.weight).float()
        next_ids, weights = batch.next_ids.to(self.device), batch.weights.to(self.device)
        each = F.cross_entropy(logits, next_ids, reduction="none")
        at_ends = scores.float().gather(1, batch.ends.to(self.device))
        at_ends = at_ends.masked_fill(~batch.end_mask.to(self.device), -1e9)
        gold = batch.gold.to(self.device)
        relevance = F.cross_entropy(at_ends, gold)
        match = F.binary_cross_entropy_with_logits(
            matches.float().flatten()[batch.sentence_tokens.to(self.device)],
            batch.matches.to(self.device),
            pos_weight=torch.tensor(3.0, device=self.device),
        )
        loss = (each * weights).sum() / weights.sum()
        loss = loss + RELEVANCE_WEIGHT * relevance + MATCH_WEIGHT * match
        with torch.no_grad():
            copied = (weights == 1.0) & ~batch.first.to(self.device)
            right = logits.argmax(-1) == next_ids
            first = batch.first.to(self.device)
            return {
                "loss": loss,
                "match": match,
                "copy": each[copied].mean(),
                "copied": right[copied].float().mean(),
                "choice": right[first].float().mean(),
                "relevant": (at_ends.argmax(-1) == gold).float().mean(),
            }

    def _set_rate(self, done: float) -> None:
        warm = min(1.0, (self.progress.steps + 1) / 200)
        rate = self.learning_rate * warm * min(1.0, max(0.02, (1.0 - done) / 0.4))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

    def _report(self, figures: dict[str, float], shape: Shape) -> None:
        progress = self.progress
        progress.log.append({"tokens": progress.tokens, "seconds": progress.seconds, **figures})
        line = " ".join(f"{name} {value:.3f}" for name, value in figures.items())
        rate = progress.tokens / max(progress.seconds, 1e-9)
        print(
            f"{progress.seconds / 60:6.1f} min  {progress.tokens / 1e6:6.2f}M tokens  "
            f"{rate:,.0f}/s  length {shape.length}  {line}",
            file=sys.stderr,
            flush=True,
        )

    def save(self) -> None:
        """Write weights, optimizers and progress; the old checkpoint is replaced at once."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "network": self.network.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "progress": [self.progress.steps, self.progress.tokens, self.progress.seconds],
        }
        temporary = self.folder / "checkpoint.tmp"
        torch.save(state, temporary)
        temporary.replace(self.folder / "checkpoint.pt")
        (self.folder / "log.json").write_text(json.dumps(self.progress.log))

    def _resume(self) -> None:
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.network.load_state_dict(state["network"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress.steps, self.progress.tokens, self.progress.seconds = state["progress"]
        if (self.folder / "log.json").exists():
            self.progress.log = json.loads((self.folder / "log.json").read_text())
        self.maker.rng.seed(self.progress.steps)
        print(f"resumed after {self.progress.tokens / 1e6:.1f}M tokens", file=sys.stderr)
