"""Training on transformers' Trainer over packed rows, from samples to an adapter."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
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
from ragaccel.models.load import bundled_reader_path, load_for_training
from ragaccel.models.space_adapter import describe_base_model
from ragaccel.models.support import read_max_positions
from ragaccel.paths import atomic_write
from ragaccel.training.data import (
    IGNORED,
    Collator,
    Samples,
    answer_samples,
    plan_rows,
    read_answers,
    read_samples,
    split_held_out,
    truncate_samples,
)
from ragaccel.training.evaluate import Metrics, evaluate
from ragaccel.training.model import SpaceNetwork

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from ragaccel.models.tokenizer import Tokenizer
    from ragaccel.training.config import Recipe
    from ragaccel.training.data import Plan, Sample


_DDP_TIMEOUT_SECONDS = 12 * 3600  # other processes wait while the first one makes answers
_PARTIAL = "checkpoint.part"
_DECAY = 0.8  # a draft token is accepted only if all before it are right


def make_arguments(recipe: Recipe, folder: Path, device: str | None = None) -> TrainingArguments:
    """Make transformers' training arguments from a recipe; find devices and other processes.

    Args:
        recipe: The recipe; ``SpaceTrainer`` sets the number of steps.
        folder: Folder of the checkpoints.
        device: "cpu" to use no GPU; by default all visible GPUs, else the CPU.

    Raises:
        MissingExtraError: accelerate is not installed.
        ConfigurationError: Another device is named.
    """
    if device not in (None, "cpu"):
        raise ConfigurationError(
            f"device must be cpu or not given, not {device!r}: choose GPUs with the variable "
            "CUDA_VISIBLE_DEVICES"
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
            ddp_timeout=_DDP_TIMEOUT_SECONDS,
            use_cpu=is_cpu,
        )
    except ImportError:
        raise MissingExtraError("accelerate", "train") from None
    # the recipe decides the precision, not ACCELERATE_MIXED_PRECISION
    arguments.mixed_precision = "bf16" if arguments.bf16 else "no"
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # one GPU per process: torchrun starts several
    return arguments


class SpaceTrainer(Trainer):
    """A trainer of a network over packed rows, which resumes from the last checkpoint.

    A resumed run ends with the same weights, bit for bit, on a CPU.

    Args:
        network: The network to train.
        rows: The packed rows of all steps, in order.
        arguments: The arguments from ``make_arguments``.
        held_out: Samples to evaluate on; may be empty.
        callbacks: Callbacks at steps, logs and evaluations.
    """

    model: SpaceNetwork

    def __init__(
        self,
        network: SpaceNetwork,
        rows: Sequence[Sequence[Plan]],
        arguments: TrainingArguments,
        *,
        held_out: Sequence[Sample] = (),
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        at_once = network.recipe.accumulate * arguments.world_size
        arguments.max_steps = len(rows) // at_once
        if not held_out:
            arguments.eval_strategy = "no"
        self.recipe, self.rows, self.held_out = network.recipe, rows, held_out
        self.metrics: Metrics | None = None
        self._is_stopped, self._since = False, time.perf_counter()
        super().__init__(
            model=network,
            args=arguments,
            data_collator=Collator(network.recipe.num_masks, network.base.vocab_size),
            train_dataset=rows,
            eval_dataset=held_out or None,
            callbacks=[*callbacks, _StopCallback(self)],
        )
        self.remove_callback(PrinterCallback)
        if self.is_fsdp_enabled:
            raise ConfigurationError(
                "sharding the weights over processes (FSDP) is not supported in training: start it "
                "with torchrun, so that each process holds a whole model"
            )

    def fit(self) -> Metrics | None:
        """Train until the steps are done, then evaluate; return the metrics.

        Return None if there are no held-out samples.

        Raises:
            KeyboardInterrupt: Training was interrupted; the last step is saved.
        """
        with catch_interrupts() as self.stop_requested:
            self._since = time.perf_counter()
            self.train(resume_from_checkpoint=_last_checkpoint(Path(str(self.args.output_dir))))
        if self._is_stopped:
            raise KeyboardInterrupt
        if self.held_out and self.metrics is None:
            self.evaluate()
        return self.metrics

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Tensor:
        """Compute the loss of a packed row.

        At a mask token, a gated adapter learns the distribution that the model itself has there
        when real tokens precede; the paper's training learns the answer's token.
        """
        labels, teachers = inputs.pop("labels")[0], inputs.pop("teachers")[0]
        if self.recipe.is_paper:
            rows = (labels != IGNORED).nonzero()[:, 0]
            loss = F.cross_entropy(model(**inputs, wanted=rows).float(), labels[rows])
        else:
            rows = (teachers >= 0).nonzero()[:, 0]
            positions, back = torch.unique(teachers[rows], return_inverse=True)
            logits = model(**inputs, wanted=torch.cat((positions, rows))).float()
            target = logits[: len(positions)].softmax(-1)[back]
            each = F.cross_entropy(logits[len(positions) :], target, reduction="none")
            weights = _DECAY ** (inputs["input_ids"][0, rows] - self.model.base.vocab_size)
            loss = (each * weights).sum() / weights.sum()
        if not loss.isfinite():
            raise ConfigurationError(
                f"the loss of step {self.state.global_step + 1} is NaN or infinite: take a lower "
                "learning rate, and another folder for the new run"
            )
        return loss

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Evaluate mask predictions on held-out samples, a part of them in each process."""
        started, processes = time.perf_counter(), self.args.world_size
        own = self.held_out[self.args.process_index :: processes]

        def total(counts: Tensor) -> Tensor:
            summed: Tensor = self.accelerator.reduce(counts.to(self.args.device), "sum")
            return summed.cpu()

        self.metrics = evaluate(self.model, own, reduce=total)
        self._since += time.perf_counter() - started
        self.log({"figures": self.metrics.as_dict()})  # type: ignore[dict-item]
        self.callback_handler.on_evaluate(self.args, self.state, self.control, {})
        return {}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log a line with the seconds of all steps so far, including those of earlier runs."""
        now = time.perf_counter()
        logs["seconds"] = round(self.seconds + now - self._since, 3)
        self._since = now
        super().log(logs, start_time)

    @property
    def seconds(self) -> float:
        """The seconds of all steps up to the last line of the log."""
        return float(self.state.log_history[-1]["seconds"]) if self.state.log_history else 0.0

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.rows)

    def _save(self, output_dir: str | None = None, _state: Any = None) -> None:
        """Write the trained parameters, without a frozen base, if this is the first process."""
        if not self.args.should_save:
            return
        folder = Path(str(output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        learned = {name: weight.data for name, weight in self.model.trained_parameters().items()}
        save_file(learned, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Suppress the warning that checkpoints lack the frozen base."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint to a temporary folder and rename it, so that none is ever partial."""
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
            _publish_checkpoint(partial, folder)


