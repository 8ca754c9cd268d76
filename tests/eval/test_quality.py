"""Retrieval measured end to end, with an embedder of hashed words and a few passages of our own."""

import json
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from fakes import HashEmbedder

from eval.data import QuestionSet, load_set
from eval.experiments import retrieval
from eval.experiments.retrieval import (
    LIBRARY_FUSION,
    ArticleQuestion,
    Articles,
    Cut,
    Fusion,
    fuse_ranks,
    settings_swept,
    share_within,
    tokens_needed,
    ways_swept,
    within,
)
from eval.report import build
from ragaccel.passage import Document
from ragaccel.retrieval import MODES, Retriever, Store

LAMPS = [
    ("Gannet_Ledge", "The lamp of Gannet Ledge burns colza oil in four wicks.", "colza oil"),
    ("Gannet_Ledge", "A keeper trims each wick at dusk and again at midnight.", "midnight"),
    ("Wether Holm", "The bell of Wether Holm was cast from two broken guns.", "two broken guns"),
    ("Amity", "Sand covered the doorstep of Calder Low Light every autumn.", "Sand"),
]
QUESTIONS = [
    "What burns in the lamp of Gannet Ledge?",
    "When does a keeper trim the wick?",
    "What was the bell of Wether Holm cast from?",
    "What covered the doorstep?",
]


def row(number, question, passages, answer):
    parts = [{"title": title, "text": text} for title, text in passages]
    return {"id": number, "question": question, "passages": parts, "answer": answer}


@pytest.fixture
def data(tmp_path):
    """A data folder: each lamp's question, one of them twice; two searches of two passages each."""
    folder = tmp_path / "data" / "rag"
    folder.mkdir(parents=True)
    pairs = [
        row(number, question, [(title, text)], answer)
        for number, (question, (title, text, answer)) in enumerate(
            zip(QUESTIONS, LAMPS, strict=True)
        )
    ]
    files = {
        "squad_like": [*pairs, {**pairs[0], "id": "again"}],
        "nq_open_oracle": pairs[:3],
        "clapnq_dev": [{**pair, "answer": pair["passages"][0]["text"]} for pair in pairs],
        "llma_msmarco_davinci003": [
            row("a", "lamp wick", [("", text) for _, text, _ in LAMPS[:2]], ""),
            row("b", "bell doorstep", [("", text) for _, text, _ in LAMPS[2:]], ""),
        ],
    }
    for name, rows in files.items():
        lines = "".join(json.dumps(one) + "\n" for one in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return folder.parent


@pytest.fixture(autouse=True)
def hashed_words(monkeypatch):
    monkeypatch.setattr(retrieval, "load_embedder", HashEmbedder)
    monkeypatch.delenv("RAGACCEL_DATA", raising=False)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["python -m eval quality", *map(str, arguments)])
    retrieval.run_quality()


def test_a_set_holds_every_passage_and_every_pair_once(data):
    squad = load_set("squad", HashEmbedder(), data)
    assert [(p.title, p.text) for p in squad.passages] == [
        (title.replace("_", " "), text) for title, text, _ in LAMPS
    ]
    assert [q.text for q in squad.questions] == QUESTIONS
    assert [q.relevant for q in squad.questions] == [{f"p{i}"} for i in range(4)]
    assert squad.questions[0].group == squad.questions[1].group == "Gannet Ledge"
    searches = load_set("msmarco", HashEmbedder(), data)
    assert [q.relevant for q in searches.questions] == [{"p0", "p1"}, {"p2", "p3"}]
    assert load_set("squad", HashEmbedder(), data, 2).questions == squad.questions[:2]
    assert len(load_set("squad", HashEmbedder(), data, 2).passages) == 4


def test_the_demo_knows_which_passages_answer():
    demo = load_set("demo", HashEmbedder())
    texts = {p.passage_id: p for p in demo.passages}
    tower = next(q for q in demo.questions if q.text.startswith("Who designed the tower"))
    (name,) = tower.relevant
    assert "Isobel Tarrant designed the tower on Gannet Ledge" in texts[name].text
    assert texts[name].path == tower.group == "history/founding-and-early-years.md"
    assert len(demo.questions) == 20


