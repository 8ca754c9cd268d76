"""Training of the reader: losses, learning rates, checkpoints and logged metrics."""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from ragaccel.errors import ConfigurationError
from recipes.reader.batches import Batch, batches_of
from recipes.reader.examples import ExampleMaker
from recipes.reader.muon import Muon
from recipes.reader.network import TrainingForward
from recipes.reader.vocabulary import NONE

BLOCK = 512  # questions drawn together; checkpoints lie between blocks
# The prompts are in random order at first, and none after this share of the tokens: the order of
# the sentences is right for most questions, and would be learned instead of the rest.
SHUFFLED_UNTIL = 0.6
CHOICE_WEIGHT, RELEVANCE_WEIGHT, MATCH_WEIGHT = 1.0, 1.0, 1.0  # of the losses, beside copying
# Added to the refusal's logit in the loss alone ("logit adjustment", Menon et al., arXiv
# 2007.07314): what is trained refuses where that is e**2 times as likely as the best sentence.
REFUSAL_MARGIN = 2.0
WARM_UP_STEPS, LAST_RATE = 100, 0.02  # share of the learning rate
SECONDS_BETWEEN_CHECKPOINTS = 60


@dataclass(slots=True)
class Progress:
    """The state of training; saved with every checkpoint."""

    blocks: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    log: list[dict[str, float]] = field(default_factory=list)


class Fit:
    """A training run of the reader, which resumes from the checkpoint in its folder.

    A run resumed with the same arguments sees the examples that an uninterrupted one would.

    Raises:
        ConfigurationError: The checkpoint is of a run with other arguments.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        maker: ExampleMaker,
        folder: Path,
        *,
        tokens: int,
        learning_rate: float,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.model, self.maker, self.folder, self.device = model, maker, folder, device
        self.tokens, self.learning_rate, self.seed = tokens, learning_rate, seed
        self.network = TrainingForward(model).to(device)
        self.padding = int(model.config.pad_token_id or 0)
        self._refusal = torch.tensor(maker.id_of[NONE], device=device)
        matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
        chosen = {id(p) for p in matrices}
        others = [p for p in self.network.parameters() if id(p) not in chosen]
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=learning_rate),
            torch.optim.AdamW(
                others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
            ),
        ]
        self.progress = Progress()
        self._arguments = {"tokens": tokens, "learning_rate": learning_rate, "seed": seed}
        self._resume()

    def run(self) -> None:
        """Train on all tokens; save a checkpoint every minute and at the end."""
        last_saved = time.perf_counter()
        self.network.train()
        numbers = itertools.islice(
            self.maker.folder.order(self.seed), self.progress.blocks * BLOCK, None
        )
        while self.progress.tokens < self.tokens:
            for batch in self._block(list(itertools.islice(numbers, BLOCK))):
                self._step(batch)
            self.progress.blocks += 1
            if time.perf_counter() - last_saved > SECONDS_BETWEEN_CHECKPOINTS:
                self.save()
                last_saved = time.perf_counter()
        self.save()

    @property
    def _done(self) -> float:
        return self.progress.tokens / self.tokens

    def _block(self, numbers: Sequence[int]) -> list[Batch]:
        rng = random.Random(f"{self.seed} {self.progress.blocks}")
        shuffled = max(0.0, 1.0 - self._done / SHUFFLED_UNTIL)
        drawn = [self.maker.draw(number, rng, shuffled) for number in numbers]
        return batches_of([one for one in drawn if one is not None], self.padding, rng)

    def _step(self, batch: Batch) -> None:
        started = time.perf_counter()
        self._set_rate()
        metrics = self._losses(batch.to(self.device))
        torch.autograd.backward(metrics["loss"])
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        progress = self.progress
        progress.steps += 1
        progress.tokens += batch.token_ids.numel()
        progress.seconds += time.perf_counter() - started
        values = {name: round(value.item(), 4) for name, value in metrics.items()}
        progress.log.append({"tokens": progress.tokens, **values})
        if progress.steps % 20 == 0:
            self._report()

    def _losses(self, batch: Batch) -> dict[str, Tensor]:
        hidden, matches, scores = self.network(batch.token_ids)
        rows = torch.arange(len(batch.start), device=self.device)
        first = self.model.lm_head(hidden[rows, batch.start])
        markers = batch.token_ids.gather(1, batch.ends)
        margin = REFUSAL_MARGIN * F.one_hot(self._refusal, first.shape[1])
        choice = F.cross_entropy(first + margin, markers[rows, batch.gold])
        at_ends = scores.gather(1, batch.ends).masked_fill(~batch.end_mask, -1e9)
        relevance = F.cross_entropy(at_ends, batch.gold)
        match = F.binary_cross_entropy_with_logits(
            matches.flatten()[batch.sentence_tokens],
            batch.matches,
            pos_weight=torch.tensor(3.0, device=self.device),
        )
        copied = self.model.lm_head(hidden.flatten(0, 1)[batch.copied])
        copy = F.cross_entropy(copied, batch.copies, reduction="sum") / max(1, len(batch.copies))
        loss = copy + CHOICE_WEIGHT * choice + RELEVANCE_WEIGHT * relevance + MATCH_WEIGHT * match
        with torch.no_grad():
            chances = first.gather(1, markers).masked_fill(~batch.end_mask, -1e9)
            return {
                "loss": loss,
                "choice": choice,
                "match": match,
                "right": (chances.argmax(1) == batch.gold).float().mean(),
                "relevant": (at_ends.argmax(1) == batch.gold).float().mean(),
                "first": (batch.gold == 0).float().mean(),
                "copied": (copied.argmax(-1) == batch.copies).float().sum() / max(1, len(copied)),
            }

    def _set_rate(self) -> None:
        warm = min(1.0, (self.progress.steps + 1) / WARM_UP_STEPS)
        rate = self.learning_rate * warm * max(LAST_RATE, 1.0 - self._done)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

    def _report(self) -> None:
        progress = self.progress
        last = progress.log[-40:]
        means = {name: sum(row[name] for row in last) / len(last) for name in last[0]}
        line = " ".join(f"{name} {mean:.3f}" for name, mean in means.items() if name != "tokens")
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
        progress = self.progress
        state = {
            "arguments": self._arguments,
            "network": self.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": [progress.blocks, progress.steps, progress.tokens, progress.seconds],
            "log": progress.log,
        }
        temporary = self.folder / "checkpoint.tmp"
        torch.save(state, temporary)
        temporary.replace(self.folder / "checkpoint.pt")
        (self.folder / "log.json").write_text(json.dumps(progress.log))

    def _resume(self) -> None:
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        given = state.get("arguments")
        if given != self._arguments:
            raise ConfigurationError(
                f"{path} is of a run with {given}, not {self._arguments}: give those to go on, or "
                "another --out to begin anew"
            )
        self.network.load_state_dict(state["network"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        progress = self.progress
        progress.blocks, progress.steps, progress.tokens, progress.seconds = state["progress"]
        progress.log = state["log"]
        print(f"resumed after {progress.tokens / 1e6:.1f}M tokens", file=sys.stderr)
