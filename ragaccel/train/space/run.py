"""A run: from a file of samples and a model's name to a folder that guesses ahead."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from ragaccel.errors import ConfigurationError
from ragaccel.models.load import bundled_reader_path, load_for_training
from ragaccel.models.space_adapter import base_of
from ragaccel.models.support import read_max_positions
from ragaccel.replacing import replacing
from ragaccel.train.space.answers import answer_samples, kept_answers
from ragaccel.train.space.network import SpaceNetwork
from ragaccel.train.space.plan import Rows
from ragaccel.train.space.samples import Samples, fitted, read_samples, split_held_out
from ragaccel.train.space.trainer import SpaceTrainer, make_arguments

if TYPE_CHECKING:
    from ragaccel.models.tokenizer import Tokenizer
    from ragaccel.train.space.recipe import Recipe
    from ragaccel.train.space.samples import Sample


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained on what, and where it goes.

    Args:
        samples: a file of JSON lines, see ``read_samples``.
        out: folder of the result.
        model: a folder or a name on the hub; the bundled reader without one.
        held_out: a file to evaluate on; without one a share of the samples is held out.
        held_out_share: that share.
        evaluated: most samples that are evaluated on.
        own_answers: train on the model's own answers to the prompts.
        answer_tokens: longest of those.
        device: "cpu" for no GPU; by default what there is.
        run_folder: of checkpoints; beside ``out`` by default.
    """

    samples: Path
    out: Path
    model: str | Path | None = None
    held_out: Path | None = None
    held_out_share: float = 0.05
    evaluated: int = 200
    own_answers: bool = False
    answer_tokens: int = 256
    device: str | None = None
    run_folder: Path | None = None

    @property
    def kept_in(self) -> Path:
        """Where checkpoints and own answers are kept: not in what is shipped."""
        if self.run_folder is not None:
            return self.run_folder
        out = self.out.resolve() if self.out.name in ("", "..") else self.out
        return out.with_name(out.name + "-run")


class Listener(TrainerCallback):
    """What a run tells of itself, beside what transformers' trainer does; here it is not heard."""

    def note(self, text: str) -> None:
        """Hear what was found or decided."""

    def answered(self, done: int, total: int) -> None:
        """Hear how many of a file's prompts the model has answered."""


def train_space(
    job: Job, recipe: Recipe, listener: Listener | None = None
) -> dict[str, Any] | None:
    """Train a model to guess ahead and write the result; the same call goes on with a stopped run.

    Follows arXiv 2402.11809 and, in mode "gated", the gated low-rank changes of arXiv 2507.11851.
    Started in several processes, all take part and the first one writes.

    Returns:
        What was trained and its figures, as JSON knows them; None in other processes than the
        first.

    Raises:
        ConfigurationError: a recipe, a file or a folder that cannot work; says what to do.
        ModelNotFoundError: no such model.
        ModelRefusedError: a model that cannot be decoded exactly.
        MissingExtraError: accelerate is not installed.
        KeyboardInterrupt: stopped; what was done is saved.
    """
    _check(job)
    arguments = make_arguments(recipe, job.kept_in, job.device)
    is_first = arguments.process_index == 0
    if listener is None or not is_first:
        listener = Listener()
    model, tokenizer = load_for_training(job.model)
    samples, held_out = _read(job, recipe, model, tokenizer)
    if job.own_answers:
        with arguments.main_process_first(local=False):
            samples, held_out = _answered(job, recipe, model, (samples, held_out), listener)
    listener.note(_told("to train on", samples))
    listener.note(_told("to evaluate on", held_out))
    if is_first:
        claim(job.kept_in / "run.json", _facts(recipe, model, samples, arguments.world_size))
    saved_dtype = model.dtype
    network = SpaceNetwork(_trainable(model, recipe), recipe)
    rows = Rows(samples.rows, recipe, arguments.world_size)
    trainer = SpaceTrainer(network, rows, arguments, held_out=held_out.rows, callbacks=[listener])
    figures = trainer.fit()
    if not is_first:
        return None
    training = {
        "recipe": recipe.as_dict(),
        "samples": len(samples.rows),
        "own_answers": job.own_answers,
        "steps": rows.steps,
        "tokens": rows.count_tokens(),
        "held_out": None if figures is None else figures.as_dict(),
    }
    _write(job.kept_in / "log.json", trainer.state.log_history)
    network.publish(job.out, tokenizer.tokenizer, training, saved_dtype)
    each = round(trainer.seconds / rows.steps, 4)
    seconds = {"seconds": round(trainer.seconds, 1), "seconds_per_step": each}
    return {**training, "out": str(job.out), **seconds}


def _facts(recipe: Recipe, model: Any, samples: Samples, num_processes: int) -> dict[str, Any]:
    """Everything that a run's outcome depends on."""
    return {
        "recipe": recipe.as_dict(),
        "model": asdict(base_of(model)),
        "samples": {"count": len(samples.rows), "digest": samples.digest},
        "num_processes": num_processes,
    }


