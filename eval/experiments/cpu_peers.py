"""Measure what a CPU's user could take instead, in turns: llama.cpp, OpenVINO GenAI, vLLM."""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eval import cli
from eval.data import Job, as_recorded, jobs_for
from eval.decoders import Decoder, Run, make_decoder
from eval.measure import ratios_by_kind
from eval.models import build_random_model, load_target, read_shape
from eval.runner import ROOT, ResultsLog, Row, in_turns, note, open_results_log, result, settings_of
from eval.tasks import load_task
from ragaccel.models import bundled_reader_path

SHAPES = ("llama-135m", "qwen2.5-0.5b")
TASKS = ("llma", "clapnq", "mtrag", "humaneval", "gsm8k", "pubmedqa", "scitldr")
LARGER = f"task:{TASKS[0]}:{SHAPES[1]}"
PARTS = (
    *(f"plain:{shape}" for shape in SHAPES), *(f"task:{name}" for name in TASKS), LARGER, "reader"
)  # fmt: skip
CONTENDERS = {
    "plain": ("ours_plain", "generate", "llama_cpp/plain", "openvino/plain", "vllm/plain"),
    "task": (
        "ours_full", "ours_plain", "generate", "generate_lookup", "llama_cpp/plain",
        "llama_cpp/lookup_10", "llama_cpp/lookup_4", "llama_cpp/ours", "openvino/plain",
        "vllm/plain", "vllm/ngram_8", "vllm/ngram_4", "vllm/ours",
    ),
    "reader": (
        "ours_full", "ours_plain", "generate", "generate_lookup", "llama_cpp/plain",
        "llama_cpp/lookup_10", "llama_cpp/lookup_4", "llama_cpp/ours", "openvino/plain",
        "openvino/lookup",
    ),
}  # fmt: skip
"""{kind of part: decoders of this process, and PEER/DRAFTS of another}."""
DRAWN_PROMPT, DRAWN_ANSWER = 1024, 128
MAX_ANSWER, MAX_PROMPT = 200, 3800  # tokens
READER_ANSWER, WARM_UP_TOKENS = 64, 24
_IN_8_BITS = ("ours", "llama_cpp")
_IN_4_BITS = "llama_cpp_int4"  # a peer's name: llama.cpp with weights of 4 bits beside ours of 8
_PAUSE = 0.5  # seconds before a run: for 0.2 the threads of the engine before may keep the cores
_WORKER = Path(__file__).with_name("cpu_peers_worker.py")


@dataclass(frozen=True, slots=True)
class Timed:
    """What a contender took; ``seconds`` and ``tokens`` are those behind the first step."""

    first_seconds: float
    seconds: float
    tokens: int
    steps: int = 0
    token_ids: tuple[int, ...] = ()


@cli.experiment(
    cli.DATA,
    cli.option("--parts", default=",".join(PARTS), help="comma-separated"),
    cli.integer("--rows", 8, "answers of each part"),
    cli.option(
        "--dtype", default="bfloat16", choices=("bfloat16", "int8"), help="of drawn weights"
    ),
    cli.integer("--threads", 2, "processor threads"),
    cli.option("--llama-cpp", type=Path, default=ROOT / ".venv-llama-cpp/bin/python"),
    cli.option("--openvino", type=Path, default=ROOT / ".venv-llama-cpp/bin/python"),
    cli.option("--vllm", type=Path, default=ROOT / ".venv-vllm/bin/python"),
    file="peers-cpu.json",
    shown=("parts",),
)
def run_cpu_peers(options: Namespace) -> dict[str, Any]:
    """The fair opponents of a CPU in turns: llama.cpp, OpenVINO GenAI, vLLM, transformers and ours.

        python -m eval cpu_peers --data DATA --out eval/results

    Each peer runs in a process and an environment of its own (``--llama-cpp PYTHON``, ...;
    eval/README.md says how to make them); one that is missing is left out.

    ``plain:SHAPE`` decodes 128 drawn tokens behind 1,024 without drafts. ``task:NAME`` decodes
    recorded answers with the 135M shape (``task:llma:qwen2.5-0.5b`` with the 0.5B one): all follow
    the recording, but for OpenVINO, which gives as many tokens of the model's own. With ``--dtype
    int8`` ours keeps its weights in 8 bits, as llama.cpp does (Q8_0), which is measured with those
    of 4 bits (Q4_0), too; others are left out. Measured are the time to the end of the first step
    and, per token, that behind it.
    ``reader`` has the bundled model's own greedy answers in float32, and each engine's own loop.
    Measured answers are kept beside the result.
    """
    parts = cli.names_of(options.parts)
    if unknown := set(parts) - set(PARTS):
        raise ValueError(f"no part {', '.join(sorted(unknown))}: take some of {', '.join(PARTS)}")
    settings = settings_of(options, "rows", "threads", "dtype")
    log = open_results_log(options.out, settings)
    for part in parts:
        kind, _, name = part.partition(":")
        if kind == "reader" and options.dtype == "int8":
            continue  # its own loop is in float32
        contenders = CONTENDERS[kind]
        if options.dtype == "int8":
            contenders = [one for one in contenders if one.startswith(_IN_8_BITS)]
            others = [one for one in contenders if "/" in one]
            contenders += [f"{_IN_4_BITS}/{one.partition('/')[2]}" for one in others]
        measure_part(part, contenders, model_of(kind, name), options, log)
    return summary(log, settings)


