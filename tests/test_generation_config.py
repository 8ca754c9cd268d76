"""A model's own generation settings are applied, refused by name, or have no effect."""

import random

import pytest
import torch
from fakes import RandomDrafter
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from tiny_llm import tiny_tokenizer
from tiny_models import make_tiny_model
from transformers import GenerationConfig, RepetitionPenaltyLogitsProcessor

from ragaccel import custom_generate
from ragaccel.decoding import Reference
from ragaccel.errors import ConfigurationError
from ragaccel.llm import LLM
from ragaccel.models import HONOURED, REFUSED, SAMPLING, WITHOUT_INFLUENCE, generation_config

VOCAB, NEW, END = 380, 24, 7
FAMILIES = ("llama", "gpt2", "mistral", "gemma2", "qwen2-sliding", "gpt-neox")
PROMPT = [random.Random(3).randrange(10, VOCAB) for _ in range(17)]
SUPPRESSED = [*range(100), *range(200, 300)]

# One value of each honoured field that changes the answer to PROMPT, as the tests below check.
VALUES = {
    "bad_words_ids": [[token] for token in range(10, 180)],
    "begin_suppress_tokens": list(range(10, 360)),
    "encoder_no_repeat_ngram_size": 1,
    "encoder_repetition_penalty": 8.0,
    "eos_token_id": list(range(100)),
    "exponential_decay_length_penalty": (4, 1.9),
    "forced_eos_token_id": 11,
    "max_length": len(PROMPT) + 9,
    "max_new_tokens": 5,
    "no_repeat_ngram_size": 1,
    "repetition_penalty": 2.5,
    "sequence_bias": [[[token], 9.0] for token in range(200, 230)],
    "suppress_tokens": SUPPRESSED,
}
ALONE = {
    "min_length": ({"eos_token_id": list(range(100))}, len(PROMPT) + 12),
    "min_new_tokens": ({"eos_token_id": list(range(100))}, 9),
    "stop_strings": ({}, ["e", "t", "a", "\u0120"]),
}


def make_model(family="llama", dtype=torch.float64, **fields):
    model = make_tiny_model(family, dtype, vocab_size=VOCAB, max_position_embeddings=512)
    return configured(model, **fields)


def configured(model, **fields):
    """Give a model a fresh generation config."""
    model.generation_config = GenerationConfig(**{"eos_token_id": END, "pad_token_id": 0, **fields})
    return model


@pytest.fixture(scope="module")
def llms():
    """An LLM of every family; its generation config is read anew for every request."""
    made = {}

    def get(family):
        if family not in made:
            made[family] = LLM(make_model(family), tiny_tokenizer(), save_measurements=False)
        return made[family]

    return get


def generate(model, prompt, **given):
    """What ``generate`` answers with the model's own settings."""
    ids = torch.tensor([prompt])
    if model.generation_config.stop_strings:
        given["tokenizer"] = tiny_tokenizer()
    if model.generation_config.max_length is None and not model.generation_config.max_new_tokens:
        given.setdefault("max_new_tokens", NEW)
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **given)
    return tuple(found[0, len(prompt) :].tolist())


def answer(llm, prompt, expected, **given):
    """Return LLM's answer, drafted with right, wrong and impossible tokens."""
    config = llm.model.model.generation_config
    if config.max_length is None and not config.max_new_tokens:
        given.setdefault("max_new_tokens", NEW)
    wrong = [token + 1 for token in expected]
    references = [Reference((*prompt[-3:], *text)) for text in (expected, wrong)]
    return llm.generate(prompt, references=references, **given).token_ids


# The lists


def test_every_field_of_the_installed_transformers_is_in_one_list_and_tried_here():
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    lists = [HONOURED, frozenset(REFUSED), WITHOUT_INFLUENCE]
    for name in fields:
        assert sum(name in one for one in lists) == 1, name
    assert SAMPLING <= WITHOUT_INFLUENCE
    assert REFUSALS.keys() == REFUSED.keys()
    hard_to_show = {"forced_bos_token_id", "max_time", "remove_invalid_values"}
    assert HONOURED - VALUES.keys() - ALONE.keys() - hard_to_show == {"renormalize_logits"}


