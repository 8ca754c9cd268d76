"""Kernels compiled ahead of time for the GPUs that matter: resources and matrix units, bounded.

Nothing runs: that needs a GPU. A tile that is too large, or a loop whose product misses the matrix
unit, is seen here.
"""

import pytest
import torch
from ahead_of_time import SHARED_BYTES, compiling, load_kernels
from row_tables import block_table

from ragaccel.engine import LayerNorm, Weights, rows_per_block

pytest.importorskip("triton")

KV_HEADS, SLOTS, SPLITS = 2, 64, 4
# head size, query heads that share a KV head
SHAPES = ((64, 4), (80, 1), (96, 1), (128, 1), (128, 4), (128, 7), (128, 8), (256, 4))
MATRIX_UNITS = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


@pytest.fixture(autouse=True)
def nothing_was_compiled_before(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def attend(capability, head_size, group, dtype=torch.bfloat16, num_rows=16, **options):
    """Compile attention for a GPU; return both kernels."""
    module, heads, block_rows = load_kernels("triton_attention"), group * KV_HEADS, None
    block_rows = rows_per_block(group)
    q = torch.zeros(heads, num_rows, head_size, dtype=dtype).transpose(0, 1)
    states = torch.zeros(2, KV_HEADS, SLOTS, head_size, dtype=dtype)
    words = -(-min(num_rows, 256) // 64)
    sizes = {"num_rows": num_rows, "num_blocks": -(-num_rows // block_rows), "num_words": words}
    blocks = block_table((), **sizes, block_rows=block_rows)
    with compiling(capability) as compiled:
        options = {"scaling": 0.1, "num_splits": SPLITS, **options}
        module.TritonKernel()(q, *states, blocks, **options)
    split, combine = compiled
    assert (split.name, combine.name) == ("_attend_split", "_combine")
    for kernel in compiled:
        assert kernel.shared <= SHARED_BYTES[capability]
    return split, combine


def test_attention_fits_a_gpu_and_uses_its_matrix_units():
    split, combine = attend(90, 128, 4)
    assert split.spilled == combine.spilled == 0
    assert MATRIX_UNITS[90] in split.matrix_units
    assert not combine.matrix_units


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize(("head_size", "group"), SHAPES)
def test_attention_fits_every_gpu_at_every_size(capability, head_size, group):
    split, combine = attend(capability, head_size, group)
    assert combine.spilled == 0
    assert split.spilled <= 192, "a few registers beside thousands of products"
    if group > 1:  # blocks of fewer rows than the unit has use the older one
        assert MATRIX_UNITS[capability] in split.matrix_units
    assert split.matrix_units


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"window": 4096}, {"softcap": 50.0}], ids=str)
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_windows_and_capped_scores_fit_too(capability, options):
    split, _ = attend(capability, 256, 4, **options)
    assert split.spilled <= 64
    assert MATRIX_UNITS[capability] in split.matrix_units


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_other_dtypes_compile(capability, dtype):
    split, _ = attend(capability, 128, 4, dtype)
    assert bool(split.matrix_units) == (dtype == torch.float16), "float32 is exact, so without"


def test_one_kernel_serves_passes_of_every_width(monkeypatch):
    """Compiled once: a first use would otherwise take seconds for each of some widths."""
    module = load_kernels("triton_attention")
    monkeypatch.setitem(globals(), "load_kernels", lambda _: module)
    for num_rows in (1, 2, 16, 64, 96, 256):
        attend(90, 64, 4, num_rows=num_rows)
    caches = module._attend_split.device_caches[90][0], module._combine.device_caches[90][0]
    assert [len(cache) for cache in caches] == [1, 1]


def test_moves_take_no_shared_memory():
    states = torch.zeros(4, 2, 8, 80, dtype=torch.bfloat16)
    slots = torch.zeros(64, dtype=torch.int64)
    with compiling(90) as compiled:
        load_kernels("triton_attention").TritonKernel().move(states, slots, slots, slots[:1])
    (kernel,) = compiled
    assert (kernel.name, kernel.shared, kernel.spilled) == ("_move_slots", 0, 0)


def compile_layers(capability, size=4096, head_size=128, dtype=torch.bfloat16, norms=False):
    """Compile the kernels of a layer for a GPU."""
    module, rows, heads = load_kernels("triton_layers"), 4, 8
    layers = module.TritonLayers()
    states = torch.zeros(rows, size, dtype=dtype)
    norm = LayerNorm(torch.zeros(size, dtype=dtype), 1e-5)
    head_norm = LayerNorm(torch.zeros(head_size, dtype=dtype), 1e-5)
    parts = [torch.zeros(rows, number * head_size, dtype=dtype) for number in (heads, 2, 2)]
    angles = [torch.zeros(rows, head_size, dtype=dtype)] * 2
    pool = torch.zeros(2, KV_HEADS, SLOTS, head_size, dtype=dtype)
    slots = torch.zeros(rows, dtype=torch.int64)
    with compiling(capability) as compiled:
        layers.normalize(states, norm)
        layers.add_and_normalize(states, states, norm)
        layers.rotate_and_store(parts, angles, pool, slots, (head_norm,) * 2 if norms else None)
        layers.gate(states, states)
    return compiled


def compile_products(capability, size=4096, dtype=torch.bfloat16, num_rows=4, biased=False):
    """Compile the kernel of a layer's products for a GPU."""
    module = load_kernels("triton_layers")
    module._shared_bytes = lambda device: SHARED_BYTES[capability] - module._RESERVED_BYTES
    layers = module.TritonLayers(num_processors=132)
    states = torch.zeros(num_rows, size, dtype=dtype)
    bias = torch.zeros(size, dtype=dtype) if biased else None
    weights = Weights(torch.zeros(size, size, dtype=dtype), bias)
    with compiling(capability) as compiled:
        layers.multiply(states, [weights] * 3)
        layers.multiply_in_parts(states, weights)
        layers.multiply_gated(states, weights, weights)
    return compiled


def check_products(compiled, capability):
    assert [kernel.name for kernel in compiled] == ["_multiply_rows"] * 3
    for kernel in compiled:
        assert kernel.spilled <= 16
        assert kernel.shared <= SHARED_BYTES[capability]
        assert kernel.matrix_units


@pytest.mark.parametrize("num_rows", [1, 64])
def test_the_products_of_a_layer_use_matrix_units(num_rows):
    check_products(compile_products(90, num_rows=num_rows), 90)


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize(
    "options",
    [
        {"size": 576, "num_rows": 16},
        {"size": 2048, "dtype": torch.float16, "num_rows": 64},
        {"size": 896, "num_rows": 24, "biased": True},
    ],
    ids=str,
)
def test_the_products_of_a_layer_fit_every_gpu(capability, options):
    check_products(compile_products(capability, **options), capability)


def check_layers(compiled):
    names = ["_normalize_rows", "_normalize_rows", "_rotate_heads", "_gate_elements"]
    assert [kernel.name for kernel in compiled] == names
    assert all(kernel.spilled == 0 and kernel.shared <= 1024 for kernel in compiled)


def test_the_kernels_of_a_layer_are_small():
    check_layers(compile_layers(90))


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize(
    "options",
    [
        {"size": 576, "head_size": 64},
        {"size": 2048, "head_size": 64, "dtype": torch.float16},
        {"size": 16_384, "head_size": 256, "norms": True},
        {"size": 5120, "head_size": 80, "dtype": torch.float32, "norms": True},
    ],
    ids=str,
)
def test_the_kernels_of_a_layer_are_small_on_every_gpu(capability, options):
    check_layers(compile_layers(capability, **options))