def claim(file: Path, facts: dict[str, Any]) -> None:
    """Note in a run's folder what it is of, or find it to be of the same.

    Args:
        file: what is written, or read.
        facts: everything that the outcome depends on, as JSON knows it.

    Raises:
        ConfigurationError: another run's folder; names what differs.
    """
    if not file.exists():
        if any(file.parent.glob("checkpoint-*")):
            raise ConfigurationError(
                f"{file.parent} holds checkpoints of another training: name another folder"
            )
        _write(file, facts)
        return
    try:
        found = _flat(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, AttributeError) as error:
        raise ConfigurationError(f"{file} is damaged: delete {file.parent}") from error
    wanted = _flat(json.loads(json.dumps(facts)))
    differing = [
        f"{name} {found.get(name)!r} there, {wanted.get(name)!r} here"
        for name in sorted({*found, *wanted})
        if found.get(name) != wanted.get(name)
    ]
    if differing:
        raise ConfigurationError(
            f"{file.parent} is another run's folder ({'; '.join(differing)}): give the same "
            "arguments to go on with that run, or another folder, or delete it"
        )


def _flat(facts: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested facts under one name each."""
    found: dict[str, Any] = {}
    for name, value in facts.items():
        is_nested = isinstance(value, dict)
        found |= _flat(value, f"{prefix}{name}.") if is_nested else {f"{prefix}{name}": value}
    return found


def _write(file: Path, content: Any) -> None:
    with replacing(file) as opened:
        opened.write((json.dumps(content, indent=1) + "\n").encode())


def _check(job: Job) -> None:
    """Refuse what would fail, or do harm, only when hours of training are over."""
    if not 0 <= job.held_out_share < 1:
        raise ConfigurationError(f"held_out_share must be 0 to 1, not {job.held_out_share}")
    if job.answer_tokens < 2 or job.evaluated < 0:
        raise ConfigurationError("answer_tokens must be 2 or more, evaluated 0 or more")
    out = job.out.resolve()
    if not out.name:
        raise ConfigurationError(f"{job.out} cannot be replaced: name a folder for the result")
    model = bundled_reader_path() if job.model is None else Path(job.model).expanduser()
    if out == model.resolve():
        raise ConfigurationError(f"{job.out} is the model's own folder: name another one")
    if out == job.kept_in.resolve():
        raise ConfigurationError(
            f"{job.out} cannot hold the run's checkpoints as well: name another folder for the run"
        )
    for folder in (out, job.kept_in.resolve()):
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not there.is_dir():
            raise ConfigurationError(f"{there} is a file: name a folder for the result")
        if not os.access(there, os.W_OK | os.X_OK):
            raise ConfigurationError(f"{there} cannot be written: name another folder")


def _trainable(model: Any, recipe: Recipe) -> Any:
    """The model in a type that it can be trained in.

    Steps are smaller than what a short type tells apart, but a frozen base takes none; gradients
    outgrow float16.
    """
    stays = not recipe.is_paper and model.dtype != torch.float16
    return model if stays else model.float()


def _longest(recipe: Recipe, model: Any) -> int:
    """The longest sample that a row, or the model's context, has room for with mask tokens."""
    limit = read_max_positions(model.config.get_text_config(decoder=True))
    room = recipe.row_tokens if limit is None else min(recipe.row_tokens, limit)
    return room - recipe.num_masks


def _read(job: Job, recipe: Recipe, model: Any, tokenizer: Tokenizer) -> tuple[Samples, Samples]:
    """Samples to train on and held-out ones, cut to fit."""
    longest = _longest(recipe, model)
    vocab_size = model.get_input_embeddings().weight.shape[0]

    def read(path: Path) -> Samples:
        return read_samples(path, tokenizer, vocab_size=vocab_size, max_tokens=longest)

    samples = read(job.samples)
    if not samples.rows:
        raise ConfigurationError(
            f"no sample of {job.samples} fits: answers need two tokens or more, and a prompt with "
            f"its answer at most {longest:,}; take a larger row_tokens"
        )
    if job.held_out is None:
        samples, held_out = split_held_out(samples, job.held_out_share)
    else:
        held_out = read(job.held_out)
    return samples, replace(held_out, rows=held_out.rows[: job.evaluated])


def _answered(
    job: Job, recipe: Recipe, model: Any, both: tuple[Samples, Samples], listener: Listener
) -> tuple[Samples, ...]:
    """The samples with the model's own answers, which are kept in the run's folder."""
    facts = {"model": asdict(base_of(model)), "answer_tokens": job.answer_tokens}
    claim(job.kept_in / "answers.json", facts)
    found = []
    for name, samples in zip(("answers", "held-out-answers"), both, strict=True):
        own = _own(job, samples, job.kept_in / f"{name}.jsonl", listener)
        short = fitted(own, _longest(recipe, model))
        cut, skipped = samples.num_cut + short.num_cut, samples.num_skipped + short.num_skipped
        found.append(Samples(short.rows, cut, skipped))
    return tuple(found)


def _own(job: Job, samples: Samples, path: Path, listener: Listener) -> list[Sample]:
    from ragaccel.llm import LLM

    own = kept_answers(path, samples.rows)
    if len(own) == len(samples.rows):
        return own
    llm = LLM.load(job.model, device=job.device, keep_costs=False)
    longest, report = job.answer_tokens, listener.answered
    answer_samples(llm, samples.rows, path, max_new_tokens=longest, report=report)
    return kept_answers(path, samples.rows)


def _told(name: str, samples: Samples) -> str:
    told = f"{len(samples.rows):,} samples {name}"
    if samples.num_cut:
        told += f", {samples.num_cut:,} of them without their ends, to fit"
    if samples.num_skipped:
        told += f"; {samples.num_skipped:,} left out: too long a prompt, or nothing to guess"
    return told