def test_a_run_writes_figures_and_goes_on_where_it_was_stopped(data, tmp_path, monkeypatch, capsys):
    out = tmp_path / "r" / "quality.json"
    arguments = (f"--data={data}", "--sets=squad,msmarco", f"--out={out}")
    run(monkeypatch, *arguments)
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(out.read_text())
    squad = document["sets"]["squad"]
    assert (squad["passages"], squad["questions"], squad["groups"]) == (4, 4, 3)
    assert squad["modes"]["text"]["hit@1"] == [1.0, 1.0, 1.0]
    assert squad["fused_over"]["text"]["hit@10"] == [0.0, 0.0, 0.0]
    assert document["sets"]["msmarco"]["relevant"] == 2.0

    results_log = out.with_suffix(".rows.jsonl")
    settings, first, _ = results_log.read_text().splitlines(keepends=True)
    spoilt = {**json.loads(first), "passages": 99}
    results_log.write_text(settings + json.dumps(spoilt) + "\n")
    run(monkeypatch, *arguments)
    again = json.loads(capsys.readouterr().out)
    assert again["sets"]["squad"]["passages"] == 99  # as it was read, not measured again
    assert again["sets"]["msmarco"] == document["sets"]["msmarco"]

    monkeypatch.setattr(retrieval, "current_commit", lambda: "another")
    with pytest.raises(SystemExit, match=r"made with other settings \(commit\)"):
        run(monkeypatch, *arguments)


def test_figures_are_of_the_ranks_and_gains_of_their_differences():
    asked = {
        "set": "x",
        "passages": 9,
        "relevant": [1, 1],
        "groups": ["a", "b"],
        "ranks": {"fused": [[1], [2]], "dense": [[2], []], "text": [[1], [2]]},
    }
    figures = retrieval.search_figures(asked)
    assert figures["modes"]["fused"]["mrr@10"][0] == 0.75
    assert figures["modes"]["dense"]["mrr@10"][0] == 0.25
    assert figures["modes"]["dense"]["hit@1"][0] == 0.0
    assert figures["fused_over"]["dense"]["mrr@10"] == [0.5, 0.5, 0.5]
    assert figures["fused_over"]["text"]["ndcg@10"] == [0.0, 0.0, 0.0]


def test_every_search_is_of_its_own_mode(data, tmp_path):
    asked = load_set("squad", HashEmbedder(), data)
    strange = replace(asked.questions[3], text="zebra quagga")
    with retrieval.opened(asked, HashEmbedder(), tmp_path) as retriever:
        searched = retrieval.search_row(replace(asked, questions=(strange,)), retriever)
    assert searched["ranks"]["text"] == [[]]
    assert len(searched["ranks"]["dense"][0]) == len(searched["ranks"]["fused"][0]) == 1


def test_without_data_what_ships_is_measured_and_said_so(monkeypatch, capsys):
    monkeypatch.setattr(retrieval, "answer_row", lambda name, data: {"set": name, **ANSWERS})
    run(monkeypatch)
    said, noted = capsys.readouterr()
    document = json.loads(said)
    assert list(document["sets"]) == ["demo"]
    assert list(document["answers"]) == ["answers_demo"]
    assert "no data folder" in noted
    assert document["sets"]["demo"]["questions"] == 20


def test_missing_data_and_unknown_sets_end_in_one_line(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=r"holds no rag/squad_like\.jsonl"):
        run(monkeypatch, f"--data={tmp_path}", "--sets=squad")
    with pytest.raises(SystemExit, match="no set oil: take of squad"):
        run(monkeypatch, "--sets=oil,demo")


ANSWERS = {
    "answers": [
        {"answer": "It burns colza oil. [1]", "expected": "It burns colza oil.",
         "words": "colza oil", "right": True, "retrieved": True, "cited": True},
        {"answer": "Boats come on Monday.", "expected": "The bell is bronze.",
         "words": "bronze", "right": False, "retrieved": False, "cited": True},
        {"answer": "The passages do not tell.", "expected": None,
         "words": None, "right": True, "retrieved": False, "cited": False},
    ],
    "groups": ["a", "b", "c"],
}  # fmt: skip


def test_answers_are_scored_without_citations_and_refusals_apart():
    figures = retrieval.answer_figures(ANSWERS)
    assert figures["questions"] == 2
    assert figures["answer"]["contains"][0] == 0.5
    assert figures["answer"]["exact"][0] == 0.0
    assert figures["answer"]["f1"][0] == pytest.approx(2 * 2 / 6 / 2, abs=1e-4)
    assert figures["quotation"]["contains"] == [1.0, 1.0, 1.0]
    assert figures["answer_when_found"]["contains"] == [1.0, 1.0, 1.0]
    assert (figures["found"], figures["refused"], figures["unanswerable"]) == (1, 1, 1)
    assert figures["right"][0] == 0.5
    assert figures["cited"][0] == 1.0


