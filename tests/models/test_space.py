"""Models with a SPACE adapter: the paper's layout, unchanged rows, unchanged answers."""

from dataclasses import replace

import pytest
import torch
from decoding import decode, run_together
from fakes import RandomDrafter
from space_models import adapted_model, masks_of, random_adapter
from static_passes import static_target
from tiny_models import VOCAB, generate, make_tiny_model, random_prompt, tiny_model

from ragaccel.decoding import DraftTree, Request, Sampling, attach_masks
from ragaccel.drafting import Mixture, PaperSpaceDrafter, SpaceDrafter, TrieDrafter
from ragaccel.engine import AttentionMasks, Engine, causal_rows, tree_rows, warm_up_passes
from ragaccel.errors import ConfigurationError
from ragaccel.models import HuggingFaceModel

SOME = ["llama", "mistral", "qwen2", "gemma2", "gemma3", "phi3", "gpt2", "opt"]
STATIC = ["llama", "mistral", "gemma2", "qwen2"]


def paper_tree(num_masks):
    """The paper's figure: the last token, k candidates, k mask tokens under each of them."""
    tree = DraftTree.chain(range(1, num_masks + 2))
    return attach_masks(tree, range(VOCAB, VOCAB + num_masks), range(num_masks + 1))


@pytest.mark.parametrize("num_masks", [1, 2, 5])
def test_layout_is_the_papers_figure(num_masks):
    target = HuggingFaceModel(tiny_model("llama"))
    cache = target.new_cache(None, None)
    target.forward(causal_rows(random_prompt(7), cache), 1)
    cache.keep(range(7))
    k, tree = num_masks, paper_tree(num_masks)
    rows = tree_rows(tree, cache)
    assert rows.num_rows == (k + 1) ** 2
    assert rows.is_mask.tolist() == [False] * (k + 1) + [True] * (k * (k + 1))
    positions, sees = rows.positions[0].tolist(), rows.spans[0].sees
    for c in range(k + 1):  # the root and candidate c stand one after another
        assert positions[c] == 7 + c
        assert sees[c].nonzero()[:, 0].tolist() == list(range(c + 1))
        for m in range(k):  # its mask tokens see what it sees, itself and those before them
            row = k + 1 + c * k + m
            assert positions[row] == 7 + c + 1 + m
            own = range(row - m, row + 1)
            assert sees[row].nonzero()[:, 0].tolist() == [*range(c + 1), *own]
            # SPACE's rule: as many visible keys as the position says
            assert int(sees[row].sum()) + 7 - 1 == positions[row]
    mask = AttentionMasks(torch.float64, torch.device("cpu")).make(rows, rows.spans[0])
    assert torch.equal(mask[:, :7], torch.zeros(len(tree), 7, dtype=torch.float64))
    assert torch.equal(mask[:, 7:] == 0, sees)


def alone(target, prompt, path, adapter):
    """Logits of transformers' own pass over a prompt, some tokens and all mask tokens behind."""
    model, k = target.model, adapter.num_masks
    ids = torch.tensor([[*prompt, *path]])
    embedding = model.get_input_embeddings()
    given = torch.cat((embedding(ids), adapter.mask_embeddings.to(target.dtype)[None]), dim=1)
    positions = torch.arange(given.shape[1])[None]
    space = target._space
    if getattr(model.config, "attn_logit_softcapping", None):
        target.network.set_attn_implementation("eager")
    with torch.no_grad(), space.mark_rows(torch.tensor([[*prompt, *path, *masks_of(target)]])):
        found = target.network(inputs_embeds=given, position_ids=positions, use_cache=False)
    return found.logits[0, -k:]


