"""Suites: lists of runs that one command makes, one after the other."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from eval import cli
from eval.data import has_data
from eval.experiments import speed
from eval.runner import CACHE, HOURS, Step, given, note_step, run_all, run_and_report

QUICK_OUT = CACHE / "quick"
REPLAYED = {  # rows of each set, to keep within minutes
    "llma_tables": ("--limit=40",),
    "llma_sweep": ("--limit=20",),
    "llma_dialogue": ("--limit=60",),
    "lookahead_sweep": ("--limit=15",),
    "lookahead_branches": ("--limit=15",),
    "lookahead_memory": ("--limit=15",),
}
TIMED = ("--models=random:llama-135m", "--limit=3", "--max-new-tokens=64")
_MINUTES = 60.0


@cli.command(*cli.places(QUICK_OUT), cli.THREADS)
def run_quick(options: Namespace) -> None:
    """Quick: every table of the papers by replay, a small model timed, and the report.

        python -m eval quick --data DATA
        python -m eval quick                      # without data: what ships under eval/tasks

    The suite takes less than ten minutes on two cores. Steps are counted on the first rows of every
    set; seconds are measured with the 135M shape on three rows. Results go to ``--out``, apart from
    the project's committed ones; results that exist are not made again.
    """
    run_and_report(quick_steps(options), "eval quick", options.out)


def quick_steps(options: Namespace) -> Iterator[Step]:
    """Yield the steps of the papers' experiments by replay, then one timed set."""
    data = given(options, "data")
    for name, asked in REPLAYED.items():
        out = options.out / f"{name.replace('_', '-')}.json"
        yield Step(name, (*asked, *data, f"--out={out}"), out, 10 * _MINUTES)
    tasks = ["--tasks=llma"] * has_data(options.data)
    yield from matrix_of(*given(options, "out", "data", "threads"), *TIMED, *tasks)


def matrix_of(*arguments: str) -> Iterator[Step]:
    yield from speed.matrix_steps(speed.run_matrix.parse(arguments))


FULL_OUT = CACHE / "full"
SMALL = "--model=random:llama-135m"
BFLOAT16 = "--dtype=bfloat16"
ONE_SET = (SMALL, BFLOAT16, "--sets=llma_msmarco_davinci003", "--limit=8")
SOME_POINTS = ("--n=1,2,3,5", "--k=2,5,10,20,30")
# (the result's name, its run, its arguments)
WITHOUT_DATA = (
    ("reader-demo", "speed", ("--model=reader", "--task=demo")),
    ("reader-generation", "generation", ("--model=reader",)),
    ("reader-lossless", "lossless", ("--dtypes=float64,float32,bfloat16",)),
    ("reader-memory", "memory", ("--model=reader",)),
    ("frameworks-reader", "frameworks", ("--model=reader", "--task=demo")),
    ("rag-speedup-reader", "rag_speedup", ("--model=reader", "--task=handbook")),
    ("quality", "quality", ()),
    ("registry", "registry", ()),
)
WITH_DATA = (
    ("replay", "replay", ()),
    ("peers-replay", "peers", ()),
    ("ablation", "ablation", ()),
    ("reliability", "reliability", ()),
    ("drafting", "drafting", ()),
    ("llma-tables", "llma_tables", ()),
    ("llma-sweep", "llma_sweep", ()),
    ("llma-dialogue", "llma_dialogue", ()),
    ("lookahead-sweep", "lookahead_sweep", ()),
    ("lookahead-branches", "lookahead_branches", ()),
    ("lookahead-memory", "lookahead_memory", ()),
    ("space-reader", "space_reader", ()),
    ("llma-tables-llama-135m", "llma_tables", (SMALL, BFLOAT16, "--limit=8")),
    ("llma-sweep-llama-135m", "llma_sweep", (SMALL, BFLOAT16, "--limit=8", *SOME_POINTS)),
    ("lookahead-sweep-llama-135m", "lookahead_sweep", ONE_SET),
    ("rag-speedup-reader-llma", "rag_speedup", ("--model=reader", "--task=llma", "--limit=40")),
    ("rag-speedup-llama-135m", "rag_speedup", (SMALL, BFLOAT16, "--limit=20")),
    ("frameworks-llama-135m", "frameworks", (SMALL, "--task=llma", "--limit=6", "--rounds=2")),
    ("peak-memory-llama-135m", "peak_memory", (SMALL, BFLOAT16, "--task=llma")),
    ("llama-135m-batch", "batch", (SMALL, BFLOAT16, "--task=llma", "--groups=2")),
    ("llama-135m-roofline", "roofline", (SMALL, BFLOAT16)),
    ("never-slower", "never_slower", (SMALL, "--limit=40")),
    ("reader-exactness-float32", "exactness", ("--task=xquad", "--limit=200")),
    ("reader-exactness-bfloat16", "exactness", ("--task=xquad", "--limit=200", BFLOAT16)),
)
OUT_NAMES = {"replay": "--json"}
NO_DATA = ("registry",)  # runs without --data


