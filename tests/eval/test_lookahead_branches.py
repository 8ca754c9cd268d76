"""One branch, branches apart and a merged tree, each for the same rows."""

import json

import pytest
from eval_replayed import COPIED
from eval_sets import write_sets

from eval.data import Recorded
from eval.papers import lookahead
from eval.papers.lookahead import BranchesApart, branches, leaves, points, replay_rows
from eval.report import build
from ragaccel.decoding import Context, DraftTree, Reference
from ragaccel.drafting import TrieDrafter

#      9 ── 1 ── 2
#      │    └─── 3
#      └─── 4
TREE = DraftTree((9, 1, 4, 3, 2), (-1, 0, 0, 1, 1), (1.0, 0.6, 0.3, 0.1, 0.5), ((),) * 5)


def cut(rows):
    return [list(branch.token_ids) for branch in branches(TREE, rows)]


def test_branches_are_whole_and_a_shared_prefix_is_paid_for_in_each():
    assert leaves(TREE) == [4, 3, 2]
    assert cut(5) == [[9, 1, 2], [9, 1, 3], [9, 4]]
    assert cut(4) == [[9, 1, 2], [9, 1, 3]]
    assert cut(3) == [[9, 1, 2], [9, 1]]
    assert cut(1) == [[9, 1]]
    assert cut(0) == []


def test_branches_apart_hold_no_more_rows_than_a_tree_of_the_same_size():
    texts = [(7, 8, 30, 31, 32), (7, 8, 30, 31, 40), (7, 8, 50, 51)]
    for budget in (0, 1, 4, 8):
        context = Context([0, 7, 8], [Reference(text) for text in texts])
        whole = TrieDrafter(8).draft(context, budget)
        apart = BranchesApart(8).draft(Context([0, 7, 8], context.references), budget)
        assert sum(len(branch) - 1 for branch in branches(whole, budget)) <= budget
        assert len(apart) <= len(whole)
        paths = [[whole.token_ids[node] for node in whole.path(end)] for end in range(len(whole))]
        for end in range(len(apart)):
            assert [apart.token_ids[node] for node in apart.path(end)] in paths
    assert len(apart) < len(whole)


def test_a_merged_tree_gives_the_most_of_the_same_rows_where_texts_part():
    passage = COPIED.references[0].token_ids
    # The same words go on in four ways: a single branch is often the wrong one.
    texts = [passage, *((*passage[:at], 90, 91, 92, 93) for at in (6, 12, 18))]
    rows = [
        Recorded(
            (0, *(token for text in texts for token in text), 5),
            tuple(map(Reference, texts)),
            (),
            COPIED.answer_ids,
        )
    ]
    found = {one["mode"]: one for one in replay_rows(rows, points(16, 24))}
    assert list(found) == ["one", "parallel", "parting", "hierarchical"]
    assert found["hierarchical"]["passes"] <= found["parallel"]["passes"]
    assert found["parallel"]["drafted_per_pass"] < found["hierarchical"]["drafted_per_pass"] <= 16
    assert max(one["drafted_per_pass"] for one in found.values()) <= 16
    assert {one["tokens"] for one in found.values()} == {len(COPIED.answer_ids)}


def test_a_run_ends_in_a_table_of_all_ways_to_branch(tmp_path, capsys):
    sets, _ = write_sets(tmp_path)
    arguments = [*sets, "--decoding-lengths=4,8", "--branch-length=6", "--limit=1"]
    lookahead.run_lookahead_branches([*arguments, f"--out={tmp_path / 'r' / 'branches.json'}"])
    document = json.loads((tmp_path / "r" / "branches.json").read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"grid": document["grid"]}
    assert document["kind"] == "lookahead_branches"
    assert document["sets"] == {"lamps": 1, "gsm8k": 1}
    assert len(document["grid"]) == 2 * 2 * 2 * 4
    table = str(build.result_tables("any", document))
    assert "| hierarchical: one merged tree | 8 | " in table
    assert "paid for in each" in table
    with pytest.raises(SystemExit, match="holds no rag/poems"):
        lookahead.run_lookahead_branches([*arguments, "--sets=poems"])
