from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
from fakes import HashEmbedder
from recorded import write_inputs
from tiny_llm import DOCUMENTS_TEMPLATE, TEMPLATE, tiny_tokenizer

from eval.data import MissingDataError
from eval.experiments import frameworks, rag
from eval.experiments.frameworks import STREAMING, is_installed
from eval.experiments.rag import load_questions, open_collection, share_found
from eval.models import load_target
from eval.report import build
from eval.tasks import load_task
from ragaccel import Passage
from ragaccel.frameworks import ReferenceScope, default_registry

pytestmark = pytest.mark.usefixtures("no_event_loop_is_left")

FACTS = {
    "Who trims the wick?": "Its keeper trims the wick at dusk, and again at midnight.",
    "What rises at the mole?": "The tide rises four metres at the mole, twice a day.",
    "What does the lamp burn?": "The lamp burns rapeseed oil, of which nine barrels are landed.",
}
WAYS = [way for way in STREAMING if way == "bare" or is_installed(way)]
NAMES = [
    "generate",
    *(name for way in WAYS for name in (f"{way}_plain", way)),
    "bare_again",
]


@pytest.fixture(autouse=True)
def words_as_vectors(monkeypatch):
    monkeypatch.setattr(rag, "load_embedder", lambda _name: HashEmbedder())


