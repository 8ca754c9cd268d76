"""custom_generate gives the same tokens as generate, for all supported settings."""

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fakes import RandomDrafter
from hypothesis import given, settings, strategies as st
from tiny_llm import tiny_tokenizer
from tiny_models import VOCAB, make_tiny_model, random_prompt, tiny_model
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    pipeline,
)

from ragaccel import ConfigurationError, Passage, Reference, custom_generate
from ragaccel.frameworks.hf_generate import _SLOT_ATTRIBUTE

FAMILIES = ("llama", "mistral", "qwen2-sliding", "qwen3", "gemma3", "phi3", "gpt2", "gpt-neox")

PAD = 0
PROMPT_TEXT = "The lamp burns oil. Its keeper trims the wick. Who trims the wick?"


def padded(prompts, pad=PAD):
    """Prompts of different lengths as a batch, padded on the left."""
    width = max(map(len, prompts))
    ids = [[pad] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def some_prompts(*lengths, seed=0):
    return [random_prompt(length, seed + i) for i, length in enumerate(lengths)]


def assert_same(model, prompts, custom=custom_generate, given=None, **kwargs):
    """Generate with and without; returns what both gave."""
    kwargs = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": PAD, **kwargs}
    batch = padded(prompts)
    expected = model.generate(**batch, **kwargs)
    got = model.generate(**batch, custom_generate=custom, **(given or {}), **kwargs)
    assert got.tolist() == expected.tolist()
    assert (got.dtype, got.device) == (expected.dtype, expected.device)
    return expected


def text_model():
    model = make_tiny_model("llama", vocab_size=400, max_position_embeddings=512)
    model.generation_config.eos_token_id = 1
    model.generation_config.pad_token_id = 1
    return model


def likely_end(model, prompts, at=5):
    """A token that the first prompt's answer has at a place."""
    batch = padded(prompts)
    ids = model.generate(**batch, max_new_tokens=at + 1, do_sample=False, pad_token_id=PAD)
    return int(ids[0, -1])


@pytest.fixture
def model():
    return tiny_model("llama")


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_of_every_family_are_the_same(family):
    model = tiny_model(family)
    prompts = some_prompts(20, 7, 31)
    plain = assert_same(model, prompts)
    answers = [row[31:] for row in plain]
    assert_same(model, prompts, given={"references": answers})
    assert_same(model, prompts, custom_generate.with_settings(drafter=RandomDrafter(1, VOCAB)))
    ends = [likely_end(model, prompts, at) for at in (3, 9)]
    assert_same(model, prompts, eos_token_id=ends)


SETTINGS = {
    "max_new_tokens": st.integers(1, 30),
    "repetition_penalty": st.sampled_from([1.0, 1.3, 0.7]),
    "no_repeat_ngram_size": st.sampled_from([0, 1, 2, 3]),
    "bad_words_ids": st.sampled_from([None, [[3], [5, 6]], [[PAD]]]),
    "sequence_bias": st.sampled_from([None, [[[7], 3.0], [[8, 9], -2.0]]]),
    "min_new_tokens": st.sampled_from([None, 5]),
    "min_length": st.sampled_from([0, 5]),  # of the answer
    "suppress_tokens": st.sampled_from([None, [4, 5]]),
    "begin_suppress_tokens": st.sampled_from([None, [6, 7, 8]]),
    "exponential_decay_length_penalty": st.sampled_from([None, (3, 1.5)]),
    "forced_eos_token_id": st.sampled_from([None, 11]),
    "encoder_repetition_penalty": st.sampled_from([1.0, 1.2]),
    "renormalize_logits": st.booleans(),
    "pad_token_id": st.sampled_from([PAD, 50]),
}


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_whatever_is_asked_for_is_the_same(data):
    model = tiny_model(data.draw(st.sampled_from(["llama", "gpt2", "qwen2-sliding"])))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    prompts = some_prompts(*lengths, seed=data.draw(st.integers(0, 50)))
    names = data.draw(st.sets(st.sampled_from(sorted(SETTINGS)), max_size=5))
    kwargs = {name: data.draw(SETTINGS[name]) for name in sorted(names)}
    if kwargs.get("exponential_decay_length_penalty") or data.draw(st.booleans()):
        kwargs["eos_token_id"] = data.draw(
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9)
        )
    if kwargs.get("min_length"):
        kwargs["min_length"] = max(lengths) + min(5, kwargs.get("max_new_tokens", 24))
    if "min_new_tokens" in kwargs:
        kwargs["max_new_tokens"] = max(
            kwargs.get("max_new_tokens", 24), kwargs["min_new_tokens"] or 0
        )
    expected = assert_same(model, prompts, **kwargs)
    answers = [[row] for row in expected[:, max(lengths) :]]
    assert_same(model, prompts, given={"references": answers}, **kwargs)