@cli.command(
    *cli.places(FULL_OUT), cli.option("--only", help="comma-separated beginnings of results' names")
)
def run_full(options: Namespace) -> None:
    """Full: every result of the report anew, one after the other, by one command. Takes hours.

        python -m eval full --data DATA
        python -m eval full --data DATA --only matrix,llma        # whose names begin so
        python -m eval full --data DATA --out eval/results        # those that the project keeps

    Each result is a file of its own, made in a process of its own. An interrupted run continues
    where it stopped, failures are listed at the end, and results that exist are not made again:
    delete a file to measure it again. The report is written last. Leave the machine alone
    meanwhile. On a GPU ``python -m eval gpu`` does the same.
    """
    wanted = tuple(options.only.split(",")) if options.only else ("",)
    made = (one for one in full_steps(options) if one.out.stem.startswith(wanted))
    run_and_report(made, "eval full", options.out)


def full_steps(options: Namespace) -> Iterator[Step]:
    """Yield the matrix's steps, then the others; skip those whose data folder is missing."""
    shared = given(options, "data")
    yield from matrix_of(*given(options, "out", "data"))
    wanted = [*WITHOUT_DATA, *WITH_DATA]
    if not has_data(options.data):
        note_step("no data folder (--data): what needs it is left out")
        wanted = [*WITHOUT_DATA]
    for name, run, asked in wanted:
        out = options.out / f"{name}.json"
        where = f"{OUT_NAMES.get(run, '--out')}={out}"
        data = () if run in NO_DATA else shared
        yield Step(run, (*asked, *data, where), out, 6 * HOURS)


GPU_MODELS = "random:llama-2-7b,random:llama-3.1-8b,random:qwen2.5-0.5b"
GPU_TASK = "llma"
GPU_DECODERS = "ours,ours_tree,ours_plain,generate,generate_lookup"


@cli.command(
    *cli.places(),
    cli.option("--device", default="cuda", help="cuda, cuda:N, or cpu to try it out"),
    cli.option("--models", default=GPU_MODELS, help="comma-separated"),
    cli.option("--task", default=GPU_TASK, help="whose recorded answers are followed"),
    cli.TOKENIZER,
    cli.option("--quick", action="store_true", help="a few tokens of two examples, to try it out"),
)
def run_gpu(options: Namespace) -> None:
    """GPU: every measurement for a data-centre GPU, in order, by one command.

        python -m eval gpu --data DATA --out eval/results
        python -m eval gpu --device cpu --models random:llama-135m --data DATA --out /tmp/r --quick

    Each result is a file of its own, made in a process of its own. Failures do not stop the other
    results and are listed at the end; results that exist are not measured again. Afterwards
    ``python -m eval report`` writes the tables.
    """
    run_all(gpu_steps(options), "eval gpu")


def gpu_steps(options: Namespace) -> Iterator[Step]:
    """Yield the steps of each model, then the matrix and memory.

    Without a data folder: the questions that ship, in the bundled reader's tokens.

    Raises:
        MissingDataError: the given data folder is not one.
    """
    if not has_data(options.data):  # asked first: else each step fails, once its model is built
        note_step("no data folder (--data): what ships is measured, in the reader's tokens")
        options.tokenizer = options.tokenizer or "reader"
        options.task = speed.MATRIX_SHIPPED if options.task == GPU_TASK else options.task
    for model in options.models.split(","):
        yield from gpu_model_steps(model, options)
    few = (f"--tasks={options.task}", "--limit=2", "--max-new-tokens=8") if options.quick else ()
    yield from matrix_of(*given(options, "models", "device", "out", "data", "tokenizer"), *few)
    asked = ("--requests=4", "--every=2", "--max-new-tokens=4") if options.quick else ()
    last = options.models.split(",")[-1]  # the smallest
    yield gpu_step("memory", last, options, (*asked, f"--task={_own_task(options)}"))


def gpu_model_steps(model: str, options: Namespace) -> Iterator[Step]:
    quick, compiled = options.quick, ("--compile",)
    few = ("--max-new-tokens=8",) if quick else ()
    task = (f"--task={options.task}",)
    passes = ("--contexts=64", "--repeats=1", "--steps=16") if quick else ()
    yield gpu_step("roofline", model, options, passes)
    limit = ("--limit=2", "--cost-repeats=1") if quick else ("--limit=20",)
    asked = (*task, *limit, *few)
    without = gpu_step(
        "speed", model, options, (*asked, f"--decoders={GPU_DECODERS}"), name="speed-not-static"
    )
    names = f"--decoders={GPU_DECODERS},generate_static"
    yield gpu_step("speed", model, options, (*asked, *compiled, names), fallback=without)
    sizes = ("--sizes=2", "--groups=1") if quick else ("--sizes=2,4,8,16",)
    yield gpu_step("batch", model, options, (*task, *sizes, *few, *compiled))
    yield gpu_step("exactness", model, options, (*task, *limit[:1], *few))


