import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import ragaccel

PACKAGES = (
    "ragaccel",
    *(f"ragaccel.{stub.parent.name}" for stub in Path(ragaccel.__path__[0]).glob("*/__init__.pyi")),
)
HEAVY = ("torch", "transformers", "faiss", "sentence_transformers", "numpy")


def loaded_after(code):
    script = f"import sys\n{code}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def modules_of(folder):
    names = sorted((Path(ragaccel.__path__[0]) / folder).glob("[!_]*.py"))
    return [f"ragaccel.{folder}.{path.stem}" for path in names]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_that_a_package_offers_is_there(package):
    module = import_module(package)
    assert module.__all__
    for name in module.__all__:
        value = getattr(module, name)
        assert getattr(value, "__name__", name) == name or not isinstance(value, type)
    assert set(module.__all__) <= set(dir(module))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="NoSuchName"):
        _ = ragaccel.NoSuchName


@pytest.mark.parametrize(
    ("code", "loaded"),
    [
        ("import ragaccel", []),
        ("from ragaccel import Answer, Passage, Prompt, Reference, RAG, build_prompt", []),
        ("from ragaccel import copied_spans, citations", []),
        ("import ragaccel.answer, ragaccel.prompt", []),
        ("import ragaccel.frameworks.shared_model", []),
        (f"import {', '.join(modules_of('decoding'))}", []),
        (f"import {', '.join(modules_of('drafting'))}", ["numpy"]),
    ],
)
def test_what_an_import_loads(code, loaded):
    assert loaded_after(code) == loaded


def test_the_version_is_that_of_the_project(request):
    text = (request.config.rootpath / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{ragaccel.__version__}"' in text


OPTIONAL = ("triton", "faiss", "sentence_transformers", "accelerate", "peft", "lxml", "openpyxl")


@pytest.mark.slow
def test_no_module_needs_an_optional_library_to_be_imported():
    """But for Triton's own kernels: CPU wheels of torch bring no triton."""
    code = (
        "import sys, importlib, pkgutil, ragaccel\n"
        f"sys.modules.update(dict.fromkeys({OPTIONAL}))\n"
        "own = {'ragaccel.__main__', 'ragaccel.engine.triton_attention',\n"
        "       'ragaccel.engine.triton_layers'}\n"
        "for module in pkgutil.walk_packages(ragaccel.__path__, 'ragaccel.'):\n"
        "    if module.name not in own: importlib.import_module(module.name)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
