"""LLMA's published rules, written twice: our drafter under our session, and a plain count."""

import json
import os
import random

import pytest
from recorded import write_inputs

from eval.data import DATA_VARIABLE, Recorded, encode_apart, lay_out
from eval.experiments.replay import replay_set
from eval.models import load_tokenizer
from eval.papers import llma
from eval.papers.bench import llma_decoder
from eval.papers.llma import count, counted_of
from ragaccel.decoding import Reference

EOS = 1
SHARED = ("tokens", "passes", "tokens_per_pass", "drafted_per_pass", "triggered")


def recorded(passages, answer):
    apart = tuple(Reference(tuple(passage)) for passage in passages)
    return Recorded((0, 5), (), apart, (*answer, EOS))


def made_recordings(seed):
    """Answers pieced together from passages of few words, so that short matches abound."""
    rng = random.Random(seed)
    passages = [rng.choices(range(10, 40), k=rng.choice((3, 40, 900))) for _ in range(4)]
    answer = []
    for _ in range(12):
        passage = rng.choice(passages)
        start = rng.randrange(len(passage))
        answer += passage[start : start + rng.randint(1, 30)] + rng.choices(range(10, 50), k=2)
    return recorded(passages, answer)


@pytest.mark.parametrize(("n", "k"), [(1, 20), (1, 15), (2, 20), (3, 5), (5, 2)])
def test_our_drafter_takes_the_passes_that_the_published_rules_take(n, k):
    recordings = [made_recordings(seed) for seed in range(12)]
    replayed = replay_set(recordings, llma_decoder(n, k).replayed())
    counted = counted_of(recordings, n, k).figures()
    assert {name: replayed[name] for name in SHARED} == counted
    assert 0 < replayed["triggered"] < 1
    assert replayed["accepted_per_trigger"] > 0.2


def test_the_first_pass_has_no_draft_and_k_counts_the_token_that_is_fed():
    passage = list(range(100, 140))
    counted = count([passage], [*passage, EOS], k=20)
    # 100 without a draft; then 19 draft tokens and one of the model's own at a time: 40 are left.
    assert (counted.tokens, counted.passes, counted.triggered) == (41, 3, 2)
    assert counted.drafted == 19 + 19
    assert count([passage], [*passage, EOS], k=15).passes == 1 + 3


def test_the_first_place_of_the_longest_match_is_copied_from():
    assert count([[7, 8, 5], [7, 8, 9]], [7, 8, 9, EOS]).passes == 3  # 5 is drafted, wrongly
    assert count([[7, 8, 5], [6, 7, 8, 9]], [6, 7, 8, 9, EOS]).passes == 2
    assert count([[7, 8, 5], [6, 7, 8, 9]], [6, 7, 8, 9, EOS], n=2).passes == 3


def test_a_passage_counts_to_its_768th_token_and_an_answer_is_not_copied_from():
    far = [*range(1000, 1768), 7, 8, 9]
    assert count([far], [7, 8, 9, EOS]).passes == 4
    assert count([far[1:]], [1767, 7, EOS]).passes == 2
    assert count([], [7, 8, 7, 8, 7, 8, EOS]).passes == 7


def test_the_original_file_is_read_as_it_was_recorded(tmp_path, capsys):
    write_inputs(tmp_path)
    rag = tmp_path / "data" / "rag"
    rag.mkdir()
    text = "Its keeper trims the wick at dusk, and again at midnight."
    row = {"query": "Who?", "docs": ["The lamp burns oil.", text], "result": {"text": f" {text}"}}
    (rag / "llma_rag_original.jsonl").write_text(json.dumps(row) + "\n")
    arguments = [f"--data={tmp_path / 'data'}", "--tokenizer=words", "--sets=llma_rag_original"]
    llma.run_llma_count([*arguments, f"--out={tmp_path / 'count.json'}"])
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(point["n"], point["k"]) for point in shown] == list(llma.COUNT_SETTINGS)
    assert all(point["passes"] == point["counted"]["passes"] for point in shown)
    assert shown[0]["tokens_per_pass"] > 2
    document = json.loads((tmp_path / "count.json").read_text())
    assert document["grid"] == shown
    assert "eval llma_count" in document["run"]["command"]
    assert "llma_rag_original | 1 | 20" in llma.llma_count_table(document)


def test_the_originals_answers_keep_the_blank_they_begin_with():
    words = load_tokenizer("reader").tokenizer
    original = {"query": "Who?", "docs": ["A lamp.", "A bell."], "result": {"text": " A lamp."}}
    passages = [{"text": text} for text in original["docs"]]
    unified = {"question": "Who?", "passages": passages, "answer": " A lamp."}
    kept, stripped = lay_out(original, words), lay_out(unified, words)
    assert kept.answer_ids == (*encode_apart(" A lamp.", words), words.eos_token_id)
    assert stripped.answer_ids == (*encode_apart("A lamp.", words), words.eos_token_id)
    assert kept.answer_ids != stripped.answer_ids
    assert (kept.prompt_ids, kept.apart) == (stripped.prompt_ids, stripped.apart)


@pytest.mark.skipif(DATA_VARIABLE not in os.environ, reason=f"needs {DATA_VARIABLE}")
def test_llmas_own_answers_take_the_passes_counted_of_its_code(tmp_path):
    out = tmp_path / "count.json"
    llma.run_llma_count([f"--out={out}"])
    grid = json.loads(out.read_text())["grid"]
    found = {(point["set"], point["n"], point["k"]): point["tokens_per_pass"] for point in grid}
    wanted = {(1, 20): 3.31, (1, 15): 3.22, (2, 20): 2.89}
    for setting, tokens_per_pass in wanted.items():
        original = found[("llma_rag_original", *setting)]
        assert original == pytest.approx(tokens_per_pass, rel=0.01)
    assert found["llma_msmarco_davinci003", 1, 20] == pytest.approx(3.38, rel=0.01)
