"""A model from nothing: what it reads, that it learns, and the whole run on a processor."""

from __future__ import annotations

import io
import json
import random
import tarfile

import pytest
import torch
from recorded import SENTENCE

from eval import suites
from eval.experiments import speed
from eval.models import load_tokenizer
from eval.papers import space_model
from eval.papers.space_model import (
    AdapterTraining,
    ModelTraining,
    draw_prompts,
    own_answers,
    read_text,
    taken,
    windows,
)
from eval.report import build
from eval.report.plots import pictures_of

WORDS = "lamp keeper wick harbour tide granite oil dusk mole stair lens bell".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A data folder whose manuals are few words, again and again."""
    folder, rng = tmp_path_factory.mktemp("data"), random.Random(0)
    (folder / "text").mkdir()
    (folder / "rag").mkdir()
    with tarfile.open(folder / "text" / "tech_docs.tar.xz", "w:xz") as tar:
        for number in range(50):
            text = "".join(f"The {rng.choice(WORDS)} of {number}. " * 3 for _ in range(30)).encode()
            member = tarfile.TarInfo(f"manuals/{number}.md")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
    return folder


@pytest.fixture(scope="module")
def words():
    return load_tokenizer("reader")


@pytest.fixture(scope="module")
def text(data, words):
    return read_text(data, words, manuals_alone=True)


def test_what_is_held_out_is_not_learned_and_documents_end(data, words, text):
    (end,) = words.eos_ids
    documents = [*text.held_in, *text.held_out]
    assert len(documents) == 50
    assert 1 <= len(text.held_out) <= 5
    assert all(ids.count(end) == 1 and ids[-1] == end for ids in documents)
    assert not {tuple(ids) for ids in text.held_in} & {tuple(ids) for ids in text.held_out}
    short = read_text(data, words, manuals_alone=True, most=3000)
    assert 0 < short.num_tokens < text.num_tokens / 5
    assert taken(["abc", "defg"], 5) == taken(["abc", "defg"], 5)
    assert sum(map(len, taken(["abc", "defg"], 5))) == 5


def test_prompts_are_pieces_of_documents_and_none_twice(text):
    prompts = draw_prompts(text.held_out, 12, shortest=5, longest=20, seed=1)
    assert len(set(prompts)) == 12
    assert {5 <= len(prompt) <= 20 for prompt in prompts} == {True}
    inside = [" ".join(map(str, ids)) for ids in text.held_out]
    assert all(any(" ".join(map(str, prompt)) in one for one in inside) for prompt in prompts)
    assert draw_prompts(text.held_out, 12, shortest=5, longest=20, seed=1) == prompts
    with pytest.raises(ValueError, match="take fewer"):
        draw_prompts(text.held_out, 2, shortest=5, longest=10**6, seed=1)


def test_windows_are_pieces_of_the_text():
    generator = torch.Generator().manual_seed(0)
    found = windows(torch.arange(50), ModelTraining(1.0, window=8, rows=5), generator)
    assert found.shape == (5, 8)
    assert (found[:, 1:] - found[:, :-1] == 1).all()
    assert windows(torch.arange(6), ModelTraining(1.0, window=8, rows=2), generator).shape == (2, 5)


def test_a_model_learns_what_it_is_shown(text, words):
    model = space_model.new_model("tiny", words)
    model_training = ModelTraining(10.0, max_steps=40, window=48, rows=8, rising=5)
    before = space_model.judge(model, text.held_out, model_training, device="cpu", dtype="float32")
    trained = space_model.train_model(model, text, model_training, device="cpu", dtype="float32")
    assert trained["held_out_loss"] < before - 1.0
    assert trained["steps"] == 40
    assert trained["tokens_seen"] == 40 * 48 * 8
    assert trained["text_tokens"] == text.num_tokens


def test_the_whole_run_tells_all_and_trains_once(data, tmp_path, capsys, monkeypatch):
    row = {"id": "1", "question": "Who?", "passages": [{"text": SENTENCE}], "answer": SENTENCE}
    (tmp_path / "asked.jsonl").write_text(json.dumps(row) + "\n")
    few = {"samples": 8, "judged": 2, "answer_tokens": 8}
    monkeypatch.setattr(
        space_model, "TINY_ADAPTER_TRAINING", space_model.TINY_ADAPTER_TRAINING | few
    )
    work, out = tmp_path / "work", tmp_path / "r"
    arguments = [
        *(f"--data={data}", "--shape=tiny", "--minutes=0.02", "--adapter-minutes=0.002"),
        *(f"--work={work}", f"--out={out}", f"--tasks={tmp_path / 'asked.jsonl'}"),
        *("--limit=2", "--max-new-tokens=5", "--threads=1"),
    ]
    space_model.run_space_scratch(arguments)
    document = json.loads((out / "space-scratch-tiny.json").read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == document["sets"]
    assert list(document["sets"]) == ["held-out text", "asked.jsonl"]
    assert str(tmp_path) not in json.dumps(document)
    assert document["settings"]["num_masks"] == 3
    assert document["adapter"]["training"]["samples"] == 8
    assert document["curve"][-1]["samples"] == 2
    for figures in document["sets"].values():
        for kind in ("greedy", "sampled"):
            assert all(one["identical"] == figures["answers"] for one in figures[kind].values())
    told = str(build.result_tables("any", document))
    for said in ("SPACE: tiny, trained here", "gated changes of rank 4", "**asked.jsonl**", "nats"):
        assert said in told
    first, *_ = pictures_of({"space-scratch-tiny": document})
    assert "held-out text: k = 1" in first.alt
    assert not list(work.glob("trial*"))

    def never(*_args, **_kwargs):
        raise AssertionError("made again")

    monkeypatch.setattr(space_model, "train_model", never)
    monkeypatch.setattr("eval.papers.space_model.train_space", never)
    monkeypatch.setattr("eval.papers.space_model.answer_samples", never)
    monkeypatch.setattr(speed, "run_once", never)
    space_model.run_space_scratch(arguments)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == document["sets"]
    with pytest.raises(SystemExit, match="of other settings: delete it"):
        space_model.run_space_scratch([*arguments, "--minutes=0.03"])
    with pytest.raises(SystemExit, match="must be above 0"):
        space_model.run_space_scratch([*arguments, "--limit=0"])


def test_own_answers_that_are_there_are_kept(text, tmp_path, monkeypatch):
    adapter_training = AdapterTraining(1.0, samples=2, judged=1, shortest=3, longest=6)
    paths = tmp_path / "answers.jsonl", tmp_path / "held-out-answers.jsonl"
    for seed, (path, documents, count) in enumerate(
        zip(paths, (text.held_in, text.held_out), (2, 1), strict=True), start=1
    ):
        prompts = draw_prompts(documents, count, shortest=3, longest=6, seed=seed)
        rows = [{"prompt_ids": list(prompt), "answer_ids": [5, 6]} for prompt in prompts]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr("eval.papers.space_model.LLM", None)
    assert own_answers(tmp_path / "model", text, adapter_training, tmp_path, device="cpu") == paths


def test_a_gpu_run_has_it_where_there_is_text(data, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("RAGACCEL_DATA", raising=False)
    asked = [f"--data={data}", f"--out={tmp_path}", "--device=cpu", "--task=demo", "--quick"]
    *_, last = suites.gpu_steps(suites.parse_gpu(asked))
    assert last.run == "space_scratch"
    assert space_model.parse(list(last.arguments)).shape == "tiny"
    assert space_model.parse(list(last.arguments)).out == last.out
    asked = [f"--out={tmp_path}", "--device=cpu", "--task=demo", "--quick"]
    assert [step for step in suites.gpu_steps(suites.parse_gpu(asked)) if "space" in step.run] == []
    assert "no model is trained for SPACE" in capsys.readouterr().err
