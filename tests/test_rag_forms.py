"""The forms in which a program may give texts, retrievers, embedders and a chat to ``RAG``."""

import asyncio
import threading
import time
from functools import partial
from itertools import repeat

import numpy as np
import pytest
import torch
from hash_embedder import HashEmbedder
from tiny_llm import TEXT, say, tiny_llm

from ragaccel import RAG, Answer, Document, Passage, Store
from ragaccel.answer import Usage
from ragaccel.errors import ConfigurationError, EmptyIndexError, IndexUnusableError, StorageError
from ragaccel.retrieval import index_documents, index_passages

LAMP, TIDE = "The lamp burns rapeseed oil.", "The tide rises four metres at the mole."
QUESTION = "What does the lamp burn?"


class Framework:
    """An object with the attributes given, as LangChain's and LlamaIndex's are seen from here."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


def letters(texts):
    """Embed texts by their letters."""
    return [[text.count(letter) + 0.1 for letter in "abcdefghilmnoprstu"] for text in texts]


def from_texts(texts, **options):
    return RAG.from_texts(texts, tiny_llm(), embedder=HashEmbedder(), **options)


TEXT_FORMS = {
    "string": (LAMP, "text-1", ""),
    "passage": (Passage("p9", LAMP, title="Lamps"), "p9", "Lamps"),
    "document": (Document("oil.md", LAMP, "Oil"), "oil.md", "Oil"),
    "dict": ({"text": LAMP, "id": 7}, "7", ""),
    "langchain dict": (
        {"page_content": LAMP, "metadata": {"source": "a.html", "title": "A"}},
        "a.html",
        "A",
    ),
    "langchain": (
        Framework(page_content=LAMP, metadata={"source": "a.html"}, id=None),
        "a.html",
        "",
    ),
    "llamaindex": (
        Framework(
            node=Framework(get_content=lambda: LAMP, metadata={"file_path": "b.pdf"}), score=0.5
        ),
        "b.pdf",
        "",
    ),
}

EMPTY_CELL = float("nan")
TEXT_FORMS |= {
    "row of a table": (
        {"text": LAMP, "id": 7, "title": EMPTY_CELL, "source": None, "vector": np.ones(2)},
        "7",
        "",
    ),
    "numpy string": (np.str_(LAMP), "text-1", ""),
    "with a score": (
        (Framework(page_content=LAMP, metadata={"source": "a.html"}), 0.5),
        "a.html",
        "",
    ),
}


@pytest.mark.parametrize("form", TEXT_FORMS)
def test_texts_have_many_forms(form):
    item, name, title = TEXT_FORMS[form]
    rag = from_texts([item, TIDE])
    (found,) = [p for p in rag.prompt(QUESTION).passages if p.text == LAMP]
    assert (found.path, found.title) == (name, title or found.title)
    retrieved = RAG(rag.llm, lambda query: [item]).prompt(QUESTION).passages
    assert [(p.text, p.title) for p in retrieved] == [(LAMP, title)]


def test_texts_of_one_source_are_all_kept_with_their_pages_and_lines():
    texts = [
        {"text": LAMP, "source": "keeper.pdf", "page": 4},
        {"text": TIDE, "source": "keeper.pdf", "page": 9},
        {"text": TIDE, "source": "keeper.pdf", "page": 9},
        {"text": "The horn.\n\nIt sounds.", "source": "log.md", "line": 30},
    ]
    found = from_texts(texts, k=9).prompt(QUESTION).passages
    assert sorted((p.text.split("\n")[0], p.citation) for p in found) == [
        ("The horn.", "log.md:30"),
        (LAMP, "keeper.pdf:4"),
        (TIDE, "keeper.pdf:9"),
    ]
    assert [p.citation_at(len("The horn.\n\n")) for p in found if p.path == "log.md"] == [
        "log.md:32"
    ]


def test_texts_are_kept_in_a_file_that_is_asked_for(tmp_path):
    path, embedder = tmp_path / "texts.db", HashEmbedder()
    for texts in ([LAMP, TIDE], [LAMP, "The fog horn sounds."], ["Only this."]):
        rag = RAG.from_texts(texts, tiny_llm(), path=path, embedder=embedder)
        assert sorted(p.text for p in rag.prompt(QUESTION).passages) == sorted(texts)
    assert [text.split("\n")[-1] for text in embedder.embedded] == [
        *[LAMP, TIDE],
        "The fog horn sounds.",
        "Only this.",
    ]
    with pytest.raises(IndexUnusableError):
        RAG.from_texts([LAMP], tiny_llm(), path=path, embedder=HashEmbedder("another"))


def test_long_texts_are_split():
    rag = from_texts([" ".join([LAMP, TIDE] * 60)], k=50)
    passages = rag.prompt(QUESTION).passages
    assert len(passages) > 3
    assert {p.path for p in passages} == {"text-1"}


def test_texts_do_not_replace_documents_or_passages(tmp_path):
    path = tmp_path / "index.db"
    (tmp_path / "some.tsv").write_text(f"a\t{LAMP}\n")
    with Store(path) as store:
        index_passages(store, HashEmbedder(), tmp_path / "some.tsv")
    with pytest.raises(StorageError, match="a file of their own"):
        RAG.from_texts([TIDE], tiny_llm(), path=path, embedder=HashEmbedder())
    with Store(path) as store:
        assert store.count_passages() == 1


def test_a_folder_is_read_in_memory_or_into_a_file(tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    with pytest.raises(EmptyIndexError, match="no document"):
        RAG.from_folder(docs, tiny_llm(), embedder=HashEmbedder())
    (docs / "lamp.md").write_text(LAMP)
    for path in (None, tmp_path / "index.db"):
        rag = RAG.from_folder(docs, tiny_llm(), path=path, embedder=HashEmbedder())
        assert [p.citation for p in rag.prompt(QUESTION).passages] == ["lamp.md:1"]
    assert (tmp_path / "index.db").is_file()
    assert list(docs.iterdir()) == [docs / "lamp.md"]


def test_files_of_a_folder_that_cannot_be_read_are_named(tmp_path, caplog):
    (tmp_path / "lamp.md").write_text(LAMP)
    (tmp_path / "broken.ipynb").write_text("{")
    rag = RAG.from_folder(tmp_path, tiny_llm(), embedder=HashEmbedder())
    assert [p.citation for p in rag.prompt(QUESTION).passages] == ["lamp.md:1"]
    (told,) = caplog.messages
    assert "broken.ipynb: broken ipynb file" in told


def with_search(query, k):
    return [LAMP, TIDE][:k]


RETRIEVERS = {
    "function": lambda query: [LAMP, TIDE],
    "function of k": lambda query, k: [LAMP, TIDE][:k],
    "method": Framework(search=with_search),
    "langchain retriever": Framework(invoke=lambda query: [Framework(page_content=LAMP)]),
    "langchain vector store": Framework(
        search=lambda query, search_type: 1 / 0, similarity_search=with_search
    ),
    "llamaindex retriever": Framework(
        retrieve=lambda query: [Framework(node=Framework(get_content=lambda: LAMP), score=1.0)]
    ),
    "keyword k": lambda query, *, k: [LAMP, TIDE][:k],
    "search of top_k": Framework(search=lambda query, top_k=5: [LAMP, TIDE][:top_k]),
    "search without k": Framework(search=lambda query: [LAMP, TIDE]),
    "another default": lambda query, found=LAMP: [found],
    "fixed k": partial(with_search, k=2),
    "with scores": lambda query: [(LAMP, 0.9), (TIDE, 0.1)],
    "endless": lambda query: repeat(LAMP),
    "generator": lambda query: (text for text in [LAMP, TIDE]),
    "one text": lambda query: LAMP,
}


@pytest.mark.parametrize("form", RETRIEVERS)
def test_retrievers_have_many_forms(form):
    rag = RAG(tiny_llm(), RETRIEVERS[form], k=1)
    (passage,) = rag.prompt(QUESTION).passages
    assert passage.text == LAMP
    said = f"{LAMP} [1]"
    answer = rag.ask(QUESTION, logits_processors=[say(rag.llm, rag.prompt(QUESTION), said)])
    assert (answer.text, answer.sources) == (said, (passage,))


async def asynchronous(query):
    return [LAMP]


REFUSED = {
    "a folder": (lambda: RAG(tiny_llm(), "docs"), "from_folder"),
    "texts": (lambda: RAG(tiny_llm(), [LAMP]), "from_texts"),
    "a store": (lambda: RAG(tiny_llm(), Store()), r"Retriever\(store"),
    "a number": (lambda: RAG(tiny_llm(), 3), "method search"),
    "async": (lambda: RAG(tiny_llm(), asynchronous), "aask"),
    "async call": (lambda: RAG(tiny_llm(), Framework(search=asynchronous)), "aask"),
    "no query": (lambda: RAG(tiny_llm(), lambda: [LAMP]), "not a query"),
    "class of llm": (lambda: RAG(RAG, letters), "LLM"),
    "answers": (lambda: RAG(tiny_llm(), letters, answers=3), "AnswerMemory"),
    "template": (lambda: RAG(tiny_llm(), letters, template="x"), "fields"),
    "path": (lambda: from_texts([LAMP], path=3), "path must be"),
    "a class": (lambda: RAG(tiny_llm(), Framework), "method search"),
    "no llm": (lambda: RAG(3, letters), "LLM"),
    "system": (lambda: RAG(tiny_llm(), letters, system=["a"]), "system"),
    "one string": (lambda: from_texts(LAMP), "list of texts"),
    "no texts": (lambda: from_texts([]), "no text"),
    "blank texts": (lambda: from_texts([" "]), "no text"),
    "no text in it": (lambda: from_texts([LAMP, {"title": "x"}]), "'text'"),
    "no text in the second": (lambda: from_texts([LAMP, None]), "text-2 must be"),
    "surrogate": (lambda: from_texts([LAMP + "\ud83d"]), "lone surrogate"),
    "path of a document": (lambda: from_texts([Document(5, LAMP)]), "document's path"),
    "no folder": (lambda: RAG.from_folder("/nowhere", tiny_llm()), "no folder"),
    "embedder": (lambda: RAG.from_texts([LAMP], tiny_llm(), embedder=3), "embedder"),
    "found nothing readable": (lambda: RAG(tiny_llm(), lambda q: 3).ask("?"), "must return"),
    "found no text": (lambda: RAG(tiny_llm(), lambda q: [Passage("p", None)]).ask("?"), "text"),
    "found objects": (lambda: RAG(tiny_llm(), lambda q: [object()]).ask("?"), "passage-1 must"),
    "blank among many": (lambda: from_texts([LAMP]).ask_many([QUESTION, " "]), "empty"),
    "many": (lambda: from_texts([LAMP]).ask_many(QUESTION), "call ask"),
    "question": (lambda: from_texts([LAMP]).ask(5), "question"),
    "questions": (lambda: from_texts([LAMP]).ask(["a", "b"]), "question"),
    "setting": (lambda: from_texts([LAMP]).ask(QUESTION, max_new_tokens="x"), "max_new_tokens"),
    "default": (lambda: from_texts([LAMP], max_new_tokens=float("nan")), "max_new_tokens"),
    "history": (lambda: from_texts([LAMP]).ask(QUESTION, "before"), "history"),
    "picture": (
        lambda: from_texts([LAMP]).ask(QUESTION, [("user", [{"type": "image_url"}])]),
        "one item",
    ),
    "history number": (lambda: from_texts([LAMP]).ask(QUESTION, 5), "history"),
    "history content": (lambda: from_texts([LAMP]).ask(QUESTION, [("user", 5)]), "history"),
    "history without": (lambda: from_texts([LAMP]).ask(QUESTION, [{"role": "user"}]), "history"),
    "history item": (lambda: from_texts([LAMP]).ask(QUESTION, [3]), "one item is 3"),
    "odd history": (lambda: from_texts([LAMP]).ask(QUESTION, ["a", "b", "c"]), "no answer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_types_are_refused_with_the_right_form(case):
    call, told = REFUSED[case]
    with pytest.raises(ConfigurationError, match=told):
        call()


@pytest.mark.parametrize(
    "wrong", [{"k": 0}, {"k": "x"}, {"template": "x"}, {"template": 5}, {"limit": 3}, {"system": 3}]
)
def test_wrong_options_are_refused_before_texts_are_embedded(wrong):
    embedder = HashEmbedder()
    with pytest.raises((ConfigurationError, TypeError)):
        RAG.from_texts([LAMP], tiny_llm(), embedder=embedder, **wrong)
    assert embedder.embedded == ()


def test_blank_passages_are_not_answered_from():
    assert RAG(tiny_llm(), lambda query: ["", " "]).ask(QUESTION).refusal == "not found"


def test_a_setting_by_another_librarys_name_is_told_its_name_here():
    with pytest.raises(TypeError, match="max_new_tokens"):
        from_texts([LAMP]).ask(QUESTION, max_tokens=3)


HISTORIES = {
    "messages": [{"role": "user", "content": "Tide?"}, {"role": "assistant", "content": "Four."}],
    "pairs": [("Tide?", "Four.")],
    "roles": [("user", "Tide?"), ["assistant", "Four."]],
    "strings": ["Tide?", "Four."],
    "roles of LangChain": [("human", "Tide?"), ("ai", "Four.")],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "Tide?"}]},
        ("assistant", ["Four."]),
    ],
    "answer": [("Tide?", Answer("Four.", (), "stop", Usage(0, 0, 0), None))],
    "langchain": [
        Framework(type="human", content="Tide?"),
        Framework(type="ai", content="Four."),
    ],
}


def test_a_history_has_many_forms():
    rag = from_texts([LAMP])
    prompts = [rag.prompt(QUESTION, history).token_ids for history in HISTORIES.values()]
    assert set(prompts) == {prompts[0]}
    assert prompts[0] != rag.prompt(QUESTION).token_ids == rag.prompt(QUESTION, None).token_ids


def test_instructions_stand_before_the_chat():
    told = "Answer as a keeper."
    rag = from_texts([LAMP], system=told)
    own = {"role": "system", "content": "Be brief."}
    text = rag.prompt(QUESTION, [own, ("Tide?", "Four.")]).text
    assert (text.count("system:"), "Be brief." in text) == (1, True)
    text = rag.prompt(QUESTION, ["Tide?", "Four."]).text
    assert 0 <= text.index(told) < text.index("Tide?") < text.index(QUESTION)


def test_instructions_reach_a_model_whose_template_has_no_system_message():
    no_system = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no') }}"
        "{% endif %}{{ m['content'] }}\n{% endfor %}"
    )
    rag = RAG(tiny_llm(no_system), lambda query: [LAMP], system="Answer as a keeper.")
    assert "Answer as a keeper." in rag.prompt(QUESTION).text


def test_many_questions_are_answered_as_each_alone():
    rag = RAG(tiny_llm(), lambda query: [TEXT], max_new_tokens=12)
    questions = [f"{QUESTION} {number}" for number in range(20)]
    together = rag.ask_many(questions, temperature=0.8, seed=3)
    assert [a.token_ids for a in together] == [
        rag.ask(question, temperature=0.8, seed=3).token_ids for question in questions
    ]
    assert rag.ask_many([]) == []


def test_an_error_ends_all_questions_asked_together():
    def find(query):
        if query == "bad":
            raise KeyError("shelf")
        return [TEXT]

    rag = RAG(tiny_llm(), find, max_new_tokens=500)
    began = time.perf_counter()
    with pytest.raises(KeyError, match="shelf"):
        rag.ask_many([QUESTION, QUESTION, "bad"])
    aborted = time.perf_counter() - began
    began = time.perf_counter()
    rag.ask(QUESTION)
    assert aborted < time.perf_counter() - began


def test_async_answers_are_those_of_ask_and_do_not_block_the_loop():
    main = threading.get_ident()
    searched = []

    def find(query):
        searched.append(threading.get_ident())
        return [TEXT]

    rag = RAG(tiny_llm(), find, max_new_tokens=12)
    expected = rag.ask(QUESTION)
    searched.clear()

    async def ask():
        answer = await rag.aask(QUESTION)
        stream = rag.astream(QUESTION)
        pieces = [piece async for piece in stream]
        finished = await rag.astream(QUESTION).finish()
        return answer, "".join(pieces), stream.answer, finished

    answer, text, streamed, finished = asyncio.run(ask())
    assert answer.token_ids == streamed.token_ids == finished.token_ids == expected.token_ids
    assert text == expected.text
    assert main not in searched
    with pytest.raises(ConfigurationError, match="empty"):
        asyncio.run(rag.aask(""))


def test_an_async_stream_that_is_never_read_can_be_closed():
    async def leave():
        stream = RAG(tiny_llm(), lambda query: [TEXT]).astream(QUESTION)
        await stream.aclose()
        with pytest.raises(RuntimeError):
            _ = stream.answer
        assert stream.token_ids == ()

    asyncio.run(leave())


EMBEDDERS = {
    "function": letters,
    "tensor": lambda texts: torch.tensor(letters(texts), requires_grad=True).bfloat16(),
    "tensors": lambda texts: [torch.tensor(row, requires_grad=True) for row in letters(texts)],
    "llamaindex": Framework(
        get_text_embedding_batch=letters, get_query_embedding=lambda text: letters([text])[0]
    ),
    "array": lambda texts: np.array(letters(texts)),
    "langchain": Framework(embed_documents=letters, embed_query=lambda text: letters([text])[0]),
    "sentence-transformers": Framework(
        encode=lambda texts: 1 / 0, encode_document=letters, encode_query=lambda t: letters([t])[0]
    ),
    "older sentence-transformers": Framework(encode=letters),
}


@pytest.mark.parametrize("form", EMBEDDERS)
def test_embedders_have_many_forms(form, tmp_path):
    embedder, path = EMBEDDERS[form], tmp_path / "texts.db"
    for _ in range(2):  # the second time from the file
        rag = RAG.from_texts([TIDE, LAMP], tiny_llm(), embedder=embedder, path=path)
        assert rag.prompt("lamp burns rapeseed oil").passages[0].text == LAMP
    with pytest.raises(IndexUnusableError):
        index_documents(Store(path), HashEmbedder(), [])


class Encoder(torch.nn.Linear):
    """A model without a name, as sentence-transformers' are."""

    def encode(self, texts):
        return self(torch.tensor(letters(texts)))


