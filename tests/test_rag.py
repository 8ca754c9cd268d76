import numpy as np
import pytest
from scripted_llm import ScriptedLLM, first_passage
from tiny_llm import DOCUMENTS_TEMPLATE, say, tiny_llm

from ragaccel.decoding import NoDrafter
from ragaccel.drafting import JIT_WARMUP, AnswerMemory, CopyDrafter, TrieDrafter
from ragaccel.errors import CapacityError, ConfigurationError
from ragaccel.passage import Passage
from ragaccel.quotes import REFUSAL
from ragaccel.rag import RAG

LAMP = Passage("lamp", "The lamp burns rapeseed oil. Its keeper trims the wick at dusk.", score=0.9)
TIDE = Passage("tide", "The tide rises four metres at the mole.", score=0.5)
FOG = Passage("fog", "The fog horn sounds each minute.", score=0.2)
QUESTION = "Who trims the wick?"


class Shelf:
    """A retriever that ranks passages by the words they share with the query."""

    def __init__(self, *passages):
        self.passages, self.queries = passages, []

    def search(self, query, k=6):
        self.queries.append(query)
        words = set(query.lower().replace("?", "").split())
        shared = [len(words & set(p.text.lower().replace(".", "").split())) for p in self.passages]
        ranked = sorted(range(len(self.passages)), key=lambda i: -shared[i])
        return [self.passages[i] for i in ranked][:k]


@pytest.fixture
def rag():
    return RAG(tiny_llm(token_budget=16), Shelf(FOG, TIDE, LAMP), max_new_tokens=80)


def processors(rag, text, question=QUESTION, history=()):
    return [say(rag.llm, rag.prompt(question, history), text)]


def test_a_question_is_answered_from_the_passages_found_for_it(rag):
    said = "Its keeper trims the wick at dusk. [1]"
    answer = rag.ask(QUESTION, logits_processors=processors(rag, said))
    assert answer.text == said
    assert answer.passages[0] == LAMP
    assert set(answer.passages) == {LAMP, TIDE, FOG}
    assert answer.dropped_passages == ()
    assert answer.sources == (LAMP,)
    (span,) = answer.copied_spans
    assert span.passage_id == "lamp"
    assert LAMP.text[span.passage_start : span.passage_end] == said[: span.end]
    assert answer.stats.accepted_tokens > 0
    stream = rag.stream(QUESTION, logits_processors=processors(rag, said))
    assert stream.passages == answer.passages, "they are there from the start"
    assert "".join(stream) == stream.answer.text == said


def test_the_answer_is_the_same_with_drafting_on_or_off(rag):
    answer = rag.ask(QUESTION, max_new_tokens=40)
    plain = rag.ask(QUESTION, max_new_tokens=40, drafter=NoDrafter())
    assert answer.token_ids == plain.token_ids
    assert answer.copied_spans == plain.copied_spans


def test_a_model_that_takes_documents_gets_them_its_own_way():
    rag = RAG(tiny_llm(DOCUMENTS_TEMPLATE), Shelf(LAMP, TIDE), k=1, max_new_tokens=40)
    prompt = rag.prompt(QUESTION)
    assert prompt.text.startswith(
        "<bos><s1> The lamp burns rapeseed oil. [1]<s2> Its keeper trims the wick at dusk. [1]"
    )
    answer = rag.ask(
        QUESTION, logits_processors=processors(rag, "<s2> Its keeper trims the wick at dusk. [1]")
    )
    assert answer.sources == (LAMP,)
    assert answer.copied_spans[0].passage_id == "lamp"


def test_passages_that_do_not_fit_are_reported():
    full = len(RAG(tiny_llm(), Shelf(LAMP, TIDE, FOG)).prompt(QUESTION).token_ids)
    capacity = full - 1 + 40
    rag = RAG(tiny_llm(capacity=capacity), Shelf(LAMP, TIDE, FOG), max_new_tokens=40)
    prompt = rag.prompt(QUESTION)
    assert len(prompt.dropped) == 1
    assert len(prompt.token_ids) < full
    answer = rag.ask(QUESTION)
    assert answer.dropped_passages == prompt.dropped
    assert {*answer.passages, *answer.dropped_passages} == {LAMP, TIDE, FOG}
    with pytest.raises(CapacityError):
        rag.ask(QUESTION, max_new_tokens=capacity - 1)


def test_a_question_for_which_nothing_is_found_is_not_answered():
    rag = RAG(tiny_llm(), Shelf())
    answer = rag.ask(QUESTION)
    assert (answer.refusal, answer.text, answer.passages) == ("not found", REFUSAL, ())
    assert list(rag.stream(QUESTION)) == [REFUSAL]


def test_options_and_refusals(rag):
    made = RAG(rag.llm, rag.retriever, k=2, template="{passages}\n\nQ: {question}")
    prompt = made.prompt(QUESTION)
    assert (prompt.passages[0], len(prompt.passages)) == (LAMP, 2)
    assert prompt.text.endswith(f"\n\nQ: {QUESTION}<turn>assistant:")
    for ask, problem in (
        (lambda: rag.ask("  \n"), "empty"),
        (lambda: RAG(rag.llm, Shelf(), k=0), "k must be"),
    ):
        with pytest.raises(ConfigurationError, match=problem):
            ask()