def test_a_field_of_a_later_transformers_is_refused_by_name(llms, monkeypatch):
    llm = llms("llama")
    configured(llm.model.model)
    llm.model.model.generation_config.contrast_depth = 3
    llm.generate(PROMPT, max_new_tokens=2)  # an entry of a file's own, which generate ignores
    monkeypatch.setattr(generation_config, "_unknown_fields", lambda: ("contrast_depth",))
    with pytest.raises(ConfigurationError, match="contrast_depth=3, which this version"):
        llm.generate(PROMPT, max_new_tokens=2)


# Honoured


@pytest.mark.parametrize("name", [*VALUES, *ALONE])
def test_a_field_by_itself_changes_the_answer_as_it_does_in_generate(llms, name):
    llm = llms("llama")
    others, value = ALONE.get(name, ({}, VALUES.get(name)))
    prompt = list(range(10, 360)) if name.startswith("encoder") else PROMPT
    without = generate(configured(llm.model.model, **others), prompt)
    model = configured(llm.model.model, **others, **{name: value})
    expected = generate(model, prompt)
    assert expected != without
    assert answer(llm, prompt, expected) == expected


def test_a_forced_first_token_follows_a_prompt_of_one(llms):
    llm = llms("llama")
    configured(llm.model.model, forced_bos_token_id=42, begin_suppress_tokens=[42, *range(200)])
    expected = generate(llm.model.model, [5])
    assert expected[0] == 42
    assert answer(llm, [5], expected) == expected
    assert answer(llm, PROMPT, ()) == generate(llm.model.model, PROMPT)


def test_nan_and_infinity_are_removed_if_asked():
    model = make_model(remove_invalid_values=True)
    llm = LLM(model, tiny_tokenizer(), save_measurements=False)
    with torch.no_grad():
        model.lm_head.weight[50:60] = float("nan")
        model.lm_head.weight[70] = float("inf")
    expected = generate(model, PROMPT)
    assert answer(llm, PROMPT, expected) == expected
    assert 50 not in expected


def test_an_answer_ends_when_its_time_is_up(llms):
    llm = llms("llama")
    configured(llm.model.model, max_time=1e-9)
    found = llm.generate(PROMPT, max_new_tokens=NEW)
    assert found.finish_reason == "stop"
    assert 1 <= len(found.token_ids) < NEW


words = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3)
ANY = {
    "bad_words_ids": st.lists(words, min_size=1, max_size=30),
    "begin_suppress_tokens": st.lists(st.integers(0, VOCAB - 1), max_size=200),
    "encoder_no_repeat_ngram_size": st.integers(0, 3),
    "encoder_repetition_penalty": st.sampled_from([0.6, 1.0, 1.5]),
    "eos_token_id": st.sampled_from([END, [END, 9, 12], list(range(30))]),
    "exponential_decay_length_penalty": st.tuples(st.integers(0, 6), st.floats(1.01, 2.0)),
    "forced_eos_token_id": st.sampled_from([END, [3, END]]),
    "forced_bos_token_id": st.integers(0, VOCAB - 1),
    "max_length": st.integers(22, 60),
    "max_new_tokens": st.integers(1, 24),
    "min_length": st.integers(0, 40),
    "min_new_tokens": st.integers(0, 12),
    "no_repeat_ngram_size": st.integers(0, 3),
    "remove_invalid_values": st.booleans(),
    "renormalize_logits": st.booleans(),
    "repetition_penalty": st.sampled_from([0.7, 1.05, 1.3]),
    "sequence_bias": st.dictionaries(
        words.map(tuple), st.floats(-8, 8, width=32), min_size=1, max_size=20
    ),
    "suppress_tokens": st.lists(st.integers(0, VOCAB + 5), max_size=200),
    # without influence, whatever they say
    "do_sample": st.just(False),
    "use_cache": st.booleans(),
    "temperature": st.just(0.6),
    "top_p": st.just(0.8),
    "top_k": st.just(20),
}
# A failing case is made no smaller: that takes minutes, and each field is tried by itself above.
IN_SHORT = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.explicit, Phase.reuse, Phase.generate],
}


