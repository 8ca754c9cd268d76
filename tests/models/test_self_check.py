"""Models that cannot be decoded exactly are refused at loading, by name and cause.

What begins past the few tokens of the self-check is checked on a copy with short lengths.
"""

import importlib
import json
import linecache
import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partialmethod, wraps
from inspect import signature

import pytest
import torch
from decoding import run_together
from fakes import RandomDrafter
from tiny_models import SIZES, VOCAB, generate, make_tiny_model, random_prompt
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DynamicCache,
    LlamaForCausalLM,
    LlamaModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ragaccel.decoding import Request
from ragaccel.engine import Engine, warm_up_passes
from ragaccel.errors import UnsupportedModelError
from ragaccel.models import (
    HuggingFaceModel,
    find_lengths,
    make_small_copy,
    refuse_by_config,
    self_check as length_check,
    support as small_copy,
)
from ragaccel.models.support import cache_keyword

FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA4 = {"head_dim": 8, "layer_types": [FULL] * 2, "no_rope_layers": [1, 0]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "layer_types": [SLIDING, FULL],
    "sliding_window": 40,
}
GEMMA3N = {
    "num_kv_shared_layers": 0,
    "intermediate_size": [64] * 2,
    "activation_sparsity_pattern": [0.0] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "laurel_rank": 8,
    "head_dim": 8,
    "layer_types": [SLIDING, FULL],
    "sliding_window": 40,
}


@pytest.fixture(autouse=True)
def no_findings_are_kept(monkeypatch):
    monkeypatch.setattr(length_check, "_KNOWN_FINDINGS", {})


def make(kind, attention=None, **fields):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**SIZES, **fields})
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.eval().double()


def gpt_neo(**fields):
    kinds = [[["global", "local"], 1]]
    return make("gpt_neo", num_layers=2, num_heads=4, attention_types=kinds, **fields)


def mamba_free(kind, **fields):
    return make(kind, layer_types=[FULL] * 2, **fields)


