"""SPACE on a larger model, trained here from nothing: text, code and questions on passages.

    python -m eval.papers.space_scratch --data DATA --out eval/results --device cuda
    python -m eval.papers.space_scratch --data DATA --out /tmp/r --shape tiny

A language model of a named shape is trained for ``--minutes`` on the text archives; it goes on from
held-in text, greedily; an adapter is trained on that for ``--adapter-minutes``; then held-out
text, code and prompts with passages are continued by the decoders of ``eval.papers.space_reader``.
The model, its continuations and the adapter stay in ``--work``, and a run that was stopped goes on
after the last of them. Ends in one JSON document.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eval.adapters import chosen_adapter, describe_adapter, wearing
from eval.examples import in_data, load_task
from eval.jobs import Job, jobs_for, under_task
from eval.ledger import write_whole
from eval.machine import current_commit
from eval.papers import scratch_model
from eval.papers.published import published
from eval.papers.scratch_adapter import Lessons, own_answers, train_adapter
from eval.papers.scratch_model import Schooling
from eval.papers.scratch_text import draw_prompts, read_text
from eval.papers.space_decoders import GUESSES, TEMPERATURE, answered, figures_of
from eval.papers.space_layout import space_scratch_table
from eval.script import in_folder, measured, new_parser, note, result
from eval.steps import CACHE
from eval.targets import DTYPES, default_dtype, load_target, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eval.papers.scratch_text import Text
    from eval.targets import Target

TASKS = "humaneval,clapnq"
TEXT = "held-out text"
PROMPT_SEED = 3
LARGE = {"limit": 20, "minutes": 12.0, "adapter_minutes": 6.0, "max_new_tokens": 128}
# To try it all out on a processor, in a minute.
SMALL = {"limit": 2, "minutes": 0.15, "adapter_minutes": 0.15, "max_new_tokens": 16}
TINY_TEXT: dict[str, Any] = {"manuals_alone": True, "most": 400_000}
TINY_SCHOOLING: dict[str, Any] = {"window": 128, "rows": 4, "rising": 10}
TINY_LESSONS: dict[str, Any] = {
    **{"num_masks": 3, "rank": 4, "samples": 16, "judged": 4},
    **{"shortest": 16, "longest": 32, "answer_tokens": 24, "row_tokens": 256},
}


def main(arguments: Sequence[str] | None = None) -> None:
    document = measured("papers.space_scratch", measure, parse(arguments))
    print(space_scratch_table(document))
    print(json.dumps(document["sets"]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("papers.space_scratch", __doc__)
    add = parser.add_argument
    add("--data", type=Path, help="data folder; also the variable RAGACCEL_DATA")
    add("--shape", default="llama-135m", help="of eval/shapes, its file, or tiny")
    add("--tokenizer", help="a name in the data folder, or reader (default: gpt2; tiny: reader)")
    add("--minutes", type=float, help="that the model is trained for")
    add("--adapter-minutes", type=float, help="that the adapter is trained for")
    add("--limit", type=int, help="prompts of each set")
    add("--max-new-tokens", type=int, help="of each answer")
    add("--tasks", default=TASKS, help="comma-separated files of eval/tasks, beside held-out text")
    add("--device", default="cpu", help="cpu, cuda or cuda:N")
    add("--dtype", choices=[*DTYPES][1:3], help="default: float32 on a CPU, bfloat16 on a GPU")
    add("--threads", type=int, help="processor threads (default: torch's)")
    add("--work", type=Path, help="folder of the model and the adapter (default: below .cache)")
    add("--out", type=Path, help="result file, or its folder; a second run goes on")
    options = parser.parse_args(arguments)
    shape = Path(options.shape).stem
    for name, value in (SMALL if shape == "tiny" else LARGE).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.tokenizer = options.tokenizer or ("reader" if shape == "tiny" else "gpt2")
    options.dtype = options.dtype or default_dtype(options.device)
    options.work = options.work or CACHE / f"space-scratch-{shape}"
    options.out = in_folder(options.out, f"space-scratch-{shape}.json")
    return options


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train what is not there yet, then have all prompts continued that the ledger lacks.

    Raises:
        ValueError: a time or number that cannot work, or a work folder of other settings.
    """
    if min(options.minutes, options.adapter_minutes, options.limit) <= 0:
        raise ValueError("--minutes, --adapter-minutes and --limit must be above 0")
    data = in_data("text", options.data).parent
    asked = {
        Path(name).name: load_task(name, options.limit, options.data)
        for name in options.tasks.split(",")
    }
    learned = learn(options, data)
    target = load_target(str(options.work / "model"), dtype=options.dtype, device=options.device)
    adapter = chosen_adapter(target, options.work / "adapter")
    sets = {TEXT: _continuations(learned["text"], target, options)}
    for name, examples in asked.items():
        sets[name] = under_task(name, jobs_for(target, examples, options.max_new_tokens))
    worn = wearing(target, adapter)
    settings = _settings(options, worn, sets)
    jobs = [job for own in sets.values() for job in own]
    rows = answered(options.out, settings, target, worn, jobs)
    return result(
        "space_scratch",
        settings,
        device=options.device,
        module="papers.space_scratch",
        parameters=sum(weight.numel() for weight in target.model.parameters()),
        trained=learned["trained"],
        adapter=describe_adapter(adapter) | {"seconds": learned["adapter"]["seconds"]},
        curve=learned["adapter"]["curve"],
        sets={name: figures_of(target, own, rows) for name, own in sets.items()},
        published=published("space"),
    )