def is_taken(config):
    """Whether transformers itself takes these fields together."""
    try:
        GenerationConfig(**config)
    except ValueError:
        return False
    return True


configs = st.fixed_dictionaries({}, optional=ANY).filter(is_taken)
prompts = st.lists(st.integers(10, VOCAB - 1), min_size=1, max_size=20)


@settings(max_examples=40, **IN_SHORT)
@given(
    config=configs,
    batch=st.lists(prompts, min_size=1, max_size=3),
    family=st.sampled_from(FAMILIES),
    seed=st.integers(0, 99),
)
@pytest.mark.filterwarnings("ignore")
def test_any_fields_together_give_what_generate_gives(llms, config, batch, family, seed):
    llm = llms(family)
    model = configured(llm.model.model, **config)
    expected = [generate(model, prompt) for prompt in batch]
    noise = RandomDrafter(seed, VOCAB)
    assert answer(llm, batch[0], expected[0]) == expected[0]
    assert answer(llm, batch[0], expected[0], drafter=noise) == expected[0]
    assert generate(model, batch[0], custom_generate=custom_generate) == expected[0]
    known = {} if "max_length" in config or "max_new_tokens" in config else {"max_new_tokens": NEW}
    references = [[Reference((*p[-2:], *e))] for p, e in zip(batch, expected, strict=True)]
    found = llm.generate(batch, references=references, **known)
    assert [one.token_ids for one in found] == expected
    stream = llm.stream(batch[0], references=references[0], **known)
    assert "".join(stream) == stream.answer.text
    assert stream.answer.token_ids == expected[0]


@pytest.mark.parametrize("begins", [0, 1, 2])
def test_stop_strings_of_a_model_may_begin_in_the_prompt(llms, begins):
    llm = llms("llama")
    tokenizer = llm.tokenizer
    model = configured(llm.model.model)
    end = tokenizer.encode("wick"[:begins])
    prompts = ([*PROMPT, first, *end] for first in range(10, VOCAB))
    texts = ((prompt, tokenizer.decode(generate(model, prompt)[:1])) for prompt in prompts)
    prompt, said = next((prompt, text) for prompt, text in texts if text.isascii() and text)
    configured(model, stop_strings="wick"[:begins] + said[:1])
    expected = generate(model, prompt)
    assert answer(llm, prompt, expected) == expected


# Refused


REFUSALS = {
    "num_beams": 4, "num_beam_groups": 2, "constraints": ["x"], "force_words_ids": [[3]],
    "penalty_alpha": 0.6, "dola_layers": "high", "guidance_scale": 1.5,
    "watermarking_config": {"bias": 2.0}, "token_healing": True, "is_assistant": True,
    "num_return_sequences": 3, "cache_implementation": "quantized",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_llm_does_not_do_is_refused_by_name_and_told_how_to_go_on(name):
    model = make_model()
    setattr(model.generation_config, name, REFUSALS[name])
    with pytest.raises(ConfigurationError, match=f"sets {name}=.*LLM does not support"):
        LLM(model, tiny_tokenizer(), save_measurements=False)
    off = {name: REFUSED[name][0] or False}
    llm = LLM(model, tiny_tokenizer(), save_measurements=False, generation_config=off)
    llm.generate(PROMPT, max_new_tokens=2)
    setattr(model.generation_config, name, REFUSED[name][0])
    llm = LLM(model, tiny_tokenizer(), save_measurements=False)
    setattr(model.generation_config, name, REFUSALS[name])  # and at the next request, not silently
    with pytest.raises(ConfigurationError, match=name):
        llm.generate(PROMPT, max_new_tokens=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", -1.0), ("repetition_penalty", "high"), ("min_length", 2.5),
        ("no_repeat_ngram_size", True), ("suppress_tokens", "abc"), ("suppress_tokens", [[1]]),
        ("bad_words_ids", [3, 4]), ("bad_words_ids", [["a"]]), ("sequence_bias", 3),
        ("sequence_bias", [[3, 1.0]]), ("exponential_decay_length_penalty", 3),
        ("stop_strings", [""]), ("stop_strings", 3), ("eos_token_id", "</s>"),
        ("eos_token_id", -2), ("max_new_tokens", 0), ("max_time", "soon"),
        ("forced_eos_token_id", 1.5),
    ],
)  # fmt: skip
def test_a_value_that_cannot_work_is_named_when_the_llm_is_made(name, value):
    model = make_model()
    setattr(model.generation_config, name, value)
    with pytest.raises(ConfigurationError, match=name):
        LLM(model, tiny_tokenizer(), save_measurements=False)


