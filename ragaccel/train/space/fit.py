"""Fitting: the loop over packed rows, on one device or several, that goes on where it stopped."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from ragaccel.errors import ConfigurationError, MissingExtraError
from ragaccel.train.space.evaluate import Figures, evaluate
from ragaccel.train.space.layout import lay_out
from ragaccel.train.space.plan import Rows
from ragaccel.train.space.samples import Samples
from ragaccel.train.space.stopping import heeding_interrupts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ragaccel.train.space.network import SpaceNetwork
    from ragaccel.train.space.recipe import Recipe
    from ragaccel.train.space.run_folder import RunFolder
    from ragaccel.train.space.samples import Sample

_PATIENCE = timedelta(hours=12)  # of processes that wait for the first one's answers
_LOG_EVERY = 10  # steps


@dataclass(slots=True)
class Progress:
    """Where a run stands; saved with every checkpoint. ``tokens`` are all rows' of all devices."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Standing:
    """What a run tells of itself after a step; ``figures`` where it has just evaluated."""

    step: int
    steps: int
    loss: float
    guessed: float
    seconds: float
    figures: Figures | None = None


@dataclass(frozen=True, slots=True)
class Fitted:
    """A finished run: its figures on held-out samples, if there are such, and its log."""

    progress: Progress
    figures: Figures | None
    log: list[dict[str, Any]] = field(default_factory=list)


def make_accelerator(device: str | None = None) -> Any:
    """Find the devices, and the other processes where there are some; "cpu" uses no GPU.

    Raises:
        MissingExtraError: accelerate is not installed.
        ConfigurationError: another device by name: those that are visible are used.
    """
    if device not in (None, "cpu", "cuda", "mps"):
        raise ConfigurationError(
            f"device must be cpu, or nothing for what there is, not {device!r}: choose among GPUs "
            "with CUDA_VISIBLE_DEVICES"
        )
    try:
        from accelerate import Accelerator, InitProcessGroupKwargs
    except ImportError:
        raise MissingExtraError("accelerate", "train") from None
    # Precision is the recipe's: whatever the launcher says, runs of one recipe are alike.
    made = Accelerator(
        cpu=device == "cpu",
        mixed_precision="no",
        kwargs_handlers=[InitProcessGroupKwargs(timeout=_PATIENCE)],
    )
    if device is not None and made.device.type != device:
        raise ConfigurationError(f"there is no device {device!r} here: found {made.device}")
    return made