@pytest.mark.parametrize("family", SOME)
def test_mask_tokens_see_their_own_group_alone(family):
    target = adapted_model(family)
    cache = target.new_cache(None, None)
    prompt = random_prompt(6)
    target.forward(causal_rows(prompt, cache), 1)
    cache.keep(range(len(prompt)))
    tree = paper_tree(3)
    with torch.inference_mode():
        logits = target.forward(tree_rows(tree, cache), len(tree))
    logits = logits.clone()
    for c in range(4):
        wanted = alone(target, prompt, tree.token_ids[: c + 1], target._space.adapter)
        first = 4 + 3 * c
        torch.testing.assert_close(logits[first : first + 3], wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", SOME)
def test_rows_of_real_tokens_are_the_same_to_the_last_bit(family, dtype):
    model = make_tiny_model(family, dtype)
    bare, adapted_target = (
        HuggingFaceModel(model, self_check=False),
        HuggingFaceModel(model, self_check=False),
    )
    adapted_target.attach_space(random_adapter(model))
    prompt, tree = random_prompt(20), paper_tree(3)
    found = []
    for target in (bare, adapted_target):
        cache = target.new_cache(None, None)
        with torch.inference_mode():
            read = target.forward(causal_rows(prompt, cache), 20).clone()
            cache.keep(range(20))
            # a model without masks reads another token in their place
            ids = tuple(
                min(t, VOCAB - 1 + 10**9 * (target is adapted_target)) for t in tree.token_ids
            )
            logits = target.forward(tree_rows(replace(tree, token_ids=ids), cache), len(tree))
            found.append((read, logits.clone()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1][:4], found[1][1][:4])
    assert not torch.equal(found[0][1][4:], found[1][1][4:])


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "qwen2"])
def test_mask_tokens_that_outgrow_a_type_spoil_no_other_row(family):
    """Real tokens weigh mask states with 0, and 0 times infinity is NaN."""
    model = make_tiny_model(family, torch.float16)
    target = HuggingFaceModel(model, self_check=False)
    target.attach_space(random_adapter(model, scale=100.0))
    cache, tree = target.new_cache(None, None), paper_tree(3)
    found = []
    with torch.inference_mode():
        target.forward(causal_rows(random_prompt(20), cache), 20)
        cache.keep(range(20))
        for masks in (tree.token_ids[4:], (1,) * 12):
            read = replace(tree, token_ids=(*tree.token_ids[:4], *masks))
            found.append(target.forward(tree_rows(read, cache), len(tree))[:4].clone())
    assert found[0].isfinite().all()
    assert torch.equal(*found)


def drafters_of(target):
    mask_ids = masks_of(target)
    return {
        "paper": PaperSpaceDrafter(mask_ids),
        "tree": SpaceDrafter(mask_ids),
        "mixed": Mixture(TrieDrafter(), SpaceDrafter(mask_ids)),
        "among nonsense": Mixture(RandomDrafter(5, VOCAB), SpaceDrafter(mask_ids)),
        "paper among nonsense": Mixture(RandomDrafter(6, VOCAB), PaperSpaceDrafter(mask_ids)),
    }


SAMPLINGS = (Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=3))


@pytest.mark.parametrize(
    ("family", "is_static"), [*((one, False) for one in SOME), *((one, True) for one in STATIC)]
)
def test_answers_stay_the_same(family, is_static):
    model = make_tiny_model(family)
    target = static_target(model=model) if is_static else HuggingFaceModel(model)
    prompt = random_prompt(9)
    requests = [Request(prompt, max_new_tokens=26, sampling=one) for one in SAMPLINGS]
    expected = [decode(Engine(target), request, token_budget=0) for request in requests]
    assert expected[0] == generate(model, prompt, 26)
    target.attach_space(random_adapter(model))
    engine = Engine(target)
    for request, wanted in zip(requests, expected, strict=True):
        for kind, drafter in drafters_of(target).items():
            for budget in (None, 3) if kind == "tree" else (None,):
                assert decode(engine, request, drafter, token_budget=budget) == wanted, kind


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2", "phi3"])
def test_a_batch_of_four(family):
    target = adapted_model(family)
    engine = Engine(target)
    requests = [
        Request(
            prompt_ids=random_prompt(5 + 3 * i, i),
            max_new_tokens=12 + 5 * i,
            sampling=Sampling(temperature=0.9 * (i % 2), seed=i),
        )
        for i in range(4)
    ]
    wanted = [decode(engine, request, token_budget=0) for request in requests]
    for budget in (None, 3):
        engine.free_memory()  # each prompt is read anew, with mask tokens behind it
        drafters = [drafters_of(target)[kind] for kind in ("paper", "tree", "mixed", "tree")]
        assert run_together(engine, requests, drafters, token_budget=budget) == wanted


def never_shown_masks(ids, scores):
    assert int(ids.max()) < VOCAB
    return scores.index_fill(-1, ids[0, -1:] % 7, -1e9)


RULED = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "processors": (never_shown_masks,)}


@pytest.mark.parametrize(
    ("build", "length", "settings"),
    [
        (lambda: adapted_model("llama"), 8, {"max_new_tokens": 20, **RULED}),
        # to the last position that the model reads
        (lambda: adapted_model("llama", max_position_embeddings=32), 10, {"max_new_tokens": 22}),
        (lambda: packed_with_adapter(), 12, {"max_new_tokens": 20}),
    ],
    ids=["rules", "last position", "packed"],
)
def test_answers_of_other_models_and_requests_stay_the_same(build, length, settings):
    target = build()
    request = Request(prompt_ids=random_prompt(length), **settings)
    engine = Engine(target)
    plain = decode(engine, request, token_budget=0)
    for kind in ("paper", "tree"):
        assert decode(engine, request, drafters_of(target)[kind], token_budget=None) == plain


def packed_with_adapter():
    target = HuggingFaceModel(make_tiny_model("llama", torch.float32, hidden_size=256), pack=True)
    assert target._packed
    target.attach_space(random_adapter(target.model))
    return target