def test_tokens_outside_the_vocabulary_are_named(llms):
    llm = llms("llama")
    configured(llm.model.model, bad_words_ids=[[3], [VOCAB + 1]])
    with pytest.raises(ConfigurationError, match=r"bad_words_ids .* below 380"):
        llm.generate(PROMPT)


def test_unknown_fields_given_are_refused():
    with pytest.raises(ConfigurationError, match="no field 'repetition_penalti'"):
        LLM(make_model(), tiny_tokenizer(), generation_config={"repetition_penalti": 1.0})
    with pytest.raises(ConfigurationError, match="a dict of its fields"):
        LLM(make_model(), tiny_tokenizer(), generation_config=3)


# Order: request, LLM(...), the model's own, ours


def test_a_request_goes_before_the_llm_and_that_before_the_model():
    model = make_model(repetition_penalty=2.5, no_repeat_ngram_size=2, min_new_tokens=20)
    llm = LLM(
        model, tiny_tokenizer(), save_measurements=False, generation_config={"min_new_tokens": 3}
    )
    expected = generate(model, PROMPT, min_new_tokens=3, repetition_penalty=1.4)
    assert answer(llm, PROMPT, expected, repetition_penalty=1.4) == expected
    free = generate(model, PROMPT, min_new_tokens=3, repetition_penalty=1.0, no_repeat_ngram_size=0)
    off = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
    assert answer(llm, PROMPT, free, **off) == free != expected
    given = LLM(
        model, tiny_tokenizer(), save_measurements=False, generation_config=GenerationConfig(**off)
    )
    expected = generate(model, PROMPT, **off)
    assert answer(given, PROMPT, expected) == expected


def test_lengths_of_the_model_bound_an_answer_whose_request_names_none(llms):
    llm = llms("llama")
    configured(llm.model.model, max_length=len(PROMPT) + 6, eos_token_id=None)
    assert len(llm.generate(PROMPT).token_ids) == 6
    assert len(llm.generate(PROMPT, max_new_tokens=9).token_ids) == 9
    with pytest.raises(ConfigurationError, match="max_length=23, and the prompt alone has 34"):
        llm.generate(PROMPT * 2)
    configured(llm.model.model, max_new_tokens=10**6, eos_token_id=None)
    most = 512 - len(PROMPT)
    assert len(llm.generate(PROMPT, min_new_tokens=most).token_ids) == most
    configured(llm.model.model, min_new_tokens=20)
    assert len(llm.generate(PROMPT, max_new_tokens=4).token_ids) == 4


def test_a_processor_of_the_caller_takes_the_place_of_the_models_own(llms):
    llm = llms("llama")
    model = configured(llm.model.model, repetition_penalty=2.5)
    own = [RepetitionPenaltyLogitsProcessor(1.1)]
    expected = generate(model, PROMPT, logits_processor=own)
    assert answer(llm, PROMPT, expected, logits_processors=own) == expected


