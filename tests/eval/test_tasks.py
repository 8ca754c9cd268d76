"""What is asked: the tasks that ship, and how they are laid out."""

from __future__ import annotations

import doctest
import json
import re
import sys
import types

import pytest
from tiny_llm import tiny_tokenizer

from eval.data import make_jobs, read_rows
from eval.models import load_tokenizer
from eval.tasks import FOLDER, TASKS, load_task
from ragaccel.models import Tokenizer

SHIPPED = ("handbook", "handbook_answers")
RUN = 5  # tokens a copied span has at least


def rows_of(name):
    return list(read_rows(FOLDER / f"{name}.jsonl"))


def grounds(row):
    """What an answer may say: its passages and what was said before."""
    return " ".join([*(part["text"] for part in row["passages"]), *said_before(row)])


def said_before(row):
    return [turn["text"] for turn in row["history"]]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_figure_of_a_shipped_answer_stands_in_its_passages(name):
    for row in rows_of(name):
        figures = re.findall(r"\d[\d,.:]*\d|\d{2,}", row["answer"])
        told = grounds(row)
        derived = {"21"} if row["id"].startswith("handbook-6") else set()  # 62 - 41
        missing = [figure for figure in figures if figure not in told and figure not in derived]
        assert not missing, row["id"]


def test_handbook_answers_copy_as_real_ones_do():
    tokenizer = load_tokenizer("reader")
    copied = total = 0
    for row in rows_of("handbook"):
        ids = tokenizer.encode(row["answer"])
        parts = [tokenizer.encode(part["text"]) for part in row["passages"]]
        runs = {tuple(ids[i : i + RUN]) for ids in parts for i in range(len(ids) - RUN + 1)}
        starts = [i for i in range(len(ids) - RUN + 1) if tuple(ids[i : i + RUN]) in runs]
        copied += len({i + j for i in starts for j in range(RUN)})
        total += len(ids)
        assert 4 <= len(parts) <= 6
        assert 30 <= len(row["answer"].split()) <= 150
    assert 0.4 < copied / total < 0.65


def test_a_conversation_goes_on_from_what_it_said():
    rows = {row["id"]: row for row in rows_of("handbook")}
    later = [name for name, row in rows.items() if row["history"]]
    assert sorted(later) == [f"{c}<::>{n}" for c in ("fog", "gannet", "holm") for n in (2, 3)]
    for name in later:
        conversation, _, turn = name.partition("<::>")
        before = rows[f"{conversation}<::>{int(turn) - 1}"]
        asked, answered = rows[name]["history"][-2:]
        assert (asked["role"], asked["text"]) == ("user", before["question"])
        assert (answered["role"], answered["text"]) == ("agent", before["answer"])


def test_three_answers_stand_together_and_the_first_is_the_tasks_own():
    rows = {row["id"]: row for row in rows_of("handbook")}
    answers = rows_of("handbook_answers")
    assert len(answers) == 18
    for at in range(0, len(answers), 3):
        three = answers[at : at + 3]
        (task,) = {row["id"].rpartition("/")[0] for row in three}
        assert [row["id"] for row in three] == [f"{task}/{n}" for n in ("first", "second", "third")]
        assert len({row["answer"] for row in three}) == 3
        assert {**three[0], "id": task} == rows[task]


def test_code_solutions_do_what_their_prompts_say(monkeypatch):
    for row in rows_of("code"):
        module = types.ModuleType(row["id"])
        monkeypatch.setitem(sys.modules, row["id"], module)  # where dataclasses look names up
        exec(row["prompt"] + row["answer"], module.__dict__)
        runner = doctest.DocTestRunner(verbose=False)
        for test in doctest.DocTestFinder(exclude_empty=True).find(module, "code"):
            runner.run(test)
        assert (runner.tries > 0, runner.failures) == (True, 0), row["id"]


def test_shipped_tasks_load_without_data(monkeypatch):
    monkeypatch.delenv("RAGACCEL_DATA", raising=False)
    sizes = {name: len(load_task(name)) for name in ("demo", *SHIPPED, "code", "chat")}
    assert sizes == {"demo": 24, "handbook": 24, "handbook_answers": 18, "code": 8, "chat": 8}
    assert len(load_task("chat", 3)) == 3
    assert {"chat", "code", "handbook", "llma"} <= TASKS.keys()


def test_a_turn_of_a_chat_has_no_instructions_about_passages():
    tokenizer = load_tokenizer("reader")
    (example,) = load_task("chat", 1)
    (job,) = make_jobs([example], tokenizer, max_new_tokens=8)
    text = tokenizer.decode(job.prompt_ids)
    assert example.turns[0] in text
    assert "numbered passages" not in text
    assert (job.answer_ids, job.references) == ((), ())


def test_a_chat_without_template_is_written_as_turns(tmp_path):
    words = Tokenizer(tiny_tokenizer(None))
    path = tmp_path / "chat.jsonl"
    path.write_text('{"id": "c", "turns": ["Who trims the wick?", "And when?"]}\n')
    (job,) = make_jobs(load_task(str(path)), words, max_new_tokens=8)
    assert job.prompt_ids == tuple(
        words.encode("user: Who trims the wick?\n\nassistant:", add_special_tokens=True)
    )


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
    write("rag/spec_bench.jsonl", chats("writing", "math", "qa", "qa", "translation"))
    code = {"prompt": "def one():\n", "canonical_solution": "    return 1\n"}
    write("prompts/humaneval_x_python.jsonl", [{"task_id": f"Python/{n}", **code} for n in (0, 1)])
    chat = load_task("mt_bench", None, tmp_path)
    assert [one.example_id for one in chat] == ["writing-0", "math-3", "writing-1", "writing-2"]
    assert chat[1].turns == ("ask 3", "and then?")
    mixed = [one.example_id for one in load_task("spec_bench", 4, tmp_path)]
    assert mixed == ["mt_bench-0", "qa-2", "translation-4", "mt_bench-1"]
    (function,) = load_task("humaneval_x", 1, tmp_path)
    assert (function.prompt, function.answer) == ("def one():\n", "    return 1\n")


def test_summaries_are_asked_of_whole_documents():
    examples = load_task("summaries")
    assert len({example.example_id for example in examples}) == 8
    assert all(len(example.passages[0].text) > 1500 for example in examples)
    assert load_task("summaries", 2) == examples[:2]
