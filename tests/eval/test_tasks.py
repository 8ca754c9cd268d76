"""What is asked: the tasks that ship, the data sets, and the shapes of models."""

from __future__ import annotations

import doctest
import json
import re
import sys
import types

import pytest
import torch
from hash_embedder import HashEmbedder
from recorded import make_target, write_inputs
from transformers import AutoConfig, AutoModelForCausalLM

from eval.data import (
    Example,
    encode_apart,
    lay_out,
    load_set,
    make_jobs,
    read_rows,
    read_unified,
    without_answers_of,
)
from eval.models import SHAPES, load_tokenizer, read_shape
from eval.papers.bench import PUBLISHED
from eval.tasks import FOLDER, load_task


def rows_of(name):
    return list(read_rows(FOLDER / f"{name}.jsonl"))


def grounds(row):
    """What an answer may say: its passages and what was said before."""
    return " ".join([*(part["text"] for part in row["passages"]), *said_before(row)])


def said_before(row):
    return [turn["text"] for turn in row["history"]]


SHIPPED = ("handbook", "handbook_answers")


@pytest.mark.parametrize("name", SHIPPED)
def test_every_figure_of_a_shipped_answer_stands_in_its_passages(name):
    for row in rows_of(name):
        figures = re.findall(r"\d[\d,.:]*\d|\d{2,}", row["answer"])
        told = grounds(row)
        derived = {"21"} if row["id"].startswith("handbook-6") else set()  # 62 - 41
        missing = [figure for figure in figures if figure not in told and figure not in derived]
        assert not missing, row["id"]


def test_code_solutions_do_what_their_prompts_say(monkeypatch):
    for row in rows_of("code"):
        module = types.ModuleType(row["id"])
        monkeypatch.setitem(sys.modules, row["id"], module)  # where dataclasses look names up
        exec(row["prompt"] + row["answer"], module.__dict__)
        runner = doctest.DocTestRunner(verbose=False)
        for test in doctest.DocTestFinder(exclude_empty=True).find(module, "code"):
            runner.run(test)
        assert (runner.tries > 0, runner.failures) == (True, 0), row["id"]


def test_prompts_of_the_data_folder_come_by_category(tmp_path):
    def write(name, rows):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def chats(*categories):
        return [
            {"question_id": number, "category": category, "turns": [f"ask {number}", "and then?"]}
            for number, category in enumerate(categories)
        ]

    write("prompts/mt_bench.jsonl", chats("writing", "writing", "writing", "math"))
    code = {"prompt": "def one():\n", "canonical_solution": "    return 1\n"}
    write("prompts/humaneval_x_python.jsonl", [{"task_id": f"Python/{n}", **code} for n in (0, 1)])
    chat = load_task("mt_bench", None, tmp_path)
    assert [one.example_id for one in chat] == ["writing-0", "math-3", "writing-1", "writing-2"]
    assert chat[1].turns == ("ask 3", "and then?")
    assert load_task("mt_bench", 2, tmp_path) == chat[:2]
    (function,) = load_task("humaneval_x", 1, tmp_path)
    assert (function.prompt, function.answer) == ("def one():\n", "    return 1\n")


def test_own_files_are_tasks_whatever_separators_they_hold(tmp_path):
    path = tmp_path / "own.jsonl"
    passages = [{"title": "T", "text": "One\u2029two."}, {"text": "  "}]
    history = [{"role": "user", "text": "Hi"}, {"role": "agent", "text": "Hello"}]
    rows = [
        {"id": i, "question": " Why? ", "passages": passages, "history": history} for i in (1, 2)
    ]
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text(text + "\n", encoding="utf-8")
    (example,) = load_task(str(path), 1)
    assert (example.example_id, example.question, example.answer) == ("1", "Why?", "")
    assert [passage.text for passage in example.passages] == ["One\u2029two."]
    assert [turn["role"] for turn in example.history] == ["user", "assistant"]
    assert len(read_unified(path)) == 2


def test_rows_that_tell_a_measured_answer_are_left_out():
    history = ({"role": "assistant", "content": "As I said: At dusk. Then it burns."},)
    measured = [Example("1", "When?", answer="At dusk."), Example("2", "Who?")]
    rows = [
        Example("2", "Who?", answer="Nobody."),
        Example("3", "When is it?", answer="At dusk."),
        Example("4", "And then?", answer="It burns.", history=history),
        Example("5", prompt="Q: When? A: At dusk. Q: Why?", answer="It is dark."),
        Example("6", "Why?", answer="It is dark."),
    ]
    assert [row.example_id for row in without_answers_of(rows, measured)] == ["6"]


def test_a_recorded_answer_is_tokenized_as_it_would_follow_the_prompt(tmp_path):
    write_inputs(tmp_path)
    tokenizer = load_tokenizer("words", tmp_path / "data")
    examples = read_unified(tmp_path / "task.jsonl", 1)
    (job,) = make_jobs(examples, tokenizer, max_new_tokens=100)
    assert job.answer_ids[-1] in tokenizer.eos_ids
    assert tokenizer.decode(job.answer_ids).strip() == examples[0].answer
    assert tokenizer.decode(job.apart[0].token_ids) == examples[0].passages[0].text
    (short,) = make_jobs(examples, tokenizer, max_new_tokens=5)
    assert short.answer_ids == job.answer_ids[:5]


BILLIONS = {
    "llama-135m": 0.1345,
    "llama-2-7b": 6.738,
    "llama-3.1-8b": 8.030,
    "llama-3.2-1b": 1.236,
    "qwen2.5-0.5b": 0.494,
}


@pytest.mark.parametrize("path", sorted(SHAPES.glob("*.json")), ids=lambda path: path.stem)
def test_shapes_are_true_to_their_names(path):
    config = AutoConfig.for_model(**read_shape(path.stem)["config"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    billions = sum(weight.numel() for weight in model.parameters()) / 1e9
    assert billions == pytest.approx(BILLIONS[path.stem], rel=0.002)


def test_random_tokens_are_no_special_ones_and_the_same_every_time():
    tokenizer = make_target().tokenizer
    jobs = make_jobs(load_task("random_tokens", 3), tokenizer, max_new_tokens=1000)
    again = make_jobs(load_task("random_tokens", 3), tokenizer, max_new_tokens=1000)
    assert jobs == again
    assert len({job.prompt_ids for job in jobs} | {job.answer_ids for job in jobs}) == 6
    for job in jobs:
        ids = {*job.prompt_ids, *job.answer_ids}
        assert not ids & {*tokenizer.eos_ids, *tokenizer.tokenizer.all_special_ids}
        assert max(ids) < len(tokenizer)
        assert len(job.answer_ids) >= 100


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


def test_the_demo_knows_which_passages_answer():
    demo = load_set("demo", HashEmbedder())
    texts = {p.passage_id: p for p in demo.passages}
    tower = next(q for q in demo.questions if q.text.startswith("Who designed the tower"))
    (name,) = tower.relevant
    assert "Isobel Tarrant designed the tower on Gannet Ledge" in texts[name].text
    assert texts[name].path == tower.group == "history/founding-and-early-years.md"
    assert len(demo.questions) == 20


def test_speedups_agree_with_the_tokens_a_second_beside_them():
    for figures in PUBLISHED.values():
        for one in figures["figures"]:
            assert one["source"]
            if one.keys() >= {"plain", "accelerated", "speedup"}:
                quotient = one["accelerated"] / one["plain"]
                assert float(one["speedup"]) == pytest.approx(quotient, abs=0.01)