def deaf_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Attend causally by slot, whatever the mask says."""
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    before = key.shape[2] - query.shape[2]
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(before)
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling
    )
    return output.transpose(1, 2).contiguous(), None


def deaf(dtype):
    AttentionInterface.register("deaf", deaf_attention)
    model = make_tiny_model("llama", dtype)
    model.set_attn_implementation("deaf")
    return model


def counting():
    """A model that places rows by itself."""
    model = make_tiny_model("llama")
    forward = model.forward

    @wraps(forward)
    def by_count(*args, position_ids=None, **kwargs):
        return forward(*args, **kwargs)

    model.forward = by_count
    return model


class Partial(LlamaForCausalLM):
    forward = partialmethod(LlamaForCausalLM.forward, use_cache=True)


def test_the_cache_has_the_name_that_the_outermost_pass_gives_it():
    model = make_tiny_model("llama")
    known, forward = cache_keyword(model), model.forward
    assert known == cache_keyword(Partial(model.config))

    def renaming(input_ids, attention_mask=None, position_ids=None, past_key_values=None, **kw):
        given = {} if past_key_values is None else {known: past_key_values}
        return forward(input_ids, attention_mask, position_ids, **given, **kw)

    model.forward = renaming
    assert cache_keyword(model) == "past_key_values"
    HuggingFaceModel(model)


def leaking():
    """A layer that keeps the last row of the previous pass, as convolutions and recurrences do."""
    model = make_tiny_model("llama")
    last_row = torch.zeros(1, 1, 32, dtype=torch.float64)
    norm = model.model.norm.forward

    def leak(hidden):
        nonlocal last_row
        output = norm(hidden)
        before = torch.cat((last_row, output[:, :-1]), dim=1)
        last_row = output[:, -1:]
        return output + before

    model.model.norm.forward = leak
    return model


def rounding():
    """A quantized model that deviates from itself."""
    model = make_tiny_model("llama")
    model.model.norm.register_forward_hook(lambda *given: given[-1] + given[-1].shape[1])
    model.quantization_method = "torchao"
    return model


def flash():
    model = make_tiny_model("llama")
    model.config._attn_implementation = "flash_attention_2"
    return model


REFUSED = {
    "mask": (lambda: deaf(torch.float64), r"a tree \(does its attention ignore"),
    "mask float32": (lambda: deaf(torch.float32), r"a tree \(does its attention ignore"),
    "mask bfloat16": (lambda: deaf(torch.bfloat16), r"a tree \(does its attention ignore"),
    "positions": (counting, "LlamaForCausalLM deviates from plain"),
    "state": (leaking, "."),
    "bert": (lambda: make("bert"), "not a causal model"),
    "rounding": (rounding, "its quantization rounds a row differently"),
    "flash": (flash, "attn_implementation='sdpa'"),
    "no head": (lambda: LlamaModel(CONFIG_MAPPING["llama"](**SIZES)), "no language model head"),
    "mamba": (lambda: make("mamba"), "recurrent"),
    "bloom": (lambda: make("bloom"), "does not take position_ids"),
    "chunks": (
        lambda: make("llama4_text", head_dim=8, attention_chunk_size=16),
        "chunked_attention layers",
    ),
    "minimax": (lambda: make("minimax"), "linear_attention layers"),
    "own cache": (
        lambda: mamba_free("minimax", head_dim=8, num_local_experts=4), "uses cache of its own"
    ),
    "alibi": (lambda: make("falcon", alibi=True), "ALiBi"),
    "gpt_neo": (lambda: gpt_neo(window_size=64), "verifying a tree.*window_size=64"),
    "llama4": (
        lambda: make("llama4_text", **LLAMA4, floor_scale=64, attn_scale=0.5),
        "verifying a tree.*floor_scale=64",
    ),
    "doge": (lambda: make("doge", keep_window_size=64), "not a causal model.*keep_window_size=64"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_decoded_exactly_are_refused_by_their_cause(name):
    build, cause = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=cause):
        HuggingFaceModel(build())


def test_llm_int8_by_checkpoint_or_by_argument():
    config = CONFIG_MAPPING["llama"](**SIZES)
    eight, four = (BitsAndBytesConfig(**{f"load_in_{bits}bit": True}) for bits in (8, 4))
    refuse_by_config(config, {"quantization_config": four})
    for kwargs in ({"quantization_config": eight}, {"load_in_8bit": True}):
        with pytest.raises(UnsupportedModelError, match=r"LLM\.int8.*load it in 4 bits"):
            refuse_by_config(config, kwargs)
    config.quantization_config = eight.to_dict()
    with pytest.raises(UnsupportedModelError, match=r"LLM\.int8"):
        refuse_by_config(config, {})


@pytest.mark.parametrize("kind", ["llama", "granite", "cohere", "stablelm", "gpt_neox", "gpt2"])
def test_a_window_that_the_modeling_code_does_not_know(kind):
    with pytest.raises(UnsupportedModelError, match=r"ignores the sliding_window=64.*= None"):
        HuggingFaceModel(make(kind, sliding_window=64))
    HuggingFaceModel(make(kind, sliding_window=None))


CACHE = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"


class OwnCache(LlamaForCausalLM):
    """Keeps whole caches, whatever window a config names."""

    @wraps(LlamaForCausalLM.forward)
    def forward(self, input_ids=None, use_cache=None, **kwargs):
        if kwargs.get(CACHE) is None and use_cache:
            kwargs[CACHE] = DynamicCache()
        return super().forward(input_ids, use_cache=use_cache, **kwargs)


def test_a_window_is_left_out_where_the_model_is_right_without_it():
    torch.manual_seed(0)
    model = OwnCache(CONFIG_MAPPING["llama"](**SIZES, sliding_window=40)).eval().double()
    target = HuggingFaceModel(model)
    assert target.architecture.windows == (None, None)
    prompt = random_prompt(60)
    expected = generate(model, prompt, 8, **{CACHE: DynamicCache()})
    assert answers(target, [prompt], 8) == [expected]


class Mixing(LlamaForCausalLM):
    """Computes differently if a pass returns to the beginning of another sequence."""

    @wraps(LlamaForCausalLM.forward)
    def forward(self, input_ids=None, position_ids=None, **kwargs):
        output = super().forward(input_ids, position_ids=position_ids, **kwargs)
        if position_ids is not None and (position_ids.diff() < -9).any():
            output.logits = output.logits.roll(1, -1)
        return output


def test_rows_that_depend_on_other_sequences_have_passes_of_their_own():
    torch.manual_seed(0)
    model = Mixing(CONFIG_MAPPING["llama"](**SIZES)).eval().double()
    target = HuggingFaceModel(model)
    assert not target.batchable
    assert "depends on the rows of other requests" in target.unbatchable_reason
    prompts = [random_prompt(5, 1), random_prompt(60, 2)]
    assert answers(target, prompts, 8) == [generate(model, prompt, 8) for prompt in prompts]


def answers(target, prompts, count):
    """Decode greedily with draft tokens, all sequences in one batch."""
    requests = [Request(prompt, max_new_tokens=count) for prompt in prompts]
    drafters = [RandomDrafter(3, VOCAB) for _ in prompts]
    return run_together(Engine(target, prefill_chunk=16), requests, drafters, 12)


ACCEPTED = {
    "gemma4": lambda: make("gemma4_text", **GEMMA4),
    "gemma3n": lambda: make("gemma3n_text", **GEMMA3N),
    "granite": lambda: mamba_free("granitemoehybrid", num_local_experts=4, mamba_n_heads=4),
    "qwen3_next": lambda: mamba_free("qwen3_next", head_dim=8, **EXPERTS),
    # Without position_ids this model counts from after its padding token.
    "roberta": lambda: make("roberta", is_decoder=True, pad_token_id=1),
    # These compute parts in float32.
    "llama4": lambda: make("llama4_text", **LLAMA4, attn_temperature_tuning=False),
    "gptj": lambda: make("gptj", rotary_dim=4),
    "gpt_neo": lambda: gpt_neo(window_size=256),
    "whole window": lambda: make("llama", sliding_window=256, max_position_embeddings=256),
    "short": lambda: gpt_neo(window_size=96, max_position_embeddings=96),
    "gemma2": lambda: make("gemma2", "eager", head_dim=8),
    "vaultgemma": lambda: make("vaultgemma", "eager", head_dim=8),
}


@pytest.mark.parametrize("kind", ACCEPTED)
def test_models_are_accepted_that_share_nothing_or_attend_only(kind):
    model, prompt = ACCEPTED[kind](), random_prompt(60)
    assert answers(HuggingFaceModel(model), [prompt], 8) == [generate(model, prompt, 8)]


def test_compiled_models_run_uncompiled():
    model = make("llama")
    target = HuggingFaceModel(torch.compile(model, backend="eager"))
    assert target.model is model
    prompt = random_prompt(20)
    assert answers(target, [prompt], 8) == [generate(model, prompt, 8)]


def test_frequencies_that_change_with_length_are_not_outgrown():
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    assert HuggingFaceModel(make_tiny_model("llama", rope_parameters=dynamic)).max_positions == 256
    long = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    }
    model = make_tiny_model("phi3", original_max_position_embeddings=64, rope_parameters=long)
    assert HuggingFaceModel(model).max_positions == 64


@pytest.mark.parametrize("positions", [16, 96, 1024])
def test_short_contexts_are_warmed_up(positions):
    model = gpt_neo(window_size=positions, max_position_embeddings=positions)
    warm_up_passes(Engine(HuggingFaceModel(model, self_check=positions > 30)), context=1024)


def test_lengths_are_found_by_name():
    assert find_lengths(CONFIG_MAPPING["llama"]()) == {}
    for kind, name in {
        "modernbert-decoder": "local_attention",
        "phi3": "original_max_position_embeddings",
        "deepseek_v32": "index_topk",
        "gpt_oss": "original_max_position_embeddings",
        "recurrent_gemma": "attention_window_size",
    }.items():
        fields = {"max_position_embeddings": 10**7} if kind != "recurrent_gemma" else {}
        assert name in find_lengths(CONFIG_MAPPING[kind](**fields)), kind


def test_a_copy_has_a_layer_of_each_kind_and_short_lengths():
    kinds = [SLIDING] * 5 + [FULL]
    fields = {"head_dim": 8, "sliding_window": 60, "layer_types": kinds, "num_hidden_layers": 6}
    copy = make_small_copy(make("gemma3_text", **fields), 1)
    assert set(copy.config.layer_types) == {SLIDING, FULL}
    assert copy.config.sliding_window == small_copy.SHORT_LENGTH
    assert len(copy.model.layers) < 6


def test_nothing_of_the_caller_is_changed():
    model = make("mistral", sliding_window=40)
    model.generation_config.eos_token_id = 5
    said, state = model.config.to_dict(), torch.random.get_rng_state()
    known, weights = set(AttentionInterface().keys()), model.model.norm.weight.clone()
    torch.set_default_dtype(torch.float64)
    try:
        HuggingFaceModel(model)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert model.config.to_dict() == said
    assert torch.equal(torch.random.get_rng_state(), state)
    assert set(AttentionInterface().keys()) == known
    assert torch.equal(model.model.norm.weight, weights)


def test_findings_are_kept_by_config_and_class(tmp_path, monkeypatch):
    HuggingFaceModel(make("llama"), check_folder=tmp_path)
    with pytest.raises(UnsupportedModelError) as first:
        HuggingFaceModel(make("llama", sliding_window=64), check_folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(length_check, "_KNOWN_FINDINGS", {})
    monkeypatch.setattr(length_check, "make_small_copy", None)  # nothing is checked again
    HuggingFaceModel(make("llama"), check_folder=tmp_path)
    with pytest.raises(UnsupportedModelError) as second:
        HuggingFaceModel(make("llama", sliding_window=64), check_folder=tmp_path)
    assert str(second.value) == str(first.value)
    with pytest.raises(TypeError):
        HuggingFaceModel(make("llama", rms_norm_eps=1e-3), check_folder=tmp_path)


def checked(model, folder, monkeypatch):
    """Whether a model is checked, by what is kept in a folder alone."""
    copies = []

    def make_copy(*args, **kwargs):
        copies.append(1)
        return make_small_copy(*args, **kwargs)

    monkeypatch.setattr(length_check, "_KNOWN_FINDINGS", {})
    monkeypatch.setattr(length_check, "make_small_copy", make_copy)
    HuggingFaceModel(model, check_folder=folder)
    return bool(copies)


def test_a_class_whose_forward_method_was_replaced_is_checked_each_time(tmp_path, monkeypatch):
    model = make("llama")
    assert checked(model, tmp_path, monkeypatch)
    assert not checked(model, tmp_path, monkeypatch)
    kind = type(model.model.layers[0].self_attn)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *args, **kw: forward(self, *args, **kw))
    assert checked(model, tmp_path, monkeypatch)
    assert checked(model, tmp_path, monkeypatch)
    monkeypatch.setattr(kind, "forward", forward)
    assert not checked(model, tmp_path, monkeypatch)


def test_changed_code_of_a_part_is_checked_anew(tmp_path, monkeypatch):
    written = tmp_path / "own_parts.py"
    monkeypatch.syspath_prepend(tmp_path)

    def with_own_part(factor):
        written.write_text(
            "import torch\n"
            "class Norm(torch.nn.Module):\n"
            f"    def forward(self, hidden):\n        return {factor} * hidden\n"
        )
        sys.modules.pop("own_parts", None)
        importlib.invalidate_caches()
        linecache.clearcache()
        model = make("llama")
        model.model.norm = importlib.import_module("own_parts").Norm()
        return model

    assert checked(with_own_part(1.25), tmp_path, monkeypatch)
    assert not checked(with_own_part(1.25), tmp_path, monkeypatch)
    assert checked(with_own_part(1.5), tmp_path, monkeypatch)


def test_loading_at_once_leaves_the_random_state_as_it_is():
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**SIZES))
    state = torch.random.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: make_small_copy(model, seed), range(24)))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_damaged_findings_are_checked_anew(tmp_path, monkeypatch):
    model = make("llama", sliding_window=64)

    def refused():
        monkeypatch.setattr(length_check, "_KNOWN_FINDINGS", {})
        with pytest.raises(UnsupportedModelError, match="ignores the sliding_window"):
            HuggingFaceModel(model, check_folder=tmp_path)

    refused()
    (file,) = tmp_path.iterdir()
    for damaged in (b"", b"[]", b'{"format": "another"}', b'{"found": {"has_window": 1}}', b"\xff"):
        file.write_bytes(damaged)
        refused()
        assert json.loads(file.read_text())["found"]["refusal"]
    file.unlink()
    file.mkdir()
    refused()


def test_what_cannot_be_copied_is_used_up_to_its_first_length(monkeypatch, caplog):
    def refuse(*_, **__):
        raise small_copy.NoCopyError("no")

    monkeypatch.setattr(length_check, "make_small_copy", refuse)
    with caplog.at_level(logging.WARNING, "ragaccel"):
        assert HuggingFaceModel(make("mistral", sliding_window=40)).max_positions == 40
    assert "is limited to 40 tokens" in caplog.text
    assert HuggingFaceModel(make("llama")).max_positions == 256
