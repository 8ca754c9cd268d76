"""Real engines of vLLM over one tiny model, and the figures of every check."""

import json
import os
import time
from functools import cache
from pathlib import Path

import pytest

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

MAX_DRAFT = 8
SETTINGS = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "enforce_eager": True,
    "seed": 0,
}
DRAFTS = {
    "method": "custom_class",
    "model": "vllm_ragaccel.RagaccelProposer",
    "num_speculative_tokens": MAX_DRAFT,
}
REPAIRED = ["expand_batch_to_tokens", "register_triton_kernel_overrides"]  # see repair_vllm
FIGURES = {}
ENGINES = []  # kept to the end: one that goes ends the others
STARTED = time.perf_counter()


def pytest_addoption(parser):
    parser.addoption("--result", help="JSON file for the figures of the checks")


def pytest_configure(config):
    config.addinivalue_line("markers", "vllm: needs vLLM and its environment; `make vllm`")


def pytest_sessionfinish(session, exitstatus):
    out = session.config.getoption("result", default=None)
    if out and FIGURES:
        write_result(Path(out), failed=session.testsfailed)


def write_result(out, failed):
    """Write the figures as ``python -m eval`` writes a result."""
    from importlib.metadata import version

    from eval.runner import result

    shown = {**SETTINGS, "speculative_config": DRAFTS, "repaired in vLLM": REPAIRED}
    document = result("vllm-checks", shown, failed=failed, checks=FIGURES)
    document["machine"]["vllm-cpu"] = version("vllm-cpu")
    document["run"]["command"] = f"make vllm RESULT={out}"
    document["run"]["seconds"] = round(time.perf_counter() - STARTED)
    out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def repair_vllm():
    """Replace two functions of vLLM 0.32 that fail on CPUs; GPUs take others.

    - ``expand_batch_to_tokens`` returns uninitialized memory: it gives its kernel a copy of the
      output. Draft tokens, whoever drafts them, are sampled at a temperature that nobody chose.
    - ``register_triton_kernel_overrides`` raises AttributeError where llvmlite is loaded, so in
      every engine behind the first one of a process.
    """
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    def expand(values, ends, num_tokens, replace_from=0, replace_to=0):
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        replaced = torch.where(values == replace_from, replace_to, values)
        return replaced.repeat_interleave(counts, output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = expand
    register_once = cache(current_platform.register_triton_kernel_overrides)
    type(current_platform).register_triton_kernel_overrides = staticmethod(register_once)


class Counters:
    """What vLLM counts of one engine; its own registry knows only the engine made last."""

    def __init__(self):
        self.drafted = self.accepted = self.preemptions = self.prefix_cache_hits = 0

    def record(self, scheduler_stats, iteration_stats, **_unused):
        drafts = scheduler_stats.spec_decoding_stats
        if drafts is not None:
            self.drafted += drafts.num_draft_tokens
            self.accepted += drafts.num_accepted_tokens
        self.prefix_cache_hits += scheduler_stats.prefix_cache_stats.hits
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs

    def log(self):
        """Print nothing."""


class Engine:
    """One ``vllm.LLM`` and its counters."""

    def __init__(self, model, drafts=False, **settings):
        from vllm import LLM

        speculative = {"speculative_config": DRAFTS} if drafts else {}
        settings = {**SETTINGS, **settings, **speculative}
        self.llm = LLM(str(model), disable_log_stats=False, **settings)
        self.counters = self.llm.llm_engine.logger_manager = Counters()
        ENGINES.append(self)

    def generate(self, prompts, params):
        """Return the completions of prompts given as token ids."""
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(given, params, use_tqdm=False)
        return [output.outputs[0] for output in outputs]

    def tokens(self, prompts, params):
        return [list(one.token_ids) for one in self.generate(prompts, params)]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    from tiny_llama import save

    repair_vllm()
    return save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def plain(model):
    return Engine(model)


@pytest.fixture(scope="session")
def drafting(model):
    return Engine(model, drafts=True)


@pytest.fixture(scope="session")
def reproducible(model):
    """An engine whose drafts depend on the tokens of their request alone."""
    return Engine(model, drafts=True, additional_config={"ragaccel": {"reproducible": True}})


@pytest.fixture(scope="session")
def chunked(model):
    """An engine that reads prompts in parts, beside the steps of other requests."""
    return Engine(model, drafts=True, max_num_batched_tokens=256)


@pytest.fixture(scope="session")
def crowded(model):
    """An engine whose KV cache holds 1,024 tokens for its 16 requests."""
    small = {"block_size": 32, "num_gpu_blocks_override": 32, "enable_prefix_caching": False}
    return Engine(model, drafts=True, max_num_batched_tokens=256, **small)


@pytest.fixture
def figures(request):
    """Return the figures of a check, which the result has under the test's name."""
    name = request.node.name.removeprefix("test_").replace("_", " ")
    return FIGURES.setdefault(name, {})
