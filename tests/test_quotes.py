"""What the bundled reader may say: one sentence of its prompt, whole; and which one."""

import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LogitsProcessorList

from ragaccel import LLM, NoDrafter, Passage, build_prompt
from ragaccel.models import bundled_reader_path
from ragaccel.passage import NearestSentence
from ragaccel.quotes import (
    REFUSAL,
    QuoteConstraint,
    QuoteSigns,
    ruled_out,
    values_of,
)

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


def _ask(llm, prompt, values=(), is_sure=None, **settings):
    constraint = QuoteConstraint(prompt.token_ids, llm.tokenizer, values, is_sure)
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


def test_the_value_of_a_sentence_counts_beside_its_chance(llm, prompt):
    for place, sentence in enumerate(SENTENCES):
        assert _ask(llm, prompt, [9.0 * (at == place) for at in range(3)]).text == sentence
    alike = _ask(llm, prompt, [-50.0, -50.0, -50.0]).text
    assert alike == _ask(llm, prompt, [3.0, 3.0, 3.0]).text != REFUSAL
    assert _ask(llm, prompt, [3.0]).text == _ask(llm, prompt).text, "not that many"


def test_an_unsure_quote_becomes_the_refusal(llm, prompt):
    asked = []

    def is_sure(best):
        asked.append(best)
        return best != 1

    for place, said in enumerate([SENTENCES[0], REFUSAL, SENTENCES[2]]):
        values = [9.0 * (at == place) for at in range(3)]
        assert _ask(llm, prompt, values, is_sure).text == said
        assert asked.pop() == place


def test_what_must_not_be_quoted_is_not_and_nothing_else_is_refused(llm, prompt):
    none = -math.inf
    said = {_ask(llm, prompt, [0.0, 0.0, none], temperature=5.0, seed=n).text for n in range(30)}
    assert said == set(SENTENCES[:2])
    assert _ask(llm, prompt, [none, none, none]).text == REFUSAL


def test_a_question_repeated_in_the_text_is_no_rival_of_its_answer():
    question = "How do I reset the pump?"
    texts = [question, "Hold the red button down.", "Call the office."]
    sentences = [
        NearestSentence(Passage(one, one), 0, len(one), relevance)
        for one, relevance in zip(texts, (4.0, 3.0, 1.5), strict=True)
    ]
    beside = QuoteSigns.of(question, sentences, 1)
    assert beside.lead == QuoteSigns.of(question, sentences[1:], 0).lead == 1.5


def _sentences(scores):
    return [
        NearestSentence(Passage(text, text), 0, len(text), score) for text, score in scores.items()
    ]


def test_a_better_sentence_in_another_language_makes_a_quote_less_sure():
    question, german = "When does the train leave?", "Der Zug fährt um neun Uhr von der Stadt ab"
    english = {"The train leaves at nine.": 3.0, "It is red.": 1.0}
    alone, behind, beside, headed = (
        QuoteSigns.of(question, _sentences(english | more), 0)
        for more in (
            {},
            {f"{german}.": 5.0},
            {f"{german}.": 2.5},
            {f"# {german}": 5.0, f"{german}?": 5.0, "the train leave": 5.0},
        )
    )
    assert (alone.lead, behind.lead) == (2.0, -2.0)
    assert alone == beside == headed, "none has more relevance and answers"


def test_a_line_of_the_title_s_words_is_no_answer_but_a_sentence_is():
    title, question = "Kestrel DW640 dishwasher", "How loud is the Kestrel dishwasher?"
    lines = ["Kestrel DW640", "Kestrel DW640 dishwasher.", "Kestrel DW640: 44 dB"]
    sentences = [NearestSentence(Passage(one, one, title), 0, len(one), 0.4) for one in lines]
    assert [value > -math.inf for value in values_of(question, sentences)] == [False, True, True]


@pytest.mark.parametrize(
    ("question", "told"),
    [
        ("How much power does the Kestrel D80 draw?", "0000"),
        ("How much power does the Kestrel D60 draw?", "1100"),
        ("How much does it cost in 2023?", "0011"),
        ("What changed in v4.0 of 2023?", "0000"),
        ("What does it cost for 1,200 users in 2023?", "0011"),
        ("How many watts do 3 lamps of 60kg draw?", "1111"),
    ],
)
def test_only_documents_with_the_question_s_numbers_and_codes_are_quoted(question, told):
    sentences = [
        NearestSentence(Passage(text, text, title, path), 0, len(text), 3.0)
        for path, title, text in (
            ("d60.md", "Kestrel D60", "It draws 900 watts."),
            ("d60.md", "Kestrel D60", "It costs more than it did in March."),
            ("prices-2023.md", "Prices", "1200 users pay 90 crowns each."),
            ("prices-2023.md", "Prices", "All others pay 120 crowns."),
        )
    ]
    found = [value > -math.inf for value in values_of(question, ruled_out(question, sentences))]
    assert found == [one == "1" for one in told]


