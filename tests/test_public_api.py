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
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


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


def test_importing_the_package_loads_nothing_heavy():
    assert loaded_after("import ragaccel") == []


def test_the_light_half_loads_nothing_heavy():
    names = "Answer, Passage, Prompt, Reference, RAG, build_prompt, copied_spans, citations"
    assert loaded_after(f"from ragaccel import {names}") == []
    assert loaded_after("import ragaccel.answer, ragaccel.prompt") == []
    assert loaded_after("import ragaccel.frameworks.shared_model") == []


def test_the_version_is_that_of_the_project(request):
    text = (request.config.rootpath / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{ragaccel.__version__}"' in text