def _last_checkpoint(folder: Path) -> str | None:
    """Return the path of the last checkpoint in a folder, or None; create the folder if missing.

    Raises:
        ConfigurationError: The checkpoint is damaged.
    """
    folder.mkdir(parents=True, exist_ok=True)  # the first process to come here creates it
    last: str | None = get_last_checkpoint(folder)  # type: ignore[no-untyped-call]
    if last is not None:
        try:
            TrainerState.load_from_json(os.path.join(last, TRAINER_STATE_NAME))
            with safe_open(os.path.join(last, SAFE_WEIGHTS_NAME), "pt"):
                pass
        except (OSError, ValueError, TypeError, SafetensorError) as error:
            raise ConfigurationError(f"{last} is damaged: delete it to train anew") from error
    return last


def _publish_checkpoint(partial: Path, folder: Path) -> None:
    """Move a complete checkpoint into the run's folder and delete the older ones."""
    (made,) = partial.iterdir()
    for path in (*made.rglob("*"), made):
        _flush(path)
    if not (folder / made.name).exists():
        made.rename(folder / made.name)
    _flush(folder)
    for old in folder.glob("checkpoint-*"):
        is_ours = old.name.removeprefix("checkpoint-").isdecimal()  # a user's renamed copy is not
        if is_ours and old.name != made.name:
            old.rename(partial / old.name)
    shutil.rmtree(partial)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _StopCallback(TrainerCallback):
    """A callback that stops training in all processes if one of them was interrupted."""

    def __init__(self, trainer: SpaceTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Make the trainer save and stop if a process was interrupted."""
        trainer = self._trainer
        stop_votes = torch.tensor(int(trainer.stop_requested.is_set()))
        if args.world_size > 1:
            stop_votes = trainer.accelerator.reduce(stop_votes.to(args.device), "sum")
        if stop_votes and state.global_step < state.max_steps:
            trainer._is_stopped = control.should_save = control.should_training_stop = True


@contextmanager
def catch_interrupts() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C sets; a second one interrupts at once.

    Outside the main thread, which alone gets signals, the event is never set.
    """
    stop_requested, before = threading.Event(), signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or before in (None, signal.SIG_IGN):  # None: set from C
        yield stop_requested
        return

    def request_stop(*_: object) -> None:
        stop_requested.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, request_stop)
    try:
        yield stop_requested
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True, slots=True)
class Job:
    """The inputs and outputs of a training run.

    Args:
        samples: A file of JSON lines, see ``read_samples``.
        out: Folder to write the result to.
        model: A folder or a name on the hub; the bundled reader by default.
        held_out: A file to evaluate on; by default a share of the samples is held out.
        held_out_share: The share of samples to hold out if ``held_out`` is None.
        max_evaluated: Maximum number of samples to evaluate on.
        own_answers: Train on the model's own answers to the prompts.
        answer_tokens: Maximum number of tokens of an own answer.
        device: "cpu" to use no GPU; by default all visible GPUs, else the CPU.
        run_folder: Folder of checkpoints; ``out`` with ``-run`` appended by default.
    """

    samples: Path
    out: Path
    model: str | Path | None = None
    held_out: Path | None = None
    held_out_share: float = 0.05
    max_evaluated: int = 200
    own_answers: bool = False
    answer_tokens: int = 256
    device: str | None = None
    run_folder: Path | None = None

    @property
    def checkpoint_folder(self) -> Path:
        """The folder of checkpoints and own answers, another one than the result's."""
        if self.run_folder is not None:
            return self.run_folder
        out = self.out.resolve() if self.out.name in ("", "..") else self.out
        return out.with_name(out.name + "-run")


