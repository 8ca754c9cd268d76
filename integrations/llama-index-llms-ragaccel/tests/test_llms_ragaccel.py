import subprocess
import sys

from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.instrumentation import get_dispatcher

from llama_index.llms import ragaccel
from llama_index.llms.ragaccel import Ragaccel, RetrievalCollector


def test_class():
    names_of_base_classes = [b.__name__ for b in Ragaccel.__mro__]
    assert BaseLLM.__name__ in names_of_base_classes
    assert Ragaccel.class_name() == "Ragaccel"


def test_every_public_name_is_there():
    assert all(hasattr(ragaccel, name) for name in ragaccel.__all__)


def test_the_import_registers_one_collector():
    handlers = get_dispatcher().event_handlers
    assert sum(isinstance(handler, RetrievalCollector) for handler in handlers) == 1


def test_import_and_construction_load_nothing_heavy():
    code = (
        "import sys; from llama_index.llms.ragaccel import Ragaccel; Ragaccel(); "
        "Ragaccel('no/such-model').to_dict(); "
        "print(*{'torch', 'transformers', 'faiss', 'sentence_transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
