"""The report: a snapshot of the committed one, and results that are odd or damaged."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest

from eval.report import build
from eval.report.plots import LOOKS, looks_of
from eval.report.tables import matrices, plain_table, verdict

MACHINE = {"gpu": None, "processor": "P", "threads": 2, "torch": "2", "transformers": "5"}


def figures(speed, over, low, static=1.0):
    """Of one decoder: tokens a second, its ratio to HF greedy and where its interval begins."""
    whole = {"ratio_generate": over / 2, "ratio_generate_interval": [low / 2, over]}
    return {
        "tokens_per_second": speed,
        "ratio_generate": over,
        "ratio_generate_interval": [low, over + 1.0],
        "ratio_static": static,
        "ratio_static_interval": [static - 0.1, static + 0.1],
        "end_to_end": {"tokens_per_second": speed / 2, **whole},
        "tokens": 100,
        "acceptance_length": 2.0,
        "acceptance_histogram": {"1": 60, "3": 20, "14": 20},
        "identical_to_generate": 1.0,
        "seconds": {"prefill": 1.0, "draft": 0.5, "verify": 9.0, "model": 8.0, "other": 0.5},
    }


def speed_result(model="random:tiny", task="sums", **decoders):
    settings = {"model": model, "task": task, "dtype": "float32", "device": "cpu"}
    command = f"python -m eval speed --task {task} --limit 3 --out eval/results/{task}.json"
    return {
        "kind": "speed",
        "settings": {**settings, "forced": True, "examples": 3},
        "machine": MACHINE,
        "run": {"commit": "c0ffee", "date": "2026-01-01", "command": command},
        "milliseconds": {"1": 10.0, "4": 12.0, "64": 40.0},
        "decoders": decoders,
    }


def won(task="sums"):
    greedy, static = figures(10.0, 1.0, 1.0), figures(12.0, 1.2, 1.1)
    lookup, ours = figures(20.0, 2.0, 1.5), figures(40.0, 4.0, 3.0, static=3.3)
    decoders = {"generate": greedy, "generate_static": static, "generate_lookup": lookup}
    return speed_result(task=task, **decoders, ours_full=ours)


@pytest.fixture
def folder(tmp_path):
    lost = won("<script>")
    lost["decoders"]["ours_full"] = figures(15.0, 1.6, 0.9, static=1.05)
    results = {"matrix-tiny-sums": won(), "matrix-tiny-lost": lost, "other": won("notes")}
    results["broken"] = {"answers": []}
    for stem, one in results.items():
        (tmp_path / f"{stem}.json").write_text(json.dumps(one))
    return tmp_path


def test_a_set_that_is_not_won_says_so():
    decoders = won()["decoders"]
    assert verdict(decoders, "ours_full") == "faster than all of HF's"
    slow = {**decoders, "ours_full": figures(15.0, 1.6, 0.9, static=1.05)}
    expected = "**slower than** HF prompt lookup; not clearly faster than HF greedy, "
    assert verdict(slow, "ours_full") == expected + "HF compiled greedy"
    assert verdict({**decoders, "ours_full": figures(21.0, 2.1, 1.9, static=1.5)}, "ours_full") == (
        "not clearly faster than HF prompt lookup"
    )
    paired = {"ratio_lookup": 1.1, "ratio_lookup_interval": [1.02, 1.2], "examples": 6}
    close = {**decoders, "ours_full": figures(21.0, 2.1, 1.9, static=1.5) | paired}
    assert verdict(close, "ours_full") == "faster than all of HF's"
    close["ours_full"]["ratio_lookup_interval"] = [0.98, 1.2]
    assert verdict(close, "ours_full") == "not clearly faster than HF prompt lookup"
    close["ours_full"] |= {"ratio_lookup_interval": [1.02, 1.2], "examples": 5}
    assert verdict(close, "ours_full") == (
        "faster than all of HF's; too few examples to be sure: 5"
    )
    del decoders["generate_static"]
    assert verdict(decoders, "ours_full") == "faster than HF greedy, HF prompt lookup"
    assert verdict({"generate": figures(10.0, 1.0, 1.0)}, "ours_full") == ""


def test_machines_and_dtypes_are_not_mixed_in_one_matrix():
    elsewhere, half = won("notes"), won("half")
    elsewhere["machine"] = {**MACHINE, "processor": "Q"}
    half["settings"]["dtype"] = "bfloat16"
    found = matrices({"matrix-a": won(), "matrix-b": elsewhere, "matrix-c": half})
    assert [list(one["sets"]) for one in found.values()] == [["sums"], ["notes"], ["half"]]


def test_tables_need_no_matplotlib(folder, monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(build, "find_spec", lambda n: None if n == "matplotlib" else found(n))
    build.run_report(["--results", str(folder)])
    assert "pip install ragaccel[eval]" in capsys.readouterr().err
    assert "| sums | faster than all of HF's |" in (folder / "RESULTS.md").read_text()
    assert "![" not in (folder / "RESULTS.md").read_text()


def test_no_damaged_result_loses_the_others(folder, capsys):
    whole, no_dtype = won("odd"), won("untyped")
    del no_dtype["settings"]["dtype"]
    odd = won("gaps")
    del odd["decoders"]["ours_full"]["seconds"]["prefill"]
    places = ((1, 2), (1, 3), (2, 2))  # one of the grid is missing
    grid = [{"set": "sums", "n": n, "k": k, "tokens_per_pass": 2.0} for n, k in places]
    damaged = {
        "none": {**whole, "decoders": None},
        "text": {**whole, "decoders": {"generate": "fast"}},
        "hashless": {**whole, "kind": ["speed"]},
        "matrix-untyped": no_dtype,
        "replay": [1],
    }
    sweep = {**whole, "kind": "llma_sweep", "figures": {"timed": ""}, "grid": grid}
    sweep |= {"plain": {}, "published": []}
    for stem, one in {**damaged, "matrix-gaps": odd, "sweep": sweep}.items():
        (folder / f"{stem}.json").write_text(json.dumps(one))
    build.run_report(["--results", str(folder)])
    told = capsys.readouterr().err
    for stem in damaged.keys() - {"hashless"}:
        assert f"{stem}.json is left out" in told
    assert "a picture is left out" in told
    text = (folder / "RESULTS.md").read_text()
    assert "| sums | faster than all of HF's |" in text
    assert "matrix-tiny-float32-cpu-speed.svg" in text


def test_no_two_decoders_look_alike_even_in_grey():
    looks = list(LOOKS.values())
    assert len({colour for colour, _ in looks}) == len(looks)
    names = ["generate_lookup", "ours_tree", "ours", "ours_plain"]
    found = [looks_of(names)[name] for name in names]
    assert len(set(found)) == len(names)
    assert found[0] == LOOKS["generate_lookup"]


def test_the_report_names_every_measurement_and_picture(folder):
    build.run_report(["--results", str(folder), "--out", str(folder / "shown")])
    text = (folder / "shown" / "RESULTS.md").read_text()
    for told in ("P, 2 threads", "c0ffee", "python -m eval speed --task TASK --limit 3"):
        assert told in text
    for section in re.findall(r"\(#(.*?)\)", text):
        assert f"## {section}".replace("-", " ") in text.lower().replace(",", "")
    pictures = re.findall(r"!\[(.+)\]\(plots/(.*)\)", text)
    assert len(pictures) == 1
    assert {name for _, name in pictures} == {
        one.name for one in (folder / "shown/plots").iterdir()
    }


def test_a_table_leaves_out_empty_columns_and_escapes_bars():
    rows = [["a|b", "", "1"], ["c", "", ""]]
    assert plain_table(["x", "empty", "y"], rows) == (
        "| x | y |\n|---|---|\n| a\\|b | 1 |\n| c |  |"
    )