FIRST_OUT = CACHE / "gpu-first"
FIRST_TESTS = {
    "kernels": (
        "tests/engine/test_triton_attention.py",
        "tests/engine/test_triton_layers.py",
    ),
    "cuda": ("tests/engine/test_cuda.py",),
}
FIRST_MODELS = "random:llama-3.1-8b,random:llama-3.2-1b,random:llama-135m"
FIRST_WAYS = ("launched", "graphs", "compiled")
FIRST_DECODERS = "ours,ours_plain,generate,generate_lookup"


@cli.command(
    *cli.places(FIRST_OUT),
    cli.option("--device", default="cuda", help="cuda, cuda:N, or cpu to try it out"),
    cli.option("--models", default=FIRST_MODELS, help="comma-separated"),
    cli.option("--quick", action="store_true", help="a few passes and tokens, to try it out"),
)
def run_gpu_first(options: Namespace) -> None:
    """GPU, the first half hour: do the kernels work, and how near is a pass to the limit?

        python -m eval gpu_first                       # or: make gpu-first
        python -m eval gpu_first --device cpu --models random:llama-135m --quick --out /tmp/r

    In parts of at most eight minutes, each a process and a file of its own; the same command goes
    on after an interruption. First the kernels against float64 and the tests for CUDA; then passes
    of 1, 8, 16 and 64 rows over 2k and 32k tokens, launched, captured and compiled, as a share of
    the limit that the memory's bandwidth sets; then LLMA's recorded answers (without a data folder
    those that ship) against transformers' ``generate``, its prompt lookup and its compiled cache.
    """
    run_all(first_steps(options), "eval gpu_first")


def first_steps(options: Namespace) -> Iterator[Step]:
    """Yield the tests, then every way of every model, then the recorded answers of each model."""
    for name, files in FIRST_TESTS.items():
        out = options.out / f"{name}.json"
        asked = (f"--files={','.join(files)}", *given(options, "device"), f"--out={out}")
        yield Step("gpu_tests", asked, out, 8 * _MINUTES)
    ways = FIRST_WAYS if options.device != "cpu" else FIRST_WAYS[:1]
    for model in options.models.split(","):
        for way in ways:
            yield _first_passes(model, way, options)
    for model in options.models.split(","):
        yield _first_answers(model, options)


def _first_passes(model: str, way: str, options: Namespace) -> Step:
    sizes = ("--contexts=2048,32768", "--rows=1,8,16,64", "--repeats=7", "--steps=128")
    if options.quick:
        sizes = ("--contexts=64", "--rows=1,8", "--repeats=1", "--steps=16")
    return _first_step("roofline", model, options, (*sizes, f"--ways={way}"), name=f"passes-{way}")


def _first_answers(model: str, options: Namespace) -> Step:
    asked = ["--limit=1", "--max-new-tokens=8"] if options.quick else ["--limit=6"]
    asked += [f"--task={GPU_TASK if has_data(options.data) else speed.MATRIX_SHIPPED}", "--forced"]
    plain = _first_step(
        "speed", model, options, (*asked, f"--decoders={FIRST_DECODERS}"), name="answers-not-static"
    )
    if options.device == "cpu":
        return plain
    names = f"--decoders={FIRST_DECODERS},generate_static"
    return _first_step("speed", model, options, (*asked, names), name="answers", fallback=plain)


def _first_step(
    kind: str,
    model: str,
    options: Namespace,
    arguments: tuple[str, ...],
    *,
    name: str,
    fallback: Step | None = None,
) -> Step:
    out = options.out / f"{model.split(':')[-1]}-{name}.json"
    common = [f"--model={model}", *given(options, "device", "data"), f"--out={out}"]
    common += ["--dtype=bfloat16"] * (options.device != "cpu")
    common += ["--tokenizer=reader"] * (not has_data(options.data))
    return Step(kind, (*common, *arguments), out, 8 * _MINUTES, fallback)


def gpu_step(
    kind: str,
    model: str,
    options: Namespace,
    arguments: tuple[str, ...],
    *,
    name: str = "",
    fallback: Step | None = None,
) -> Step:
    """Return a step whose result file has the device, model and kind in its name."""
    shape = Path(model.rpartition(":")[2]).stem if model.endswith(".json") else model.split(":")[-1]
    place = "cpu" if options.device == "cpu" else "gpu"
    out = options.out / f"{place}-{Path(shape).name}-{name or kind}.json"
    common = [f"--model={model}", *given(options, "device", "data", "tokenizer"), f"--out={out}"]
    common += ["--dtype=bfloat16"] * (options.device != "cpu")
    return Step(kind, (*common, *arguments), out, fallback=fallback)


def _own_task(options: Namespace) -> str:
    """Return the task of the memory run: one that ships, or the caller's file of questions."""
    return options.task if options.task.endswith(".jsonl") else "demo"