class Documents:
    """A retriever that returns what documents hold."""

    def __init__(self, *passages):
        self.passages = passages

    def document_passages(self, path):
        return [passage for passage in self.passages if passage.path == path]


@pytest.mark.parametrize(
    ("asked", "told", "is_told"),
    [
        ("the Quillo R7", "Router: Quillo R7", True),
        ("the Quillo R8", "Router: Quillo R7", False),
        ("version 5.2", "Since 5.2.1", True),
        ("version 5.2", "It takes 15.2 or 5.25 seconds", False),
        ("version 5.2.1", "Since 5.2", False),
        ("P-17", "as in P17", True),
        ("P17", "as in P-17", True),
        ("RFC2616", "as in RFC 2616", True),
        ("the 500mAh battery", "a battery of 500 mAh", True),
        ("ISO9001", "ISO 9001:2015", True),
        ("the rule of 2015", "ISO 9001:2015", True),
        ("the rule of 2023", "since 15.10.2023", True),
        ("the model 200", "for 1,200 crowns", False),
        ("the bus 175", "for 175,000 miles", False),
        ("section 14", "at 14:30", False),
    ],
)
def test_the_whole_document_is_asked_for_numbers_and_codes(asked, told, is_told):
    last = Passage("end", "The firmware is the one of March.", "Ticket", "ticket.md")
    other = Passage("other", f"All about {asked}.", "Other", "other.md")
    given, question = NearestSentence(last, 0, len(last.text), 3.0), f"Which firmware has {asked}?"
    (alone,) = ruled_out(question, [given])
    assert alone.score == -math.inf
    for first in (replace(last, text=told), replace(last, title=f"Ticket > {told}")):
        (together,) = ruled_out(question, [given], Documents(first, last, other))
        assert together.score == (3.0 if is_told else -math.inf)


@pytest.mark.parametrize("part", ["a", "_", "1", "1.", "1,", "a-", "a 1"])
def test_numbers_of_a_long_text_are_found_in_linear_time(part):
    text = part * 100_000  # quadratic time would be minutes
    given = NearestSentence(Passage("b", text, path="b.md"), 0, len(text), 3.0)
    began = time.process_time()
    (alone,) = ruled_out("What is of R78?", [given])
    assert time.process_time() - began < 5.0
    assert alone.score == -math.inf


def test_passages_without_a_document_are_no_document_together():
    told = Passage("a", "The kettle has the number R78.")
    given = NearestSentence(Passage("b", "It is of March."), 0, 15, 3.0)
    (alone,) = ruled_out("What is of R78?", [given], Documents(told, given.passage))
    assert alone.score == -math.inf


def test_documents_of_an_own_retriever_may_be_strings_or_missing():
    given = NearestSentence(Passage("b", "It is of March.", path="b.md"), 0, 15, 3.0)
    for found, score in ((["It is of R78."], 3.0), (None, -math.inf)):
        source = SimpleNamespace(document_passages=lambda _, found=found: found)
        assert ruled_out("What is of R78?", [given], source)[0].score == score


@pytest.mark.parametrize("text", ["Anna's phone number: 555 0199.", "Men’s shoes cost £40."])
def test_a_possessive_is_no_other_language(text):
    (value,) = values_of("What is it?", [NearestSentence(Passage("a", text), 0, len(text), 0.4)])
    assert value > -math.inf


def test_a_sentence_in_another_language_may_not_be_quoted():
    question = "When does the train to Cologne leave?"
    texts = ["Der Zug nach Köln fährt um neun Uhr von der Stadt ab.", "The train leaves at nine."]
    sentences = [NearestSentence(Passage(one, one), 0, len(one), 0.4) for one in texts]
    foreign, english = values_of(question, sentences)
    assert foreign == -math.inf < english


def test_a_sentence_of_more_relevance_is_worth_more_and_a_heading_nothing():
    question = "How loud is the horn of Gannet Ledge?"
    texts = [
        "# The horn of Gannet Ledge",
        "The horn of Gannet Ledge?",
        "The horn of Gannet Ledge is loud.",
        "The horn of Gannet Ledge reaches 120 decibels.",
    ]
    sentences = [
        NearestSentence(Passage(text, text), 0, len(text), float(at))
        for at, text in enumerate(texts)
    ]
    heading, asked, loud, reaches = values_of(question, sentences)
    assert heading == asked == -math.inf
    assert reaches > loud


def test_a_question_of_the_documents_is_no_answer():
    text = "Which VPN do we use? We use the client of the company."
    sentences = [NearestSentence(Passage("faq", text), *span, 0.5) for span in ((0, 20), (21, 53))]
    asked, answer = values_of("Which VPN should one use?", sentences)
    assert (asked, answer > 0) == (-math.inf, True)


def test_a_prompt_without_marked_sentences_is_answered_freely(llm):
    constraint = QuoteConstraint(llm.tokenizer.encode("The lamp"), llm.tokenizer)
    answer = llm.generate("The lamp", logits_processors=[constraint], max_new_tokens=20)
    assert answer.text == llm.generate("The lamp", max_new_tokens=20).text
