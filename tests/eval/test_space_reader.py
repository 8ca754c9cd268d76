"""SPACE's decoders: the same answers on a tiny model and the reader, and what is told of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from fakes import HashEmbedder
from recorded import make_job, make_target
from space_models import random_adapter

from eval.decoders import PLAIN, SPACE, make_decoder
from eval.experiments import speed
from eval.experiments.generation import GENERATION_DECODERS, default_decoders
from eval.models import load_target, masks_of, useful_masks, with_adapter
from eval.papers import space
from eval.papers.space import (
    NUM_DRAFT_TOKENS,
    SAMPLED,
    SpaceDecoder,
    counted,
    draw_jobs,
    figures_of,
    make_decoders,
)
from eval.report import build
from eval.report.plots import pictures_of
from eval.robustness.stand_ins import save_tiny_model
from eval.runner import ResultsLog
from ragaccel.drafting import SpaceDrafter
from ragaccel.models import bundled_reader_path, load_model
from recipes.reader.corpus import Article
from recipes.reader.examples import ExampleMaker

MASKS = 3


@pytest.fixture(scope="module")
def targets():
    target = make_target()
    return target, with_adapter(target, random_adapter(target.model, MASKS))


def jobs_of(count, **changes):
    prompts = ((0, *range(20 + i, 50 + i), 5, 6, 23 + i) for i in range(count))
    return [
        make_job((), job_id=f"kind/{i}", prompt_ids=prompt, max_new_tokens=12, **changes)
        for i, prompt in enumerate(prompts)
    ]


def test_all_decoders_give_what_plain_decoding_gives_and_rows_are_the_papers(targets):
    jobs, results_log, decoders = jobs_of(4), ResultsLog(None, {}), make_decoders(*targets)
    names = [decoder.name for decoder in decoders]
    assert names[:4] == [PLAIN, "space_paper_1", "space_paper_2", "space_paper_3"]
    assert {"copy_space", "copy_24", f"{SAMPLED}space_paper_3"} <= set(names)
    speed.run_rounds(
        targets[0], jobs, decoders, results_log, repeats=1, forced=False, keep_answers=True
    )
    figures = figures_of(targets[0], jobs, results_log.measurements)
    for kind in ("greedy", "sampled"):
        assert all(one["identical"] == 4 for one in figures[kind].values())
        assert figures[kind][PLAIN]["tokens_per_pass"] == 1.0
        assert figures[kind][PLAIN]["masks_per_pass"] == 0.0
    assert [bool(one["differences"]) for one in figures["greedy"].values()] == [False] * 10
    greedy, sampled = (
        {row["example"]: row["token_ids"] for row in results_log.rows if row["decoder"] == name}
        for name in (PLAIN, SAMPLED + PLAIN)
    )
    assert greedy != sampled
    for k in range(1, MASKS + 1):
        widths = [r["rows_of_each"] for r in results_log.rows if r["decoder"] == f"space_paper_{k}"]
        assert max(max(width) for width in widths) == (k + 1) ** 2
        assert figures["greedy"][f"space_paper_{k}"]["draft_tokens_per_pass"] <= k
        assert figures["greedy"][f"space_paper_{k}"]["masks_per_pass"] > 0


def test_a_tenth_of_the_questions_warms_and_does_not_count(targets):
    jobs = jobs_of(20)
    assert counted(jobs) == jobs[2:]
    assert counted(jobs[:3]) == jobs[:3]


def test_a_number_of_draft_tokens_is_verified_whatever_passes_cost(targets):
    (job,), adapted = jobs_of(1), targets[1]
    rows = []
    for slope in (0.0, 100.0):
        decoder = SpaceDecoder(
            "any",
            adapted,
            lambda: SpaceDrafter(masks_of(adapted)),
            num_draft_tokens=NUM_DRAFT_TOKENS,
        )
        decoder.know_costs({n: 1.0 + slope * (n - 1) for n in (1, 8, 64)})
        rows.append(decoder.run(job).rows_of_each)
    assert rows[0] == rows[1]
    assert max(rows[0]) > 1


def test_our_trees_take_the_mask_tokens_that_are_worth_their_rows(targets):
    figures = {"tokens_per_pass": [1.5, 1.9, 1.901]}
    told = {"held_out": figures}
    target = targets[0]
    adapted = with_adapter(target, replace(random_adapter(target.model, MASKS), training=told))
    assert [len(useful_masks(one)) for one in (target, adapted)] == [0, 2]
    names = [decoder.name for decoder in make_decoders(target, adapted)]
    assert "space_paper_3" in names
    assert f"{SAMPLED}space_paper_2" in names
    (job,) = jobs_of(1)
    decoder = next(one for one in make_decoders(target, adapted) if one.name == "space_tree_24")
    assert max(decoder.run(job).rows_of_each) <= 1 + NUM_DRAFT_TOKENS + 2 * (1 + NUM_DRAFT_TOKENS)


def test_an_attached_adapter_leaves_the_target_without(targets):
    assert (targets[0].ours.num_masks, targets[1].ours.num_masks) == (0, MASKS)
    assert list(masks_of(targets[0])) == []
    assert len(masks_of(targets[1])) == MASKS


def test_a_pass_with_mask_tokens_follows_no_recording(targets):
    decoder = make_decoders(*targets)[1]
    with decoder.teacher_forced(make_job()), pytest.raises(ValueError, match="take --real"):
        decoder.run(make_job())


def test_a_model_with_an_adapter_in_its_folder_has_a_decoder_for_it(tmp_path):
    folder = save_tiny_model(tmp_path, seed=4)
    target = load_target(str(folder), dtype="float64")
    assert default_decoders(target) == list(GENERATION_DECODERS)
    with pytest.raises(ValueError, match="name one with --adapter"):
        make_decoder(SPACE, target)
    random_adapter(target.model, MASKS).save(folder / "space")
    assert default_decoders(target) == [*GENERATION_DECODERS, SPACE]
    (job,) = jobs_of(1)
    ours, plain = (make_decoder(name, target) for name in (SPACE, PLAIN))
    run = ours.run(job)
    assert run.token_ids == plain.run(job).token_ids
    assert run.rows > run.passes + run.draft_tokens


@pytest.fixture(scope="module")
def maker():
    """Few articles in the reader's tokens, and an embedder that needs no weights."""
    articles = [
        Article(
            f"Station {n}",
            tuple(f"The keeper of lamp {n} trims wick {i} at {i + n} o'clock." for i in range(9)),
            "tech_docs",
        )
        for n in range(12)
    ]
    _, words = load_model(bundled_reader_path())
    return ExampleMaker(articles, [], words.tokenizer, seed=3, embedder=HashEmbedder())