class Fit:
    """One training run, resumable from its folder: bit for bit on a CPU.

    Order and cuts follow from a step's number, and so do the numbers that dropout draws.

    Args:
        network: what is trained, on any device.
        samples: what it learns from.
        folder: where checkpoints are.
        held_out: what it is evaluated on; may be empty.
        accelerator: as ``make_accelerator`` makes it.
        report: is told after every step, in the first process.

    Raises:
        ConfigurationError: the folder is another run's.
    """

    def __init__(
        self,
        network: SpaceNetwork,
        samples: Samples,
        folder: RunFolder,
        *,
        held_out: Sequence[Sample] = (),
        accelerator: Any = None,
        report: Callable[[Standing], None] | None = None,
    ) -> None:
        self.recipe: Recipe = network.recipe
        self.accelerator = accelerator or make_accelerator()
        self.network, self.folder, self.held_out = network, folder, held_out
        self._held_out_digest = Samples(tuple(held_out)).digest
        self.rows = Rows(samples.rows, self.recipe)
        self.steps = self._count_steps()
        self.progress, self.log = Progress(), list[dict[str, Any]]()
        self._report = report or (lambda _: None)
        if self._is_first:
            folder.claim(self._facts(samples))
        self.accelerator.wait_for_everyone()
        optimizer = torch.optim.AdamW(
            network.trained().values(),
            lr=self.recipe.learning_rate,
            weight_decay=self.recipe.weight_decay,
        )
        self._forward, self._optimizer = self.accelerator.prepare(network.train(), optimizer)
        self._resume()

    def run(self) -> Fitted:
        """Train until the steps are done, then evaluate; a checkpoint before every end.

        Raises:
            KeyboardInterrupt: somebody asked to stop; the last step is saved.
        """
        with heeding_interrupts() as wish:
            while self.progress.steps < self.steps:
                if self._any(wish.stop):
                    self.save()
                    raise KeyboardInterrupt
                self._step()
        figures = self._last_figures()
        if figures is None and self.held_out:
            self.save()  # evaluation may take longer than steps, and be interrupted
            figures = self._evaluate()
        self.save()
        return Fitted(self.progress, figures, self.log)

    def save(self) -> None:
        """Write what was learned, the optimizer and the progress."""
        if not self._is_first:
            return
        state = {
            "weights": {name: weight.data for name, weight in self.network.trained().items()},
            "optimizer": self._optimizer.state_dict(),
            "progress": asdict(self.progress),
        }
        self.folder.save(state, self.log)

    @property
    def _is_first(self) -> bool:
        return bool(self.accelerator.is_main_process)

    def _count_steps(self) -> int:
        if self.recipe.steps is not None:
            return self.recipe.steps
        rows = self.rows.first_of(self.recipe.epochs)
        at_once: int = self.recipe.accumulate * self.accelerator.num_processes
        return math.ceil(rows / at_once)

    def _facts(self, samples: Samples) -> dict[str, Any]:
        return {
            "recipe": self.recipe.as_dict(),
            "model": asdict(self.network.base),
            "samples": {"count": len(samples.rows), "digest": samples.digest},
            "num_processes": self.accelerator.num_processes,
        }

    def _resume(self) -> None:
        saved = self.folder.load()
        if saved is None:
            return
        state, self.log = saved
        with torch.no_grad():
            for name, weight in self.network.trained().items():
                weight.copy_(state["weights"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])

    def _step(self) -> None:
        started = time.perf_counter()
        recipe, progress = self.recipe, self.progress
        for group in self._optimizer.param_groups:
            group["lr"] = recipe.learning_rate * rate(progress.steps, self.steps, recipe)
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        first = progress.steps * recipe.accumulate * world
        torch.manual_seed(hash((recipe.seed, progress.steps, rank)) % 2**63)
        told = torch.zeros(2, device=self.accelerator.device)
        for number in range(recipe.accumulate):
            is_last = number == recipe.accumulate - 1
            with nullcontext() if is_last else self.accelerator.no_sync(self._forward):
                told += self._learn(first + number * world + rank) / recipe.accumulate
        self.accelerator.clip_grad_norm_(self.network.trained().values(), recipe.max_gradient)
        self._optimizer.step()
        self._optimizer.zero_grad()
        rows = (self.rows.row(first + i) for i in range(recipe.accumulate * world))
        progress.tokens += sum(p.num_tokens(recipe.num_masks) for row in rows for p in row)
        progress.steps += 1
        loss, guessed = told.tolist()
        if not math.isfinite(loss):
            raise ConfigurationError(
                f"the loss of step {progress.steps} is no number: take a lower learning rate, and "
                "another folder for that run"
            )
        progress.seconds += time.perf_counter() - started
        self._tell(loss, guessed)
        if progress.steps % recipe.save_every == 0 and progress.steps < self.steps:
            self.save()

    def _learn(self, number: int) -> Tensor:
        """Add a row's gradients; return its loss and the share of right guesses, [2]."""
        recipe = self.recipe
        layout = lay_out(
            self.rows.row(number),
            num_masks=recipe.num_masks,
            vocab_size=self.network.base.vocab_size,
            learns_real=recipe.mode != "gated",
        ).to(self.accelerator.device)
        with self._computing():
            losses = self._forward(layout)
        self.accelerator.backward(losses.loss / recipe.accumulate)
        return torch.stack((losses.loss.detach(), losses.guessed))

    def _tell(self, loss: float, guessed: float) -> None:
        step, every = self.progress.steps, self.recipe.evaluate_every
        if step % _LOG_EVERY == 0 or step == self.steps:
            self.log.append({"step": step, "loss": loss, "guessed": guessed})
        figures = None
        if every and step % every == 0 and self.held_out:
            figures = self._evaluate()
        if self._is_first:
            seconds = self.progress.seconds
            self._report(Standing(step, self.steps, loss, guessed, seconds, figures))

    def _evaluate(self) -> Figures:
        world, device = self.accelerator.num_processes, self.accelerator.device
        own = self.held_out[self.accelerator.process_index :: world]

        def total(counts: Tensor) -> Tensor:
            summed: Tensor = self.accelerator.reduce(counts.to(device), "sum")
            return summed.cpu()

        with self._computing():
            figures = evaluate(self.network, own, reduce=total)
        told = {"figures": figures.as_dict(), "held_out": self._held_out_digest}
        self.log.append({"step": self.progress.steps, **told})
        return figures

    def _last_figures(self) -> Figures | None:
        """Those of the last step, where it was evaluated already on the same samples."""
        last = self.log[-1] if self.log else {}
        is_last = last.get("step") == self.steps
        if is_last and last.get("held_out") == self._held_out_digest and "figures" in last:
            return Figures.of(last["figures"])
        return None

    def _computing(self) -> Any:
        is_rough = self.recipe.precision == "bfloat16"
        return torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=is_rough)

    def _any(self, wish: bool) -> bool:
        """Whether any process was asked to stop: all stop after the same step."""
        if self.accelerator.num_processes == 1:
            return wish
        wishes = torch.tensor([int(wish)], device=self.accelerator.device)
        return bool(self.accelerator.reduce(wishes, "sum").item())


def rate(step: int, steps: int, recipe: Recipe) -> float:
    """The share of the learning rate that a step takes: a rise, then the schedule's fall."""
    rising = max(1, round(recipe.warmup * steps))
    if step < rising:
        return (step + 1) / rising
    if recipe.schedule == "constant":
        return 1.0
    done = (step - rising) / max(1, steps - rising)
    return 0.5 * (1 + math.cos(math.pi * done))
