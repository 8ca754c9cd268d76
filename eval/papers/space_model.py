"""Train a model and a SPACE adapter from scratch, and measure SPACE on them."""

from __future__ import annotations

import json
import math
import random
import shutil
import tarfile
import time
import zlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from eval import cli
from eval.data import Job, in_data, jobs_for, under_task
from eval.models import (
    DTYPES,
    Target,
    chosen_adapter,
    default_dtype,
    describe_adapter,
    load_target,
    load_tokenizer,
    read_shape,
    with_adapter,
)
from eval.papers.published import published
from eval.papers.space import (
    NUM_DRAFT_TOKENS,
    TEMPERATURE,
    answered,
    curve_of,
    figures_of,
    read_run,
    space_scratch_table,
)
from eval.runner import (
    CACHE,
    note,
    result,
    settings_of,
    write_whole,
)
from eval.tasks import load_task
from ragaccel.llm import LLM
from ragaccel.models import Tokenizer
from ragaccel.training import (
    Job as TrainingJob,
    Listener,
    Recipe,
    Sample,
    answer_samples,
    make_recipe,
    read_answers,
    train_space,
)
from recipes.reader.corpus import load_articles

MANUALS = "tech_docs"
_SUFFIXES = (".md", ".mdx", ".txt")
_HELD_OUT = 25  # one manual in 25

Documents = list[list[int]]


