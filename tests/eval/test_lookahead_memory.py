"""A trie cold and warm: who is asked, who warms, and what of them is remembered."""

import json

from eval_replayed import EOS
from eval_sets import write_sets

from eval.data import FITTED, Recorded
from eval.papers import lookahead
from eval.papers.lookahead import (
    AskedSplit,
    Frozen,
    mixed,
    replay_rows,
    split_rows,
    states,
    trie_point,
    warmed,
)
from eval.report import build
from ragaccel.decoding import Reference
from ragaccel.drafting import History


def row(number, passage=None, start=70):
    """A row of its own prompt, and of a passage that it may share."""
    apart = (Reference((900 + (number if passage is None else passage),)),)
    return Recorded((0, number), apart, apart, (*range(start, start + 20), EOS))


ROWS = [row(number, passage=number // 2) for number in range(20)]


def test_who_warms_shares_no_passage_with_who_is_asked():
    sets = split_rows(ROWS, 4, 20)
    assert len(sets.asked) == 4
    assert len(sets.others) <= 14  # at least two shared theirs with one that is asked
    texts = {part.token_ids for one in sets.asked for part in one.apart}
    assert all(part.token_ids not in texts for one in sets.others for part in one.apart)
    assert sets == split_rows(ROWS, 4, 20)
    assert sets.asked != ROWS[:4]
    assert len(split_rows(ROWS, 100, 20).asked) == 10
    other = AskedSplit([], [ROWS[0], row(50)])
    assert mixed([other, AskedSplit([], [row(60)])], [ROWS[1]]) == [row(60), row(50)]


def test_rows_that_our_drafter_was_fitted_to_warm_and_are_not_asked():
    sets = split_rows(ROWS, 10, 6)
    assert sorted(one.prompt_ids for one in sets.asked) == [one.prompt_ids for one in ROWS[:6]]
    assert len(sets.others) == 14
    assert sets.others != ROWS[6:]
    assert min(rows.start for rows in FITTED.values() if rows.start) == lookahead.MAY_ASK


def test_whole_requests_or_their_answers_are_remembered():
    whole, answers = (warmed([row(7)], what) for what in ("requests", "answers"))
    assert 7 in whole.suffix_array().token_ids
    assert 7 not in answers.suffix_array().token_ids
    assert 75 in answers.suffix_array().token_ids


def test_a_warmed_memory_helps_and_does_not_grow():
    point, fresh = [trie_point(16, 8)], [row(1, start=40), row(2, start=40)]
    history = warmed([row(3, start=40)], "answers")
    (cold,) = replay_rows(fresh, point)
    (warm,) = replay_rows(fresh, point, Frozen(history))
    (unrelated,) = replay_rows(fresh, point, Frozen(warmed([row(3, start=70)], "answers")))
    assert warm["passes"] < cold["passes"] / 2
    assert unrelated["passes"] > 0.8 * cold["passes"]
    assert history.num_requests == 1
    replay_rows([row(7)], point, grown := History())
    assert {7, 75} <= {
        *grown.suffix_array().token_ids.tolist()
    }  # whole requests, as our library does


def test_the_states_are_apart_and_sizes_that_lack_rows_are_left_out():
    sets = {
        "a": AskedSplit([row(1)], [row(n) for n in range(2, 5)]),
        "b": AskedSplit([row(9)], [row(8)]),
    }
    found = list(states("a", sets, (1, 3)))
    shown = [(known["state"], known["warm_rows"], known.get("remembered")) for known, _ in found]
    assert shown == [
        ("cold", 0, None),
        ("grown", 0, None),
        *(("same set", size, what) for what in ("requests", "answers") for size in (1, 3)),
        *(("other sets", 1, what) for what in ("requests", "answers")),
    ]
    assert found[0][1] is None
    assert isinstance(found[1][1], History)
    assert not any(isinstance(past, History) for _, past in found[2:])


def test_a_run_ends_in_a_table_of_all_states(tmp_path, capsys):
    arguments, _ = write_sets(tmp_path)
    lines = (tmp_path / "data" / "rag" / "lamps.jsonl").read_text().splitlines()
    rows = [json.loads(lines[0]) | {"passages": [], "question": f"Who {n}?"} for n in range(6)]
    text = "".join(json.dumps(one) + "\n" for one in rows)
    (tmp_path / "data" / "rag" / "lamps.jsonl").write_text(text)
    arguments = [*arguments, "--sets=lamps", "--limit=2", "--warm-rows=1,3,50"]
    lookahead.run_lookahead_memory([*arguments, f"--out={tmp_path / 'r' / 'memory.json'}"])
    document = json.loads((tmp_path / "r" / "memory.json").read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"grid": document["grid"]}
    assert document["kind"] == "lookahead_memory"
    assert document["sets"] == {"lamps": {"asked": 2, "may_warm": 4}}
    cold, *others = document["grid"]
    assert cold["state"] == "cold"
    assert all(one["tokens_per_pass"] > cold["tokens_per_pass"] + 1 for one in others[1:])
    assert {one["warm_rows"] for one in others} == {0, 1, 3}
    table = str(build.result_tables("any", document))
    assert "| requests of its set, answers alone | 3 | " in table
    assert "| nothing (cold) | 0 | " in table