def test_padding_counts_where_it_counts_for_generate(model):
    """A row's padding is among the tokens that its n-grams repeat."""
    short, long = some_prompts(7, 20)
    likely = likely_end(model, [short], at=0)
    batch = padded([short, long], pad=likely)
    kwargs = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": likely}
    expected = model.generate(**batch, **kwargs, no_repeat_ngram_size=1)
    assert expected[0, 20] != likely
    got = model.generate(**batch, **kwargs, no_repeat_ngram_size=1, custom_generate=custom_generate)
    assert got.equal(expected)


def only(*tokens):
    return lambda row, ids: [tokens[(row + len(ids)) % len(tokens)], *range(20 + row, 40 + row)]


class RowBias:
    """A processor of a whole batch: every row has a bias of its own."""

    def __call__(self, ids, scores):
        scores[torch.arange(len(ids)), (ids.sum(1) + 3 * torch.arange(len(ids))) % VOCAB] += 8.0
        assert scores.dtype == torch.float32
        return scores


class EndsWithMultiple(StoppingCriteria):
    def __call__(self, ids, scores, **kwargs):
        return ids[:, -2:].sum(1) % 7 == 0


RULES = {
    "allowed tokens": {"prefix_allowed_tokens_fn": only(3, 5, 60)},
    "processors": {"logits_processor": LogitsProcessorList([RowBias()])},
    # Without end tokens, generate goes on with rows that have ended until all have.
    "criteria": {"stopping_criteria": StoppingCriteriaList([EndsWithMultiple()])},
    "criteria and end": {
        "stopping_criteria": StoppingCriteriaList([EndsWithMultiple()]),
        "eos_token_id": 90,
    },
}


@pytest.mark.parametrize("name", RULES)
def test_rules_of_the_caller_see_rows_at_their_places_with_their_padding(model, name):
    for lengths in ((12,), (12, 20, 9, 15)):
        prompts = some_prompts(*lengths, seed=3)
        expected = assert_same(model, prompts, **RULES[name])
        answers = [row[max(lengths) :] for row in expected]
        assert_same(model, prompts, given={"references": answers}, **RULES[name])
        assert (expected.shape[1] < max(lengths) + 24) == name.startswith("criteria")


def test_lengths_may_be_given_in_every_way(model):
    prompts = some_prompts(12, 20)
    assert assert_same(model, prompts, max_new_tokens=None, max_length=33).shape[1] == 33
    shorter = StoppingCriteriaList([MaxLengthCriteria(30), MaxLengthCriteria(27)])
    assert assert_same(model, prompts, stopping_criteria=shorter).shape[1] == 27
    config = GenerationConfig(max_new_tokens=7, pad_token_id=PAD, do_sample=False)
    batch = padded(prompts)
    expected = model.generate(**batch, generation_config=config)
    got = model.generate(**batch, generation_config=config, custom_generate=custom_generate)
    assert got.tolist() == expected.tolist()
    assert got.shape[1] == 27
    out_of_time = assert_same(model, prompts, max_time=0.0)
    assert out_of_time.shape[1] == 21


def test_prompts_without_a_mask_or_without_padding(model):
    ids = torch.tensor([random_prompt(15)])
    kwargs = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": PAD}
    expected = model.generate(ids, **kwargs)
    assert model.generate(ids, custom_generate=custom_generate, **kwargs).equal(expected)
    assert model.generate(inputs=ids, custom_generate=custom_generate, **kwargs).equal(expected)
    assisted = model.generate(ids, assistant_model=model, custom_generate=custom_generate, **kwargs)
    assert assisted.equal(expected)
    both = model.generate(ids.repeat(2, 1), custom_generate=custom_generate, **kwargs)
    assert both.tolist() == expected.tolist() * 2