def test_a_question_that_follows_on_is_searched_with_the_one_before(rag):
    history = [
        {"role": "user", "content": "How far does the tide rise at the mole?"},
        {"role": "assistant", "content": "Four metres."},
    ]
    rag.rewrite = False
    prompt = rag.prompt("And the wick?", history)
    assert rag.retriever.queries == [
        "And the wick?",
        "How far does the tide rise at the mole? And the wick?",
    ]
    assert prompt.passages == (LAMP, TIDE, FOG)  # the best of each in turn, each once
    assert "user: How far does the tide rise" in prompt.text


def test_earlier_answers_are_copied_from(rag):
    said = "It burns rapeseed oil, trimmed twice a night by the keeper."
    history = [{"role": "user", "content": "Lamp?"}, {"role": "assistant", "content": said}]
    question = "Say that again."
    answer = rag.ask(question, history, logits_processors=processors(rag, said, question, history))
    assert answer.text == said
    assert answer.stats.acceptance_length > 2


SAID = "Nobody here trims it any more, they say, since the lamp was made electric in May."


class Bag:
    """Embeds texts by the words in them, so that similar questions have similar vectors."""

    def __init__(self):
        self.calls = 0

    def __call__(self, texts):
        self.calls += 1
        vectors = np.zeros((len(texts), 64))
        for row, text in zip(vectors, texts, strict=True):
            for word in text.lower().replace("?", "").split():
                row[sum(map(ord, word)) % 64] += 1.0
        return vectors


def ask_for(rag, question, **settings):
    return rag.ask(question, logits_processors=processors(rag, SAID, question), **settings)


def remembering(embed):
    llm = tiny_llm(token_budget=16)
    return RAG(llm, Shelf(FOG, TIDE, LAMP), max_new_tokens=80, answers=AnswerMemory(embed))


@pytest.fixture(params=[CopyDrafter(), None], ids=["copying", "trees"])
def quietly(request):
    """Settings under which only the memory of answers drafts."""
    if request.param is None:
        assert JIT_WARMUP.wait(120)
        return {"drafter": TrieDrafter()}
    return {"drafter": request.param}


def test_answers_to_similar_questions_are_drafted_from(quietly):
    rag = remembering(Bag())
    first = ask_for(rag, "Who trims the wick?", **quietly)
    again = ask_for(rag, "Who trims the wick now?", **quietly)
    assert first.text == again.text == SAID
    assert again.stats.verify_passes < first.stats.verify_passes / 2
    assert again.passages == first.passages  # what is remembered is nothing to cite
    tide = "How high does the tide rise at the mole?"
    other = ask_for(rag, tide, namespace="yours", **quietly)
    given = ask_for(rag, tide, namespace="mine", prediction=SAID, **quietly)
    assert given.stats.verify_passes < other.stats.verify_passes / 2
    elsewhere = ask_for(rag, "Who trims the wick?", namespace="theirs", **quietly)
    assert elsewhere.stats.verify_passes > first.stats.verify_passes / 2
    assert rag.answers.stats().entries == 5


def test_whatever_is_false_forbids_to_remember():
    rag = remembering(embed := Bag())
    for value in (False, 0, "", np.False_):
        ask_for(rag, QUESTION, remember=value)
    assert (embed.calls, rag.answers.stats().entries) == (0, 0)


def test_only_whole_answers_are_remembered():
    rag = remembering(Bag())
    stream = rag.stream(QUESTION, logits_processors=processors(rag, SAID))
    next(stream)
    stream.close()
    assert rag.answers.stats().entries == 0
    with rag.stream(QUESTION, logits_processors=processors(rag, SAID)) as stream:
        assert "".join(stream) == stream.answer.text == SAID
    assert rag.answers.stats().entries == 1


def test_an_answer_comes_though_its_question_cannot_be_embedded(caplog):
    rag = remembering(lambda texts: np.zeros((len(texts), 8)))
    with caplog.at_level("WARNING", "ragaccel"):
        assert ask_for(rag, QUESTION).text == SAID
    assert "cannot remember an answer" in caplog.text

    def fails(texts):
        raise ValueError("the embedder is gone")

    rag = remembering(Bag())
    ask_for(rag, QUESTION)
    rag.answers._embed = fails
    with caplog.at_level("WARNING", "ragaccel"):
        assert ask_for(rag, "Who trims it now?").text == SAID
    assert "the embedder is gone" in caplog.text


@pytest.mark.parametrize(
    ("written", "searched"),
    [
        ('"Who trims the wick of the lamp?"', "Who trims the wick of the lamp?"),
        ("<think>\nWell", "And the wick?"),
        ("word " * 200, "And the wick?"),
        ("", "And the wick?"),
    ],
)
def test_the_model_makes_a_follow_up_a_full_question_before_searching(written, searched):
    shelf = Shelf(LAMP, TIDE)
    llm = ScriptedLLM(lambda prompt: first_passage(prompt) or written)
    answer = RAG(llm, shelf).ask("And the wick?", ["How far does the tide rise?", "Four metres."])
    assert shelf.queries[0] == searched
    assert "And the wick?" in llm.prompts[-1].text
    assert answer.answered
    first, last = llm.settings
    assert (first["remember"], "remember" in last) == (False, False)
    RAG(llm, shelf).ask("And the wick?")  # without a chat there is nothing to refer to
    assert len(llm.prompts) == 3
