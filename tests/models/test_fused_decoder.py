"""Passes of fused layers on a CPU: the modules' logits but for rounding, and the same answers."""

import logging
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from itertools import accumulate, chain

import pytest
import torch
from decoding import OracleDrafter, decode, run_together
from fakes import RandomDrafter
from space_models import random_adapter
from tiny_models import generate, make_tiny_model, random_prompt, skip_without_products_of
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ragaccel import ConfigurationError
from ragaccel.decoding import DraftTree, Request, Sampling, attach_masks
from ragaccel.engine import Engine, bfloat16
from ragaccel.engine.kv_cache import KVCache
from ragaccel.engine.model_input import causal_rows, concat_rows, tree_rows
from ragaccel.models import HuggingFaceModel, fused_decoder, round_to_int8

BIG = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 512}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}
FAMILIES = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),  # it scales cosines and sines
    "llama, dynamic NTK": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 32}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {}),
    "phi3": ("phi3", {}),
    "qwen2": ("qwen2", {}),
    "qwen2-sliding": ("qwen2-sliding", {}),
    "qwen3": ("qwen3", {"head_dim": 64}),
    "qwen3-sliding": ("qwen3", {"head_dim": 64, **WINDOWS}),
}
OTHERS = ("gemma2", "gemma3", "gpt2")
DTYPES = [torch.float32, torch.bfloat16]
PROMPT = random_prompt(20)


def make_model(family, dtype=torch.float32):
    name, changes = FAMILIES.get(family, (family, {}))
    return make_tiny_model(name, dtype, **{**BIG, **changes})


def fused(model, **options):
    skip_without_products_of(model.dtype)
    target = HuggingFaceModel(model, pack=True, **options)
    assert target.is_fused
    return target


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_generate(family):
    model = make_model(family)
    limit = 10 if "NTK" in family else 60  # generate's own cache keeps other frequencies past 32
    expected = generate(model, PROMPT, limit)
    engine = Engine(fused(model))
    for drafter in (OracleDrafter(PROMPT, expected), RandomDrafter(1, 97), RandomDrafter(2, 97)):
        assert decode(engine, Request(PROMPT, max_new_tokens=limit), drafter) == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_those_of_the_modules_but_for_rounding(family, dtype):
    target = fused(make_model(family, dtype))
    for length in (1, 7, 19, 80):  # with padding and without
        found, expected = (logits(target, length, is_fused) for is_fused in (True, False))
        share = (8 if dtype == torch.bfloat16 else 512) * torch.finfo(dtype).eps
        torch.testing.assert_close(
            found, expected, rtol=0, atol=share * float(expected.abs().max())
        )


def logits(target, length, is_fused):
    kept, cache = target._fused, target.new_cache(None, None)
    target._fused = kept if is_fused else None
    try:
        with torch.inference_mode():
            target.forward(causal_rows(random_prompt(12, 1), cache), 1)
            cache.keep(range(12))
            return target.forward(causal_rows(random_prompt(length, 2), cache), length).clone()
    finally:
        target._fused = kept


@pytest.mark.parametrize("family", ["llama", "llama with biases", "qwen3"])
def test_bfloat16_rows_have_the_same_bits_in_passes_of_any_width(family):
    """So drafts change no token there; those of trees are compared in the engine's tests."""
    if bfloat16.kernels("products") is None:
        pytest.skip("nothing is compiled for bfloat16 here")
    name, changes = FAMILIES[family]
    target = fused(make_tiny_model(name, torch.bfloat16, **BIG, **changes, vocab_size=320))
    tokens, found = random_prompt(180), []
    for widths in ([180], [1, 2, 5, 8, 16, 17, 31, 100], [64, 1, 1, 66, 48]):
        cache, rows = target.new_cache(None, None), []
        with torch.inference_mode():
            for start, width in zip(accumulate(widths, initial=0), widths, strict=False):
                own = causal_rows(tokens[start : start + width], cache)
                rows.append(target.forward(own, width).clone())
                cache.keep(range(width))
        found.append(torch.cat(rows))
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_rotations_round_as_the_modules_do(dtype):
    torch.manual_seed(5)
    model = make_model("qwen3", dtype)
    norm, rotary = model.model.norm, model.model.rotary_emb
    with torch.inference_mode():
        norm.weight.normal_(1.0, 0.3)
        states = torch.randn(9, 256).to(dtype) * 7.0
        found = fused_decoder._norm_of(norm).apply(states)
        heads = torch.randn(9, 6, 64).to(dtype)
        angles = rotary(heads, torch.arange(40, 49)[None])
        rotated = fused_decoder._rotate(heads, *fused_decoder._angles(*angles)).transpose(0, 1)
        expected = apply_rotary_pos_emb(*[heads.transpose(0, 1)[None]] * 2, *angles)[0][0]
    if dtype == torch.bfloat16:
        assert torch.equal(rotated, expected)
        assert (found != norm(states)).float().mean() < 1e-3  # where the sums' order decides
    torch.testing.assert_close(rotated, expected)
    torch.testing.assert_close(found, norm(states))