def inputs(folder):
    """A tiny random model, three questions, and a passage each that their answers quote."""
    made = write_inputs(folder)
    rows = [
        {
            "id": str(number),
            "question": question,
            "passages": [{"text": f"This is known. {fact} So much for that."}],
            "answer": fact,
        }
        for number, (question, fact) in enumerate(FACTS.items())
    ]
    (folder / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [*made, "--k=2", "--max-new-tokens=60", "--threads=1", f"--out={folder / 'x.json'}"]


@pytest.fixture
def arguments(tmp_path):
    return inputs(tmp_path)


@pytest.fixture
def made(monkeypatch):
    """The ways of a run, to be looked at afterwards."""
    make, ways = rag.make_ways, {}

    def noted(*given):
        found = make(*given)
        ways.update({way.name: way for way in found})
        return found

    monkeypatch.setattr(rag, "make_ways", noted)
    return ways


@pytest.fixture(scope="module")
def ways(tmp_path_factory):
    """The ways over an open index, to be asked; do not change them."""
    options = rag.parse(inputs(tmp_path_factory.mktemp("inputs")))
    target = load_target(options.model, data=options.data)
    with open_collection("task", load_task(options.task), HashEmbedder()) as collection:
        found = rag.make_ways(WAYS, target, collection.source, options)
        yield {way.name: way for way in found}


def document_of(arguments):
    rag.run_rag_speedup(arguments)
    (out,) = (argument for argument in arguments if argument.startswith("--out="))
    with open(out.removeprefix("--out="), encoding="utf-8") as file:
        return json.load(file)


def rows_in(folder):
    _, *lines = (folder / "x.rows.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    "template", [TEMPLATE, DOCUMENTS_TEMPLATE, None], ids=["chat", "apart", "plain"]
)
def test_every_way_gives_the_recording_from_the_same_prompt(template, arguments, capsys, tmp_path):
    tiny_tokenizer(template).save_pretrained(tmp_path / "data" / "tokenizers" / "words")
    document = document_of(arguments)
    decoders = document["decoders"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == decoders
    assert list(decoders) == NAMES
    assert document["index"] == {"passages": 3, "own_found": 1.0}
    rows = rows_in(tmp_path)
    assert {len({row["text_hash"] for row in rows if row["example"] == at}) for at in "012"} == {1}
    assert len({row["prompt_tokens"] for row in rows if row["example"] == "0"}) == 1
    for row in rows:
        assert 0 < row["first_token_seconds"] <= row["total_seconds"]
        assert sum(row["stages"].values()) == pytest.approx(row["total_seconds"])
        assert all(seconds >= 0 for seconds in row["stages"].values())
    for figures in decoders.values():
        assert figures["same_text"] == figures["answers"] == figures["examples"] == 3
        assert figures["ratio_generate"] > 0
    assert decoders["generate"].get("ratio") is None
    tables = build.result_tables("x", document).tables
    assert tables.count("| 3 of 3 |") == len(NAMES)
    assert "3 passages in the index, 2 in a prompt; of those that" in tables
    assert build.title_of(document).endswith("task task.jsonl, recorded answers")


def test_plain_decoding_drafts_nothing_and_the_others_do(arguments):
    decoders = document_of(arguments)["decoders"]
    for name, figures in decoders.items():
        is_plain = name == "generate" or name.endswith("_plain")
        assert (figures["acceptance_length"] == 1.0) == is_plain
        if name.endswith("_plain"):
            assert figures["ratio"] == figures["ratio_first_token"] == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_leaves_the_recording_ends_the_run(name, ways, monkeypatch):
    question, recorded = "Who trims the wick?", (40, 41, 42, 1)
    assert ways[name].ask(question, recorded).token_ids == recorded
    monkeypatch.setattr(rag, "teacher_forced", lambda *_given: nullcontext())
    with pytest.raises(RuntimeError, match=f"{name} left the recording"):
        ways[name].ask(question, recorded)


def test_a_chain_that_asks_its_model_twice_is_refused(ways, monkeypatch):
    way = ways["bare"]
    once = way._pieces
    monkeypatch.setattr(way, "_pieces", lambda asked: [*once(asked), *once(asked)])
    with pytest.raises(ValueError, match="asked its model 2 times"):
        way.ask("Who trims the wick?")


def test_a_chain_that_tells_other_words_than_its_model_is_refused(ways, monkeypatch):
    way = ways["bare"]
    once = way._pieces
    monkeypatch.setattr(way, "_pieces", lambda asked: [*once(asked), "!"])
    with pytest.raises(RuntimeError, match="returned another text"):
        way.ask("Who trims the wick?", (40, 41, 42, 1))


def test_nothing_is_registered_for_plain_decoding(ways, monkeypatch):
    registered, register = [], ReferenceScope.register
    known = len(default_registry())

    def noted(scope, passages):
        passages = [passages] if isinstance(passages, Passage) else list(passages)
        registered.extend(passages)
        register(scope, passages)

    monkeypatch.setattr(ReferenceScope, "register", noted)
    for name, num_known in (("langchain_plain", 0), ("langchain", 2), ("llama_index", 2)):
        if name.removesuffix("_plain") in WAYS:
            registered.clear()
            ways[name].ask("Who trims the wick?", (40, 41, 42, 1))
            assert len({passage.text for passage in registered}) == num_known
    assert len(default_registry()) == known


def test_a_round_begins_with_nothing_remembered(arguments, made):
    document_of([*arguments, "--repeats=2"])
    for way in WAYS:
        assert made[way].llm.memory.stats().requests == len(FACTS)  # of the last round alone
        assert made[f"{way}_plain"].llm.memory.stats().requests == 0
    assert made["bare_again"].llm.memory.stats().requests >= len(FACTS)


def test_what_is_asked_again_reads_its_whole_prompt_again(ways):
    for way, times in ((ways["bare"], 1), (ways["bare_again"], 2)):
        way.forget()
        before = way.llm.engine.prefilled_rows
        asked = way.ask("Who trims the wick?", (40, 41, 42, 1))
        assert way.llm.engine.prefilled_rows - before == times * (asked.prompt_tokens - 1)


def test_a_stopped_run_goes_on(arguments, monkeypatch, tmp_path):
    ask, calls = rag.Ours.ask, []

    def stopping(way, *given):
        calls.append(way.name)
        if len(calls) > 3 * (len(NAMES) - 1):  # the warm-up, two questions
            raise KeyboardInterrupt
        return ask(way, *given)

    monkeypatch.setattr(rag.Ours, "ask", stopping)
    with pytest.raises(KeyboardInterrupt):
        rag.run_rag_speedup(arguments)
    rows = (tmp_path / "x.rows.jsonl").read_text().splitlines()
    assert len(rows) == 1 + 2 * len(NAMES)
    monkeypatch.setattr(rag.Ours, "ask", ask)
    document = document_of(arguments)
    assert (tmp_path / "x.rows.jsonl").read_text().splitlines()[: len(rows)] == rows
    assert document["resumed"] == [{"round": 0, "example": "2"}]
    assert all(figures["answers"] == 3 for figures in document["decoders"].values())


def test_a_framework_that_is_not_installed_is_left_out_and_said(arguments, capsys, monkeypatch):
    monkeypatch.setattr(rag, "is_installed", lambda _name: False)
    document = document_of(arguments)
    assert list(document["decoders"]) == ["generate", "bare_plain", "bare", "bare_again"]
    assert document["settings"]["left_out"] == ["langchain", "llama_index"]
    assert "langchain is left out" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="no way 'haystack'"):
        rag.run_rag_speedup([*arguments, "--ways=haystack"])


def test_without_data_the_questions_that_ship_are_asked(monkeypatch, capsys):
    monkeypatch.delenv("RAGACCEL_DATA", raising=False)
    task, examples = load_questions(None, None)
    assert examples == load_task(task)
    assert "which ship" in capsys.readouterr().err
    with pytest.raises(MissingDataError):
        load_questions("llma", None)
    with open_collection(task, examples, HashEmbedder()) as collection:
        assert collection.num_passages > 200
        (found,) = collection.source.search("Who designed the tower on Gannet Ledge?", 1)
        assert found.path


@pytest.mark.usefixtures("arguments")
def test_the_share_found_counts_a_questions_own_passages(tmp_path):
    examples = load_task(str(tmp_path / "task.jsonl"))
    with open_collection("task.jsonl", examples, HashEmbedder()) as collection:
        assert share_found(collection, examples, 3) == 1.0
        strangers = [load_task("demo", 1)[0]]
        assert share_found(collection, [*examples, *strangers], 3) == 3 / 6


def test_an_answer_that_says_something_else_than_plain_decoding_is_not_the_same_text():
    def row(name, example, said):
        seconds = {"first_token_seconds": 1.0, "total_seconds": 2.0, "stages": {"rest": 2.0}}
        place = {"decoder": name, "example": example, "round": 0, "text_hash": said}
        return {**place, **seconds, "tokens": 4, "passes": 2, "prompt_tokens": 9}

    said = {"generate": "ab", "bare_plain": "ab", "bare": "ax", "bare_again": "xx"}
    rows = [row(name, at, hashes[at]) for name, hashes in said.items() for at in (0, 1)]
    figures = rag.compare(rows)
    assert {name: found["same_text"] for name, found in figures.items()} == {
        **{"generate": 2, "bare_plain": 2},
        **{"bare": 1, "bare_again": 0},
    }


@pytest.mark.skipif(len(WAYS) < len(STREAMING), reason="both frameworks are needed")
def test_frameworks_are_measured_with_the_same_chains(arguments, capsys):
    asked = [argument for argument in arguments if not argument.startswith("--k=")]
    frameworks.run_frameworks([*asked, "--rounds=1", "--max-new-tokens=8"])
    decoders = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(decoders) == list(WAYS)
    assert all(figures["same_text"] == 3 for figures in decoders.values())


@pytest.mark.skipif(len(WAYS) < len(STREAMING), reason="both frameworks are needed")
def test_frameworks_find_no_prompt_of_the_round_before(arguments, monkeypatch):
    kept, ask_all = [], frameworks.ask_all

    def noted(decoders, example, number, at):
        if at == 0:
            kept.append([llm.engine.prefix_cache.num_idle for llm in llms])
        return ask_all(decoders, example, number, at)

    class Noted(frameworks.LLM):
        def __init__(self, *given):
            super().__init__(*given)
            llms.append(self)

    llms = []
    monkeypatch.setattr(frameworks, "LLM", Noted)
    monkeypatch.setattr(frameworks, "ask_all", noted)
    asked = [argument for argument in arguments if not argument.startswith("--k=")]
    frameworks.run_frameworks([*asked, "--rounds=2", "--max-new-tokens=8"])
    assert kept == [[0, 0, 0]] * 3
    assert all(llm.engine.prefix_cache.num_idle == len(FACTS) for llm in llms)


@pytest.mark.usefixtures("arguments")
def test_a_recording_ends_with_an_end_token_unless_it_is_cut(tmp_path):
    target = load_target(f"random:{tmp_path / 'tiny.json'}", data=tmp_path / "data")
    (example, *_) = load_task(str(tmp_path / "task.jsonl"))
    ids = rag.recorded_answers([example], target, 60)["0"]
    assert ids[-1] in target.tokenizer.eos_ids
    assert target.tokenizer.decode(ids) == example.answer
    assert rag.recorded_answers([example], target, 5)["0"] == ids[:5]
