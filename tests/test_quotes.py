"""What the bundled reader may say: one sentence of its prompt, whole, or that they do not tell."""

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LogitsProcessorList

from ragaccel import LLM, NoDrafter, Passage, build_prompt
from ragaccel.models import bundled_reader_path
from ragaccel.quotes import REFUSAL, QuoteConstraint

PASSAGES = [
    Passage("tide", "The tide rises four metres at the mole. It turns at noon.", title="Tides"),
    Passage("lamp", "The lamp burns rapeseed oil."),
]
SENTENCES = [
    "The tide rises four metres at the mole. [1]",
    "It turns at noon. [1]",
    "The lamp burns rapeseed oil. [2]",
]


@pytest.fixture(scope="module")
def llm():
    """A random model with the reader's vocabulary."""
    tokenizer = AutoTokenizer.from_pretrained(bundled_reader_path())
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return LLM(LlamaForCausalLM(config).eval(), tokenizer)


@pytest.fixture(scope="module")
def prompt(llm):
    return build_prompt(llm.tokenizer, "How far does the tide rise?", PASSAGES)


def _ask(llm, prompt, similarities=(), **settings):
    constraint = QuoteConstraint(prompt.token_ids, llm.tokenizer, similarities)
    return llm.generate(prompt, logits_processors=[constraint], max_new_tokens=60, **settings)


def test_any_model_says_a_sentence_or_that_they_do_not_tell(llm, prompt):
    said = {_ask(llm, prompt, temperature=5.0, seed=seed).text for seed in range(40)}
    assert said == {*SENTENCES, REFUSAL}


@pytest.mark.parametrize("settings", [{}, {"temperature": 2.0, "seed": 3}])
def test_drafting_stays_as_it_is_and_changes_nothing(llm, prompt, settings):
    drafted = _ask(llm, prompt, **settings)
    plain = _ask(llm, prompt, drafter=NoDrafter(), **settings)
    assert (drafted.text, drafted.finish_reason) == (plain.text, plain.finish_reason) != ("", "")
    assert drafted.stats.accepted_tokens > 0
    assert drafted.stats.verify_passes < plain.stats.verify_passes


def test_it_is_a_processor_of_transformers_too(llm, prompt):
    ids = torch.tensor([prompt.token_ids])
    constraint = QuoteConstraint(prompt.token_ids, llm.tokenizer)
    written = llm.model.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False,
        logits_processor=LogitsProcessorList([constraint]),
    )  # fmt: skip
    answer = _ask(llm, prompt)
    assert llm.tokenizer.decode(written[0, ids.shape[1] :].tolist()) == answer.text


def test_the_similarity_of_a_sentence_counts_beside_its_chance(llm, prompt):
    for place, sentence in enumerate(SENTENCES):
        similarities = [0.5 + 0.4 * (at == place) for at in range(3)]
        assert _ask(llm, prompt, similarities).text == sentence
    assert _ask(llm, prompt, [0.0, 0.0, 0.0]).text == REFUSAL
    alike = _ask(llm, prompt, [0.9, 0.9, 0.9]).text
    assert alike == _ask(llm, prompt, [0.8, 0.8, 0.8]).text != REFUSAL
    assert _ask(llm, prompt, [0.9]).text == _ask(llm, prompt).text, "not that many"


def test_a_prompt_without_marked_sentences_is_answered_freely(llm):
    constraint = QuoteConstraint(llm.tokenizer.encode("The lamp"), llm.tokenizer)
    answer = llm.generate("The lamp", logits_processors=[constraint], max_new_tokens=20)
    assert answer.text == llm.generate("The lamp", max_new_tokens=20).text