def skip_without_compiled_layers():
    if bfloat16.kernels("layers") is None:
        pytest.skip("nothing is compiled for bfloat16 here")


BRANCHING = DraftTree((5, 6, 7, 8, 9), (-1, 0, 0, 1, 2), (1.0,) * 5, ((),) * 5)


@pytest.mark.parametrize("way", ["_attend_by_kernels", "_run_compiled"])
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize(
    "family", ["llama", "mistral", "llama with biases", "phi3", "qwen2-sliding", "qwen3"]
)
def test_kernels_give_what_torch_does_to_the_last_bit(family, is_int8, way, monkeypatch):
    """So an answer may begin before they are compiled, and go on with them."""
    if way == "_run_compiled" or is_int8:
        skip_without_compiled_layers()
    assert fused_decoder.KERNELS_WARMUP.wait(120)
    model, passes = make_model(family, torch.bfloat16), []
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.normal_(1.0, 0.3, generator=generator)
    if is_int8:
        round_to_int8(model)
    target = fused(model)
    found = getattr(target._fused, way)
    monkeypatch.setattr(
        target._fused, way, lambda *given: passes.append(len(given)) or found(*given)
    )
    if way == "_attend_by_kernels":
        monkeypatch.setattr(target._fused, "_compiled_layers", None)

    def logits_of(sizes):
        """Of passes one after another, of one sequence and of two."""
        caches, logits = [KVCache() for _ in range(2)], []
        for size in sizes:
            for cache in caches:
                logits.append(target.forward(causal_rows(random_prompt(size, size), cache), size))
                cache.keep(range(size))
            first, second = caches
            pair = concat_rows([causal_rows(random_prompt(3), first), tree_rows(BRANCHING, second)])
            logits.append(target.forward(pair, 8))
        return logits

    with torch.inference_mode():
        sizes = (1, 40, 1, 7, 16, 17, 3, 420, 16, 9)  # the caches grow at 512
        found_logits = logits_of(sizes)
        assert len(passes) >= 3 * len(sizes) - (1 if way == "_run_compiled" else 0)
        monkeypatch.setattr(target._fused, "_takes_kernels", False)
        passes.clear()
        wanted = logits_of(sizes)
    assert not passes
    assert all(torch.equal(*pair) for pair in zip(found_logits, wanted, strict=True))


def test_teams_of_any_size_and_two_models_at_once_give_the_same_bits():
    skip_without_compiled_layers()
    assert fused_decoder.KERNELS_WARMUP.wait(120)
    targets = [fused(make_model(family, torch.bfloat16)) for family in ("llama", "qwen3")]

    @torch.inference_mode()
    def logits_of(target):
        cache = KVCache()
        target.forward(causal_rows(random_prompt(90), cache), 1)
        cache.keep(range(90))
        return [target.forward(tree_rows(BRANCHING, cache), 5) for _ in range(20)]

    known, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append([logits_of(target) for target in targets])
    finally:
        torch.set_num_threads(known)
    with ThreadPoolExecutor(2) as pool:
        found.append(list(pool.map(logits_of, targets)))
    for own in zip(*found, strict=True):
        first, *others = chain.from_iterable(own)
        assert all(torch.equal(first, other) for other in others)


def test_layers_may_have_mlps_of_different_sizes(monkeypatch):
    skip_without_compiled_layers()
    assert fused_decoder.KERNELS_WARMUP.wait(120)
    model = make_model("llama", torch.bfloat16)
    mlp = model.model.layers[1].mlp
    for name, sizes in (
        ("gate_proj", (256, 2048)),
        ("up_proj", (256, 2048)),
        ("down_proj", (2048, 256)),
    ):
        setattr(mlp, name, torch.nn.Linear(*sizes, bias=False, dtype=torch.bfloat16))
    target = HuggingFaceModel(model, pack=True, self_check=False)
    rows, logits = random_prompt(30), []
    for _ in range(2):
        with torch.inference_mode():
            logits.append(target.forward(causal_rows(rows, KVCache()), 30))
        monkeypatch.setattr(target._fused, "_compiled_layers", None)
    assert torch.equal(*logits)


