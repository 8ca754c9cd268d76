"""What is left of the trie drafter when one idea or source is taken out."""

import json

import numpy as np
import pytest
from eval_replayed import COPIED, PASSAGE
from recorded import SENTENCE, write_inputs

from eval.data import Recorded
from eval.experiments import replay
from eval.experiments.replay import LongestOnly, PartOfPast, calling, variants
from eval.report import build
from ragaccel.decoding import Context, Reference
from ragaccel.drafting import (
    PAST_ANSWER,
    PAST_PROMPT,
    History,
    NoPast,
    RequestText,
    TrieDrafter,
    bucket_starts,
    default_match_weights,
    empty_bigrams,
    expansion as scores,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Spare the tests the seconds in which the one variant with code of its own is compiled."""
    monkeypatch.setattr(replay, "LongestOnly", TrieDrafter)


def make_history():
    """A past in which 80 to 85 were followed by 86 in a prompt and by 87 in an answer."""
    history = History()
    history.add([50, *range(80, 86), 86, 51], [52, *range(80, 86), 87, 53])
    return history


def sources_of(drafter, context):
    tree = drafter.draft(context, 16)
    return {origins[0].source for origins in tree.origins[1:]}


def test_a_source_that_is_left_out_is_not_copied_from():
    token_ids = [0, 7, 8, 30, 31, 5, 7, 8]
    made = variants(make_history(), 16)
    for name, source in (("reference", "reference"), ("prompt", "prompt")):
        for variant, is_there in (("full", True), (f"no_{name}", False)):
            drafter = made[variant]
            context = Context(token_ids, [Reference((7, 8, 30, 31))])
            if name == "prompt":
                context = Context(token_ids)
            assert (source in sources_of(drafter, context)) is is_there
    for name in ("full", "no_output"):
        context = Context([0, 2, 3])
        made[name].draft(context, 16)
        context.token_ids += [60, 61, 62, 60, 61]
        assert ("output" in sources_of(made[name], context)) is (name == "full")
    for name, source in (("no_past_prompt", "past prompt"), ("no_past_answer", "past answer")):
        assert source in sources_of(made["full"], Context([0, *range(80, 86)]))
        assert source not in sources_of(made[name], Context([0, *range(80, 86)]))


def test_what_is_left_of_the_past_can_still_be_searched():
    history = make_history()
    part = PartOfPast(history, hidden=PAST_PROMPT)
    suffix_array = part.suffix_array()
    left = suffix_array.positions[: suffix_array.num_positions]
    assert set(suffix_array.kinds[left]) == {PAST_ANSWER}
    assert np.array_equal(suffix_array.bucket_starts, bucket_starts(suffix_array.token_ids, left))
    assert np.array_equal(part.counts(), history.counts())
    assert part.bigrams() is history.bigrams()
    without = PartOfPast(history, has_bigrams=False)
    assert without.suffix_array().num_positions == history.suffix_array().num_positions
    assert len(without.bigrams().totals) == len(empty_bigrams().totals)
    assert PartOfPast(History(), hidden=PAST_PROMPT).suffix_array().num_positions == 0


def test_ideas_are_taken_out_one_at_a_time():
    made = variants(make_history(), 16)
    assert "frequent" in sources_of(made["full"], Context([0, 40, 41, 42]))
    context = Context([0, 40, 41, 42])
    assert "frequent" not in sources_of(variants(NoPast(), 16)["no_frequent"], context)
    assert np.all(made["no_beyond"].match_weights.beyond == 1.0)
    assert np.all(made["no_support"].match_weights.support == 1.0)
    assert made["one_branch"].draft(Context([0, 7, 8, 30, 7, 8]), 16).is_chain
    calibration = made["no_calibration"].calibration
    calibration.learn(None, None, None)
    assert np.all(calibration.odds == 1.0)
    assert "no_successors" not in variants(NoPast(), 16)


def test_only_the_longest_matches_are_heard():
    context = Context([0, 7, 8, 9, 20, 21, 8, 9, 30, 31, 9, 40, 41, 7, 8, 9])
    text = RequestText(context)
    heard = {}
    for name, score_candidates in (
        ("all", scores.score_candidates),
        ("longest", LongestOnly._poll),
    ):
        arrays, past = scores.new_scores(), History()
        _, _, count = score_candidates(
            text.suffix_array, past.suffix_array(), past.bigrams(), text.suffix_array.token_ids,
            text.end,
            default_match_weights(), np.zeros(0), arrays,
        )  # fmt: skip
        heard[name] = set(arrays.token_ids[:count].tolist())
    assert heard == {"all": {20, 30, 40}, "longest": {20}}
    expand = LongestOnly._grow.py_func.__globals__["expand"]
    assert expand.py_func.__globals__["score_candidates"] is LongestOnly._poll
    assert LongestOnly._build.__globals__["build_tree"] is LongestOnly._grow


@pytest.mark.slow
def test_the_longest_matches_alone_are_drafted_from():
    token_ids = [0, 7, 8, 9, 20, 21, 8, 9, 30, 31, 9, 40, 41, 7, 8, 9]

    def children(drafter):
        tree = drafter.draft(Context(token_ids), 16)
        draft_tokens = zip(tree.token_ids, tree.parents, tree.origins, strict=True)
        return {t for t, parent, origins in draft_tokens if parent == 0 and origins[0].match_length}

    full, longest = children(TrieDrafter(16)), children(LongestOnly(16))
    assert {20, 30, 40} <= full
    assert 20 in longest
    assert not {30, 40} & longest


def test_a_function_that_is_not_called_cannot_be_replaced():
    with pytest.raises(ValueError, match="score_candidates knows no colect"):
        calling(scores.score_candidates, colect=scores.score_matches)
    with pytest.raises(ValueError, match="draft knows no build_tree"):  # not called here
        calling(TrieDrafter.draft, build_tree=None)
    made = calling(lambda: PASSAGE[0], PASSAGE=(3,))
    assert made() == 3


def test_a_run_ends_in_a_table_of_all_variants(tmp_path, capsys):
    write_inputs(tmp_path)
    line = {"question": "Who?", "passages": [{"text": SENTENCE}], "answer": SENTENCE}
    (tmp_path / "data" / "rag").mkdir()
    rows = "".join(json.dumps({"id": str(i), **line}) + "\n" for i in range(2))
    (tmp_path / "data" / "rag" / "lamps.jsonl").write_text(rows)
    arguments = [f"--data={tmp_path / 'data'}", "--sets=lamps", "--tokenizer=words"]
    replay.run_ablation([*arguments, f"--out={tmp_path / 'r' / 'ablation.json'}"])
    shown = json.loads(capsys.readouterr().out.strip().split("\n")[-1])
    document = json.loads((tmp_path / "r" / "ablation.json").read_text())
    assert document["kind"] == "ablation"
    assert document["drafters"] == shown
    assert list(shown["64_history"]) == list(variants(History(), 64))
    assert shown["16"]["full"]["lamps"]["difference"] == 0.0
    assert shown["16"]["no_reference"]["lamps"]["difference"] < -1.0
    assert str(tmp_path) not in json.dumps(document)
    table = build.all_results(tmp_path / "r")
    assert "| tree, 16 draft tokens | lamps |" in table
    assert "| not from references | 1." in table
    with pytest.raises(SystemExit, match=r"holds no rag/poems"):
        replay.run_ablation([*arguments, "--sets=poems"])


def test_the_full_drafter_is_the_one_that_is_replayed():
    new = Recorded((0, 5), (), (), (*range(70, 90), 1))
    found = replay.ablate([COPIED, new], 16, has_past=False)
    assert set(found) == set(variants(NoPast(), 16))
    assert found["full"] > found["no_reference"]
