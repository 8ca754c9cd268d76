"""Peak memory: the most a decoder needs at once, each in a process of its own.

    python -m eval.peak_memory --model random:llama-135m --task llma --data DATA

The process loads the model as its decoder needs it (ours with packed weights in place of the loaded
ones on a CPU, transformers' as they are), follows the longest example's recorded answer once, and
tells what was resident before and at most meanwhile. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eval.contenders import make_contender
from eval.examples import load_task
from eval.jobs import as_recorded, jobs_for, shortened
from eval.ledger import kept_beside
from eval.machine import current_commit
from eval.memory import in_own_process, resident_bytes
from eval.memory_tables import peak_memory_table
from eval.passes import allocated_bytes, peak_bytes
from eval.script import measured, new_parser, note, result
from eval.speed import run_once
from eval.targets import Side, add_dtype_option, add_target_options, chosen_target, describe_target

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTENDERS = "generate,generate_lookup,ours_plain,ours_paper,ours_tree,ours_full"
_SHORT = 8  # tokens
_PEAK, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def main(arguments: Sequence[str] | None = None) -> None:
    document = measured("peak_memory", measure, parse(arguments))
    print(peak_memory_table(document))
    print(json.dumps(document["contenders"]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("peak_memory", __doc__)
    add_target_options(parser)
    add_dtype_option(parser)
    add = parser.add_argument
    add("--task", default="demo", help="a file of eval/tasks, or a .jsonl file of your own")
    add("--limit", type=int, help="examples of which the longest is taken (default: all)")
    add("--contenders", default=CONTENDERS, help="comma-separated (default: %(default)s)")
    add("--max-new-tokens", type=int, default=64)
    add("--out", type=Path, help="result file; rows stand beside it, and a second run goes on")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure each decoder that the ledger lacks."""
    settings = {
        **describe_target(options),
        "task": Path(options.task).name,
        "limit": options.limit,
        "max_new_tokens": options.max_new_tokens,
        "commit": current_commit(),
    }
    ledger = kept_beside(options.out, settings)
    done = {row["contender"] for row in ledger.rows}
    for name in options.contenders.split(","):
        if name not in done:
            row = in_own_process(peak_of, options, name)
            note(f"{name}: {row['peak_bytes'] / 1e6:.0f} MB at most")
            ledger.add({"contender": name, **row})
    contenders = {row.pop("contender"): row for row in map(dict, ledger.rows)}
    return result("peak_memory", settings, device=options.device, contenders=contenders)


def peak_of(options: argparse.Namespace, name: str) -> dict[str, int]:
    """Decode the longest example: bytes before, and at most meanwhile."""
    torch.set_num_threads(options.threads or torch.get_num_threads())
    side: Side = "ours" if name.startswith("ours") else "theirs"
    target = chosen_target(options, options.dtype, side)
    examples = load_task(options.task, options.limit, options.data)
    jobs = jobs_for(target, examples, options.max_new_tokens)
    if target.is_random:
        jobs = [as_recorded(job) for job in jobs if job.answer_ids]
    if not jobs:
        raise ValueError(f"task {options.task} has no recorded answers that {name} could follow")
    job = max(jobs, key=lambda one: len(one.prompt_ids))
    contender = make_contender(name, target)
    # Compiles what is compiled, and has libraries load what they load at first use.
    run_once(contender, shortened(job, _SHORT), forced=target.is_random)
    contender.forget()
    before = allocated_bytes(target.ours.device)
    loaded = forget_peak() if before is None else before
    run_once(contender, job, forced=target.is_random)
    peak = most_resident_bytes() if before is None else peak_bytes(target.ours.device)
    return {"prompt_tokens": len(job.prompt_ids), "loaded_bytes": loaded, "peak_bytes": peak}


def forget_peak() -> int:
    """Have the system count this process's peak anew, where it can: what is resident now."""
    with suppress(OSError):
        _RESET.write_text("5", encoding="ascii")  # Linux: the peak of resident memory alone
    return resident_bytes()


def most_resident_bytes() -> int:
    """The most that was resident since ``forget_peak``; elsewhere than on Linux, ever."""
    try:
        lines = _PEAK.read_text(encoding="ascii").splitlines()
        (kilobytes,) = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
        return 1024 * int(kilobytes)
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most


if __name__ == "__main__":
    main()