def test_weights_of_other_shapes_are_refused():
    model = make_model("llama")
    target = fused(model)
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.data = weight.data[:, :256].clone()
    with pytest.raises(ConfigurationError, match="other shapes"):
        target.refresh()


def strided(norm):
    norm.weight.data = torch.ones(2 * norm.weight.numel(), dtype=norm.weight.dtype)[::2]


def other_epsilon(norm):
    norm.variance_epsilon = 0.5


@pytest.mark.parametrize("change", [strided, other_epsilon])
def test_norms_of_another_layout_or_epsilon_take_no_kernel(change):
    assert fused_decoder.KERNELS_WARMUP.wait(120)
    model = make_model("qwen3", torch.bfloat16)
    change(model.model.layers[0].self_attn.k_norm)
    target, cache = fused(model), KVCache()
    with torch.inference_mode():
        target.forward(causal_rows(random_prompt(20), cache), 1)
        cache.keep(range(20))
        assert target._fused._kernels(causal_rows([1], cache)) is None


def test_rows_without_room_are_left_to_torch_which_raises():
    assert fused_decoder.KERNELS_WARMUP.wait(120)
    target, cache = fused(make_model("llama", torch.bfloat16)), KVCache(16)
    with torch.inference_mode():
        target.forward(causal_rows(random_prompt(4), cache), 1)
        cache.keep(range(4))
        rows = causal_rows(random_prompt(12), cache)
        assert target._fused._kernels(rows) is not None
        cache.keep(range(12))
        with pytest.raises(RuntimeError, match="expanded size"):
            target.forward(rows, 1)


def test_the_first_token_waits_for_no_kernel(monkeypatch):
    """They begin to be compiled with the first pass after the prompt, not with its second chunk."""
    started = []

    class Warmup:
        def is_ready(self):
            return False

        def start(self):
            started.append(True)

    monkeypatch.setattr(fused_decoder, "KERNELS_WARMUP", Warmup())
    target = fused(make_model("llama", torch.bfloat16))
    started.clear()  # the self-check has passes after prompts
    cache = target.new_cache(None, 128)
    with torch.inference_mode():
        for length in (5, 100):
            target.forward(causal_rows(random_prompt(length), cache), 1)
            cache.keep(range(length))
            assert not started
        target.forward(causal_rows([1], cache), 1)
        assert started


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_seed_gives_one_text_with_drafts_and_in_batches(family):
    engine = Engine(fused(make_model(family)))
    requests = [
        Request(
            random_prompt(10 + 7 * seed, seed),
            max_new_tokens=30,
            sampling=Sampling(temperature=1.0, top_p=0.9, seed=seed),
        )
        for seed in range(4)
    ]
    expected = [decode(engine, request, token_budget=0) for request in requests]
    assert [decode(engine, one, RandomDrafter(3, 97)) for one in requests] == expected
    drafters = [RandomDrafter(seed, 97) for seed in range(4)]
    assert run_together(engine, requests, drafters) == expected


CHANGED = (
    "embed_tokens.weight",
    "norm.weight",
    "layers.0.input_layernorm.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.1.self_attn.k_proj.bias",
)


def change(model, name):
    """Replace a weight's memory by other numbers."""
    weights = dict(model.named_parameters())[f"model.{name}"]
    torch.manual_seed(4)
    weights.data = torch.randn(weights.shape)


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("owned", [False, True])
def test_changed_weights_are_followed(name, owned):
    model, stock = make_model("qwen2"), make_model("qwen2")
    engine, request = Engine(fused(model, owned=owned)), Request(PROMPT, max_new_tokens=20)
    before = decode(engine, request)
    if owned and "_proj.weight" in name:
        assert f"model.{name}" not in dict(model.named_parameters())  # packed: it cannot be written
        return
    change(model, name)
    change(stock, name)
    found = decode(engine, request)
    assert found != before
    assert found == generate(stock, PROMPT, 20)


