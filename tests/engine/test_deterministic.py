"""Deterministic mode equals plain decoding to the last bit, whatever else the engine computes."""

from contextlib import closing

import pytest
import torch
from decoding import OracleDrafter, decode
from fakes import RandomDrafter
from space_models import masks_of, random_adapter
from tiny_models import (
    FAMILIES,
    SIZES,
    VOCAB,
    make_tiny_model,
    random_prompt,
    skip_without_products_of,
    tiny_model,
)
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ragaccel.decoding import DraftTree, NoDrafter, Request, attach_masks
from ragaccel.drafting import PaperSpaceDrafter, SpaceDrafter
from ragaccel.engine import DETERMINISTIC_ROWS, Engine, attention, bfloat16
from ragaccel.errors import ConfigurationError
from ragaccel.models import HuggingFaceModel, hf_model, self_check

CHUNK, PREFILL = 16, 12
LENGTHS = (1, 2, PREFILL, PREFILL + 1, PREFILL + 2, CHUNK + 1, 50)
NEW = 18
BIG = {"hidden_size": 256, "intermediate_size": 512}
BATCH_INVARIANT = "bfloat16 packed with its head"
KINDS = {
    "float32": (torch.float32, {}, False),
    "bfloat16": (torch.bfloat16, {}, False),
    "float32 packed": (torch.float32, BIG, True),
    "bfloat16 packed": (torch.bfloat16, BIG, True),
    BATCH_INVARIANT: (torch.bfloat16, {**BIG, "vocab_size": 320}, True),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(attention, "CHUNK", CHUNK)


@pytest.fixture(scope="module", params=KINDS)
def target(request):
    dtype, sizes, pack = KINDS[request.param]
    skip_without_products_of(dtype if pack else None)
    target = HuggingFaceModel(make_tiny_model("llama", dtype, **sizes), pack=pack)
    assert target.batchable
    assert bool(target._packed) == pack
    is_compiled = bfloat16.kernels("attention") is not None
    assert target.is_batch_invariant == (request.param == BATCH_INVARIANT and is_compiled)
    return target


def make_engine(target, **settings):
    return Engine(target, **{"prefill_chunk": PREFILL, "exact": True, **settings})


def plain(engine, request):
    return decode(engine, request, NoDrafter())


class Recorder:
    """Record an engine's logits by the tokens they follow."""

    def __init__(self, engine):
        self.logits, self._engine, self._forward = {}, engine, engine.model.forward
        engine.model.forward = self.forward

    def forward(self, rows, keep):
        logits = self._forward(rows, keep)
        (span,) = rows.spans
        entries = self._engine.prefix_cache._open
        before = next(held.token_ids for held in entries if held.cache is span.cache)
        ids, first = rows.token_ids[0], span.num_rows - keep
        for row, seen in enumerate(rows.sees()[first:]):
            text = (*before, *ids[seen].tolist())
            self.logits.setdefault(text, []).append(logits[row])
        return logits

    def __enter__(self):
        return self.logits

    def __exit__(self, *_):
        del self._engine.model.forward


def assert_equal_bits(target, prompt, new=NEW, **settings):
    """Assert that an answer and its logits are the same in plain and in drafted passes."""
    answers, logits = [], []
    for drafter in (NoDrafter(), None, RandomDrafter(5, VOCAB)):
        engine = make_engine(target, kept_prefixes=0, **settings)
        drafter = drafter or OracleDrafter(prompt, answers[0])
        with Recorder(engine) as seen:
            answers.append(decode(engine, Request(prompt, max_new_tokens=new), drafter))
        logits.append(seen)
    assert answers[0] == answers[1] == answers[2]
    text = (*prompt, *answers[0])
    for seen in logits:
        for end in range(len(prompt), len(text)):
            wanted = logits[0][text[:end]][0]
            assert all(torch.equal(wanted, each) for each in seen[text[:end]])


def test_logits_are_the_same_to_the_last_bit(target):
    for seed, length in enumerate(LENGTHS):
        assert_equal_bits(target, random_prompt(length, seed))


def test_kept_prefixes_change_nothing(target):
    engine = make_engine(target)
    passages = random_prompt(55, 7)
    for index in range(6):
        prompt = [*passages[: 55 - 7 * (index % 3)], *random_prompt(4 + index, index)]
        with Recorder(engine) as warm:
            found = decode(engine, Request(prompt, max_new_tokens=NEW), RandomDrafter(index, VOCAB))
        cold_engine = make_engine(target, kept_prefixes=0)
        with Recorder(cold_engine) as cold:
            assert plain(cold_engine, Request(prompt, max_new_tokens=NEW)) == found
        for end in range(len(prompt), len(prompt) + NEW):
            text = (*prompt, *found)[:end]
            assert all(torch.equal(cold[text][0], each) for each in warm[text])
    assert engine.prefilled_rows < 6 * 40


def test_passes_of_a_batch_invariant_model_are_as_without_exact(target):
    engine = make_engine(target)
    assert engine.deterministic != target.is_batch_invariant
    assert engine.max_rows == (64 if target.is_batch_invariant else DETERMINISTIC_ROWS)


@pytest.fixture
def batch_invariant():
    if bfloat16.kernels("attention") is None:
        pytest.skip("nothing is compiled for bfloat16 here")
    dtype, sizes, pack = KINDS[BATCH_INVARIANT]
    return HuggingFaceModel(make_tiny_model("llama", dtype, **sizes), pack=pack)


def test_passes_are_deterministic_if_ordinary_ones_show_that_branches_matter(batch_invariant):
    forward = batch_invariant.forward

    def wrong_in_trees(rows, keep):
        logits = forward(rows, keep)
        return logits if rows.spans[0].paths is None else logits + 1

    batch_invariant.forward = wrong_in_trees
    assert make_engine(batch_invariant).deterministic
    del batch_invariant.forward
    assert not make_engine(batch_invariant).deterministic


def test_mask_tokens_change_no_bits_of_a_batch_invariant_model(batch_invariant):
    wanted = [
        plain(make_engine(batch_invariant), Request(random_prompt(9, seed), max_new_tokens=NEW))
        for seed in range(3)
    ]
    batch_invariant.attach_space(random_adapter(batch_invariant.model))
    engine = make_engine(batch_invariant, kept_prefixes=0)
    assert not engine.deterministic
    for seed, answer in enumerate(wanted):
        request = Request(random_prompt(9, seed), max_new_tokens=NEW)
        for make in (PaperSpaceDrafter, SpaceDrafter):
            with Recorder(engine) as seen:
                assert decode(engine, request, make(masks_of(batch_invariant))) == answer
            assert any(max(text) >= batch_invariant.vocab_size for text in seen)
            with Recorder(engine) as alone:
                assert plain(engine, request) == answer
            text = (*request.prompt_ids, *answer)
            for end in range(len(request.prompt_ids), len(text)):
                (logits,) = alone[text[:end]]
                assert all(torch.equal(logits, one) for one in seen[text[:end]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_rows", [1, 5, 9, 64])
def test_fewer_rows_are_deterministic_too(max_rows, dtype):
    target = HuggingFaceModel(tiny_model("llama", dtype), self_check=False)
    assert make_engine(target, max_rows=max_rows).max_rows == min(max_rows, DETERMINISTIC_ROWS)
    for length in (9, 40):
        assert_equal_bits(target, random_prompt(length, length), max_rows=max_rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family):
    target = HuggingFaceModel(tiny_model(family, torch.float32))
    for length in (5, 40, *[256 - NEW] * (family == "gpt2")):  # up to the last position
        assert_equal_bits(target, random_prompt(length, length))


def test_only_chains_of_draft_tokens_are_verified_and_every_pass_costs_the_same():
    engine = make_engine(HuggingFaceModel(tiny_model("llama"), self_check=False))
    request = Request(random_prompt(9), max_new_tokens=9)
    decode(engine, request)
    with closing(engine.open(request)) as verifier:
        assert verifier.chains_only
        assert len({verifier.cost_seconds(rows) for rows in range(1, DETERMINISTIC_ROWS + 1)}) == 1
        verifier.prefill(request)
        root = request.prompt_ids[-1]
        tree = DraftTree((root, 1, 2), (-1, 0, 0), (1.0,) * 3, ((),) * 3)
        for refused in (tree, attach_masks(DraftTree.chain([root, 1]), [5], [1])):
            with pytest.raises(ValueError, match="chains of draft tokens only"):
                verifier.verify(refused)
        with pytest.raises(ValueError, match="exceeds max_rows=16"):
            verifier.verify(DraftTree.chain([root] * 17))


def test_deterministic_passes_are_never_replayed():
    target = HuggingFaceModel(make_tiny_model("llama", torch.float32))
    target.enable_graphs(object, capture=False)  # it can neither move states nor attend
    assert target.kv_pool is not None
    for length in (1, 2, 40):
        assert_equal_bits(target, random_prompt(length, length))


def test_batched_experts_are_refused_and_separate_ones_are_deterministic():
    sizes = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}

    def make_target(experts):
        torch.manual_seed(0)
        config = CONFIG_MAPPING["mixtral"](**sizes, experts_implementation=experts)
        return HuggingFaceModel(AutoModelForCausalLM.from_config(config))

    with pytest.raises(ConfigurationError, match="experts_implementation='batched_mm'"):
        make_engine(make_target("eager"))
    for length in (5, 40):
        assert_equal_bits(make_target("batched_mm"), random_prompt(length))


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "gelu", "relu2"])
@pytest.mark.parametrize("threads", [1, 3, 5])
def test_any_number_of_threads(threads, activation):
    sizes = {"intermediate_size": 4864, "hidden_act": activation}
    model = make_tiny_model("llama", torch.float32, **sizes)
    target = HuggingFaceModel(model, self_check=False)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_equal_bits(target, random_prompt(9), new=12)
    finally:
        torch.set_num_threads(before)