@dataclass(frozen=True, slots=True)
class Text:
    """Documents in token ids, each with an end token, for training (``held_in``) and held out.

    ``kinds`` describes the documents in words.
    """

    held_in: Documents
    held_out: Documents
    kinds: str

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens for training."""
        return sum(map(len, self.held_in))


def read_text(
    data: Path, tokenizer: Tokenizer, *, manuals_alone: bool = False, most: int | None = None
) -> Text:
    """Read the text archives: books and articles as prose, manuals with their code.

    The name of an article, book or manual decides whether it is held out.

    Args:
        data: The data folder.
        tokenizer: The tokenizer.
        manuals_alone: Whether to read only manuals; the other texts take half a minute.
        most: Maximum number of characters for training, and of held-out ones; None for all.
    """
    parts: dict[bool, list[str]] = {False: [], True: []}
    for read in (_manuals,) if manuals_alone else (_manuals, _articles):
        for text, is_held_out in read(data):
            parts[is_held_out].append(text)
    held_in, held_out = (encoded(tokenizer, taken(parts[side], most)) for side in (False, True))
    if not held_in or not held_out:
        raise ValueError(
            f"the text archives hold {len(parts[False])} documents to learn and "
            f"{len(parts[True])} held-out ones: both are needed"
        )
    kinds = "manuals" if manuals_alone else "books, a factbook, encyclopedia articles and manuals"
    return Text(held_in, held_out, kinds)


def _articles(data: Path) -> Iterator[tuple[str, bool]]:
    for article in load_articles(data):
        if article.source != MANUALS:
            yield f"{article.title}\n\n{' '.join(article.sentences)}", article.held_out


def _manuals(data: Path) -> Iterator[tuple[str, bool]]:
    archive = data / "text" / f"{MANUALS}.tar.xz"
    if not archive.exists():
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            if file is not None and member.name.endswith(_SUFFIXES):
                text = file.read().decode("utf-8", errors="replace")
                yield text, zlib.crc32(member.name.encode()) % _HELD_OUT == 0


def taken(texts: Sequence[str], most: int | None) -> list[str]:
    """Shuffle texts with a fixed seed, and return the first up to ``most`` characters."""
    order = list(texts)
    random.Random(0).shuffle(order)
    if most is None:
        return order
    found, room = [], most
    for text in order:
        if room <= 0:
            break
        found.append(text[:room])
        room -= len(text)
    return found


def encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> Documents:
    """Return the token ids of each text, with an end token after each."""
    if not texts:
        return []
    words: Any = tokenizer.tokenizer
    found = words(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    end = sorted(tokenizer.eos_ids)[:1]
    return [[*ids, *end] for ids in found]


def draw_prompts(
    documents: Documents, count: int, *, shortest: int, longest: int, seed: int
) -> list[tuple[int, ...]]:
    """Draw distinct pieces of documents as prompts to continue."""
    rng = random.Random(seed)
    long_enough = [ids for ids in documents if len(ids) > longest]
    found: dict[tuple[int, ...], None] = {}
    for _ in range(20 * count):
        if len(found) == count or not long_enough:
            break
        ids, length = rng.choice(long_enough), rng.randint(shortest, longest)
        start = rng.randrange(len(ids) - length)
        found.setdefault(tuple(ids[start : start + length]))
    if len(found) < count:
        raise ValueError(
            f"{len(long_enough)} documents of more than {longest} tokens give no {count} prompts: "
            "take fewer"
        )
    return list(found)


EVALUATIONS = 8
_TRIED, _FIRST = 10, 3  # steps to measure one; the first ones take longer
ADAPTER_FILE = "training.json"


@dataclass(frozen=True, slots=True)
class AdapterTraining:
    """Settings of training an adapter: its time, and the number and length of answers."""

    minutes: float
    num_masks: int = 8
    rank: int = 32
    samples: int = 2000
    judged: int = 64
    shortest: int = 48
    longest: int = 160
    answer_tokens: int = 128
    row_tokens: int = 2048


def own_answers(
    model: Path, text: Text, adapter_training: AdapterTraining, work: Path, *, device: str
) -> tuple[Path, Path]:
    """Continue pieces of text greedily with a model, unless the answers exist.

    Returns:
        The file of answers for training and the file of held-out answers for evaluation.
    """
    sides = (
        (work / "answers.jsonl", text.held_in, adapter_training.samples),
        (work / "held-out-answers.jsonl", text.held_out, adapter_training.judged),
    )
    for seed, (path, documents, count) in enumerate(sides, start=1):
        prompts = draw_prompts(
            documents,
            count,
            shortest=adapter_training.shortest,
            longest=adapter_training.longest,
            seed=seed,
        )
        samples = [Sample(prompt, ()) for prompt in prompts]
        if len(read_answers(path, samples)) < count:
            note(f"{path.name}: {count} continuations")
            llm = LLM.load(model, device=device, save_measurements=False)
            answer_samples(llm, samples, path, max_new_tokens=adapter_training.answer_tokens)
    return sides[0][0], sides[1][0]


class StepTimes(Listener):
    """A trainer callback that records the times at which steps end."""

    def __init__(self) -> None:
        self.ended: dict[int, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Record the time."""
        self.ended[state.global_step] = time.perf_counter()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Print a line of progress."""
        told = state.log_history[-1]["figures"]["tokens_per_pass"]
        lengths = ", ".join(f"{one:.2f}" for one in told)
        note(f"the adapter: step {state.global_step} of {state.max_steps}, tokens a pass {lengths}")

    @property
    def each(self) -> float:
        """Return the mean seconds of a step, without the first ones."""
        last = max(self.ended)
        return (self.ended[last] - self.ended[_FIRST]) / (last - _FIRST)


def train_adapter(
    model: Path,
    answers: tuple[Path, Path],
    adapter_training: AdapterTraining,
    work: Path,
    *,
    device: str,
    dtype: str,
) -> dict[str, Any]:
    """Train an adapter for the number of steps that should fill the minutes, unless it exists.

    Returns:
        The time and the evaluations of the run, or of the existing one.
    """
    out = work / "adapter"
    file = out / ADAPTER_FILE
    if file.exists():
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found
    samples, held_out = answers
    place = "cpu" if device == "cpu" else None
    job = TrainingJob(samples, out, model=model, held_out=held_out, device=place)
    recipe = make_recipe(
        num_masks=adapter_training.num_masks,
        rank=adapter_training.rank,
        row_tokens=adapter_training.row_tokens,
        precision=dtype,
    )
    steps = _steps_for(job, recipe, adapter_training.minutes, work)
    every = -(-steps // EVALUATIONS)
    told = train_space(job, replace(recipe, steps=steps, evaluate_every=every), StepTimes())
    assert told is not None, "one process trains"
    log, _ = read_run(job.checkpoint_folder)
    kept = {"steps": steps, "seconds": told["seconds"], "curve": curve_of(log)}
    write_whole(file, json.dumps(kept) + "\n")
    return kept


def _steps_for(job: TrainingJob, recipe: Recipe, minutes: float, work: Path) -> int:
    """Time some steps in a temporary run; return the number of steps for the minutes."""
    file, trial, checkpoint_folder = work / "steps.json", work / "trial", work / "trial-run"
    if file.exists():  # an interrupted run continues
        return int(json.loads(file.read_text(encoding="utf-8")))
    for folder in (trial, checkpoint_folder):
        shutil.rmtree(folder, ignore_errors=True)
    step_times = StepTimes()
    tried = replace(job, out=trial, run_folder=checkpoint_folder, max_evaluated=0)
    train_space(tried, replace(recipe, steps=_TRIED), step_times)
    for folder in (trial, checkpoint_folder):
        shutil.rmtree(folder, ignore_errors=True)
    steps = max(_TRIED, round(60.0 * minutes / max(1e-6, step_times.each)))
    write_whole(file, f"{steps}\n")
    return steps


TINY_SHAPE = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
MODEL_FILE = "training.json"
_MULTIPLE = 64  # the number of logits is a multiple of this
_NOTE_EVERY = 15.0  # seconds
_JUDGED = 16  # windows of the reported loss


@dataclass(frozen=True, slots=True)
class ModelTraining:
    """Settings of training a model: time, tokens of a window and windows of a step.

    ``max_steps`` can end the training before the time is over.
    """

    minutes: float
    max_steps: int | None = None
    window: int = 1024
    rows: int = 32
    rate: float = 1.5e-3
    rising: int = 100
    seed: int = 0


def new_model(shape: str, tokenizer: Tokenizer, seed: int = 0) -> Any:
    """Return an untrained model of a shape's size with logits for a tokenizer's ids."""
    config = TINY_SHAPE if shape == "tiny" else read_shape(shape)["config"]
    size = -(-len(tokenizer) // _MULTIPLE) * _MULTIPLE
    end = sorted(tokenizer.eos_ids)[0]
    torch.manual_seed(seed)
    made = AutoConfig.for_model(
        **{**config, "vocab_size": size, "bos_token_id": end, "eos_token_id": end}
    )
    return AutoModelForCausalLM.from_config(made, dtype=torch.float32)  # type: ignore[no-untyped-call]


def train_model(
    model: Any, text: Text, model_training: ModelTraining, *, device: str, dtype: str
) -> dict[str, Any]:
    """Train until the minutes are over; return the time, the steps and the losses.

    Passes are computed in ``dtype``, weights and updates in float32. The learning rate rises, then
    falls with the remaining time.
    """
    model.to(device).train()
    tokens = torch.tensor([token for ids in text.held_in for token in ids])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=model_training.rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    generator = torch.Generator().manual_seed(model_training.seed)
    started = told = perf_counter()
    steps, done = 0, 0.0
    while done < 1.0 or not steps:
        share = min(1.0, (steps + 1) / model_training.rising) * (
            0.05 + 0.475 * (1 + math.cos(math.pi * min(1.0, done)))
        )
        for group in optimizer.param_groups:
            group["lr"] = model_training.rate * share
        batch = windows(tokens, model_training, generator).to(device)
        with computing(device, dtype):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps, value = steps + 1, float(loss.detach())  # float() waits for the device
        now = perf_counter()
        done = (now - started) / (60.0 * model_training.minutes)
        if model_training.max_steps is not None:
            done = max(done, steps / model_training.max_steps)
        if now - told > _NOTE_EVERY:
            told = now
            note(f"the model: {100 * min(1.0, done):.0f} %, step {steps}, loss {value:.3f}")
    seconds = perf_counter() - started
    model.eval()
    return {
        "minutes": model_training.minutes,
        "seconds": round(seconds, 1),
        "steps": steps,
        "text": text.kinds,
        "text_tokens": text.num_tokens,
        "tokens_seen": steps * model_training.rows * min(model_training.window, len(tokens) - 1),
        "held_in_loss": judge(model, text.held_in, model_training, device=device, dtype=dtype),
        "held_out_loss": judge(model, text.held_out, model_training, device=device, dtype=dtype),
    }


def windows(tokens: Tensor, model_training: ModelTraining, generator: torch.Generator) -> Tensor:
    """Draw random windows [rows, window] of a text [N]; they are shorter if the text is."""
    length = min(model_training.window, len(tokens) - 1)
    starts = torch.randint(len(tokens) - length, (model_training.rows, 1), generator=generator)
    found: Tensor = tokens[starts + torch.arange(length)]
    return found


def computing(device: str, dtype: str) -> AbstractContextManager[Any]:
    """Return a context that computes in ``dtype`` by autocast, or in float32 without one."""
    if dtype == "float32":
        return nullcontext()
    return torch.autocast(torch.device(device).type, DTYPES[dtype])


@torch.no_grad()
def judge(
    model: Any, documents: Documents, model_training: ModelTraining, *, device: str, dtype: str
) -> float:
    """Return the mean loss over fixed windows of documents, in nats per token."""
    tokens = torch.tensor([token for ids in documents for token in ids])
    generator = torch.Generator().manual_seed(model_training.seed + 1)
    losses = []
    for _ in range(max(1, _JUDGED // model_training.rows)):
        batch = windows(tokens, model_training, generator).to(device)
        with computing(device, dtype):
            losses.append(float(model(input_ids=batch, labels=batch, use_cache=False).loss))
    return round(sum(losses) / len(losses), 4)


def save_model(model: Any, tokenizer: Tokenizer, folder: Path, dtype: str, trained: Any) -> None:
    """Write a model's folder with its training settings; the weights are written last."""
    model.to(DTYPES[dtype]).save_pretrained(folder)
    words: Any = tokenizer.tokenizer
    words.save_pretrained(folder)
    write_whole(folder / MODEL_FILE, json.dumps(trained, indent=1) + "\n")


