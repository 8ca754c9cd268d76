"""Stuffed prompts of frameworks are parsed into documents and a question."""

import pytest
from fakes import ByteTokenizer
from tiny_llm import DOCUMENTS_TEMPLATE, TEMPLATE, tiny_tokenizer

from ragaccel.errors import ConfigurationError
from ragaccel.frameworks import ReferenceRegistry, find_question, is_documents_only, parse_prompt
from ragaccel.models import Tokenizer
from ragaccel.passage import Passage

LAMP = Passage("lamp", "The lamp burns rapeseed oil. Its keeper trims the wick at dusk.", "Lamp")
TIDE = Passage("tide", "The tide rises four metres at the mole, and falls before noon.", "Tide")
QUESTION = "Who trims the wick?"

COMPACT = (
    "Context information is below.\n---------------------\n{context}\n---------------------\n"
    "Given the context information and not prior knowledge, answer the query.\n"
    "Query: {question}\nAnswer: "
)
REFINE = (
    "The original query is as follows: {question}\nWe have provided an existing answer: Nobody.\n"
    "We have the opportunity to refine the existing answer with some more context below.\n"
    "------------\n{context}\n------------\nRefined Answer: "
)
LAST = "Use the following pieces of context.\n\n{context}\n\n{question}"
FIRST = "{question}\n\nContext:\n{context}\n"
LABELLED = "Answer from the context.\n\n{context}\n\nQuestion: {question}\nHelpful Answer:"
MARKED = "**Context:** {context}\n\n**Question:** {question}\n\n**Answer:**"
TEMPLATES = [COMPACT, REFINE, LAST, FIRST, LABELLED, MARKED]


@pytest.fixture
def registry():
    made = ReferenceRegistry()
    made.register([LAMP, TIDE])
    return made


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(tiny_tokenizer(DOCUMENTS_TEMPLATE))


