"""The same engine on a CUDA device; skipped without one."""

from contextlib import closing, suppress

import pytest
import torch
from decoding import OracleDrafter, decode, run_together
from space_models import masks_of, random_adapter
from tiny_models import FAMILIES, VOCAB, generate, make_tiny_model, random_prompt
from torch.nn.attention import SDPBackend, sdpa_kernel

from ragaccel.decoding import DraftTree, NoDrafter, Request, Sampling, attach_masks
from ragaccel.drafting import PaperSpaceDrafter, SpaceDrafter
from ragaccel.engine import Engine, TokenNoise, causal_rows, tree_rows
from ragaccel.engine.attention import _attend_causally, _has_flash_kernel
from ragaccel.errors import CapacityError
from ragaccel.models import HuggingFaceModel

# Float32 tokens are compared with those of a CPU.
torch.backends.cuda.matmul.allow_tf32 = False

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate(family):
    model = make_tiny_model(family).cuda()
    prompt = random_prompt(40)
    expected = generate(model, prompt, 40, repetition_penalty=1.2)
    engine = Engine(HuggingFaceModel(model), prefill_chunk=16)
    request = Request(prompt, max_new_tokens=40, repetition_penalty=1.2)
    assert decode(engine, request) == expected
    assert decode(engine, request, OracleDrafter(prompt, expected)) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_type_passes_its_self_check(dtype):
    for family in FAMILIES:
        HuggingFaceModel(make_tiny_model(family, dtype).cuda())


def test_sampling_does_not_depend_on_drafting_nor_on_the_device():
    model = make_tiny_model("llama")
    prompt = random_prompt(30)
    request = Request(prompt, max_new_tokens=40, sampling=Sampling(0.9, top_p=0.95, seed=3))
    on_cpu = decode(Engine(HuggingFaceModel(model)), request)
    engine = Engine(HuggingFaceModel(model.cuda()))
    assert decode(engine, request, token_budget=0) == on_cpu
    assert decode(engine, request, OracleDrafter(prompt, on_cpu)) == on_cpu


def test_noise_is_the_same_on_every_device():
    here, there = (TokenNoise(1000, torch.device(kind)) for kind in ("cpu", "cuda"))
    assert torch.allclose(here.gumbel(5, range(9)), there.gumbel(5, range(9)).cpu(), atol=1e-12)


def test_one_synchronization_a_step():
    model = make_tiny_model("llama", torch.float32).cuda()
    engine = Engine(HuggingFaceModel(model))
    request = Request(random_prompt(30), max_new_tokens=10)
    verifier = engine.open(request)
    verifier.prefill(request)
    tree = OracleDrafter(list(request.prompt_ids), random_prompt(9)).draft
    from ragaccel.decoding import Context

    drafted = tree(Context(request.prompt_ids), 8)
    verifier.verify(drafted)
    verifier.commit([0])
    with torch.profiler.profile() as profile:
        verifier.verify(drafted)
    copies = [event for event in profile.events() if "Memcpy DtoH" in event.name]
    assert len(copies) <= 1


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2-sliding", "gemma3"])
def test_replayed_graphs_give_the_same_tokens_across_buckets(family):
    model = make_tiny_model(family, torch.float32, max_position_embeddings=4096).cuda()
    target = HuggingFaceModel(model)
    assert target.graphs_status == "on"
    assert target._static.is_fused == (family != "gemma3")
    engine = Engine(target, prefill_chunk=256)
    for length in (1, 30, 500, 520, 1030, 2040):
        prompt = random_prompt(length, length)
        expected = generate(model, prompt, 40)
        request = Request(prompt, max_new_tokens=40)
        assert decode(engine, request, NoDrafter()) == expected
        assert decode(engine, request, OracleDrafter(prompt, expected), 40) == expected
    assert len(target.graphs._passes) > 5


def test_sequences_share_replayed_graphs():
    model = make_tiny_model("llama", torch.float32).cuda()
    prompts = [random_prompt(length, length) for length in (3, 40, 11, 1, 25, 64, 17)]
    expected = [generate(model, prompt, 30) for prompt in prompts]
    requests = [Request(prompt, max_new_tokens=30) for prompt in prompts]
    drafters = [
        OracleDrafter(prompt, answer) for prompt, answer in zip(prompts, expected, strict=True)
    ]
    assert run_together(Engine(HuggingFaceModel(model)), requests, drafters) == expected