class Listener(TrainerCallback):
    """A callback of transformers' trainer that also gets notes and the progress of own answers."""

    def note(self, text: str) -> None:
        """Handle a line about the run; do nothing by default."""

    def answered(self, done: int, total: int) -> None:
        """Handle the numbers of prompts answered so far and in all; do nothing by default."""


def train_space(
    job: Job, recipe: Recipe, listener: Listener | None = None
) -> dict[str, Any] | None:
    """Train a SPACE adapter and write it; the same call resumes a run that was stopped.

    Follows arXiv 2402.11809 and, in mode "gated", the gated LoRA of arXiv 2507.11851. If started in
    several processes, all of them train and the first one writes.

    Returns:
        The training settings and metrics, for JSON; None in all processes but the first.

    Raises:
        ConfigurationError: The recipe, a file or a folder cannot be used; the message says what to
            do.
        ModelNotFoundError: There is no such model.
        UnsupportedModelError: The model cannot be decoded exactly.
        MissingExtraError: accelerate is not installed.
        KeyboardInterrupt: Training was interrupted; the steps done are saved.
    """
    _check_job(job)
    arguments = make_arguments(recipe, job.checkpoint_folder, job.device)
    is_first = arguments.process_index == 0
    if listener is None or not is_first:
        listener = Listener()
    model, tokenizer = load_for_training(job.model)
    samples, held_out = _read_samples(job, recipe, model, tokenizer)
    if job.own_answers:
        with arguments.main_process_first(local=False):
            samples, held_out = _use_own_answers(job, recipe, model, (samples, held_out), listener)
    listener.note(_describe_samples("to train on", samples))
    listener.note(_describe_samples("to evaluate on", held_out))
    if is_first:
        claim_run_folder(
            job.checkpoint_folder / "run.json",
            _run_facts(recipe, model, samples, arguments.world_size),
        )
    saved_dtype = model.dtype
    network = SpaceNetwork(_trainable(model, recipe), recipe)
    rows = plan_rows(samples.rows, recipe, arguments.world_size)
    trainer = SpaceTrainer(network, rows, arguments, held_out=held_out.rows, callbacks=[listener])
    metrics = trainer.fit()
    if not is_first:
        return None
    training = {
        "recipe": recipe.as_dict(),
        "samples": len(samples.rows),
        "own_answers": job.own_answers,
        "steps": arguments.max_steps,
        "tokens": sum(plan.num_tokens(recipe.num_masks) for row in rows for plan in row),
        "held_out": None if metrics is None else metrics.as_dict(),
    }
    _write(job.checkpoint_folder / "log.json", trainer.state.log_history)
    network.publish(job.out, tokenizer.tokenizer, training, saved_dtype)
    each = round(trainer.seconds / arguments.max_steps, 4)
    seconds = {"seconds": round(trainer.seconds, 1), "seconds_per_step": each}
    return {**training, "out": str(job.out), **seconds}