def test_biases_of_an_owned_model_and_its_copy_are_read_as_they_are():
    model, stock = make_model("qwen2"), make_model("qwen2")
    fused(model, owned=True)
    copied, name = deepcopy(model), "layers.1.self_attn.k_proj.bias"
    before = generate(stock, PROMPT, 20)
    for one in (model, copied):
        assert generate(one, PROMPT, 20) == before
    for one in (model, copied, stock):
        change(one, name)
    after = generate(stock, PROMPT, 20)
    assert after != before
    for one in (model, copied):
        assert generate(one, PROMPT, 20) == after


def test_other_models_dtypes_and_changed_modules_run_as_their_modules_do():
    for family in OTHERS:
        assert not HuggingFaceModel(make_model(family), pack=True).is_fused
    assert not HuggingFaceModel(make_model("llama"), pack=False).is_fused
    assert not HuggingFaceModel(make_model("llama", torch.float64), pack=True).is_fused
    model = make_model("llama")
    model.model.layers[1].register_forward_hook(lambda module, inputs, output: output * 1.5)
    target = HuggingFaceModel(model, pack=True)
    assert not target.is_fused
    assert decode(Engine(target), Request(PROMPT, max_new_tokens=9)) == generate(model, PROMPT, 9)


def own_norm(model):
    model.model.layers[1].input_layernorm = torch.nn.RMSNorm(256, 1e-6)


def patched_class(model):
    attention = type(model.model.layers[0].self_attn)
    forward = attention.forward
    model.restore = lambda: setattr(attention, "forward", forward)
    attention.forward = lambda self, *given, **named: forward(self, *given, **named)


def derived_class(model):
    mlp = model.model.layers[0].mlp
    mlp.__class__ = type("OwnMLP", (type(mlp),), {"__module__": __name__})


def own_activation(model):
    activation = model.model.layers[1].mlp.act_fn
    activation.forward = torch.tanh


@pytest.mark.parametrize("change", [own_norm, patched_class, derived_class, own_activation])
def test_models_of_other_parts_run_as_their_modules_do(change):
    model = make_model("llama")
    change(model)
    try:
        target = HuggingFaceModel(model, pack=True)
        assert not target.is_fused
        found = decode(Engine(target), Request(PROMPT, max_new_tokens=9))
        assert found == generate(model, PROMPT, 9)
    finally:
        getattr(model, "restore", lambda: None)()


def test_deterministic_passes_run_through_the_modules(monkeypatch):
    model = make_model("llama")
    target = fused(model)
    request = Request(PROMPT, max_new_tokens=30)
    expected = decode(Engine(target), request)

    def fail(*given):
        raise AssertionError("fused passes ran")

    with monkeypatch.context() as patch:
        patch.setattr(target._fused, "run", fail, raising=True)
        assert decode(Engine(target, exact=True), request) == expected
        with pytest.raises(AssertionError, match="fused passes ran"):
            decode(Engine(target), request)


def mask_trees(ids):
    """Mask tokens under a chain, under two nodes of a tree, and after a prompt; and none."""
    branched = DraftTree((5, 6, 7, 8), (-1, 0, 0, 1), (1.0,) * 4, ((),) * 4)
    yield attach_masks(DraftTree.chain(random_prompt(9)), ids, [8])
    yield branched
    yield attach_masks(branched, ids, [1, 2])
    yield attach_masks(DraftTree.chain(random_prompt(150)), ids, [149])


def logits_of_masks(target, ids, is_fused):
    """Logits of ``mask_trees``, each in a pass of its own and then all in one."""
    trees, kept = list(mask_trees(ids)), target._fused
    caches = [target.new_cache(None, None) for _ in trees]
    target._fused = kept if is_fused else None
    alone = []
    try:
        with torch.inference_mode():
            for cache, tree in zip(caches, trees, strict=True):
                target.forward(causal_rows(random_prompt(12), cache), 1)
                cache.keep(range(12))
                alone.append(target.forward(tree_rows(tree, cache), len(tree)).clone())
                cache.keep(())
            batch = concat_rows(list(map(tree_rows, trees, caches)))
            together = target.forward(batch, batch.num_rows).clone()
        return [*alone, *together.split([len(tree) for tree in trees])]
    finally:
        target._fused = kept