def test_graphs_that_were_freed_are_captured_again():
    model = make_tiny_model("llama", torch.float32, max_position_embeddings=4096).cuda()
    target = HuggingFaceModel(model)
    engine, graphs = Engine(target, kept_prefixes=0), target.graphs
    graphs._max_passes = 2
    for length in (30, 520, 30, 1030):
        prompt = random_prompt(length, length)
        expected = generate(model, prompt, 40)
        request = Request(prompt, max_new_tokens=40)
        assert decode(engine, request, OracleDrafter(prompt, expected), 40) == expected
        assert len(graphs._passes) <= 2
        kept, held = graphs.num_bytes, torch.cuda.memory_allocated()
        engine.free_memory()
        assert torch.cuda.memory_allocated() <= held - kept // 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_deterministic_mode_equals_plain_decoding_to_the_last_bit(dtype):
    model = make_tiny_model("llama", dtype, hidden_size=256, intermediate_size=512).cuda()
    engine = Engine(HuggingFaceModel(model), exact=True, prefill_chunk=64)
    for length in (5, 63, 64, 65, 120):
        prompt = random_prompt(length, length)
        request = Request(prompt, max_new_tokens=80)
        plain = decode(engine, request, NoDrafter())
        assert decode(engine, request, OracleDrafter(prompt, plain)) == plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_chain_of_drafts_changes_no_bits_of_its_rows(family, dtype):
    model = make_tiny_model(family, dtype, hidden_size=1024, intermediate_size=2048).cuda()
    target, ids = HuggingFaceModel(model), random_prompt(40)
    assert target._static.is_fused
    kernels = pytest.importorskip("ragaccel.engine.triton_layers")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    assert kernels.num_parts(1024, 2048, processors) > 1
    found = []
    for step in (40, 8, 1):
        cache, rows = target.new_cache(None, 64), []
        with torch.inference_mode():
            for start in range(0, len(ids), step):
                own = ids[start : start + step]
                rows.append(target.forward(causal_rows(own, cache), len(own)).clone())
                cache.keep(range(len(own)))
        found.append(torch.cat(rows))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_long_chunk_behind_others_never_has_its_scores_stored(dtype):
    model = make_tiny_model("qwen2-sliding", dtype, hidden_size=64, max_position_embeddings=4096)
    engine = Engine(HuggingFaceModel(model.cuda()), prefill_chunk=512)
    request = Request(random_prompt(1500), max_new_tokens=1)
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with closing(engine.open(request)) as verifier:
        engine.prefill(verifier)
        with sdpa_kernel(kernels):  # raises where neither can
            verifier.prefill(request)
        assert verifier.is_prefilled


@pytest.mark.parametrize("groups", [1, 4])
def test_a_long_chunk_behind_others_is_attended_to_by_flash(groups):
    generator, size, start, n = torch.Generator().manual_seed(0), 64, 1000, 700
    states = [
        torch.randn(1, heads, length, size, generator=generator).cuda().bfloat16()
        for heads, length in ((2 * groups, n), (2, start + n), (2, start + n))
    ]
    assert _has_flash_kernel(*states)
    found = _attend_causally(*states, 0.125).cpu().double()
    queries, keys, values = (part.cpu().double() for part in states)
    keys, values = (part.repeat_interleave(groups, 1) for part in (keys, values))
    scores = queries @ keys.transpose(2, 3) * 0.125
    seen = torch.ones(n, start + n, dtype=torch.bool).tril(start)
    wanted = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)


def test_a_full_device_ends_one_request_and_not_the_next():
    model = make_tiny_model("llama", torch.float32).cuda()
    engine = Engine(HuggingFaceModel(model))
    request = Request(random_prompt(20), max_new_tokens=10)
    expected = decode(engine, request)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    step = 2 << 20  # the allocator rounds up to this
    hog = torch.empty(max(0, free - 4 * step) // step * step, dtype=torch.uint8, device="cuda")
    hungry = Request(random_prompt(200), max_new_tokens=50)
    with suppress(CapacityError):  # what is left may suffice
        decode(engine, hungry)
    del hog
    torch.cuda.empty_cache()
    assert decode(engine, request) == expected


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "qwen2"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_mask_tokens_change_no_answer_captured_or_not(family, temperature):
    model = make_tiny_model(family, torch.float32).cuda()  # float64 is never captured
    request = Request(
        random_prompt(30), max_new_tokens=40, sampling=Sampling(temperature=temperature, seed=2)
    )
    plain = decode(Engine(HuggingFaceModel(model)), request, token_budget=0)
    target = HuggingFaceModel(model)
    target.attach_space(random_adapter(model))
    for drafter in (SpaceDrafter(masks_of(target)), PaperSpaceDrafter(masks_of(target))):
        assert decode(Engine(target), request, drafter, token_budget=None) == plain
    assert target.graphs is not None
    assert any(size.has_masks for size in target.graphs._passes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_real_tokens_are_the_same_to_the_last_bit_whatever_the_adapter(dtype):
    model = make_tiny_model("llama", dtype).cuda()
    tree = attach_masks(DraftTree.chain(range(1, 5)), range(VOCAB, VOCAB + 3), range(4))
    found = []
    for seed in (0, 1):
        target = HuggingFaceModel(model)
        target.attach_space(random_adapter(model, seed=seed))
        cache = target.new_cache(None, 64)
        with torch.inference_mode():
            target.forward(causal_rows(random_prompt(20), cache), 1)
            cache.keep(range(20))
            found.append(target.forward(tree_rows(tree, cache), len(tree)).clone())
    assert torch.equal(found[0][:4], found[1][:4])
    assert not torch.equal(found[0][4:], found[1][4:])