def model_of(kind: str, name: str) -> str:
    """Return the model of a part as ``load_target`` names it."""
    if kind == "reader":
        return "reader"
    shape = name if kind == "plain" else name.partition(":")[2]
    return f"random:{shape or SHAPES[0]}"


def measure_part(
    part: str, contenders: Sequence[str], model: str, options: Namespace, log: ResultsLog
) -> None:
    """Measure one part and add its rows to the log."""
    note(part)
    kind, _, name = part.partition(":")
    dtype = "float32" if kind == "reader" else options.dtype
    target = load_target(model, dtype=dtype, data=options.data)
    jobs = {f"{part}/{job.job_id}": job for job in jobs_of(kind, name, target, options)}
    with peers(model, dtype, contenders, options, proposes=kind == "task") as workers:
        taken = [name for name in contenders if "/" not in name or name.split("/")[0] in workers]
        decoders = {name: make_decoder(name, target) for name in taken if "/" not in name}
        versions = {name: worker.about["version"] for name, worker in workers.items()}

        def measure(name: str, job: Job) -> Row:
            timed = (
                timed_here(decoders[name], job)
                if name in decoders
                else timed_there(workers, name, job)
            )
            row = asdict(timed)
            said = row.pop("token_ids")
            known = {"token_ids": said} if kind == "reader" else {}
            peer = name.partition("/")[0]
            return {"part": part, "version": versions.get(peer), **row, **known}

        def warm_up(name: str) -> None:
            job = next(iter(jobs.values()))
            short = min(WARM_UP_TOKENS, job.max_new_tokens)
            measure(name, replace(job, answer_ids=job.answer_ids[:short], max_new_tokens=short))

        in_turns(log, taken, jobs, measure, lambda row: f"{ms_per_token(row):.1f}", warm_up=warm_up)


def jobs_of(kind: str, name: str, target: Any, options: Namespace) -> list[Job]:
    """Return the jobs of a part: drawn, recorded, or without an answer for the reader."""
    if kind == "plain":
        return [drawn_job(number, target.ours.vocab_size) for number in range(options.rows)]
    if kind == "reader":
        asked = jobs_for(target, load_task("demo", options.rows, options.data), READER_ANSWER)
        return [replace(job, answer_ids=()) for job in asked]
    found = jobs_for(target, load_task(name.partition(":")[0], None, options.data), MAX_ANSWER)
    fitting = [as_recorded(job) for job in found if len(job.prompt_ids) <= MAX_PROMPT]
    return [job for job in fitting if len(job.answer_ids) > 8][: options.rows]


def drawn_job(number: int, vocab_size: int) -> Job:
    """Return a job of random tokens, which no drafter could draft."""
    draw = random.Random(number)
    ids = tuple(draw.randrange(256, vocab_size - 256) for _ in range(DRAWN_PROMPT + DRAWN_ANSWER))
    prompt, answer = ids[:DRAWN_PROMPT], ids[DRAWN_PROMPT:]
    return Job(str(number), prompt, (), (), answer, DRAWN_ANSWER, frozenset())


class Worker:
    """A peer's process: it reads work as JSON lines and replies in JSON lines, in turns.

    Its stderr is that of this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        settings: dict[str, Any],
    ) -> None:
        """Start the process in ``folder``; its first line are the settings."""
        self.name = command[-1]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, **environment},
        )
        self.about = self.ask(**settings)

    def ask(self, **work: Any) -> dict[str, Any]:
        """Do one piece of work in the process and return its reply.

        Raises:
            RuntimeError: The process ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(work) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended: so does its output
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.name} ended: what it said stands above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@contextmanager
def peers(
    model: str, dtype: str, contenders: Sequence[str], options: Namespace, *, proposes: bool
) -> Iterator[dict[str, Worker]]:
    """Start the processes of the peers that are installed, over the same weights."""
    wanted = dict.fromkeys(name.split("/")[0] for name in contenders if "/" in name)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = saved(model, scratch)
        settings = {"folder": str(folder), "gguf": str(scratch), "dtype": dtype}
        settings |= {"threads": options.threads, "proposes": proposes}
        environment = {
            "PYTHONPATH": f"{ROOT / 'integrations/vllm-ragaccel'}:{ROOT}",
            "OMP_NUM_THREADS": str(options.threads),
        }
        workers = {}
        for name in wanted:
            engine = "llama_cpp" if name == _IN_4_BITS else name
            own = settings | {"dtype": "int4"} if name == _IN_4_BITS else settings
            python = getattr(options, engine)
            if not python.exists():
                flag = engine.replace("_", "-")
                note(f"{name} is left out: no {python.name} at --{flag} (see eval/README.md)")
                continue
            command = [str(python.absolute()), str(_WORKER), engine]
            workers[name] = Worker(command, ROOT, environment, own)
            stack.callback(workers[name].close)
        yield workers