def saved_model(folder: Path) -> dict[str, Any] | None:
    """Return a saved model's training settings, or None if no complete model was saved."""
    file = folder / MODEL_FILE
    if not file.exists():
        return None
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


TASKS = "humaneval,clapnq"
TEXT = "held-out text"
PROMPT_SEED = 3
LARGE = {"limit": 20, "minutes": 12.0, "adapter_minutes": 6.0, "max_new_tokens": 128}
# For a trial on a CPU, in a minute.
SMALL = {"limit": 2, "minutes": 0.15, "adapter_minutes": 0.15, "max_new_tokens": 16}
TINY_TEXT: dict[str, Any] = {"manuals_alone": True, "most": 400_000}
TINY_MODEL_TRAINING: dict[str, Any] = {"window": 128, "rows": 4, "rising": 10}
TINY_ADAPTER_TRAINING: dict[str, Any] = {
    **{"num_masks": 3, "rank": 4, "samples": 16, "judged": 4},
    **{"shortest": 16, "longest": 32, "answer_tokens": 24, "row_tokens": 256},
}


def with_defaults(options: Namespace) -> Namespace:
    """Fill in the options whose defaults depend on the shape or the device."""
    shape = Path(options.shape).stem
    for name, value in (SMALL if shape == "tiny" else LARGE).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.tokenizer = options.tokenizer or ("reader" if shape == "tiny" else "gpt2")
    options.dtype = options.dtype or default_dtype(options.device)
    options.work = options.work or CACHE / f"space-scratch-{shape}"
    return options


