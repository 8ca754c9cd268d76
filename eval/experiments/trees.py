"""Compare the speed of this checkout with that of another."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


ROOT = Path(__file__).resolve().parents[2]
Work = dict[str, Any]


class Worker:
    """A process that does measured work with the code of one checkout."""

    def __init__(self, tree: Path, settings: Work) -> None:
        self.tree = tree
        own = tree / ".venv" / "bin" / "python"
        self._process = subprocess.Popen(
            [str(own) if own.exists() else sys.executable, str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
        )
        self.ask(**settings, tree=str(tree))

    def ask(self, **work: Any) -> Work:
        """Do one piece of work in the process and return its reply.

        Raises:
            RuntimeError: The process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.tree} ended: what it said stands above")
        answer: Work = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def work() -> None:
    """Serve a :class:`Worker`: read work as JSON lines from stdin and write replies to stdout."""
    import ragaccel

    settings = json.loads(sys.stdin.readline())
    tree = Path(settings["tree"]).resolve()
    if tree not in Path(ragaccel.__file__).resolve().parents:
        sys.exit(f"eval trees: ragaccel comes from {ragaccel.__file__}, not from {tree}")
    print("{}", flush=True)
    made: dict[str, Callable[[Work], Work]] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        kind = asked["kind"]
        if kind not in made:
            made[kind] = KINDS[kind](settings)
        print(json.dumps(made[kind](asked)), flush=True)


def decoding(settings: Work) -> Callable[[Work], Work]:
    """Return a function that decodes a recorded answer with a random model of realistic size."""
    from eval.data import as_recorded, jobs_for
    from eval.decoders import make_decoder
    from eval.experiments.speed import parse_speed
    from eval.models import chosen_target
    from eval.tasks import load_task

    options = parse_speed([f"--model={settings['model']}", f"--data={settings['data']}"])
    target = chosen_target(options, "bfloat16")
    examples = load_task("llma", settings["limit"], Path(settings["data"]))
    jobs = [as_recorded(job) for job in jobs_for(target, examples, 128)]
    decoder = make_decoder("ours_full", target)

    def run(asked: Work) -> Work:
        job = jobs[asked["at"] % len(jobs)]
        decoder.forget()
        with decoder.teacher_forced(job):
            done = decoder.run(job)
        return {"seconds": done.decode_seconds, "did": list(done.token_ids), "of": len(jobs)}

    return run


def answering(settings: Work) -> Callable[[Work], Work]:  # noqa: ARG001
    """Return a function that answers a request with the bundled reader.

    The reader's passes are short, so the request's other costs show.
    """
    from ragaccel import LLM

    llm = LLM.load()
    llm.warm_up()
    passages = [
        path.read_text(encoding="utf-8")[:700]
        for path in sorted((ROOT / "demos" / "documents").rglob("*.md"))[:12]
    ]

    def run(asked: Work) -> Work:
        text = passages[asked["at"] % len(passages)]
        started = time.perf_counter()
        answer = llm.generate(text, references=[text], max_new_tokens=24)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "did": list(answer.token_ids), "of": len(passages)}

    return run


def indexing(settings: Work) -> Callable[[Work], Work]:
    """Return a function that indexes a folder anew: reads, cuts and stores it."""
    from ragaccel import Store, index_folder  # names that older checkouts have as well

    sys.path.append(str(ROOT / "eval" / "robustness"))
    from stand_ins import HashEmbedder

    def run(asked: Work) -> Work:  # noqa: ARG001
        with (
            tempfile.TemporaryDirectory() as scratch,
            Store(Path(scratch, "index.db")) as store,
        ):
            started = time.perf_counter()
            report = index_folder(store, HashEmbedder(), settings["documents"])
            return {
                "seconds": time.perf_counter() - started,
                "did": [report.added, report.passages],
                "of": 1,
            }

    return run


KINDS = {"decoding": decoding, "answering": answering, "indexing": indexing}