def test_the_sweeps_library_setting_is_what_the_retriever_does(data, tmp_path):
    asked, embedder = load_set("squad", HashEmbedder(), data), HashEmbedder()
    with retrieval.opened(asked, embedder, tmp_path) as retriever:
        found = retrieval.search_deeply(asked, retriever, tmp_path)
        for question, (dense, text) in zip(asked.questions, found, strict=True):
            ours = [p.passage_id for p in retriever.search(question.text, 10)]
            assert LIBRARY_FUSION.order(dense, text)[:10] == ours
            for mode, weight in (("dense", 1.0), ("text", 0.0)):
                alone = [p.passage_id for p in retriever.search(question.text, 10, mode=mode)]
                fused = Fusion(dense_weight=weight).order(dense, text)
                assert fused[: len(alone)] == alone
    assert LIBRARY_FUSION in settings_swept()
    assert len(settings_swept()) == len(set(settings_swept()))


def test_deep_searches_are_read_again(data, tmp_path, monkeypatch):
    asked = load_set("squad", HashEmbedder(), data)
    with retrieval.opened(asked, HashEmbedder(), tmp_path) as retriever:
        first = retrieval.search_deeply(asked, retriever, tmp_path)
        monkeypatch.setattr(Retriever, "search", None)
        again = retrieval.search_deeply(asked, retriever, tmp_path)
        assert json.loads(json.dumps(first)) == json.loads(json.dumps(again))
        other = QuestionSet(asked.name, asked.passages[:3], asked.questions)
        with pytest.raises(ValueError, match="other settings \\(passages\\)"):
            retrieval.search_deeply(other, retriever, tmp_path)


def test_fusion_settings_do_what_they_say():
    dense, text = [("a", 0.9), ("b", 0.5), ("c", 0.1)], [("c", 8.0), ("d", 4.0)]
    assert Fusion("ranks", 0.5, 0).order(dense, text) == ["c", "a", "b", "d"]
    assert Fusion("ranks", 0.5, 0, dense_depth=2).order(dense, text) == ["a", "c", "b", "d"]
    assert Fusion("ranks", 0.5, 0, text_depth=0).order(dense, text) == ["a", "b", "c"]
    assert Fusion("ranks", 0.9, 0).order(dense, text)[0] == "a"
    assert Fusion(dense_weight=0.3).order(dense, text) == ["c", "d", "a", "b"]
    assert Fusion(dense_weight=0.7).order(dense, text) == ["a", "b", "c", "d"]
    usual = dict(fuse_ranks(dense, text, 0.5, 60))
    assert usual["c"] == pytest.approx((1 / 63 + 1 / 61) / 2)
    assert usual["d"] == pytest.approx(1 / 62 / 2)
    assert len(ways_swept()["reciprocal rank"]) == 77


def test_articles_keep_the_places_of_their_paragraphs():
    articles = Articles()
    assert articles.place("Gannet Ledge", "One.") == ("Gannet-Ledge.txt", 0)
    path, offset = articles.place("Gannet Ledge", "Two oil lamps.")
    assert articles.place("Gannet Ledge", "One.")[1] == 0
    (document,) = articles.documents()
    assert document.path == path
    assert document.text[offset:] == "Two oil lamps."


def test_a_passage_answers_only_with_the_whole_answer_at_its_place():
    text = "Oil burns. The lamp burns oil at night."
    document = Document("a.txt", text)
    start = text.index("lamp burns oil")
    asked = ArticleQuestion("What?", "a.txt", ((start, start + len("lamp burns oil")),))
    count = HashEmbedder().count_tokens
    (whole,) = Cut(128).passages(document, count)
    assert asked.question([whole]).relevant == {whole.passage_id}
    short = Cut(3).passages(document, count)
    assert len(short) > 2
    assert asked.question(short).relevant == frozenset()