def test_without_an_adapter_mask_tokens_are_any_token():
    target = HuggingFaceModel(tiny_model("llama"))
    request = Request(prompt_ids=random_prompt(8), max_new_tokens=20)
    engine = Engine(target)
    plain = decode(engine, request, token_budget=0)
    for mask_ids in ((3, 4), (VOCAB + 5, VOCAB + 6)):
        assert decode(engine, request, SpaceDrafter(mask_ids), token_budget=None) == plain


def test_a_second_adapter_is_refused():
    target = adapted_model("llama")
    with pytest.raises(ConfigurationError, match="already"):
        target.attach_space(random_adapter(target.model))
    with pytest.raises(ConfigurationError, match="model_type"):
        HuggingFaceModel(make_tiny_model("llama")).attach_space(random_adapter(tiny_model("gpt2")))


@pytest.mark.parametrize("family", STATIC)
def test_static_passes_take_mask_tokens(family):
    model = make_tiny_model(family, torch.float32)
    adapter = random_adapter(model)
    static, launched = static_target(model=model), HuggingFaceModel(model)
    found = []
    for target in (launched, static):
        target.attach_space(adapter)
        cache = target.new_cache(None, 64)
        with torch.inference_mode():
            target.forward(causal_rows(random_prompt(20), cache), 1)
            cache.keep(range(20))
            tree = paper_tree(3)
            found.append(target.forward(tree_rows(tree, cache), len(tree)).clone())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    assert {size.has_masks for size in static.graphs._passes} == {True}


def test_static_rows_of_real_tokens_are_the_same_to_the_last_bit():
    model = make_tiny_model("llama", torch.float32)
    found = []
    for adapter in (random_adapter(model), random_adapter(model, seed=1)):
        target = static_target(model=model)
        target.attach_space(adapter)
        cache, tree = target.new_cache(None, 64), paper_tree(3)
        with torch.inference_mode():
            target.forward(causal_rows(random_prompt(20), cache), 1)
            cache.keep(range(20))
            found.append(target.forward(tree_rows(tree, cache), len(tree)).clone())
    assert torch.equal(found[0][:4], found[1][:4])
    assert not torch.equal(found[0][4:], found[1][4:])


def test_passes_with_mask_tokens_are_warmed_up_too():
    target = static_target(model=make_tiny_model("llama"))
    target.attach_space(random_adapter(target.model))
    warm_up_passes(Engine(target, max_rows=16), context=20)
    sizes = {(size.rows, size.has_masks) for size in target.graphs._passes}
    assert {(rows, True) for rows in (2, 4, 8, 16)} <= sizes
    assert {(rows, False) for rows in (1, 2, 4, 8, 16)} <= sizes


@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("length", [1, 2, 9, 40])
def test_mask_tokens_are_read_with_the_prompt(family, length):
    target = adapted_model(family)
    prompt = random_prompt(length)
    request = Request(prompt_ids=prompt, max_new_tokens=8)
    if length == 40:  # a prompt that is kept is not read again
        warm = Engine(target)
        decode(warm, request)
        kept = warm.open(request)
        kept.predict_masks(masks_of(target))
        kept.prefill(request)
        assert not kept.mask_predictions
        kept.close()
    engine = Engine(target, prefill_chunk=16, kept_prefixes=0)
    plain = decode(engine, request, token_budget=0)
    verifier = engine.open(request)
    verifier.predict_masks(masks_of(target))
    verifier.prefill(request)
    if length == 1:
        assert not verifier.mask_predictions  # nothing is read before the first pass
    else:
        # the same group under the token before, in a separate pass
        behind = engine.open(Request(prompt_ids=prompt[:-1], max_new_tokens=8))
        behind.prefill(behind.request)
        tree = attach_masks(DraftTree.chain(prompt[-2:-1]), masks_of(target), [0])
        wanted = behind.verify(tree).mask_predictions
        assert [[token for token, _ in row] for row in verifier.mask_predictions] == [
            [token for token, _ in row] for row in wanted
        ]
        for found, own in zip(verifier.mask_predictions, wanted, strict=True):
            assert [p for _, p in found] == pytest.approx([p for _, p in own], rel=1e-4)
        behind.close()
    verifier.close()
    assert decode(engine, request, SpaceDrafter(masks_of(target)), token_budget=None) == plain


def test_mask_predictions_are_drawn_with_the_noise_of_their_position():
    target = adapted_model("llama")
    # A model that is right about its mask tokens: drawn tokens are the mask predictions.
    with torch.no_grad():
        for weights in target.model.parameters():
            weights.zero_()
    target.mark_weights_changed()
    sampling = Sampling(temperature=1.0, seed=5)
    request = Request(prompt_ids=random_prompt(9), max_new_tokens=12, sampling=sampling)
    engine = Engine(target, kept_prefixes=0)
    verifier = engine.open(request)
    verifier.predict_masks(masks_of(target))
    verifier.prefill(request)
    drawn = decode(engine, request, token_budget=0)
    assert [row[0][0] for row in verifier.mask_predictions] == drawn[:3]
    verifier.close()