def test_only_a_template_of_documents_and_one_question_is_documents_only(tokenizer):
    assert is_documents_only(tokenizer)
    assert not is_documents_only(Tokenizer(tiny_tokenizer(TEMPLATE)))
    assert not is_documents_only(Tokenizer(tiny_tokenizer(None)))
    assert not is_documents_only(ByteTokenizer())
    both = (
        "{% for document in documents %}{{ document['text'] }}{% endfor %}"
        "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )
    assert not is_documents_only(Tokenizer(tiny_tokenizer(both)))


@pytest.mark.parametrize("template", TEMPLATES)
def test_passages_and_question_of_a_text_or_message_are_found(template, registry, tokenizer):
    for question in (QUESTION, "Name the keeper of the lamp", "为什么？"):
        text = template.format(context=f"{TIDE.text}\n\n{LAMP.text}", question=question)
        prompt = parse_prompt(text, tokenizer, registry)
        assert [passage.passage_id for passage in prompt.passages] == ["tide", "lamp"]
        assert prompt.text.endswith(f"<turn>{question}<turn>assistant:")
        assert parse_prompt([{"role": "user", "content": text}], tokenizer, registry) == prompt


def test_passages_may_stand_in_other_messages_than_the_question(registry, tokenizer):
    chat = [
        {"role": "system", "content": f"Answer from this:\n{LAMP.text}"},
        {"role": "user", "content": "What rises at the mole?"},
        {"role": "assistant", "content": "The tide."},
        {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
        {"role": "tool", "content": TIDE.text},
    ]
    prompt = parse_prompt(chat, tokenizer, registry)
    assert [passage.passage_id for passage in prompt.passages] == ["lamp", "tide"]
    assert prompt.text.endswith(f"<turn>{QUESTION}<turn>assistant:")


def test_a_question_that_a_passage_asks_is_not_the_question(registry, tokenizer):
    asking = Passage("faq", "Question: what burns in the lamp by night? Rapeseed oil, it is said.")
    registry.register(asking)
    prompt = parse_prompt(LAST.format(context=asking.text, question=QUESTION), tokenizer, registry)
    assert prompt.text.endswith(f"<turn>{QUESTION}<turn>assistant:")
    assert prompt.passages == (asking,)


def test_of_a_passage_only_what_stands_in_the_prompt_is_read(tokenizer):
    shown = "The keeper of the lamp writes down the wind, the sea and every ship that goes by. "
    shown += "In the morning she sends the list to the harbour."
    registry = ReferenceRegistry()
    secret = "Its door opens with the number 4795. "
    registry.register(Passage("book", secret + shown, path="book.md", start=100, end=300))
    text = LABELLED.format(context=shown, question="Which number opens the door?")
    (passage,) = parse_prompt(text, tokenizer, registry).passages
    assert passage.text == shown
    assert (passage.passage_id, passage.start) == ("book", 100 + len(secret))
    assert passage.end - passage.start == len(shown)
    assert "4795" not in parse_prompt(text, tokenizer, registry).text


def test_two_passages_may_have_one_id(tokenizer):
    registry = ReferenceRegistry()
    same = [Passage("1", LAMP.text), Passage("1", TIDE.text)]
    registry.register(same)
    text = LABELLED.format(context=f"{LAMP.text}\n\n{TIDE.text}", question=QUESTION)
    assert list(parse_prompt(text, tokenizer, registry).passages) == same


@pytest.mark.parametrize("template", ["{question}", *TEMPLATES])
def test_a_question_may_be_a_registered_text_itself(template, registry, tokenizer):
    asked = "Who trims the wick of the lamp, and when?"
    registry.register(Passage("faq", asked))
    prompt = parse_prompt(template.format(context=LAMP.text, question=asked), tokenizer, registry)
    assert prompt.text.endswith(f"<turn>{asked}<turn>assistant:")
    assert list(prompt.passages) == ([] if template == "{question}" else [LAMP])


def test_what_nobody_registered_is_passages_by_its_paragraphs(tokenizer):
    text = f"Answer briefly.\n\nContext:\n\n{LAMP.text}\n\n{TIDE.text}\n\nQuestion: {QUESTION}"
    for registry in (None, ReferenceRegistry()):
        prompt = parse_prompt(text, tokenizer, registry)
        assert [passage.text for passage in prompt.passages] == [LAMP.text, TIDE.text]
    chat = [
        {"role": "system", "content": LAMP.text},
        {"role": "user", "content": "What rises at the mole, and how far?"},
        {"role": "assistant", "content": "Nobody knows what rises at the mole."},
        {"role": "user", "content": QUESTION},
    ]
    assert [one.text for one in parse_prompt(chat, tokenizer, None).passages] == [LAMP.text]
    between = COMPACT.format(context=f"{LAMP.text}\n\n{TIDE.text}", question=QUESTION)
    read = [one.text for one in parse_prompt(between, tokenizer, None).passages]
    assert read == ["Context information is below.", LAMP.text, TIDE.text]


def test_a_question_alone_has_no_passages(tokenizer):
    assert parse_prompt(QUESTION, tokenizer, None).passages == ()
    assert parse_prompt(f"Be brief.\n\nQuestion: {QUESTION}", tokenizer, None).passages == ()


def test_passages_that_do_not_fit_are_reported(registry, tokenizer):
    text = LABELLED.format(context=f"{LAMP.text}\n\n{TIDE.text}", question=QUESTION)
    alone = parse_prompt(QUESTION, tokenizer, registry)
    prompt = parse_prompt(text, tokenizer, registry, max_tokens=len(alone.token_ids) + 45)
    assert len(prompt.passages) == len(prompt.dropped) == 1


def test_a_prompt_that_asks_nothing_is_refused(registry, tokenizer):
    with pytest.raises(ConfigurationError, match="'Question:'"):
        parse_prompt(f"{LAMP.text}\n\n---\n", tokenizer, registry)


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("Question: a?\nThought: hm\nQuestion: b?\nHelpful Answer:", "b?"),
        ("Query: How high may\n it be?\nAnswer: ", "How high may it be?"),
        ("Question:\nWhat is it?", "What is it?"),
        ("No question here: none.\n\nTell me.", "Tell me."),
        ("A request: hm?\n\nDo it", "A request: hm?"),
        ("", ""),
    ],
)
def test_what_is_found_as_the_question(text, question):
    assert find_question(text) == question


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_is_given_is_found_where_nothing_is_registered(template, tokenizer):
    text = template.format(context=f"{LAMP.text}\n\n{TIDE.text}", question=QUESTION)
    near = Passage("near", "Of what is given, this stands nowhere in the text that asks.")
    taken = parse_prompt(text, tokenizer, None, given=[TIDE, near, LAMP.text], namespace="mine")
    assert [one.text for one in taken.passages] == [LAMP.text, TIDE.text]
    assert [one.passage_id for one in taken.passages] == ["reference-3", "tide"]
    assert QUESTION in taken.text
