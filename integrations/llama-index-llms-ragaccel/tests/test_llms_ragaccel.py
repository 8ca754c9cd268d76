import subprocess
import sys

from llama_index.core.instrumentation import get_dispatcher

from llama_index.llms import ragaccel
from llama_index.llms.ragaccel import RetrievalCollector


def test_every_public_name_is_there():
    assert all(hasattr(ragaccel, name) for name in ragaccel.__all__)


def test_the_import_registers_one_collector():
    handlers = get_dispatcher().event_handlers
    assert sum(isinstance(handler, RetrievalCollector) for handler in handlers) == 1


def test_the_retriever_imports_the_collector():
    code = (
        "import llama_index.retrievers.ragaccel as _; "
        "from llama_index.core.instrumentation import get_dispatcher as d; "
        "print(*[type(handler).__name__ for handler in d().event_handlers])"
    )
    assert "RetrievalCollector" in printed_by(code)


def printed_by(code):
    """Return the words that a new process prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_import_and_construction_load_nothing_heavy():
    code = (
        "import sys; from llama_index.llms.ragaccel import Ragaccel; Ragaccel(); "
        "Ragaccel('no/such-model').to_dict(); "
        "print(*{'torch', 'transformers', 'faiss', 'sentence_transformers'} & set(sys.modules))"
    )
    assert printed_by(code) == []