@pytest.mark.parametrize(
    "models",
    [
        [Framework(embed_documents=letters, model_name=name) for name in "ab"],
        [Encoder(18, 18), Encoder(18, 18)],
    ],
    ids=["names", "weights"],
)
def test_vectors_of_another_model_of_one_class_are_not_mixed(tmp_path, models):
    for _ in range(2):
        RAG.from_texts([LAMP], tiny_llm(), embedder=models[0], path=tmp_path / "texts.db")
    with pytest.raises(IndexUnusableError):
        RAG.from_texts([LAMP], tiny_llm(), embedder=models[1], path=tmp_path / "texts.db")


class Quantized(Encoder):
    """A model whose state also holds what is no tensor, as dynamic quantization leaves it."""

    def state_dict(self):
        return {"packed": (self.weight.detach(), None), "dtype": torch.qint8}


def test_a_quantized_model_is_told_apart_too(tmp_path):
    models = [Quantized(18, 18), Quantized(18, 18)]
    for _ in range(2):
        RAG.from_texts([LAMP], tiny_llm(), embedder=models[0], path=tmp_path / "texts.db")
    with pytest.raises(IndexUnusableError):
        RAG.from_texts([LAMP], tiny_llm(), embedder=models[1], path=tmp_path / "texts.db")


def test_a_tilde_in_a_path_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    from_texts([LAMP], path="~/texts.db")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "lamp.txt").write_text(LAMP)
    RAG.from_folder("~/docs", tiny_llm(), embedder=HashEmbedder(), path="~/docs.db")
    assert (tmp_path / "texts.db").is_file()
    assert (tmp_path / "docs.db").is_file()


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ([[1.0, 2.0]] * 5, "5 vectors|1 vectors"),
        ([1.0], "not an array"),
        ("text", "vectors"),
        ([[float("nan")]], "finite"),
    ],
)
def test_what_is_no_vectors_is_refused(returned, told):
    with pytest.raises(ConfigurationError, match=told):
        RAG.from_texts([LAMP], tiny_llm(), embedder=lambda texts: returned)
