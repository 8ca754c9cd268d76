"""Run test files on a GPU and count what passed, failed and was skipped."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from eval import cli
from eval.runner import ROOT, result

_OPTIONS = ("-q", "-p", "no:cacheprovider", "-W", "default")
_ADDOPTS = "addopts=--import-mode=importlib --strict-markers"
_SHOWN = 400  # characters of an error


@cli.experiment(
    cli.DEVICE,
    cli.option("--files", required=True, help="comma-separated"),
    table=lambda document: "\n".join(f"{key}: {n}" for key, n in document["counts"].items()),
    shown=("counts",),
    file="gpu-tests.json",
)
def run_gpu_tests(options: Namespace) -> dict[str, Any]:
    """GPU tests: run files of tests as ``make gpu`` does, and count.

        python -m eval gpu_tests --device cuda --files tests/engine/test_cuda.py

    On a GPU it is an error if a test fails, if a file has none, or if all of its tests are skipped.
    """
    files = cli.names_of(options.files)
    told = {file: run_tests(file) for file in files}
    if options.device != "cpu":
        bad = [file for file, one in told.items() if one["failures"] or not one["passed"]]
        if bad:
            errors = [line for file in bad for line in told[file]["failures"]] or ["no test ran"]
            raise ValueError(f"{', '.join(bad)}: {'; '.join(errors)}")
    counts = {
        key: sum(one[key] for one in told.values()) for key in ("passed", "skipped", "failed")
    }
    return result("gpu_tests", {"files": files}, device=options.device, counts=counts, files=told)


def run_tests(file: str) -> dict[str, Any]:
    """Run one file's tests in a process of its own; return counts, seconds and failures."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            *_OPTIONS,
            "-o",
            _ADDOPTS,
            f"--junitxml={report}",
        ]
        done = subprocess.run(
            [*command, file],
            cwd=ROOT,
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            check=False,
        )
        if not report.is_file():
            raise ValueError(f"pytest ended with {done.returncode} before it reported on {file}")
        return read_report(report)


def read_report(report: Path) -> dict[str, Any]:
    """Read pytest's report in JUnit's format."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [(one, bad) for one in cases for bad in one if bad.tag in ("failure", "error")]
    skipped = sum(one.find("skipped") is not None for one in cases)
    return {
        "passed": len(cases) - skipped - len({one.get("name") for one, _ in failed}),
        "skipped": skipped,
        "failed": len({one.get("name") for one, _ in failed}),
        "seconds": sum(float(one.get("time", 0)) for one in cases),
        "failures": [
            f"{one.get('name')}: {(bad.get('message') or '')[:_SHOWN]}" for one, bad in failed
        ],
    }
