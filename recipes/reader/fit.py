"""Training of the reader: a curriculum of growing examples, checkpoints and logged metrics."""

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

from recipes.reader.batches import Batch, Batches, Stage
from recipes.reader.examples import ExampleMaker
from recipes.reader.network import TrainingForward
from recipes.reader.passages import Shape

# (share of the tokens at which a stage starts, ((share of the examples, shape), …)). Copying and
# matching are learned on short texts; later stages have passages as the retriever ranks and cuts
# them, beside whole ones.
CURRICULUM: tuple[tuple[float, Stage], ...] = (
    (0.00, ((1.0, Shape(192, 2, 75)),)),
    (0.14, ((1.0, Shape(256, 3, 90)),)),
    (
        0.26,
        (
            (0.5, Shape(448, 4, 110)),
            (0.5, Shape(448, 6, 150, human_share=0.3, max_sentences=2)),
        ),
    ),
    (
        0.45,
        (
            (0.25, Shape(640, 6, 130, human_share=0.4)),
            (0.75, Shape(448, 6, 150, 1, 0.4, max_sentences=2, unanswerable_share=0.14)),
        ),
    ),
    (
        0.80,
        (
            (0.15, Shape(1024, 6, 160, human_share=0.4)),
            (0.85, Shape(640, 6, 150, 1, 0.45, max_sentences=2, unanswerable_share=0.14)),
        ),
    ),
)
# weights of the losses beside that of all tokens, of which one in fifty chooses the sentence
CHOICE_WEIGHT, RELEVANCE_WEIGHT, MATCH_WEIGHT = 1.0, 1.0, 1.0


@dataclass(slots=True)
class Progress:
    """The state of training; saved with every checkpoint."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    log: list[dict[str, float]] = field(default_factory=list)


class Fit:
    """A training run of the reader, which resumes from the checkpoint in its folder."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        maker: ExampleMaker,
        folder: Path,
        *,
        tokens: int,
        learning_rate: float = 2.5e-3,
        device: str = "cpu",
        compiled: bool = True,
    ) -> None:
        self.maker, self.folder = maker, folder
        self.tokens, self.learning_rate, self.device = tokens, learning_rate, device
        self.network = TrainingForward(model).to(device)
        self.model = model
        self.batches = Batches(maker, model.config.pad_token_id or 0)
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
        self._resume()

    def run(self) -> None:
        """Train on all tokens; save a checkpoint every two minutes and at the end."""
        last_saved = time.perf_counter()
        while self.progress.tokens < self.tokens:
            self._step()
            if time.perf_counter() - last_saved > 120:
                self.save()
                last_saved = time.perf_counter()
        self.save()

    def _step(self) -> None:
        started = time.perf_counter()
        done = self.progress.tokens / self.tokens
        stage = next(shapes for at, shapes in reversed(CURRICULUM) if done >= at)
        batch = self.batches.draw(stage)
        self._set_rate(done)
        metrics = self._losses(batch)
        torch.autograd.backward(metrics["loss"])
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        progress = self.progress
        progress.steps += 1
        progress.tokens += batch.token_ids.numel()
        progress.seconds += time.perf_counter() - started
        if progress.steps % 20 == 0:
            self._report({k: v.item() for k, v in metrics.items()})

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
        first = batch.first.to(self.device)
        loss = (each * weights).sum() / weights.sum() + CHOICE_WEIGHT * each[first].mean()
        loss = loss + RELEVANCE_WEIGHT * relevance + MATCH_WEIGHT * match
        with torch.no_grad():
            copied = (weights == 1.0) & ~first
            right = logits.argmax(-1) == next_ids
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

    def _report(self, metrics: dict[str, float]) -> None:
        progress = self.progress
        progress.log.append({"tokens": progress.tokens, "seconds": progress.seconds, **metrics})
        line = " ".join(f"{name} {value:.3f}" for name, value in metrics.items())
        rate = progress.tokens / max(progress.seconds, 1e-9)
        print(
            f"{progress.seconds / 60:6.1f} min  {progress.tokens / 1e6:6.2f}M tokens  "
            f"{rate:,.0f}/s  {line}",
            file=sys.stderr,
            flush=True,
        )

    def save(self) -> None:
        """Write weights, optimizers and progress; replace the old checkpoint atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "network": self.network.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
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
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress.steps, self.progress.tokens, self.progress.seconds = state["progress"]
        if (self.folder / "log.json").exists():
            self.progress.log = json.loads((self.folder / "log.json").read_text())
        self.maker.reseed(self.progress.steps)
        print(f"resumed after {self.progress.tokens / 1e6:.1f}M tokens", file=sys.stderr)