def test_a_stop_string_ends_an_answer_by_its_criterion():
    model, tokenizer = text_model(), tiny_tokenizer()
    prompts = [tokenizer.encode(PROMPT_TEXT), tokenizer.encode("Who?")]
    free = assert_same(model, prompts, eos_token_id=None)
    answer = free[0, len(prompts[0]) + 4 :].tolist()
    string = next(
        text for i in answer if (text := tokenizer.decode([i])).isascii() and len(text) > 1
    )
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, [string])])
    expected = assert_same(model, prompts[:1], stopping_criteria=criteria, eos_token_id=1)
    assert expected.shape[1] < free.shape[1]
    assert_same(model, prompts, stopping_criteria=criteria, eos_token_id=1)


def sampled(model, custom=None, **kwargs):
    kwargs = {"max_new_tokens": 6, "do_sample": True, "pad_token_id": PAD, "top_k": 5, **kwargs}
    batch = padded(some_prompts(8, 12))
    return model.generate(**batch, custom_generate=custom, **kwargs)[:, 12:]


def test_sampling_depends_on_torchs_seed_and_not_on_drafting(model):
    torch.manual_seed(5)
    first, second = sampled(model, custom_generate), sampled(model, custom_generate)
    torch.manual_seed(5)
    plain = custom_generate.with_settings(token_budget=0)
    assert sampled(model, plain).equal(first)
    assert sampled(model, plain, references=[[1, 2]]).equal(second)
    assert not first.equal(second)


WARPED = {
    "all": {"top_k": 20, "temperature": 0.7, "top_p": 0.8, "min_p": 0.05,
            "repetition_penalty": 1.4},
    "others": {"top_k": 0, "typical_p": 0.7, "temperature": 1.5},
}  # fmt: skip


@pytest.mark.parametrize("name", WARPED)
def test_sampled_tokens_have_the_distribution_of_generate(model, name):
    kwargs = {"max_new_tokens": 1, "do_sample": True, "pad_token_id": PAD, **WARPED[name]}
    batch = padded(some_prompts(9))
    scores = model.generate(
        **batch, **kwargs, return_dict_in_generate=True, output_scores=True
    ).scores[0]
    torch.manual_seed(0)
    drawn = model.generate(
        **batch, **kwargs, num_return_sequences=300, custom_generate=custom_generate
    )[:, -1]
    shares = torch.bincount(drawn, minlength=VOCAB) / len(drawn)
    probabilities = scores[0].softmax(-1)
    assert (shares[probabilities == 0] == 0).all()
    error = (probabilities * (1 - probabilities) / len(drawn)).sqrt()
    assert ((shares - probabilities).abs() <= 5 * error + 1e-9).all()


class Watched(RandomDrafter):
    """Records the references that it may copy from."""

    def __init__(self):
        super().__init__(0, VOCAB)
        self.references, self.given = set(), set()

    def draft(self, context, budget):
        self.references |= {reference.token_ids for reference in context.references}
        prompt = tuple(context.token_ids[:8])
        self.given |= {(prompt, reference.token_ids) for reference in context.references}
        return super().draft(context, budget)


def test_rows_of_one_prompt_are_sampled_independently(model):
    batch = padded(some_prompts(8, 12))
    kwargs = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 8, "pad_token_id": 0}
    drafter = Watched()
    custom = custom_generate.with_settings(drafter=drafter)
    rows = model.generate(**batch, **kwargs, custom_generate=custom, references=[[[1, 2]], [[3]]])
    first, second = (tuple(prompt[:8]) for prompt in some_prompts(8, 12))
    assert drafter.given == {(first, (1, 2)), (second, (3,))}
    assert rows.shape == (6, 20)
    assert rows[:3, :12].equal(batch["input_ids"][:1].repeat(3, 1))
    assert len({tuple(row) for row in rows.tolist()}) == 6


def test_the_dictionary_holds_the_sequences(model):
    kwargs = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": PAD}
    batch = padded(some_prompts(8))
    found = model.generate(
        **batch, **kwargs, custom_generate=custom_generate, return_dict_in_generate=True
    )
    assert found.sequences.equal(model.generate(**batch, **kwargs))
    ignored = model.generate(**batch, **kwargs, custom_generate=custom_generate, output_scores=True)
    assert ignored.equal(found.sequences)


