"""Fused layers of static passes: the modules' logits, the same answers, and few kernels."""

from collections import Counter

import pytest
import torch
from decoding import OracleDrafter, decode, run_together
from fakes import RandomDrafter
from interpreted import CUDA, load
from space_models import masks_of, random_adapter
from static_passes import PlainKernel, PlainLayers, static_target
from tiny_models import VOCAB, generate, make_tiny_model, random_prompt, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from ragaccel.decoding import DraftTree, NoDrafter, Request, attach_masks
from ragaccel.drafting import SpaceDrafter
from ragaccel.engine import Engine, StaticPass, causal_rows, tree_rows
from ragaccel.models import HuggingFaceModel

FUSED = ["llama", "mistral", "qwen2", "qwen2-sliding", "qwen3"]
OTHERS = ["gemma2", "gemma3", "phi3", "gpt2", "opt"]
PROMPT = random_prompt(21)


@pytest.mark.parametrize("family", FUSED)
def test_fused_layers_give_the_same_tokens(family):
    target = static_target(family, fused=True)
    wanted = generate(tiny_model(family), PROMPT, 25)
    request = Request(PROMPT, max_new_tokens=25)
    for drafter in (NoDrafter(), RandomDrafter(1, VOCAB), OracleDrafter(PROMPT, wanted)):
        assert decode(Engine(target, prefill_chunk=16), request, drafter) == wanted
    assert target.num_captures > 2


def test_sequences_share_passes_of_fused_layers():
    target = static_target("qwen3", fused=True)
    prompts = [random_prompt(length, length) for length in (3, 40, 11, 1)]
    wanted = [generate(tiny_model("qwen3"), prompt, 14) for prompt in prompts]
    requests = [Request(prompt, max_new_tokens=14) for prompt in prompts]
    drafters = [OracleDrafter(*known) for known in zip(prompts, wanted, strict=True)]
    assert run_together(Engine(target, prefill_chunk=16), requests, drafters) == wanted


@pytest.mark.parametrize("family", OTHERS)
def test_layers_of_another_form_stay_as_they_are(family):
    target = HuggingFaceModel(tiny_model(family), self_check=False)
    target.enable_graphs(PlainKernel, capture=False, layers=PlainLayers())
    assert target.graphs is not None
    assert not target._static.is_fused


def changed_model(what):
    model = make_tiny_model("llama", torch.float32)
    if what == "a hook":
        model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    elif what == "another gate":
        model.model.layers[0].mlp.act_fn = torch.nn.GELU()
    elif what == "a forward of its own":
        model.model.norm.forward = type(model.model.norm).forward.__get__(model.model.norm)
    return model


@pytest.mark.parametrize("what", ["a hook", "another gate", "a forward of its own"])
def test_a_changed_model_keeps_its_modules(what):
    target = HuggingFaceModel(changed_model(what), self_check=False, pack=False)
    target.enable_graphs(PlainKernel, capture=False, layers=PlainLayers())
    assert target._static is None or not target._static.is_fused


def logits_of_a_tree(target):
    cache, prompt = target.new_cache(None, 64), random_prompt(23)
    tree = DraftTree((5, 6, 7, 8, 9), (-1, 0, 0, 1, 3), (1.0,) * 5, ((),) * 5)
    with torch.inference_mode():
        target.forward(causal_rows(prompt, cache), 1)
        cache.keep(range(23))
        return target.forward(tree_rows(tree, cache), 5).clone()


@pytest.mark.parametrize("family", FUSED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_logits_are_those_of_the_modules_to_the_last_bit(family, dtype):
    model = tiny_model(family, dtype)
    found, wanted = (
        logits_of_a_tree(static_target(model=model, fused=fused)) for fused in (True, False)
    )
    assert torch.equal(found, wanted)


@pytest.mark.skipif(CUDA, reason="interpreted kernels need a CPU")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernels_give_the_modules_logits(family, dtype):
    model = make_tiny_model(family, dtype, hidden_size=64, intermediate_size=128)
    wanted = logits_of_a_tree(static_target(model=model))
    with load("triton_layers") as module:
        target = HuggingFaceModel(model)
        target.enable_graphs(PlainKernel, capture=False, layers=module.TritonLayers())
        found = logits_of_a_tree(target)
        assert target._static.is_fused
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found, wanted, rtol=0, atol=16 * eps * float(wanted.abs().max()))


def test_mask_tokens_and_their_adapter_go_through_fused_layers():
    model = make_tiny_model("llama")
    plain = generate(model, PROMPT, 25)
    target = static_target(model=model, fused=True)
    target.attach_space(random_adapter(model))
    request = Request(PROMPT, max_new_tokens=25)
    found = decode(Engine(target), request, SpaceDrafter(masks_of(target)), token_budget=None)
    assert found == plain
    assert {size.has_masks for size in target.graphs._passes} == {False, True}


