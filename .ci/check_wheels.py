"""Wheels, checked where nothing else is installed: light to import, and able to answer."""

import re
import subprocess
import sys
from importlib.metadata import distribution, metadata
from statistics import median

HEAVY = ("torch", "transformers", "faiss", "sentence_transformers", "numba", "pandas")
FRAMEWORK_OF = {
    # what the first call of any model of LangChain imports
    "langchain_ragaccel": "langchain_core.language_models, langchain_core.tracers.context",
    "llama_index.llms.ragaccel": "llama_index.core.llms, llama_index.core.instrumentation",
    "vllm_ragaccel": "importlib",  # vLLM imports it, not the other way round
}
MAX_SECONDS = 0.5  # of the processor, beyond the framework's own import
CONTEXT = "The lamp burns rapeseed oil. Its keeper trims the wick at dusk, and again at midnight."
PROMPT = f"{CONTEXT}\n\nQuestion: When does the keeper trim the wick?"


def run(code):
    """Run some Python in a process of its own; return what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def seconds_of_import(module, framework):
    """Return the processor's time for an import once the framework's own modules are there."""
    clock = "time.process_time()"
    code = f"import time, {framework}\nbegan = {clock}\nimport {module}\nprint({clock} - began)"
    return median(float(run(code)) for _ in range(5))


def main():
    """Check the metadata, the imports, and an answer through each framework."""
    for name in ("ragaccel", "langchain-ragaccel", "llama-index-llms-ragaccel", "vllm-ragaccel"):
        files = [str(file) for file in distribution(name).files]
        assert any(file.endswith("py.typed") for file in files), f"{name} says nothing of its types"
        assert not any(file.startswith(("tests", "demos", "eval", "src")) for file in files), name
        if name == "ragaccel":
            assert any(file.endswith("sentence_ranker/adapter.safetensors") for file in files)
        assert "llama_index/__init__.py" not in files
        assert "llama_index/llms/__init__.py" not in files
    for module, framework in FRAMEWORK_OF.items():
        loaded = run(f"import sys, {module}\nprint(*[m for m in {HEAVY} if m in sys.modules])")
        assert not loaded, f"import {module} loads {loaded}"
        seconds = seconds_of_import(module, framework)
        print(f"import {module}: {seconds:.3f} s beyond its framework")
        assert seconds < MAX_SECONDS
    print(answers())
    print(f"{examples()} examples of the packages' pages run")
    assert drafting_is_compiled(), "token trees cannot be drafted here"
    assert drafts_of_llama_cpp() == [3, 1, 2]
    print("wheels: 4 passed, 0 failed")


def answers():
    """What both say, with the passage known to them as a retriever's would be."""
    from langchain_ragaccel import ChatRagaccel
    from llama_index.llms.ragaccel import Ragaccel

    from ragaccel import Passage, reference_scope

    with reference_scope() as scope:
        scope.register(Passage("lamp", CONTEXT))
        said = ChatRagaccel().invoke(PROMPT)
        completed = Ragaccel().complete(PROMPT)
    spans = said.response_metadata["ragaccel"]["copied_spans"]
    assert "midnight" in said.text, said.text
    assert completed.text == said.text
    assert [span["passage_id"] for span in spans] == ["lamp"]
    return said.text


def examples():
    """Run what the pages on the index show, but for what needs the extra ``retrieval``."""
    blocks = [
        block
        for name in ("langchain-ragaccel", "llama-index-llms-ragaccel")
        for block in re.findall(r"```python\n(.*?)```", metadata(name).get_payload(), re.DOTALL)
        if "Embedding" not in block
    ]
    assert len(blocks) >= 4
    assert all(run(block) for block in blocks)
    return len(blocks)


def drafts_of_llama_cpp():
    """What is drafted after a repeated text, without llama.cpp or vLLM."""
    import numpy as np
    from vllm_ragaccel import RagaccelDraft

    draft, ids = RagaccelDraft(3), np.array([1, 2, 3] * 12, np.intc)
    return [draft(ids[:size]).tolist() for size in range(29, 33)][-1]  # the first steps are plain


def drafting_is_compiled():
    """Wait for what compiles the drafting: it writes into the environment, removed next."""
    from ragaccel.drafting.policy import JIT_WARMUP

    return JIT_WARMUP.wait(seconds=300)


if __name__ == "__main__":
    main()