@pytest.mark.parametrize(
    ("references", "seen"),
    [
        ([[1, 2, 3]], {(1, 2, 3)}),
        ([torch.tensor([4, 5]), Reference((6,))], {(4, 5), (6,)}),
        ([[[1, 2]], []], {(1, 2)}),
        ([[[1, 2]], [[3], Reference((4, 4))]], {(1, 2), (3,), (4, 4)}),
        (None, set()),
    ],
)
def test_references_reach_the_drafter(model, references, seen):
    drafter = Watched()
    custom = custom_generate.with_settings(drafter=drafter)
    assert_same(model, some_prompts(8, 9), custom, given={"references": references})
    assert drafter.references == seen


def test_references_may_be_texts_where_there_is_a_tokenizer():
    model, tokenizer = text_model(), tiny_tokenizer()
    prompts = [tokenizer.encode(PROMPT_TEXT)]
    drafter = Watched()
    custom = custom_generate.with_settings(drafter=drafter, tokenizer=tokenizer)
    given_references = ["trims the wick", Passage("a", "no such words")]
    assert_same(model, prompts, custom, given={"references": given_references})
    texts = {tokenizer.decode(ids) for ids in drafter.references}
    assert any("trims the wick" in text for text in texts)
    assert "no such words" in texts
    with pytest.raises(ConfigurationError, match=r"with_settings\(tokenizer=tokenizer\)"):
        assert_same(model, prompts, given={"references": ["text"]})
    with pytest.raises(ConfigurationError, match="one list for all 1 prompts"):
        assert_same(model, prompts, given={"references": [[[1]], [[2]]]})


@pytest.mark.slow
def test_threads_share_an_engine_and_get_their_own_tokens():
    model = make_tiny_model("llama", seed=4)
    prompts = [some_prompts(9 + i, 5, seed=10 * i) for i in range(6)]
    kwargs = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": PAD}
    expected = [model.generate(**padded(each), **kwargs) for each in prompts]

    def run(prompt):
        found = model.generate(**padded(prompt), custom_generate=custom_generate, **kwargs)
        return found, model.__dict__[_SLOT_ATTRIBUTE].engine

    with ThreadPoolExecutor(len(prompts)) as threads:
        found, engines = zip(*threads.map(run, prompts), strict=True)
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))
    assert len(set(engines)) == 1


def test_an_error_of_a_processor_reaches_its_caller_and_nothing_stays_open(model):
    def fails(row, ids):
        raise ZeroDivisionError("a rule that fails")

    for prompts in (some_prompts(9), some_prompts(9, 12)):
        with pytest.raises(ZeroDivisionError, match="a rule that fails"):
            model.generate(
                **padded(prompts),
                prefix_allowed_tokens_fn=fails,
                max_new_tokens=5,
                custom_generate=custom_generate,
                pad_token_id=PAD,
            )
    engine = model.__dict__[_SLOT_ATTRIBUTE].engine.scheduler.engine
    assert not engine.prefix_cache._open
    assert_same(model, some_prompts(9))


def test_an_engine_ends_with_its_model_and_is_in_no_copy():
    model = make_tiny_model("llama", seed=5)
    assert_same(model, some_prompts(9))
    engine = weakref.ref(model.__dict__[_SLOT_ATTRIBUTE].engine)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.__dict__[_SLOT_ATTRIBUTE] is None
        assert_same(other, some_prompts(9))
    assert b"ragaccel" not in pickle.dumps(model).replace(_SLOT_ATTRIBUTE.encode(), b"")
    assert not any("ragaccel" in name for name in model.state_dict())
    del model, other
    gc.collect()
    assert engine() is None


def test_changed_weights_modules_and_types_are_followed():
    model = make_tiny_model("llama", seed=6)
    prompts = some_prompts(12, 9)
    before = assert_same(model, prompts)
    with torch.no_grad():
        model.lm_head.weight.add_(torch.randn_like(model.lm_head.weight))
    after = assert_same(model, prompts)
    assert not after.equal(before)
    layer = torch.nn.Linear(32, VOCAB, bias=False).to(torch.float64)
    model.lm_head = layer
    assert not assert_same(model, prompts).equal(after)
    hook = model.model.layers[0].register_forward_hook(lambda *args: args[2] * -0.5)
    hooked = assert_same(model, prompts)
    hook.remove()
    assert not assert_same(model, prompts).equal(hooked)
    model.float()
    assert_same(model, prompts, max_new_tokens=4)