class Wrapped(torch.Tensor):
    """A weight as libraries for quantization make it: in an nn.Linear, but not in memory."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        own = [one.inner if isinstance(one, Wrapped) else one for one in args]
        found = func(*own, **(kwargs or {}))
        return Wrapped(found) if func is torch.ops.aten.detach.default else found


class Addressed(PlainLayers):
    """Kernels that read weights by their address, as those for a GPU do."""

    def multiply(self, states, weights):
        """Return the products, if the weights are in memory."""
        assert all(matrix.data_ptr() for matrix, _ in weights)
        return super().multiply(states, weights)


def test_weights_that_are_no_numbers_in_memory_are_left_to_their_modules():
    model = make_tiny_model("llama")
    wanted = logits_of_a_tree(static_target(model=model, fused=True))
    for layer in model.model.layers:
        own = layer.mlp.down_proj.weight.data
        layer.mlp.down_proj.weight = torch.nn.Parameter(Wrapped(own), requires_grad=False)
    target = HuggingFaceModel(model, self_check=False, pack=False)
    target.enable_graphs(PlainKernel, capture=False, layers=Addressed())
    assert target._static.is_fused
    assert torch.equal(logits_of_a_tree(target), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_adapter_changes_no_bits_of_real_rows(dtype):
    model = tiny_model("llama", dtype)
    wanted = logits_of_a_tree(static_target(model=model, fused=True))
    target = static_target(model=model, fused=True)
    target.attach_space(random_adapter(model))
    assert torch.equal(logits_of_a_tree(target), wanted)
    cache, prompt = target.new_cache(None, 64), random_prompt(23)
    tree = DraftTree((5, 6, 7, 8, 9), (-1, 0, 0, 1, 3), (1.0,) * 5, ((),) * 5)
    tree = attach_masks(tree, [*masks_of(target)][:2], [4])
    with torch.inference_mode():
        target.forward(causal_rows(prompt, cache), 1)
        cache.keep(range(23))
        found = target.forward(tree_rows(tree, cache), len(tree))
    eps = torch.finfo(dtype).eps  # of more rows, a library may add in another order
    torch.testing.assert_close(found[:5], wanted, rtol=0, atol=16 * eps * float(wanted.abs().max()))


# The nodes of a captured graph, counted.

VIEWS = (
    "view", "transpose", "unsqueeze", "expand", "slice", "t.", "permute", "select.", "split",
    "unbind", "alias", "detach", "_unsafe_view", "squeeze", "reshape", "as_strided", "flatten",
    "unflatten", "empty", "new_empty", "contiguous", "lift_fresh", "sym_", "is_",
)  # fmt: skip


class Operations(TorchDispatchMode):
    """Counts the operations that are kernels on a GPU: all but views."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.")
        if not name.startswith(VIEWS):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class Launched(PlainLayers):
    """Counts the launches of the kernels for layers, each of which is one."""

    def __init__(self, takes):
        self.launches, self._takes = 0, takes

    def supports(self, states, weights):
        """Return whether products are launches too."""
        return self._takes

    def __getattribute__(self, name):
        if name in FAKES:
            self.launches += 1
            return lambda *args: FAKES[name](*args)
        return super().__getattribute__(name)


FAKES = {
    "normalize": lambda states, norm: torch.empty_like(states),
    "add_and_normalize": lambda states, residual, norm: (torch.empty_like(states), residual),
    "rotate_and_store": lambda states, angles, pool, slots, norms: torch.empty(
        len(states[0]), states[0].shape[1] // pool[0].shape[2], pool[0].shape[2]
    ),
    "gate": lambda gates, values: torch.empty_like(values),
    "multiply": lambda states, weights: [states.new_empty(len(states), len(w)) for w, _ in weights],
    "multiply_in_parts": lambda states, weights: states.new_empty(
        1, len(states), len(weights.matrix)
    ),
    "multiply_gated": lambda states, gate, values: states.new_empty(len(states), len(gate.matrix)),
}


class Attention:
    """An attention kernel, which is two launches: splits and their combination."""

    launches, buffers = 0, ()

    def __call__(self, q, *rest, **options):
        Attention.launches += 2
        return torch.empty(q.shape, dtype=q.dtype)


def count_nodes(family, num_layers, fused, takes=True):
    """Count the nodes of a captured pass."""
    changes = {"num_hidden_layers": num_layers}
    model = make_tiny_model(family, torch.float32, **changes)
    layers, Attention.launches = Launched(takes), 0
    target = HuggingFaceModel(model, self_check=False, pack=False)
    target.enable_graphs(Attention, capture=False, layers=layers if fused else None)
    rows = tree_rows(DraftTree.chain([1, 2, 3, 4]), target.new_cache(None, 64))
    static = StaticPass(
        target.graphs._size(rows), target.kv_pool, Attention(), target.graphs._group
    )
    static.fill(rows)
    with torch.inference_mode(), Operations() as operations:
        target._static.compute(static)
    return sum(operations.counts.values()) + layers.launches + Attention.launches


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_layer_is_nine_nodes(family):
    def of_a_layer(**how):
        return (count_nodes(family, 6, **how) - count_nodes(family, 2, **how)) / 4

    assert of_a_layer(fused=True) == 9
    assert of_a_layer(fused=True, takes=False) == 13, "other modules than torch's, many rows"
    assert of_a_layer(fused=False) > 35
    assert count_nodes(family, 2, fused=True) - 2 * 9 <= 16, "of a pass"