@cli.experiment(
    cli.DATA,
    cli.option("--shape", default="llama-135m", help="of eval/shapes, its file, or tiny"),
    cli.option("--tokenizer", help="a name in the data folder, or reader (default: by shape)"),
    cli.option("--minutes", type=float, help="that the model is trained for"),
    cli.option("--adapter-minutes", type=float, help="that the adapter is trained for"),
    cli.option("--limit", type=int, help="prompts of each set"),
    cli.option("--max-new-tokens", type=int, help="of each answer"),
    cli.option("--tasks", default=TASKS, help="comma-separated, beside held-out text"),
    cli.DEVICE, cli.DTYPE, cli.THREADS,
    cli.option("--work", type=Path, help="folder of the model and the adapter (default: .cache)"),
    table=space_scratch_table, shown=("sets",), file="space-scratch-{shape}.json",
)  # fmt: skip
def run_space_scratch(options: Namespace) -> dict[str, Any]:
    """SPACE on a larger model, trained here from scratch: text, code and questions on passages.

        python -m eval space_scratch --data DATA --out eval/results --device cuda
        python -m eval space_scratch --data DATA --out /tmp/r --shape tiny

    A language model of a named shape is trained for ``--minutes`` on the text archives and
    continues training text greedily. An adapter is trained on these continuations for
    ``--adapter-minutes``. Then the decoders of ``eval space_reader`` continue held-out text, code
    and prompts with passages. The model, its continuations and the adapter are kept in ``--work``,
    and an interrupted run continues after the last of them.
    """
    options = with_defaults(options)
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
    adapted = with_adapter(target, adapter)
    settings = settings_of(
        options, "dtype", "device", "minutes", "adapter_minutes", "max_new_tokens",
        model=f"{Path(options.shape).stem}, trained here", tokenizer=Path(options.tokenizer).name,
        threads=torch.get_num_threads(), examples=sum(map(len, sets.values())),
        num_masks=adapter.num_masks, draft_tokens=NUM_DRAFT_TOKENS, temperature=TEMPERATURE,
    )  # fmt: skip
    jobs = [job for own in sets.values() for job in own]
    rows = answered(options.out, settings, target, adapted, jobs)
    return result(
        "space_scratch",
        settings,
        device=options.device,
        parameters=sum(weight.numel() for weight in target.model.parameters()),
        trained=learned["trained"],
        adapter=describe_adapter(adapter) | {"seconds": learned["adapter"]["seconds"]},
        curve=learned["adapter"]["curve"],
        sets={name: figures_of(target, own, rows) for name, own in sets.items()},
        published=published("space"),
    )