def test_end_tokens_that_change_are_followed(llms):
    llm = llms("llama")
    model = configured(llm.model.model)
    expected = generate(model, PROMPT)
    model.generation_config.eos_token_id = expected[2]
    assert llm.generate(PROMPT, max_new_tokens=NEW).token_ids == expected[:3]
    given = LLM(
        model, tiny_tokenizer(), save_measurements=False, generation_config={"eos_token_id": 1}
    )
    assert given.generate(PROMPT, max_new_tokens=NEW).token_ids == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"eos_token_id": -1, "min_new_tokens": 4},
        {"eos_token_id": [END, -1], "min_new_tokens": 4},
        {"suppress_tokens": [-1, *SUPPRESSED], "begin_suppress_tokens": [-1]},
    ],
)
def test_minus_one_names_no_token(fields):
    model = make_model(**fields)
    # A choice of the last token shows an index of -1.
    model.lm_head.weight.data[-1] = 3.0 * model.lm_head.weight.data[generate(model, PROMPT)[1]]
    expected = generate(model, PROMPT)
    llm = LLM(model, tiny_tokenizer(), save_measurements=False)
    assert answer(llm, PROMPT, expected) == expected


# Sampling


SAMPLED = {"do_sample": True, "temperature": 0.9, "top_p": 0.7, "top_k": 30}


def test_sampling_of_the_model_is_off_unless_asked_for():
    model = make_model(**SAMPLED)
    llm = LLM(model, tiny_tokenizer(), save_measurements=False)
    greedy = generate(model, PROMPT, do_sample=False)
    assert answer(llm, PROMPT, greedy) == greedy
    asked = LLM(model, tiny_tokenizer(), generation_config={"do_sample": True})
    sampled = asked.generate(PROMPT, max_new_tokens=NEW, seed=3).token_ids
    assert sampled != greedy
    assert answer(asked, PROMPT, greedy, temperature=0.0) == greedy
    same = llm.generate(PROMPT, max_new_tokens=NEW, seed=3, temperature=0.9, top_p=0.7, top_k=30)
    assert same.token_ids == sampled


def test_what_a_sampled_request_leaves_open_the_model_fills_in():
    model = make_model(**SAMPLED, eos_token_id=None)
    llm = LLM(model, tiny_tokenizer(), save_measurements=False)
    plain = LLM(
        configured(make_model(), eos_token_id=None), tiny_tokenizer(), save_measurements=False
    )
    short = llm.generate(PROMPT, max_new_tokens=NEW, temperature=1.3, seed=5).token_ids
    known = {"max_new_tokens": NEW, "temperature": 1.3, "seed": 5}
    assert plain.generate(PROMPT, **known, top_p=0.7, top_k=30).token_ids == short
    assert plain.generate(PROMPT, **known).token_ids != short
    off = llm.generate(PROMPT, **known, top_p=1.0, top_k=0)
    assert plain.generate(PROMPT, **known).token_ids == off.token_ids


@pytest.mark.parametrize(
    "field", [{"typical_p": 0.4}, {"epsilon_cutoff": 0.02}, {"eta_cutoff": 0.05}, {"top_h": 0.3}]
)
def test_warpers_without_a_setting_of_ours_shape_sampling_too(field):
    """Of many draws none is a token that transformers' own processors rule out."""
    model = make_model(**field, **SAMPLED, eos_token_id=None)
    llm = LLM(model, tiny_tokenizer(), save_measurements=False)
    config = model.generation_config
    model._prepare_special_tokens(config)
    warp = model._get_logits_processor(config, input_ids_seq_length=len(PROMPT))
    with torch.inference_mode():
        scores = model(torch.tensor([PROMPT])).logits[:, -1].float()
    allowed = set(warp(torch.tensor([PROMPT]), scores)[0].isfinite().nonzero()[:, 0].tolist())
    drawn = {
        llm.generate(PROMPT, max_new_tokens=1, temperature=0.9, seed=seed).token_ids[0]
        for seed in range(40)
    }
    assert drawn <= allowed
    assert len(allowed) < 30
