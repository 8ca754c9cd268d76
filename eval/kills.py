"""Kills: processes killed in the middle of writing, and whether anything acknowledged is lost.

    python -m eval.kills --out eval/results

An index built, brought up to date and made anew, a collection, a memory, the history and
checkpoints of a training run: each in a process that is killed (SIGKILL) at a random moment,
1,150 times in all. After each kill everything that the process had noted as done must be there, in
a file that is whole; interrupted builds must end in what an index made from nothing holds. What the
system has not yet brought to the disk is not at stake: only processes die, the machine does not.
It exits with 1 if anything was lost.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.kill_trials import KINDS
from eval.machine import ROOT
from eval.script import in_folder, measured, new_parser, note, result

if TYPE_CHECKING:
    import argparse

COUNTS = {
    "build": 150,
    "update": 150,
    "rebuild": 155,
    "collection": 270,
    "memory": 150,
    "history": 150,
    "checkpoints": 125,
}


def kill_all(options: argparse.Namespace) -> dict[str, Any]:
    """Run the trials of each kind in a process of its own, one after the other."""
    found: dict[str, dict[str, Any]] = {}
    for kind in options.kinds:
        count = options.count or COUNTS[kind]
        command = [sys.executable, "-m", "eval.kill_trials", kind]
        command += ["--count", str(count), "--seed", str(options.seed)]
        ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        if ended.returncode:
            raise ValueError(f"the trials of {kind} failed by themselves; see above")
        found[kind] = json.loads(ended.stdout)
        note(f"{kind}: {json.dumps(found[kind])}")
    total = {key: sum(one.get(key, 0) for one in found.values()) for key in ("kills", "lost")}
    failed = sum(one.get("failed", 0) for one in found.values())
    return result("kills", {"seed": options.seed}, kinds=found, **total, failed=failed)


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("kills", __doc__ or "")
    parser.add_argument(
        "--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="which [all]"
    )
    counts = ", ".join(f"{kind} {count}" for kind, count in COUNTS.items())
    parser.add_argument("--count", type=int, help=f"kills of each kind [{counts}]")
    parser.add_argument("--seed", type=int, default=1, help="of the moments of the kills [1]")
    parser.add_argument("--out", type=Path, help="folder or file of the result")
    options = parser.parse_args(arguments)
    options.out = in_folder(options.out, "kills.json")
    document = measured("kills", kill_all, options)
    print(
        json.dumps({key: document[key] for key in ("kinds", "kills", "lost", "failed")}, indent=1)
    )
    sys.exit(bool(document["lost"] or document["failed"]))


if __name__ == "__main__":
    main()
