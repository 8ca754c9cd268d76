"""A training run in blocks of examples, which can be interrupted and resumed."""

from __future__ import annotations

import io
import json
import math
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Generic, TypeVar

import torch
import typer
from torch import Tensor, nn

from ragaccel.errors import ConfigurationError

BLOCK = 512  # questions drawn together; checkpoints lie between blocks
LAST_RATE = 0.02  # share of the learning rate
SECONDS_BETWEEN_CHECKPOINTS = 60
INTERRUPTED = 130  # exit status of typer
_STEPS_REPORTED = 50

Batch = TypeVar("Batch")


@dataclass(slots=True)
class Progress:
    """The state of training; saved with every checkpoint."""

    blocks: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    log: list[dict[str, float]] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Return the tokens trained on, and the minutes."""
        return {"tokens": self.tokens, "minutes": round(self.seconds / 60, 1)}


class TrainingRun(ABC, Generic[Batch]):
    """Trains parameters on batches; resumes from the checkpoint in its folder.

    A run resumed with the same arguments sees the examples that an uninterrupted one would.

    Args:
        trained: The parameters by name.
        optimizers: Those of the parameters. A group's rate is ``factor`` (1) times the run's.
        folder: Holds the checkpoint and the log.
        tokens: The tokens to train on.
        learning_rate: The peak learning rate, after ``warm_up`` steps; it falls to 0.02 of it.
        seed: Seed of order and examples.
        device: A torch device.
        data: Digest of the data, which may not change when the run is resumed.
        warm_up: The number of steps in which the learning rate rises.

    Raises:
        ConfigurationError: The checkpoint is of a run with other arguments.
    """

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        optimizers: Sequence[torch.optim.Optimizer],
        folder: Path,
        *,
        tokens: int,
        learning_rate: float,
        seed: int,
        device: str,
        data: str,
        warm_up: int,
    ) -> None:
        self.trained, self.optimizers = dict(trained), optimizers
        self.folder, self.device, self.warm_up = folder, device, warm_up
        self.tokens, self.learning_rate, self.seed = tokens, learning_rate, seed
        self.progress = Progress()
        self._arguments = {
            "tokens": tokens, "learning_rate": learning_rate, "seed": seed, "data": data,
        }  # fmt: skip
        self._resume()

    @abstractmethod
    def draw(self, block: int) -> list[Batch]:
        """Return the batches of a block, the same at the same progress."""

    @abstractmethod
    def losses(self, batch: Batch) -> tuple[dict[str, Tensor], int]:
        """Return ``loss`` and other values of a batch to log, and its number of tokens.

        A value that a batch does not have is left out.
        """

    def run(self) -> None:
        """Train on all tokens; save a checkpoint every minute and at the end."""
        last_saved = time.perf_counter()
        while self.progress.tokens < self.tokens:
            for batch in self.draw(self.progress.blocks):
                self._step(batch)
            self.progress.blocks += 1
            if time.perf_counter() - last_saved > SECONDS_BETWEEN_CHECKPOINTS:
                self.save()
                last_saved = time.perf_counter()
        self.save()

    def _step(self, batch: Batch) -> None:
        started = time.perf_counter()
        progress = self.progress
        self._set_rate()
        metrics, tokens = self.losses(batch)
        torch.autograd.backward(metrics["loss"])
        torch.nn.utils.clip_grad_norm_(self.trained.values(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        progress.steps, progress.tokens = progress.steps + 1, progress.tokens + tokens
        progress.seconds += time.perf_counter() - started
        values = {name: round(value.item(), 4) for name, value in metrics.items()}
        progress.log.append({"tokens": progress.tokens, **values})
        if progress.steps % _STEPS_REPORTED == 0:
            self._report()

    def _set_rate(self) -> None:
        warm = min(1.0, (self.progress.steps + 1) / self.warm_up)
        left = 1.0 - self.progress.tokens / self.tokens
        rate = self.learning_rate * warm * max(LAST_RATE, left)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("factor", 1.0)

    def _report(self) -> None:
        progress = self.progress
        last = progress.log[-_STEPS_REPORTED:]
        values: dict[str, list[float]] = defaultdict(list)
        for row in last:
            for name, value in row.items():
                values[name].append(value)
        line = " ".join(
            f"{name} {fmean(each):.3f}" for name, each in values.items() if name != "tokens"
        )
        rate = progress.tokens / max(progress.seconds, 1e-9)
        print(
            f"{progress.seconds / 60:6.1f} min  {progress.tokens / 1e6:6.2f}M tokens  "
            f"{rate:,.0f}/s  {line}",
            file=sys.stderr,
            flush=True,
        )

    def save(self) -> None:
        """Write what is trained, optimizers and progress; replace the old checkpoint atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        progress = self.progress
        state = {
            "arguments": self._arguments,
            "trained": self.trained,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": [progress.blocks, progress.steps, progress.tokens, progress.seconds],
            "log": progress.log,
        }
        half_written = self.folder / "checkpoint.tmp"
        packed = io.BytesIO()  # torch does not tell of a full disk
        torch.save(state, packed)
        half_written.write_bytes(packed.getbuffer())
        half_written.replace(self.folder / "checkpoint.pt")
        (self.folder / "log.json").write_text(json.dumps(progress.log))

    def _resume(self) -> None:
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return
        state: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
        if state["arguments"] != self._arguments:
            raise ConfigurationError(
                f"{path} is of a run with {state['arguments']}, not {self._arguments}: give those "
                "to go on, or another --out to begin anew"
            )
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(state["trained"][name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        progress = self.progress
        progress.blocks, progress.steps, progress.tokens, progress.seconds = state["progress"]
        progress.log = state["log"]
        print(f"resumed after {progress.tokens / 1e6:.1f}M tokens", file=sys.stderr)


def check_arguments(tokens: float, learning_rate: float, device: str) -> None:
    """Raise a ConfigurationError if no run can have these arguments."""
    for name, value in (("--tokens", tokens), ("--learning-rate", learning_rate)):
        if not 0 < value < math.inf:
            raise ConfigurationError(f"{name} {value:g} must be a number above 0")
    if device != "cpu" and not torch.cuda.is_available():
        raise ConfigurationError(f"--device {device}: torch finds no GPU; train with --device cpu")


def run_command(main: Callable[..., None]) -> None:
    """Run a recipe's command; tell an error in one line, and how to go on if interrupted."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        typer.run(main)
    except (ConfigurationError, OSError) as error:
        sys.exit(f"error: {error}")
    except SystemExit as done:
        if done.code == INTERRUPTED:
            print("interrupted: the same command goes on from the last checkpoint", file=sys.stderr)
        raise


def has_bfloat16(device: str) -> bool:
    """Return whether torch has kernels of the device for products in bfloat16."""
    return device != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def mixed_precision(device: str) -> AbstractContextManager[Any]:
    """Return the precision to train in: products in bfloat16 where the device has them."""
    if not has_bfloat16(device):
        return nullcontext()
    return torch.autocast(device, torch.bfloat16)