def _run_facts(recipe: Recipe, model: Any, samples: Samples, num_processes: int) -> dict[str, Any]:
    """Return everything that a run's result depends on, for ``claim_run_folder``."""
    return {
        "recipe": recipe.as_dict(),
        "model": asdict(describe_base_model(model)),
        "samples": {"count": len(samples.rows), "digest": samples.digest},
        "num_processes": num_processes,
    }


def claim_run_folder(file: Path, facts: dict[str, Any]) -> None:
    """Record which run a folder belongs to, or check that it belongs to the same run.

    Args:
        file: JSON file in the folder, written by the first call.
        facts: Everything that the result depends on, for JSON.

    Raises:
        ConfigurationError: The folder belongs to another run; the message names the differences.
    """
    if not file.exists():
        if any(file.parent.glob("checkpoint-*")):
            raise ConfigurationError(
                f"{file.parent} holds checkpoints of another training run: name another folder"
            )
        _write(file, facts)
        return
    try:
        found = _flatten(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, AttributeError) as error:
        raise ConfigurationError(
            f"{file} is damaged: delete {file.parent} and train anew"
        ) from error
    wanted = _flatten(json.loads(json.dumps(facts)))
    differing = [
        f"{name} {found.get(name)!r} there, {wanted.get(name)!r} here"
        for name in sorted({*found, *wanted})
        if found.get(name) != wanted.get(name)
    ]
    if differing:
        raise ConfigurationError(
            f"{file.parent} is the folder of another run ({'; '.join(differing)}): give the same "
            "arguments to resume that run, or another folder, or delete it"
        )


