import subprocess
import sys

from langchain_core.tracers import context

import langchain_ragaccel
from langchain_ragaccel import callbacks as collecting

NAMES = [
    "ChatRagaccel",
    "RagaccelEmbeddings",
    "RagaccelLLM",
    "RagaccelRetriever",
    "RagaccelVectorStore",
    "ReferenceCollector",
    "__version__",
    "collecting_into",
]
HEAVY = ("torch", "transformers", "numpy", "faiss", "sentence_transformers", "numba")


def loaded_after(code):
    script = f"import sys\n{code}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_the_public_names_are_these():
    assert sorted(langchain_ragaccel.__all__) == NAMES
    assert set(NAMES) - {"__version__"} <= set(dir(langchain_ragaccel))
    assert all(getattr(langchain_ragaccel, name) for name in NAMES)


def test_importing_the_package_and_making_models_loads_nothing_heavy():
    before = set(loaded_after("from langchain_core.language_models import chat_models, llms"))
    code = (
        "from langchain_ragaccel import ChatRagaccel, RagaccelLLM\n"
        "for _ in range(10): ChatRagaccel(), RagaccelLLM(model='/nowhere')"
    )
    assert set(loaded_after(code)) == before


def test_the_collector_is_registered_once():
    hooks = [hook for hook in context._configure_hooks if hook[0] is collecting._COLLECTOR]
    assert len(hooks) == 1
    _, inheritable, *_ = hooks[0]
    assert inheritable


def test_the_version_is_that_of_the_project(request):
    text = (request.config.rootpath / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{langchain_ragaccel.__version__}"' in text