def saved(model: str, scratch: Path) -> Path:
    """Return the folder of a model; random weights are written in float16, which all can read."""
    if model == "reader":
        return Path(bundled_reader_path())
    config = read_shape(model.removeprefix("random:"))["config"]
    build_random_model(config, torch.float16, torch.device("cpu")).save_pretrained(scratch)
    return scratch


def timed_here(decoder: Decoder, job: Job) -> Timed:
    """Decode a job in this process: its recorded answer if it has one, else the model's own."""
    time.sleep(_PAUSE)
    with decoder.teacher_forced(job) if job.answer_ids else nullcontext():
        run = decoder.run(job)
    if job.answer_ids and run.token_ids != job.answer_ids:
        raise RuntimeError(f"{decoder.name} did not give the recorded answer of {job.job_id}")
    return timed_run(run)


def timed_run(run: Run) -> Timed:
    """Return the times of a run, split behind its first step."""
    whole = run.prefill_seconds + run.decode_seconds
    at_first = run.tokens_of_each[0] if run.tokens_of_each else 1
    return Timed(
        run.first_token_seconds,
        whole - run.first_token_seconds,
        len(run.token_ids) - at_first,
        run.passes,
        run.token_ids,
    )


def timed_there(workers: Mapping[str, Worker], name: str, job: Job) -> Timed:
    """Decode a job in a peer's process."""
    time.sleep(_PAUSE)
    peer, _, drafts = name.partition("/")
    given: dict[str, Any] = {"name": drafts, "prompt": job.prompt_ids}
    if job.answer_ids:
        return Timed(**workers[peer].ask(do="decode", **given, answer=job.answer_ids))
    most, ends = job.max_new_tokens, sorted(job.eos_ids)
    return Timed(**workers[peer].ask(do="generate", **given, most=most, ends=ends))


def ms_per_token(row: Row) -> float:
    """Return the milliseconds of a token behind the first step."""
    return float(1e3 * row["seconds"] / max(1, row["tokens"]))


KINDS_OF_SECONDS = {
    "": ms_per_token,
    "whole_": lambda row: row["first_seconds"] + row["seconds"],
}
"""What is compared: a token behind the first step, and the whole answer."""


def summary(log: ResultsLog, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the result: the figures of each part, and ours over every contender."""
    parts, versions = {}, {}
    for part in PARTS:
        rows = [row for row in log.measurements if row["part"] == part]
        if rows:
            parts[part] = figures_of_part(rows)
        versions |= {row["decoder"].split("/")[0]: row["version"] for row in rows if row["version"]}
    return result("cpu_peers", {**settings, "versions": versions}, log=log, parts=parts)


def figures_of_part(rows: Sequence[Row]) -> dict[str, Any]:
    """Return each contender's figures, and the ratios of ours and of our drafts elsewhere."""
    names = list(dict.fromkeys(row["decoder"] for row in rows))
    by_name = {name: [row for row in rows if row["decoder"] == name] for name in names}
    own = [name for name in names if "ours" in name]
    return {
        "answers": len(by_name[names[0]]),
        "contenders": {name: figures_of(by_name[name], by_name) for name in names},
        "over": {
            name: {
                other: ratios_by_kind(by_name[name], by_name[other], KINDS_OF_SECONDS)
                for other in names
                if other != name
            }
            for name in own
        },
    }


def figures_of(rows: Sequence[Row], by_name: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """Return the figures of one contender over a part."""
    tokens, seconds = (sum(row[key] for row in rows) for key in ("tokens", "seconds"))
    firsts = sorted(row["first_seconds"] for row in rows)
    steps = sum(row["steps"] for row in rows)
    figures = {
        "tokens_per_second": round(tokens / seconds, 2),
        "ms_per_token": round(1e3 * seconds / tokens, 3),
        "first_seconds": round(firsts[len(firsts) // 2], 4),
        "whole_seconds": round(seconds + sum(firsts), 3),
        "steps": steps or None,
    }
    if "token_ids" in rows[0] and "generate" in by_name:
        theirs = {row["example"]: row["token_ids"] for row in by_name["generate"]}
        same = [list(row["token_ids"]) == list(theirs[row["example"]]) for row in rows]
        figures["same_as_generate"] = sum(same)
    return figures