# Engine(exact=True) checks the model.


def test_a_refusal_names_the_cause(monkeypatch):
    eager = HuggingFaceModel(make_tiny_model("llama", attn_implementation="eager"))
    with pytest.raises(ConfigurationError, match="s attention: load it with attn_impl"):
        make_engine(eager)
    model = tiny_model("llama", torch.float32)
    monkeypatch.setattr(self_check, "_KNOWN_FINDINGS", {})  # of patched code: for this test only
    with monkeypatch.context() as patch:
        patch.setattr(hf_model, "make_shared_copy", lambda model: None)
        with pytest.raises(ConfigurationError, match="s attention: its modules cannot be copied"):
            Engine(HuggingFaceModel(model), exact=True)
    monkeypatch.setattr(hf_model, "passes_check", lambda *_: False)
    message = "s attention: this model fails the self-check with it"
    with pytest.raises(ConfigurationError, match=message):
        Engine(HuggingFaceModel(model), exact=True)


@pytest.mark.parametrize("edge", [48, 256])
def test_an_error_at_the_edge_of_a_chunk_is_found(edge, monkeypatch):
    """Simulate a model whose result depends on the row's place in a chunk."""
    monkeypatch.setattr(attention, "CHUNK", edge)
    model = make_tiny_model("llama", torch.float32, max_position_embeddings=edge + 32)
    target = HuggingFaceModel(model, self_check=False)
    Engine(target, exact=True)
    forward = target.forward

    def wrong_at_the_edge(rows, keep):
        logits = forward(rows, keep)
        logits[rows.positions[0, -keep:] == edge] += rows.spans[0].start
        return logits

    monkeypatch.setattr(target, "forward", wrong_at_the_edge)
    with pytest.raises(ConfigurationError, match="depends on the other tokens of the pass"):
        Engine(target, exact=True)


def test_a_model_shorter_than_a_chunk_is_checked_up_to_its_length(monkeypatch):
    monkeypatch.setattr(attention, "CHUNK", 256)
    target = HuggingFaceModel(tiny_model("gpt2", torch.float32), self_check=False)
    forward, longest = target.forward, []

    def watched(rows, keep):
        longest.append(int(rows.positions.max()))
        return forward(rows, keep)

    monkeypatch.setattr(target, "forward", watched)
    Engine(target, exact=True)
    assert max(longest) == 3 * 5 + DETERMINISTIC_ROWS - 1


def test_prompts_below_a_thousand_tokens_are_reused_without_settings():
    target = HuggingFaceModel(make_tiny_model("llama", torch.float32))
    assert Engine(target, exact=True).prefill_chunk == 512  # whole chunks are reused
    assert Engine(target).prefill_chunk == 1024
