"""The trainer: transformers' own over packed rows, with checkpoints that are never half written."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback, TrainerState
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import SAFE_WEIGHTS_NAME

from ragaccel.errors import ConfigurationError, MissingExtraError
from ragaccel.train.space.evaluate import Figures, evaluate
from ragaccel.train.space.layout import IGNORED, Collator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from ragaccel.train.space.network import SpaceNetwork
    from ragaccel.train.space.plan import Rows
    from ragaccel.train.space.recipe import Recipe
    from ragaccel.train.space.samples import Sample

_PATIENCE = 12 * 3600  # seconds that processes wait for the first one's answers
_PARTIAL = "checkpoint.part"
_DECAY = 0.8  # a guess far ahead counts only if all nearer ones are right


def make_arguments(recipe: Recipe, folder: Path, device: str | None = None) -> TrainingArguments:
    """Tell transformers what a recipe says, and find the devices and the other processes.

    Args:
        recipe: the recipe; how many steps it takes is told when its rows are known.
        folder: of the checkpoints.
        device: "cpu" for no GPU; by default what there is.

    Raises:
        MissingExtraError: accelerate is not installed.
        ConfigurationError: another device by name: those that are visible are used.
    """
    if device not in (None, "cpu"):
        raise ConfigurationError(
            f"device must be cpu, or left away for what there is, not {device!r}: choose among "
            "GPUs with CUDA_VISIBLE_DEVICES"
        )
    is_cpu = device == "cpu" or not torch.accelerator.is_available()
    try:
        arguments = TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=1,
            gradient_accumulation_steps=recipe.accumulate,
            learning_rate=recipe.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=0.03,
            bf16=recipe.precision == "bfloat16",
            seed=recipe.seed,
            save_steps=recipe.save_every,
            eval_strategy="steps" if recipe.evaluate_every else "no",
            eval_steps=recipe.evaluate_every or None,
            logging_steps=10,
            logging_first_step=True,
            logging_nan_inf_filter=False,
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=not is_cpu,
            ddp_find_unused_parameters=False,
            ddp_timeout=_PATIENCE,
            use_cpu=is_cpu,
        )
    except ImportError:
        raise MissingExtraError("accelerate", "train") from None
    arguments.mixed_precision = "bf16" if arguments.bf16 else "no"  # not a variable
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # a process trains on one: more take torchrun
    return arguments


class SpaceTrainer(Trainer):
    """Trains a network over packed rows; goes on from the last checkpoint, bit for bit on a CPU.

    Args:
        network: what is trained.
        rows: what it learns from.
        arguments: as ``make_arguments`` makes them.
        held_out: what it is evaluated on; may be empty.
        callbacks: hear of steps, logs and evaluations.
    """

    model: SpaceNetwork

    def __init__(
        self,
        network: SpaceNetwork,
        rows: Rows,
        arguments: TrainingArguments,
        *,
        held_out: Sequence[Sample] = (),
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        arguments.max_steps = rows.steps
        if not held_out:
            arguments.eval_strategy = "no"
        self.recipe, self.rows, self.held_out = network.recipe, rows, held_out
        self.figures: Figures | None = None
        self._is_stopped, self._since = False, time.perf_counter()
        super().__init__(
            model=network,
            args=arguments,
            data_collator=Collator(network.recipe.num_masks, network.base.vocab_size),
            train_dataset=rows,
            eval_dataset=held_out or None,
            callbacks=[*callbacks, _Stopping(self)],
        )
        self.remove_callback(PrinterCallback)
        if self.is_fsdp_enabled:
            raise ConfigurationError(
                "sharding the weights over processes (FSDP) is not supported in training: start it "
                "with torchrun, which gives each process a whole model"
            )

    def fit(self) -> Figures | None:
        """Train until the steps are done, then evaluate.

        Raises:
            KeyboardInterrupt: somebody asked to stop; the last step is saved.
        """
        with heeding_interrupts() as self.wish:
            self._since = time.perf_counter()
            self.train(resume_from_checkpoint=_last_checkpoint(Path(str(self.args.output_dir))))
        if self._is_stopped:
            raise KeyboardInterrupt
        if self.held_out and self.figures is None:
            self.evaluate()
        return self.figures

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Tensor:
        """Compute the loss of a packed row.

        A gated adapter learns the distribution that the model itself has after the real tokens that
        a mask token stands for; the paper's training learns the answers' tokens.
        """
        labels, teachers = inputs.pop("labels")[0], inputs.pop("teachers")[0]
        if self.recipe.is_paper:
            rows = (labels != IGNORED).nonzero()[:, 0]
            loss = F.cross_entropy(model(**inputs, wanted=rows).float(), labels[rows])
        else:
            rows = (teachers >= 0).nonzero()[:, 0]
            places, back = torch.unique(teachers[rows], return_inverse=True)
            logits = model(**inputs, wanted=torch.cat((places, rows))).float()
            taught = logits[: len(places)].softmax(-1)[back]
            each = F.cross_entropy(logits[len(places) :], taught, reduction="none")
            weights = _DECAY ** (inputs["input_ids"][0, rows] - self.model.base.vocab_size)
            loss = (each * weights).sum() / weights.sum()
        if not loss.isfinite():
            raise ConfigurationError(
                f"the loss of step {self.state.global_step + 1} is NaN or infinite: take a lower "
                "learning rate, and another folder for that run"
            )
        return loss

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Judge the guesses on held-out samples, each process a part of them."""
        started, processes = time.perf_counter(), self.args.world_size
        own = self.held_out[self.args.process_index :: processes]

        def total(counts: Tensor) -> Tensor:
            summed: Tensor = self.accelerator.reduce(counts.to(self.args.device), "sum")
            return summed.cpu()

        self.figures = evaluate(self.model, own, reduce=total)
        self._since += time.perf_counter() - started
        self.log({"figures": self.figures.as_dict()})  # type: ignore[dict-item]
        self.callback_handler.on_evaluate(self.args, self.state, self.control, {})
        return {}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Note with every line how many seconds all steps took so far, also before a stop."""
        now = time.perf_counter()
        logs["seconds"] = round(self.seconds + now - self._since, 3)
        self._since = now
        super().log(logs, start_time)

    @property
    def seconds(self) -> float:
        """What the steps up to the last line of the log took."""
        return float(self.state.log_history[-1]["seconds"]) if self.state.log_history else 0.0

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.rows)

    def _save(self, output_dir: str | None = None, _state: Any = None) -> None:
        """Write what is learned, in the first process: nothing of a base that stays as it is."""
        if not self.args.should_save:
            return
        folder = Path(str(output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        learned = {name: weight.data for name, weight in self.model.trained().items()}
        save_file(learned, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Say nothing of the base, which checkpoints do not hold."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint aside and rename it, so that a torn one is never gone on from."""
        folder = Path(str(self.args.output_dir))
        partial = folder / _PARTIAL
        if self.args.should_save:
            shutil.rmtree(partial, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self.args.output_dir = str(partial)
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.output_dir = str(folder)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            _move_in(partial, folder)


def _last_checkpoint(folder: Path) -> str | None:
    """The checkpoint to go on from; None where there is none.

    Raises:
        ConfigurationError: it is damaged.
    """
    folder.mkdir(parents=True, exist_ok=True)  # by whichever process is first
    last: str | None = get_last_checkpoint(folder)  # type: ignore[no-untyped-call]
    if last is not None:
        try:
            TrainerState.load_from_json(os.path.join(last, TRAINER_STATE_NAME))
            with safe_open(os.path.join(last, SAFE_WEIGHTS_NAME), "pt"):
                pass
        except (OSError, ValueError, TypeError, SafetensorError) as error:
            raise ConfigurationError(f"{last} is damaged: delete it to begin anew") from error
    return last


def _move_in(partial: Path, folder: Path) -> None:
    """Put a checkpoint that is whole into its place, and take the older ones away."""
    (made,) = partial.iterdir()
    for path in (*made.rglob("*"), made):
        _flush(path)
    if not (folder / made.name).exists():
        made.rename(folder / made.name)
    _flush(folder)
    for old in folder.glob("checkpoint-*"):
        is_ours = old.name.removeprefix("checkpoint-").isdecimal()  # not a copy that somebody kept
        if is_ours and old.name != made.name:
            old.rename(partial / old.name)
    shutil.rmtree(partial)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _Stopping(TrainerCallback):
    """Ends training after a step, in all processes, once one of them was asked to stop."""

    def __init__(self, trainer: SpaceTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save and stop, if so asked."""
        trainer, wishes = self._trainer, torch.tensor(int(self._trainer.wish.is_set()))
        if args.world_size > 1:
            wishes = trainer.accelerator.reduce(wishes.to(args.device), "sum")
        if wishes and state.global_step < state.max_steps:
            trainer._is_stopped = control.should_save = control.should_training_stop = True


@contextmanager
def heeding_interrupts() -> Iterator[threading.Event]:
    """Take the first Ctrl-C as a wish to stop; a second one interrupts at once, as ever.

    Outside the main thread, where signals cannot be taken, nothing is changed.
    """
    wish, before = threading.Event(), signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or before in (None, signal.SIG_IGN):  # another's, or switched off
        yield wish
        return

    def heed(*_: object) -> None:
        wish.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, heed)
    try:
        yield wish
    finally:
        signal.signal(signal.SIGINT, before)