def learn(options: Namespace, data: Path) -> dict[str, Any]:
    """Train the model, write its continuations, train the adapter; skip parts that exist."""
    is_tiny = options.shape == "tiny"
    model_training = ModelTraining(options.minutes, **(TINY_MODEL_TRAINING if is_tiny else {}))
    adapter_training = AdapterTraining(
        options.adapter_minutes, **(TINY_ADAPTER_TRAINING if is_tiny else {})
    )
    _claim(options.work, model_training, adapter_training, options)
    note("reading the text")
    words = load_tokenizer(options.tokenizer, options.data)
    text = read_text(data, words, **(TINY_TEXT if is_tiny else {}))
    folder = options.work / "model"
    trained = saved_model(folder)
    if trained is None:
        note(f"the model: {text.num_tokens:,} tokens, {options.minutes:g} minutes")
        model = new_model(options.shape, words)
        trained = train_model(
            model, text, model_training, device=options.device, dtype=options.dtype
        )
        save_model(model, words, folder, options.dtype, trained)
        del model  # frees memory for the adapter
    answers = own_answers(folder, text, adapter_training, options.work, device=options.device)
    note(f"the adapter: {options.adapter_minutes:g} minutes")
    adapter = train_adapter(
        folder, answers, adapter_training, options.work, device=options.device, dtype=options.dtype
    )
    return {"text": text, "trained": trained, "adapter": adapter}


def _claim(
    work: Path,
    model_training: ModelTraining,
    adapter_training: AdapterTraining,
    options: Namespace,
) -> None:
    """Write the settings into the work folder, or check that they equal those there."""
    names = ("shape", "tokenizer", "dtype")
    facts = {
        **{name: Path(str(getattr(options, name))).name for name in names},
        "schooling": asdict(model_training),
        "lessons": asdict(adapter_training),
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


def _continuations(text: Text, target: Target, options: Namespace) -> list[Job]:
    """Return jobs to continue held-out text, other than the adapter's evaluation uses."""
    length = 64 if options.shape == "tiny" else 128
    prompts = draw_prompts(
        text.held_out, options.limit, shortest=length, longest=length, seed=PROMPT_SEED
    )
    return [
        Job(f"text/{at}", prompt, (), (), (), options.max_new_tokens, target.tokenizer.eos_ids)
        for at, prompt in enumerate(prompts)
    ]