def learn(options: argparse.Namespace, data: Path) -> dict[str, Any]:
    """Train the model, have it go on from text, train the adapter; skip what the work folder has.

    Raises:
        ValueError: the folder is of other settings.
    """
    is_tiny = options.shape == "tiny"
    schooling = Schooling(options.minutes, **(TINY_SCHOOLING if is_tiny else {}))
    lessons = Lessons(options.adapter_minutes, **(TINY_LESSONS if is_tiny else {}))
    _claim(options.work, schooling, lessons, options)
    note("reading the text")
    words = load_tokenizer(options.tokenizer, options.data)
    text = read_text(data, words, **(TINY_TEXT if is_tiny else {}))
    folder = options.work / "model"
    trained = scratch_model.saved(folder)
    if trained is None:
        note(f"the model: {text.num_tokens:,} tokens, {options.minutes:g} minutes")
        model = scratch_model.new_model(options.shape, words)
        trained = scratch_model.train(
            model, text, schooling, device=options.device, dtype=options.dtype
        )
        scratch_model.save(model, words, folder, options.dtype, trained)
        del model  # what it and its gradients take is wanted for the adapter
    answers = own_answers(folder, text, lessons, options.work, device=options.device)
    note(f"the adapter: {options.adapter_minutes:g} minutes")
    adapter = train_adapter(
        folder, answers, lessons, options.work, device=options.device, dtype=options.dtype
    )
    return {"text": text, "trained": trained, "adapter": adapter}


def _claim(work: Path, schooling: Schooling, lessons: Lessons, options: argparse.Namespace) -> None:
    """Take the work folder for these settings, or find it taken for the same."""
    names = ("shape", "tokenizer", "dtype")
    facts = {
        **{name: Path(str(getattr(options, name))).name for name in names},
        "schooling": asdict(schooling),
        "lessons": asdict(lessons),
    }
    file = work / "settings.json"
    if not file.exists():
        work.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(facts, indent=1) + "\n")
    elif json.loads(file.read_text(encoding="utf-8")) != facts:
        raise ValueError(
            f"{work} holds a model or an adapter of other settings: delete it, or choose another "
            "--work"
        )


def _continuations(text: Text, target: Target, options: argparse.Namespace) -> list[Job]:
    """KGrams of held-out text to go on from, other ones than the adapter was judged on."""
    length = 64 if options.shape == "tiny" else 128
    prompts = draw_prompts(
        text.held_out, options.limit, shortest=length, longest=length, seed=PROMPT_SEED
    )
    return [
        Job(f"text/{at}", prompt, (), (), (), options.max_new_tokens, target.tokenizer.eos_ids)
        for at, prompt in enumerate(prompts)
    ]


def _settings(
    options: argparse.Namespace, target: Target, sets: dict[str, list[Job]]
) -> dict[str, Any]:
    return {
        "model": f"{Path(options.shape).stem}, trained here",
        "tokenizer": Path(options.tokenizer).name,
        "dtype": options.dtype,
        "device": options.device,
        "threads": torch.get_num_threads(),
        "minutes": options.minutes,
        "adapter_minutes": options.adapter_minutes,
        "examples": sum(map(len, sets.values())),
        "num_masks": target.ours.num_masks,
        "guesses": GUESSES,
        "temperature": TEMPERATURE,
        "max_new_tokens": options.max_new_tokens,
        "commit": current_commit(),
    }


if __name__ == "__main__":
    main()
