"""A run: from a file of samples and a model's name to a folder that guesses ahead."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ragaccel.errors import ConfigurationError
from ragaccel.models.architecture import read_max_positions
from ragaccel.models.load import bundled_reader_path, load_for_training
from ragaccel.models.space_adapter import base_of
from ragaccel.train.space.answers import answer_samples, kept_answers
from ragaccel.train.space.fit import Fit, make_accelerator
from ragaccel.train.space.network import SpaceNetwork
from ragaccel.train.space.publish import publish
from ragaccel.train.space.run_folder import RunFolder
from ragaccel.train.space.samples import Samples, fitted, read_samples, split_held_out

if TYPE_CHECKING:
    from ragaccel.models.tokenizer import Tokenizer
    from ragaccel.train.space.fit import Fitted, Standing
    from ragaccel.train.space.recipe import Recipe


_ANSWERING = "answers.json"  # in the run's folder: whose own answers are kept


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
        merge: write low-rank changes of all rows into the weights.
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
    merge: bool = False
    device: str | None = None
    run_folder: Path | None = None

    @property
    def kept_in(self) -> Path:
        """Where checkpoints and own answers are kept: not in what is shipped."""
        if self.run_folder is not None:
            return self.run_folder
        out = self.out.resolve() if self.out.name in ("", "..") else self.out
        return out.with_name(out.name + "-run")


class Listener:
    """What a run tells of itself while it lasts; does nothing as it is."""

    def note(self, text: str) -> None:
        """Hear what was found or decided."""

    def answered(self, done: int, total: int) -> None:
        """Hear how many of a file's prompts the model has answered."""

    def stepped(self, standing: Standing) -> None:
        """Hear where fitting stands."""


def train_space(
    job: Job, recipe: Recipe, listener: Listener | None = None
) -> dict[str, Any] | None:
    """Train a model to guess ahead and write the result; the same call goes on with a stopped run.

    Follows SAR-SFT (arXiv 2402.11809) and, in mode "gated", gated low-rank changes
    (arXiv 2507.11851). Started in several processes, all take part and the first one writes.

    Returns:
        What was trained and its figures, as JSON knows them; None in other processes than the
        first.

    Raises:
        ConfigurationError: a recipe, a file or a folder that cannot work; says what to do.
        ModelNotFoundError: no such model.
        ModelRefusedError: a model that cannot be decoded exactly.
        MissingExtraError: accelerate, or peft for mode "lora", is not installed.
        KeyboardInterrupt: stopped; what was done is saved.
    """
    _check(job, recipe)
    accelerator = make_accelerator(job.device)
    if listener is None or not accelerator.is_main_process:
        listener = Listener()
    model, tokenizer = load_for_training(job.model)
    samples, held_out = _read(job, recipe, model, tokenizer)
    if job.own_answers:
        longest = _longest(recipe, model)
        with accelerator.main_process_first():
            if accelerator.is_main_process:
                _claim_answers(job, model)
            samples = _own(job, samples, "answers", listener, longest=longest)
            held_out = _own(job, held_out, "held-out-answers", listener, longest=longest)
    listener.note(_told("to train on", samples))
    listener.note(_told("to evaluate on", held_out))
    saved_dtype = model.dtype
    network = SpaceNetwork(_trainable(model, recipe), recipe)
    done = Fit(
        network,
        samples,
        RunFolder(job.kept_in),
        held_out=held_out.rows,
        accelerator=accelerator,
        report=listener.stepped,
    ).run()
    if not accelerator.is_main_process:
        return None
    training = _told_of(job, recipe, samples, done)
    publish(
        network,
        tokenizer.tokenizer,
        job.out,
        training=training,
        merge=job.merge,
        dtype=saved_dtype,
    )
    seconds = done.progress.seconds
    return {
        **training,
        "out": str(job.out),
        "seconds": round(seconds, 1),
        "seconds_per_step": round(seconds / done.progress.steps, 4),
    }


def _told_of(job: Job, recipe: Recipe, samples: Samples, done: Fitted) -> dict[str, Any]:
    """What the result says of its making: nothing that differs between machines."""
    return {
        "recipe": recipe.as_dict(),
        "samples": len(samples.rows),
        "own_answers": job.own_answers,
        "steps": done.progress.steps,
        "tokens": done.progress.tokens,
        "held_out": None if done.figures is None else done.figures.as_dict(),
    }


def _check(job: Job, recipe: Recipe) -> None:
    if job.merge and recipe.mode == "gated":
        raise ConfigurationError(
            "gated changes act on mask tokens alone and cannot be merged into weights: leave "
            "merge away, or take mode lora"
        )
    if not 0 <= job.held_out_share < 1:
        raise ConfigurationError(f"held_out_share must be 0 to 1, not {job.held_out_share}")
    if job.answer_tokens < 2 or job.evaluated < 0:
        raise ConfigurationError("answer_tokens must be 2 or more, evaluated 0 or more")
    _check_folders(job)


def _check_folders(job: Job) -> None:
    """Refuse what would fail, or do harm, only when hours of training are over."""
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
    stays = recipe.mode == "gated" and model.dtype != torch.float16
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


def _claim_answers(job: Job, model: Any) -> None:
    """See that kept answers are this model's, and of this length."""
    if (job.kept_in / "answers.jsonl").exists() and not (job.kept_in / _ANSWERING).exists():
        return  # kept before that was told
    facts = {"model": asdict(base_of(model)), "answer_tokens": job.answer_tokens}
    RunFolder(job.kept_in).claim(facts, _ANSWERING)


def _own(job: Job, samples: Samples, name: str, listener: Listener, *, longest: int) -> Samples:
    """The samples with the model's own answers, which are kept in the run's folder."""
    from ragaccel.llm import LLM

    path = job.kept_in / f"{name}.jsonl"
    if len(kept_answers(path, samples.rows)) < len(samples.rows):
        with LLM.load(job.model, device=job.device, keep_costs=False) as llm:
            answer_samples(
                llm,
                samples.rows,
                path,
                max_new_tokens=job.answer_tokens,
                report=listener.answered,
            )
    found = fitted(kept_answers(path, samples.rows), longest)
    return Samples(
        found.rows, samples.num_cut + found.num_cut, samples.num_skipped + found.num_skipped
    )


def _told(name: str, samples: Samples) -> str:
    told = f"{len(samples.rows):,} samples {name}"
    if samples.num_cut:
        told += f", {samples.num_cut:,} of them without their ends, to fit"
    if samples.num_skipped:
        told += f"; {samples.num_skipped:,} left out: too long a prompt, or nothing to guess"
    return told