def test_answers_are_remembered_only_where_that_is_asked_for(monkeypatch):
    from ragaccel.drafting import JIT_WARMUP

    JIT_WARMUP.wait()
    model = make_tiny_model("llama", seed=7)
    prompts = some_prompts(20)
    assert_same(model, prompts)
    memory = model.__dict__[_SLOT_ATTRIBUTE].engine.drafting.memory
    assert memory.namespaces == []
    assert_same(model, prompts, custom_generate.with_settings(remember=True, namespace="a"))
    assert memory.namespaces == ["a"]


def test_pipelines_give_the_same_texts():
    model, tokenizer = text_model(), copy.deepcopy(tiny_tokenizer())
    tokenizer.padding_side, tokenizer.pad_token = "left", "<eos>"
    texts = ["Who trims the wick?", "The lamp burns", "What rises at the mole? The tide"]
    kwargs = {"max_new_tokens": 12, "do_sample": False}
    plain = pipeline("text-generation", model=model, tokenizer=tokenizer)
    for batch_size in (1, 3):
        expected = plain(texts, batch_size=batch_size, **kwargs)
        got = plain(texts, batch_size=batch_size, custom_generate=custom_generate, **kwargs)
        assert got == expected
    chat = [{"role": "user", "content": texts[0]}]
    assert plain(chat, custom_generate=custom_generate, **kwargs) == plain(chat, **kwargs)


# Refused


def filled_cache():
    cache = DynamicCache()
    cache.update(*torch.zeros(2, 1, 2, 4, 8, dtype=torch.float64), 0)
    return cache


REFUSED = {
    "beams": ({"num_beams": 2}, "beam search"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "drafts by itself"),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
    "states": (
        {"return_dict_in_generate": True, "output_hidden_states": True},
        "output_hidden_states",
    ),
    "cache": ({"past_key_values": filled_cache()}, "keeps its own cache"),
    "positions": ({"position_ids": torch.arange(5, 15)[None]}, "position_ids"),
    "embeddings": ({"inputs_embeds": torch.zeros(1, 10, 32, dtype=torch.float64)}, "inputs_embeds"),
    "too long": ({"max_new_tokens": 500}, "exceed"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_done_is_refused(model, name):
    with pytest.raises(TypeError, match="no_such"):
        custom_generate.with_settings(no_such=1)
    kwargs, words = REFUSED[name]
    kwargs = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": PAD, **kwargs}
    batch = padded([random_prompt(10)])
    if name == "embeddings":
        batch = {}
    with pytest.raises(ConfigurationError, match=words):
        model.generate(**batch, custom_generate=custom_generate, **kwargs)


def test_masks_with_holes_training_and_autocast_are_refused():
    model = make_tiny_model("llama")
    batch = padded([random_prompt(10), random_prompt(8)])
    kwargs = {"max_new_tokens": 5, "pad_token_id": PAD, "custom_generate": custom_generate}
    for broken in ([1] * 9 + [0], [1, 0] + [1] * 8, [0] * 10):
        batch["attention_mask"][1] = torch.tensor(broken)
        with pytest.raises(ConfigurationError, match="padded on the left only"):
            model.generate(**batch, **kwargs)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigurationError, match="autocast"):
        assert_same(model, some_prompts(5))
    model.train()
    with pytest.raises(ConfigurationError, match=r"model.eval\(\)"):
        assert_same(model, some_prompts(5))
    assert model.training


def test_guidance_is_followed_for_one_prompt_and_refused_for_several(model):
    kwargs = {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[4, 5, 6]])}
    guided = assert_same(model, some_prompts(12), **kwargs)
    assert not guided.equal(assert_same(model, some_prompts(12)))
    with pytest.raises(ConfigurationError, match="keeps state between calls"):
        model.generate(
            **padded(some_prompts(12, 9)),
            guidance_scale=1.5,
            max_new_tokens=5,
            pad_token_id=PAD,
            custom_generate=custom_generate,
        )