@pytest.mark.parametrize("family", ["llama", "llama with biases", "phi3", "qwen3"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changed", ["", "q_proj", "up_proj"])
def test_mask_tokens_have_the_changes_of_an_adapter(family, dtype, changed):
    model = make_model(family, dtype)
    target = fused(model)
    before = logits_of_masks(target, (1, 2), is_fused=True)
    adapter = random_adapter(model, num_masks=2, rank=3)
    kept = {name: one for name, one in adapter.changes.items() if name.endswith(changed)}
    for name in (name for name in kept if "layers.1" in name):
        kept[name] = kept[name][0][:0], kept[name][1][:, :0]  # of rank 0
    target.attach_space(replace(adapter, changes=kept))
    assert target.is_fused
    assert target.latency_key.endswith("-fused-space")
    ids = (target.vocab_size, target.vocab_size + 1)
    found, expected = (logits_of_masks(target, ids, is_fused) for is_fused in (True, False))
    share = (16 if dtype == torch.bfloat16 else 512) * torch.finfo(dtype).eps
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=share * float(other.abs().max()))
    for one, other, tree in zip(found, before, 2 * list(mask_trees(ids)), strict=True):
        count = len(tree) - tree.num_masks
        assert torch.equal(one[:count], other[:count])
        assert not tree.num_masks or not torch.equal(one[count:], other[count:])


@pytest.mark.parametrize("changed", ["", "q_proj", "up_proj", "down_proj", "none"])
def test_changes_of_mask_tokens_have_the_same_bits_in_one_call(changed, monkeypatch):
    skip_without_compiled_layers()
    assert fused_decoder.KERNELS_WARMUP.wait(120)
    model, calls = make_model("qwen3", torch.bfloat16), []
    target = fused(model)
    adapter = random_adapter(model, num_masks=2, rank=3)
    kept = {name: one for name, one in adapter.changes.items() if name.endswith(changed)}
    target.attach_space(replace(adapter, changes=kept))
    decoder = target._fused
    once = fused_decoder.FusedDecoder._run_compiled
    monkeypatch.setattr(
        decoder, "_run_compiled", lambda *given: calls.append(once(decoder, *given))
    )
    ids = (target.vocab_size, target.vocab_size + 1)
    found = logits_of_masks(target, ids, is_fused=True)
    made = len(calls)  # the prompts and the trees; the pass of them all only without changes
    assert made == (8 if kept else 9)
    monkeypatch.setattr(decoder, "_compiled_layers", None)
    assert all(map(torch.equal, found, logits_of_masks(target, ids, is_fused=True)))
    assert len(calls) == made


@pytest.mark.parametrize("is_int8", [False, True])
def test_teams_of_any_size_change_mask_tokens_alike(is_int8):
    skip_without_compiled_layers()
    assert fused_decoder.KERNELS_WARMUP.wait(120)
    model = make_model("llama with biases", torch.bfloat16)
    if is_int8:
        round_to_int8(model)
    target = fused(model)
    target.attach_space(random_adapter(model, num_masks=2, rank=3))
    ids, known, found = (target.vocab_size, target.vocab_size + 1), torch.get_num_threads(), []
    # What the head gets: its own product is torch's, which depends on the number of threads.
    head = target._fused._network.get_output_embeddings()
    head.register_forward_pre_hook(lambda _, given: found[-1].append(given[0].clone()))
    try:
        for threads in (1, 2, 5, 5, 5):
            torch.set_num_threads(threads)
            found.append([])
            logits_of_masks(target, ids, is_fused=True)
    finally:
        torch.set_num_threads(known)
    assert {len(states) for states in found} == {9}
    assert all(all(map(torch.equal, found[0], other)) for other in found[1:])


@pytest.fixture
def wrong(monkeypatch):
    """Fused passes with other logits."""
    right = fused_decoder.FusedDecoder.run
    monkeypatch.setattr(
        fused_decoder.FusedDecoder, "run", lambda self, *given: right(self, *given) * 1.2
    )
    return monkeypatch


def test_a_check_that_fused_passes_fail_is_not_recorded(wrong, tmp_path):
    def num_records():
        HuggingFaceModel(make_model("llama"), pack=True, files="its files", check_folder=tmp_path)
        return len(list(tmp_path.iterdir()))

    before = num_records()  # of the architecture alone
    assert num_records() == before
    wrong.undo()
    assert num_records() == before + 1


def test_wrong_passes_are_found_at_load_and_not_used(wrong, caplog):
    model = make_model("llama")
    with caplog.at_level(logging.WARNING, "ragaccel"):
        target = HuggingFaceModel(model, pack=True)
    assert not target.is_fused
    assert "fused passes are not used, so answers come more slowly" in caplog.text
    assert decode(Engine(target), Request(PROMPT, max_new_tokens=9)) == generate(model, PROMPT, 9)