def test_questions_differ_and_have_their_passages_as_they_stand_in_the_prompt(maker):
    jobs = draw_jobs(maker, 6, eos_ids=frozenset({1}), max_new_tokens=9)
    assert len({job.prompt_ids for job in jobs}) == 6
    assert all(job.job_id.startswith("made/") for job in jobs)
    for job in jobs:
        prompt = " ".join(map(str, job.prompt_ids))
        assert len(job.references) in (4, 6)
        for reference in job.references:
            assert " ".join(map(str, reference.token_ids)) in prompt
        assert max(len(reference.token_ids) for reference in job.references) < 200


def test_a_run_on_the_reader_tells_all_and_goes_on(tmp_path, capsys, monkeypatch, maker):
    (tmp_path / "data" / "text").mkdir(parents=True)
    monkeypatch.setattr(space, "held_out_maker", lambda *_given: maker)
    arguments = [
        *(f"--data={tmp_path / 'data'}", f"--out={tmp_path / 'r'}", "--limit=2"),
        *("--max-new-tokens=6", "--threads=1"),
    ]
    model, _ = load_model(bundled_reader_path())
    random_adapter(model.model, 2).save(tmp_path / "adapter")
    arguments.append(f"--adapter={tmp_path / 'adapter'}")
    space.run_space_reader(arguments)
    document = json.loads((tmp_path / "r" / space.READER_FILE).read_text())
    told = capsys.readouterr().out
    assert json.loads(told.splitlines()[-1]) == document["sets"]
    assert str(tmp_path) not in json.dumps(document)
    assert document["settings"]["num_masks"] == 2
    (figures,) = document["sets"].values()
    assert figures["answers"] == 2
    assert len(figures["greedy"]) == 1 + 2 + 6
    text = str(build.result_tables("any", document))
    for said in (
        "SPACE as published, k = 2",
        "copying and SPACE, 24 draft tokens",
        "| 2.54 / 4.32 / 2.09 |",
    ):
        assert said in text
    assert "6.9 million" in text
    (picture,) = pictures_of({"space-reader": document})
    assert "k = 2" in picture.alt

    def never(*_args, **_kwargs):
        raise AssertionError("measured again")

    monkeypatch.setattr(speed, "run_once", never)
    space.run_space_reader(arguments)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == document["sets"]
    with pytest.raises(SystemExit, match="other settings"):
        space.run_space_reader([*arguments, "--limit=1"])