def pairs(kind: str, here: Worker, other: Worker, rounds: int) -> Iterator[tuple[float, float]]:
    """Yield the seconds of both workers for the same piece of work; the first one alternates.

    Raises:
        ValueError: The results of the work differ.
    """
    number = here.ask(kind=kind, at=0)["of"]
    other.ask(kind=kind, at=0)
    for at in range(number * rounds):
        order = [here, other] if at % 2 == 0 else [other, here]
        found = {worker.tree: worker.ask(kind=kind, at=at) for worker in order}
        ours, theirs = found[here.tree], found[other.tree]
        if ours["did"] != theirs["did"]:
            raise ValueError(f"{kind} {at}: {ours['did']} here, {theirs['did']} there")
        yield ours["seconds"], theirs["seconds"]


def figures(times: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the medians of both times, and the median and quartiles of their ratio."""
    ratios = [ours / theirs for ours, theirs in times]
    spread = statistics.quantiles(ratios, n=4)[::2] if len(ratios) > 1 else ratios * 2
    return {
        "pairs": len(times),
        "seconds": round(statistics.median(ours for ours, _ in times), 4),
        "seconds_other": round(statistics.median(theirs for _, theirs in times), 4),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(one, 4) for one in spread],
    }


def run_trees(arguments: Sequence[str] | None = None) -> None:
    """Two checkouts side by side: is this one slower than another?

        python -m eval trees --other CHECKOUT --data DATA --documents FOLDER --out eval/results

    Each checkout runs in a process of its own and does one piece of work at a time, in alternating
    order, so that a change of the machine's speed affects both. The figures are medians, and the
    ratio of this checkout's seconds to the other's, pair by pair: below 1 this one is faster. Both
    must give the same tokens and index the same number of passages. The other checkout runs with
    its own ``.venv`` if it has one. For documents, reading, cutting and storing are timed: the
    embedder only hashes words.
    """
    from eval.runner import in_folder, measured

    options = parse(arguments)
    options.out = in_folder(options.out, "trees.json")
    document = measured("trees", measure, options)
    print(json.dumps(document["kinds"]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    from eval.runner import new_parser

    parser = new_parser("trees", run_trees.__doc__)
    add = parser.add_argument
    add("--other", type=Path, required=True, help="another checkout of this project")
    add("--data", type=Path, help="data folder, for decoding")
    add("--documents", type=Path, default=ROOT / "demos" / "documents", help="a folder to index")
    add("--model", default="random:llama-135m", help="a model for decoding")
    add("--limit", type=int, default=8, help="recorded answers to decode")
    add("--rounds", type=int, default=3, help="times that each piece of work is done")
    add("--only", default=",".join(KINDS), help="comma-separated (default: %(default)s)")
    add("--out", type=Path, help="result file, or its folder")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Compare both checkouts in every kind of work for which the options give the data."""
    from eval.runner import note, result

    kinds = options.only.split(",")
    if options.data is None and "decoding" in kinds:
        note("no data folder (--data): decoding is left out")
        kinds.remove("decoding")
    settings = {
        "data": str(options.data), "documents": str(options.documents.resolve()),
        "model": options.model, "limit": options.limit,
    }  # fmt: skip
    here, other = (Worker(tree.resolve(), settings) for tree in (ROOT, options.other))
    found = {}
    try:
        for kind in kinds:
            found[kind] = figures(list(pairs(kind, here, other, options.rounds)))
            note(f"{kind}: {found[kind]}")
    finally:
        here.close()
        other.close()
    commit = subprocess.run(
        ["git", "-C", str(options.other), "rev-parse", "--short=12", "HEAD"],
        capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    shown = {"model": options.model, "limit": options.limit, "rounds": options.rounds}
    return result("trees", {**shown, "other": commit or "unknown"}, kinds=found)


if __name__ == "__main__":  # a worker's process
    sys.path.pop(0)  # remove this folder: its modules are eval.experiments.NAME
    work()
