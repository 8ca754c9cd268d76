"""What each layer may load: the loop and the drafters work where no torch is installed."""

import subprocess
import sys
from pathlib import Path

import pytest

import ragaccel

PACKAGE = Path(ragaccel.__path__[0])


def modules_of(folder):
    return [
        f"ragaccel.{folder}.{path.stem}" for path in sorted((PACKAGE / folder).glob("[!_]*.py"))
    ]


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        (modules_of("decoding"), ["torch", "transformers", "numpy", "faiss"]),
        (
            ["ragaccel.decoding.session", *modules_of("drafting")],
            ["torch", "transformers", "faiss"],
        ),
    ],
    ids=["decoding", "drafting"],
)
def test_light_layers_load_nothing_heavy(modules, forbidden):
    code = (
        f"import sys, importlib\n"
        f"for name in {modules}: importlib.import_module(name)\n"
        f"print([name for name in {forbidden} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert len(modules) > 3


OPTIONAL = ("triton", "faiss", "sentence_transformers", "accelerate", "peft", "lxml", "openpyxl")


@pytest.mark.slow
def test_no_module_needs_an_optional_library_to_be_imported():
    """But for Triton's own kernels: CPU wheels of torch bring no triton."""
    code = (
        "import sys, importlib, pkgutil, ragaccel\n"
        f"sys.modules.update(dict.fromkeys({OPTIONAL}))\n"
        "own = {'ragaccel.__main__', 'ragaccel.engine.triton_attention'}\n"
        "for module in pkgutil.walk_packages(ragaccel.__path__, 'ragaccel.'):\n"
        "    if module.name not in own: importlib.import_module(module.name)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
