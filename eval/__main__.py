"""Run an experiment: ``python -m eval RUN ...``; without a run, list all of them.

Only the module of the requested run is imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

RUNS: dict[str, dict[str, tuple[str, str]]] = {
    "Suites": {
        "quick": ("suites", "under ten minutes: the papers' tables by replay, a few rows timed"),
        "full": ("suites", "hours: every result and the report; resumes"),
        "gpu": ("suites", "everything that is asked of a data-centre GPU; resumes"),
        "gpu_first": ("suites", "the first half hour on a GPU: tests, passes, answers; resumes"),
        "report": ("report.build", "tables and pictures of all results on disk"),
    },
    "Speed and costs": {
        "matrix": ("experiments.speed", "many sets against transformers' decoders and ours"),
        "speed": ("experiments.speed", "any decoders on one set, recorded or own answers"),
        "batch": ("experiments.batch", "several answers together, one by one, and by generate"),
        "never_slower": ("experiments.speed", "what drafting costs where nothing can be copied"),
        "roofline": ("experiments.cost", "passes against the memory's bandwidth"),
        "host_step": ("experiments.host_step", "the host's work a step, beside a simulated GPU"),
        "gpu_tests": ("experiments.gpu_tests", "test files on a GPU, counted"),
        "memory": ("experiments.memory", "how a process grows while it answers"),
        "peak_memory": ("experiments.memory", "the most memory that each decoder needs"),
        "vllm_speed": (
            "experiments.vllm_speed",
            "inside vLLM: its own drafters and ours, in turns",
        ),
        "cpu_peers": ("experiments.cpu_peers", "beside llama.cpp, OpenVINO and vLLM, in turns"),
        "cpu_step": ("experiments.cpu_step", "a plain step on a CPU beside llama.cpp's; its parts"),
        "indexing": ("experiments.indexing", "index a folder: new, unchanged, edited; query it"),
        "rag_speedup": ("experiments.rag", "from a question to the last word of its answer"),
        "frameworks": ("experiments.frameworks", "chains of LangChain and LlamaIndex"),
        "registry": ("experiments.frameworks", "registered texts, found again in prompts"),
    },
    "The same answers": {
        "generation": ("experiments.generation", "a model's own answers by kind of prompt"),
        "lossless": ("experiments.generation", "answers against generate, token by token"),
        "exactness": ("experiments.generation", "which modes agree, and what exact mode costs"),
        "architectures": (
            "experiments.architectures",
            "every decoder-only family, against generate",
        ),
    },
    "Drafters, replayed without a model": {
        "replay": ("experiments.replay", "tokens a pass of any drafter on recorded answers"),
        "peers": ("experiments.peers", "our drafts beside the rules of vLLM, SGLang, llama.cpp"),
        "ablation": ("experiments.replay", "what each idea and source of the trie is worth"),
        "reliability": ("experiments.replay", "estimated chances against what was accepted"),
        "drafting": ("experiments.drafting", "how long a draft takes"),
        "fit_evidence": ("experiments.drafting", "fit what matches are worth to recorded answers"),
    },
    "Retrieval and answers": {
        "quality": ("experiments.retrieval", "hit rate, MRR, nDCG; the reader's F1"),
        "reader": ("experiments.answers", "the bundled reader on unseen documents"),
        "questions": ("experiments.answers", "the whole chain on the demo's questions"),
        "first_screen": ("experiments.answers", "what 24 lines show: right, misleading, refused"),
        "quotes": ("experiments.answers", "which of the reader's quotes are shown"),
    },
    "The papers' experiments": {
        "llma_tables": ("papers.llma", "LLMA's Tables 1 and 2"),
        "llma_sweep": ("papers.llma", "LLMA's Figures 4 and 5: n and k"),
        "llma_dialogue": ("papers.llma", "LLMA over several turns"),
        "lookahead_sweep": ("papers.lookahead", "Lookahead: lengths of drafts and branches"),
        "lookahead_branches": ("papers.lookahead", "Lookahead: one branch, several, a merged tree"),
        "lookahead_memory": ("papers.lookahead", "Lookahead: its trie cold and warm"),
        "space_reader": ("papers.space", "SPACE on the bundled reader"),
        "space_curves": ("papers.space", "SPACE while an adapter is trained"),
    },
    "Robustness (exit code 1 if a promise is broken)": {
        "fuzz": ("robustness.fuzz", "broken documents, indexes, models, settings, encodings"),
        "kills": ("robustness.kills", "processes killed in the middle of writing"),
        "tenants": ("robustness.tenants", "50 tenants at one time, through both frameworks"),
    },
}
"""{heading: {run: (module that defines ``run_NAME``, line of help)}}."""


def main(arguments: Sequence[str]) -> Any:
    """Run what the first argument names with the other arguments; without any, list all runs."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(listed())
        return 0
    name, *rest = arguments
    run = find_run(name)
    sys.argv = [f"python -m eval {name}", *rest]
    return run()


def find_run(name: str) -> Callable[..., Any]:
    """Import a run's module and return its function."""
    modules = {key: module for runs in RUNS.values() for key, (module, _) in runs.items()}
    if name not in modules:
        sys.exit(f"eval: no run {name!r}: `python -m eval` lists those there are")
    run: Callable[..., Any] = getattr(
        importlib.import_module(f"eval.{modules[name]}"), f"run_{name}"
    )
    return run


def listed() -> str:
    """Return the list of all runs: headings, and one line for each run."""
    width = max(len(name) for runs in RUNS.values() for name in runs)
    lines = ["usage: python -m eval RUN [OPTIONS]; each tells its options with --help"]
    for heading, runs in RUNS.items():
        lines += ["", heading]
        lines += [f"  {name:{width}}  {about}" for name, (_, about) in runs.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