def _flatten(facts: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping with dotted names as keys."""
    found: dict[str, Any] = {}
    for name, value in facts.items():
        is_nested = isinstance(value, dict)
        found |= _flatten(value, f"{prefix}{name}.") if is_nested else {f"{prefix}{name}": value}
    return found


def _write(file: Path, content: Any) -> None:
    with atomic_write(file) as opened:
        opened.write((json.dumps(content, indent=1) + "\n").encode())


def _check_job(job: Job) -> None:
    """Refuse a job that would fail, or overwrite the model, at the end of training."""
    if not 0 <= job.held_out_share < 1:
        raise ConfigurationError(
            f"held_out_share must be at least 0 and below 1, not {job.held_out_share}"
        )
    if job.answer_tokens < 2 or job.max_evaluated < 0:
        raise ConfigurationError("answer_tokens must be 2 or more, and max_evaluated 0 or more")
    out = job.out.resolve()
    if not out.name:
        raise ConfigurationError(f"{job.out} cannot be replaced: name a folder for the result")
    model = bundled_reader_path() if job.model is None else Path(job.model).expanduser()
    if out == model.resolve():
        raise ConfigurationError(f"{job.out} is the model's own folder: name another one")
    if out == job.checkpoint_folder.resolve():
        raise ConfigurationError(
            f"{job.out} cannot hold both result and checkpoints: name another folder for the run"
        )
    for folder in (out, job.checkpoint_folder.resolve()):
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not there.is_dir():
            raise ConfigurationError(f"{there} is a file: name a folder for the result")
        if not os.access(there, os.W_OK | os.X_OK):
            raise ConfigurationError(f"{there} cannot be written: name another folder")


def _trainable(model: Any, recipe: Recipe) -> Any:
    """Return the model in a data type that it can be trained in, float32 if need be.

    In a 16-bit type, small changes of trained weights are rounded away; a frozen base does not
    change and may keep bfloat16. Gradients overflow float16.
    """
    stays = not recipe.is_paper and model.dtype != torch.float16
    return model if stays else model.float()


def _max_sample_tokens(recipe: Recipe, model: Any) -> int:
    """Return how many tokens of a sample fit a row and the context, along with mask tokens."""
    limit = read_max_positions(model.config.get_text_config(decoder=True))
    room = recipe.row_tokens if limit is None else min(recipe.row_tokens, limit)
    return room - recipe.num_masks


def _read_samples(
    job: Job, recipe: Recipe, model: Any, tokenizer: Tokenizer
) -> tuple[Samples, Samples]:
    """Return the samples to train on and the held-out ones, cut to fit."""
    max_tokens = _max_sample_tokens(recipe, model)
    vocab_size = model.get_input_embeddings().weight.shape[0]

    def read(path: Path) -> Samples:
        return read_samples(path, tokenizer, vocab_size=vocab_size, max_tokens=max_tokens)

    samples = read(job.samples)
    if not samples.rows:
        raise ConfigurationError(
            f"no sample of {job.samples} fits: an answer needs at least two tokens, and a prompt "
            f"with its answer at most {max_tokens:,} tokens: take a larger row_tokens"
        )
    if job.held_out is None:
        samples, held_out = split_held_out(samples, job.held_out_share)
    else:
        held_out = read(job.held_out)
    return samples, replace(held_out, rows=held_out.rows[: job.max_evaluated])


def _use_own_answers(
    job: Job, recipe: Recipe, model: Any, both: tuple[Samples, Samples], listener: Listener
) -> tuple[Samples, ...]:
    """Return both sets of samples with the model's own answers, kept in the run's folder."""
    from ragaccel.llm import LLM

    facts = {"model": asdict(describe_base_model(model)), "answer_tokens": job.answer_tokens}
    claim_run_folder(job.checkpoint_folder / "answers.json", facts)
    found = []
    for name, samples in zip(("answers", "held-out-answers"), both, strict=True):
        path = job.checkpoint_folder / f"{name}.jsonl"
        if len(read_answers(path, samples.rows)) < len(samples.rows):
            llm = LLM.load(job.model, device=job.device, save_measurements=False)
            limit, report = job.answer_tokens, listener.answered
            answer_samples(llm, samples.rows, path, max_new_tokens=limit, report=report)
        own = read_answers(path, samples.rows)
        short = truncate_samples(own, _max_sample_tokens(recipe, model))
        cut, skipped = samples.num_cut + short.num_cut, samples.num_skipped + short.num_skipped
        found.append(Samples(short.rows, cut, skipped))
    return tuple(found)


def _describe_samples(name: str, samples: Samples) -> str:
    text = f"{len(samples.rows):,} samples {name}"
    if samples.num_cut:
        text += f", {samples.num_cut:,} of them cut to fit"
    if samples.num_skipped:
        text += (
            f"; {samples.num_skipped:,} left out: the prompt is too long or the answer too short"
        )
    return text