def test_overlapping_passages_share_half_and_lose_nothing():
    sentences = [f"Lamp number {i} burns oil." for i in range(7)]
    document = Document("lamps.txt", " ".join(sentences))
    count = HashEmbedder().count_tokens
    overlapping = Cut(10, overlap=True).passages(document, count)
    assert [p.text for p in overlapping] == [f"{a} {b}" for a, b in pairwise(sentences)]
    assert all(document.text[p.start : p.end] == p.text for p in overlapping)
    apart = Document("a.md", "# One\n\nOil burns.\n\n# Two\n\nSand comes.\n", markup="markdown")
    assert [p.text for p in Cut(10, overlap=True).passages(apart, count)] == [
        "Oil burns.",
        "Sand comes.",
    ]


def test_tokens_are_counted_to_the_end_of_the_passage_that_answers(data, tmp_path):
    asked = load_set("squad", HashEmbedder(), data)
    with Store(tmp_path / "i.db") as store:
        asked.index(store, HashEmbedder(), tmp_path)
        retriever = Retriever(store, HashEmbedder())
        sizes = [len(f"{p.title} {p.text}".split()) for p in asked.passages]
        assert tokens_needed(asked, retriever)[0] == sizes[0]
        nothing = [q.__class__(q.text, frozenset(), q.group) for q in asked.questions]
        unanswered = QuestionSet("squad", asked.passages, tuple(nothing))
        assert tokens_needed(unanswered, retriever) == [None] * 4
        last = asked.questions[0].__class__(QUESTIONS[0], frozenset({"p3"}), "x")
        found = [p.passage_id for p in retriever.search(QUESTIONS[0], 50)]
        before = found[: found.index("p3") + 1]
        one = QuestionSet("squad", asked.passages, (last,))
        assert tokens_needed(one, retriever) == [sum(sizes[int(name[1:])] for name in before)]
    assert within([100, 256, 257, None], 256) == [1.0, 1.0, 0.0, 0.0]
    assert share_within([256, 257, 1024, None]) == [1.0, 0.75, 0.25, 0.0]


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_in_the_table(mode):
    assert mode in _quality_document()["sets"]["x"]["modes"]


def _quality_document():
    figures = retrieval.search_figures(
        {
            "passages": 9,
            "relevant": [1, 1],
            "groups": ["a", "b"],
            "ranks": {"fused": [[1], [2]], "dense": [[2], []], "text": [[1], [2]]},
        }
    )
    return {
        "kind": "quality",
        "settings": {},
        "sets": {"x": figures},
        "answers": {"answers_demo": retrieval.answer_figures(ANSWERS)},
    }


def test_the_report_shows_search_and_answers():
    shown = build.TABLES["quality"](_quality_document())
    dense = next(line for line in shown.split("\n") if line.startswith("| x | 9 | 2 | dense |"))
    assert dense.count("0.250") == 1  # its MRR
    assert "| +0.500 (+0.500 to +0.500) |" not in dense
    assert "fused less this" in shown
    assert "1 of 1 unanswerable refused" in shown


def test_a_sweep_chooses_and_is_shown(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(retrieval, "PASSAGE_LENGTHS", (8, 128))
    monkeypatch.setattr(retrieval, "cuts_swept", lambda: [Cut(8), Cut(8, overlap=True), Cut()])
    out = tmp_path / "sweep.json"
    run(monkeypatch, "--sweep", f"--data={data}", "--sets=squad,clapnq,demo", f"--out={out}")
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "quality_sweep"
    assert document["run"]["command"].startswith("python -m eval quality --sweep")
    sets = {entry["set"] for entry in document["grid"] if entry["sweep"] == "passages"}
    assert sets == {"squad_articles", "clapnq_articles", "demo"}
    assert set(document["passages"]["chosen"]["length and overlap"]["gain"]["sets"]) == {
        "squad_articles",
        "clapnq_articles",
    }
    default = next(
        entry
        for entry in document["grid"]
        if entry["set"] == "squad" and entry["offset"] is None and entry["dense_weight"] == 0.5
    )
    assert default["hit@10"] == 1.0
    shown = build.TABLES["quality_sweep"](document)
    assert "| fusion: reciprocal rank |" in shown
    assert "| ranks, offset 60 |" in shown
    assert "| squad_articles | 8, overlapping by half |" in shown

    monkeypatch.setattr(retrieval, "passage_row", None)  # all is in the results log
    run(monkeypatch, "--sweep", f"--data={data}", "--sets=squad,clapnq,demo", f"--out={out}")
    assert json.loads(capsys.readouterr().out)["grid"] == document["grid"]
