"""Several answers at a time, by ours and by transformers."""

import json

import pytest
import torch
from recorded import ANSWER, make_job, make_target, write_inputs

from eval.decoders import ForcedTokens
from eval.experiments import batch
from eval.experiments.batch import BATCH_DECODERS, run, run_generate
from eval.report import build
from ragaccel.engine import Engine

SHORT = (*ANSWER[:9], ANSWER[-1])


def test_a_run_compares_all_decoders_and_is_reported(tmp_path, capsys):
    out = tmp_path / "r" / "b.json"
    sizes = ["--sizes=2,3", "--groups=1", "--max-new-tokens=12", "--threads=1"]
    batch.run_batch([*write_inputs(tmp_path), *sizes, f"--out={out}"])
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    document = json.loads(out.read_text())
    assert document["sizes"] == shown
    for figures in shown.values():
        assert list(figures["decoders"]) == list(BATCH_DECODERS)
        assert all(one["tokens_per_second"] > 0 for one in figures["decoders"].values())
        assert figures["together_over"]["one_by_one"]["value"] > 0
    assert str(tmp_path) not in json.dumps(document["settings"])
    table = build.all_results(tmp_path / "r")
    assert "several at a time: random:tiny.json, task task.jsonl, recorded answers" in table
    assert "\n| 3 | " in table
    with pytest.raises(SystemExit, match="has 3 recorded answers"):
        batch.run_batch([*write_inputs(tmp_path), "--sizes=4"])


def test_a_stopped_run_goes_on_with_the_next_decoder(tmp_path, monkeypatch, capsys):
    out = tmp_path / "r" / "b.json"
    sizes = ["--sizes=2,3", "--groups=1", "--max-new-tokens=8", "--threads=1", f"--out={out}"]
    arguments = [*write_inputs(tmp_path), *sizes]
    calls = []

    def stopping(*given):
        calls.append(given[0])
        if len(calls) > len(BATCH_DECODERS) + 2:  # the warm-up, two decoders
            raise KeyboardInterrupt
        return run(*given)

    monkeypatch.setattr(batch, "run", stopping)
    with pytest.raises(KeyboardInterrupt):
        batch.run_batch(arguments)
    path = out.with_suffix(".rows.jsonl")
    rows = path.read_text().splitlines()
    assert len(rows) == 1 + 2
    assert not out.exists()
    calls.clear()
    monkeypatch.setattr(batch, "run", lambda *given: calls.append(given[0]) or run(*given))
    batch.run_batch(arguments)
    assert len(calls) == (4 + 2) + (4 + 4)  # the warm-up, what was left; a size anew
    assert path.read_text().splitlines()[:3] == rows
    measured = [json.loads(row) for row in path.read_text().splitlines()[1:]]
    assert len({(row["size"], row["decoder"]) for row in measured}) == len(measured) == 8
    printed = capsys.readouterr()
    assert "2 sequences: 2/2, group 1, one_by_one: " in printed.err
    shown = json.loads(printed.out.splitlines()[-1])
    assert [one["tokens"] for one in shown["2"]["decoders"].values()] == [16, 16, 16, 14]
    calls.clear()
    batch.run_batch(arguments)
    assert calls == []
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == shown
    with pytest.raises(SystemExit, match=r"other settings .*sizes"):
        batch.run_batch([*arguments, "--sizes=2"])
    with pytest.raises(SystemExit, match=r"other settings .*tokenizer"):
        batch.run_batch([*arguments, "--tokenizer=words"])


def test_tokens_and_passes_are_those_that_were_timed(monkeypatch):
    target = make_target()
    group = [make_job(job_id="a"), make_job(SHORT, job_id="b", prompt_ids=(0, 5, 6, 23))]
    engine = Engine(target.ours, kept_prefixes=0)
    # Else a busy machine may find draft tokens too dear, for one of the two ways alone.
    monkeypatch.setattr(
        type(engine.latency_profile.of("greedy")), "seconds", lambda _, rows: 1 + rows / 99
    )
    found = {name: run(name, target, engine, group) for name in BATCH_DECODERS}
    both = len(ANSWER) + len(SHORT)
    assert [found[name].tokens for name in BATCH_DECODERS] == [both, both, both, both - 2]
    assert found["together_plain"].passes == len(ANSWER)
    assert found["generate"].passes == len(ANSWER) - 1
    assert found["together"].passes < found["one_by_one"].passes < both


def test_an_answer_that_is_not_the_recorded_one_is_an_error(monkeypatch):
    target, job = make_target(), make_job()
    monkeypatch.setattr(ForcedTokens, "__call__", lambda self, _ids, scores: scores)
    with pytest.raises(ValueError, match="was not followed"):
        run_generate(target, [job])


def test_finished_rows_choose_for_themselves():
    follow = ForcedTokens([(3, 4), (2,)], torch.device("cpu"))
    scores = torch.zeros(2, 6)
    scores[:, 5] = 1.0
    assert follow(None, scores).argmax(-1).tolist() == [3, 2]
    assert follow(None, scores).argmax(-1).tolist() == [4, 5]
    assert follow(None, scores).argmax(-1).tolist() == [5, 5]
    assert follow.calls == 3
