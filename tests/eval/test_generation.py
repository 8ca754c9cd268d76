"""A model's own answers by kind of prompt: turns, what is told, and going on after a stop."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from recorded import write_inputs

from eval.data import Example
from eval.decoders import Ours
from eval.experiments import generation, speed
from eval.models import load_target
from eval.report import build
from eval.report.tables import READER_NOTE, generation_table
from eval.robustness.stand_ins import save_tiny_model
from eval.tasks import load_task
from ragaccel.models import Tokenizer

SHORT = ["--max-new-tokens=6", "--threads=1", "--limit=2", "--dtype=float64"]
PASSAGE = {"title": "The lamp", "text": "The lamp burns oil. Its keeper trims the wick at dusk."}
TASKS = "--tasks=talk.jsonl,code,chat"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("model"), seed=4))


@pytest.fixture
def arguments(tmp_path, model, monkeypatch):
    """A tiny model that is called trained; a question alone, and after an earlier turn."""
    monkeypatch.chdir(tmp_path)
    asked = {"question": "Who trims the wick?", "passages": [PASSAGE]}
    before = [{"role": "user", "text": "What burns?"}, {"role": "agent", "text": "Oil."}]
    rows = [{"id": "first", **asked}, {"id": "later", **asked, "history": before}]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"--model={model}", TASKS, *SHORT, "--out=r/own.json"]


def prompts_of(monkeypatch):
    """The jobs of every call of ``run_rounds``, as they come."""
    calls = []

    def noting(target, jobs, *args, **kwargs):
        calls.append((target.tokenizer, jobs))
        return speed.run_rounds(target, jobs, *args, **kwargs)

    monkeypatch.setattr(generation, "run_rounds", noting)
    return calls


def test_a_run_tells_of_every_kind_of_prompt(arguments, tmp_path, capsys):
    generation.run_generation(arguments)
    groups = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(group["kind"], group["task"], group["prompts"]) for group in groups] == [
        ("multi-turn", "chat", 2),
        ("multi-turn", "talk.jsonl", 1),
        ("code", "code", 2),
        ("chat", "chat", 2),
        ("other", "talk.jsonl", 1),
    ]
    for group in groups:
        assert list(group["decoders"]) == [
            "ours_full",
            "ours_plain",
            "generate_lookup",
            "generate",
        ]
        assert [one["found"] for one in group["same"]] == list(group["decoders"])[:3]
        assert [one["identical"] for one in group["same"]] == [group["prompts"]] * 3
        for figures in group["decoders"].values():
            assert figures["tokens_per_second"] > 0
            assert figures["ratio_generate"] > 0
            assert figures["runs"] == group["prompts"]
    document = json.loads((tmp_path / "r" / "own.json").read_text())
    assert document["groups"] == groups
    assert document["settings"]["chat_template"] is True
    text = build.all_results(tmp_path / "r")
    assert "in its own words, by kind of prompt" in text
    row = next(line for line in text.splitlines() if line.startswith("| multi-turn | talk"))
    assert row.startswith("| multi-turn | talk.jsonl | 1 | 6 | ours, trees and memory |")
    assert READER_NOTE not in text


def test_a_second_turn_follows_what_generate_answered(arguments, monkeypatch, tmp_path):
    calls = prompts_of(monkeypatch)
    generation.run_generation([*arguments, "--tasks=chat"])
    (tokenizer, first), (_, second) = calls
    rows = (tmp_path / "r" / "own.rows.jsonl").read_text().splitlines()[1:]
    said = {
        row["example"]: tokenizer.decode(row["token_ids"]).strip()
        for row in map(json.loads, rows)
        if row["decoder"] == "generate"
    }
    examples = {example.example_id: example for example in load_task("chat", 2)}
    assert [job.job_id for job in second] == ["chat, turn 2/chat-letter", "chat, turn 2/chat-bread"]
    for before, job in zip(first, second, strict=True):
        turns = examples[job.job_id.partition("/")[2]].turns
        assert said[before.job_id]
        assert tokenizer.decode(job.prompt_ids, skip_special_tokens=False) == (
            f"<|user|>{turns[0]}<|end|><|assistant|>{said[before.job_id]}<|end|>"
            f"<|user|>{turns[1]}<|end|><|assistant|>"
        )


def test_code_is_requested_where_there_is_a_chat_template(model):
    target = load_target(model)
    (code,) = load_task("code", 1)
    asked = generation._in_chat(target, code)
    assert (asked.prompt, asked.answer) == ("", code.answer)
    assert asked.turns == (generation.CODE_REQUEST.format(code=code.prompt),)
    target.tokenizer.tokenizer.chat_template = None
    object.__setattr__(target, "tokenizer", Tokenizer(target.tokenizer.tokenizer))
    assert generation._in_chat(target, code) is code
    chat = Example("c", turns=("Who?",))
    assert generation._in_chat(target, chat) is chat


def test_a_stopped_run_goes_on_in_the_turn_where_it_was(arguments, monkeypatch, tmp_path, capsys):
    run_once, calls = speed.run_once, []

    def stopping(*args, **kwargs):
        calls.append(1)
        if len(calls) > 4 + 2 * 4 + 4 + 4:  # a warm-up and two first turns; another, one second one
            raise KeyboardInterrupt
        return run_once(*args, **kwargs)

    chats = [*arguments, "--tasks=chat"]
    monkeypatch.setattr(speed, "run_once", stopping)
    with pytest.raises(KeyboardInterrupt):
        generation.run_generation(chats)
    path = tmp_path / "r" / "own.rows.jsonl"
    rows = path.read_text().splitlines()
    assert len(rows) == 1 + 3 * 4
    monkeypatch.setattr(speed, "run_once", run_once)
    generation.run_generation(chats)
    assert path.read_text().splitlines()[: len(rows)] == rows
    document = json.loads((tmp_path / "r" / "own.json").read_text())
    assert document["resumed"] == [{"round": 0, "example": "chat, turn 2/chat-bread"}]
    assert [group["prompts"] for group in document["groups"]] == [2, 2]
    with pytest.raises(SystemExit, match=r"other settings .*max_new_tokens"):
        generation.run_generation([*chats, "--max-new-tokens=7"])
    assert "Traceback" not in capsys.readouterr().err


def test_what_does_not_fit_is_told(arguments, tmp_path, capsys):
    long = {"id": "long", "question": "Who?", "passages": [{"title": "", "text": "wick " * 2000}]}
    with (tmp_path / "talk.jsonl").open("a") as file:
        file.write(json.dumps(long) + "\n")
    generation.run_generation([*arguments, "--tasks=talk.jsonl", "--limit=3"])
    assert "Not asked, as they do not fit: 1 of talk.jsonl." in capsys.readouterr().out
    assert json.loads((tmp_path / "r" / "own.json").read_text())["left_out"] == {"talk.jsonl": 1}


def test_answers_that_differ_are_told_with_their_gap(arguments, monkeypatch, capsys):
    run = Ours.run

    def wrong(self, job):
        found = run(self, job)
        return found if self.name == "ours_plain" else _changed(found)

    monkeypatch.setattr(Ours, "run", wrong)
    generation.run_generation([*arguments, "--tasks=code"])
    (group,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    same = {one["found"]: one for one in group["same"]}
    assert same["ours_plain"]["identical"] == 2
    assert same["ours_full"]["identical"] == 0
    assert all(one["place"] == 1 and one["gap"] > 0 for one in same["ours_full"]["differences"])


def _changed(run):
    return replace(
        run, token_ids=(run.token_ids[0], (run.token_ids[1] + 1) % 200, *run.token_ids[2:])
    )


def test_a_random_model_is_refused_unless_it_is_a_check(tmp_path, capsys):
    model, data, _ = write_inputs(tmp_path, 1)
    asked = [model, data, "--tasks=chat", *SHORT]
    with pytest.raises(SystemExit, match="random model's own answers mean nothing"):
        generation.run_generation(asked)
    generation.run_generation([*asked, "--limit=1", "--tiny-check"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])[0]["task"] == "chat"


def test_what_ships_is_asked_without_data(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("RAGACCEL_DATA", raising=False)
    sets = generation.load_sets(generation.parse_generation([]))
    assert {task: len(examples) for task, examples in sets.items()} == {
        "handbook": 24, "summaries": 8, "code": 8, "chat": 8,
    }  # fmt: skip
    assert "handbook, summaries, code, chat" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="holds no rag/llma"):
        generation.run_generation([f"--data={tmp_path}"])


def test_the_readers_limits_are_told():
    settings = {"max_new_tokens": 6, "chat_template": True, "model": "reader"}
    assert READER_NOTE in generation_table({"settings": settings, "groups": []})
