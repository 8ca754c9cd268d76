"""The process of one checkout in ``eval trees``: it imports the checkout's own code alone.

The file runs as a script, also beside checkouts that do not have it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
Work = dict[str, Any]


def work() -> None:
    """Read work as JSON lines from stdin and write replies to stdout."""
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
    from eval.models import load_target
    from eval.tasks import load_task

    data = Path(settings["data"])
    target = load_target(settings["model"], dtype="bfloat16", data=data)
    examples = load_task(settings["task"], settings["limit"], data)
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


if __name__ == "__main__":
    sys.path.pop(0)  # remove this folder: its modules are eval.experiments.NAME
    work()
