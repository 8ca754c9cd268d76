"""The report: a snapshot of the committed one, and results that are odd or damaged."""

from __future__ import annotations

import importlib.util
import json
from html.parser import HTMLParser

import pytest

from eval.report import build
from eval.report.matrices import matrices, verdict
from eval.report.page import Picture, group_by_section, html_of, page
from eval.report.plots import (
    LONGEST,
    LOOKS,
    looks_of,
    shares,
    stage_milliseconds,
)
from eval.report.tables import plain_table

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
    assert [list(one.sets) for one in found] == [["sums"], ["notes"], ["half"]]
    assert len({one.stem for one in found}) == 3


class Page(HTMLParser):
    """What a browser would load, and what a reader who does not see is told."""

    def __init__(self, text):
        super().__init__()
        self.loaded, self.tags, self.heads, self.ids, self.targets = [], [], [], [], []
        self.alts, self.metas = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        self.loaded += [attrs[name] for name in ("src", "srcset", "data") if name in attrs]
        if tag == "link" or (tag == "a" and not attrs["href"].startswith("#")):
            self.loaded.append(attrs["href"])
        if tag == "a":
            self.targets.append(attrs["href"][1:])
        if tag == "th":
            self.heads.append(attrs.get("scope"))
        if tag == "img":
            self.alts.append(attrs["alt"])
        if tag == "meta":
            self.metas.append(attrs.get("name"))
        self.ids += [attrs["id"]] if "id" in attrs else []


def test_the_page_loads_nothing_and_names_everything(folder):
    build.run_report(["--results", str(folder), "--out", str(folder / "shown")])
    text = (folder / "shown" / "report.html").read_text()
    page = Page(text)
    assert page.loaded
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.loaded)
    assert not {"script", "iframe", "object", "embed", "base"} & set(page.tags)
    assert "url(" not in text
    assert "@import" not in text
    assert page.tags.count("table") == page.tags.count("caption") >= 9
    assert set(page.heads) == {"col", "row"}
    assert len(page.alts) == page.tags.count("img") >= 4
    assert all(page.alts)
    assert "viewport" in page.metas
    assert len(set(page.ids)) == len(page.ids)
    assert set(page.targets) <= set(page.ids)
    for told in ("P, 2 threads", "c0ffee", "python -m eval speed --task TASK --limit 3"):
        assert told in text


def test_tables_need_no_matplotlib(folder, monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(build, "find_spec", lambda n: None if n == "matplotlib" else found(n))
    build.run_report(["--results", str(folder)])
    assert "pip install ragaccel[eval]" in capsys.readouterr().err
    assert "| sums | faster than all of HF's |" in (folder / "RESULTS.md").read_text()
    assert "<img" not in (folder / "report.html").read_text()


def test_no_damaged_result_loses_the_others(folder, capsys):
    whole, odd = won("odd"), won("gaps")
    no_dtype = won("untyped")
    del no_dtype["settings"]["dtype"]
    del odd["decoders"]["ours_full"]["seconds"]["prefill"]
    odd["decoders"]["ours_full"]["acceptance_histogram"] = {"many": 3}
    damaged = {
        "none": {**whole, "decoders": None},
        "text": {**whole, "decoders": {"generate": "fast"}},
        "hashless": {**whole, "kind": ["speed"]},
        "matrix-untyped": no_dtype,
        "replay": [1],
    }
    for stem, one in {**damaged, "matrix-gaps": odd}.items():
        (folder / f"{stem}.json").write_text(json.dumps(one))
    build.run_report(["--results", str(folder)])
    told = capsys.readouterr().err
    for stem in damaged.keys() - {"hashless"}:
        assert f"{stem}.json is left out" in told
    assert "a picture is left out" in told
    text = (folder / "RESULTS.md").read_text()
    assert "| sums | faster than all of HF's |" in text
    assert "matrix-tiny-float32-cpu-speed.svg" in text


def test_cells_are_text_whatever_they_hold():
    cells = [["<img src=x>", "1<br>2"], ["c|d", "`<e>`"], ["![x](http://a.b/x.png)", "1"]]
    markdown = plain_table(["a", "`b`"], cells)
    html = html_of(markdown, 'a "title" <b>')
    assert "<img" not in html
    assert '<th scope="row">c|d</th>' in html
    assert "<td><code>&lt;e&gt;</code></td>" in html
    assert "1<br>2" in html
    assert "<caption>a &quot;title&quot; &lt;b&gt;</caption>" in html


def test_a_picture_is_told_in_words_that_end_no_attribute():
    said = '"><script>let x</script>'
    shown = Picture("p", "roofline", "", said, said, said, "<svg/>")
    text = page("t", "lead", group_by_section([], [shown], build.SECTIONS))
    assert Page(text).alts == [said]
    assert "<script" not in text


def test_no_two_decoders_look_alike_even_in_grey():
    looks = [(look.colour, look.hatch) for look in LOOKS.values()]
    assert len({colour for colour, _ in looks}) == len(looks)
    names = ["generate_lookup", "ours_tree", "ours", "ours_plain"]
    found = [looks_of(names)[name] for name in names]
    assert len(set(found)) == len(names)
    assert found[0] == LOOKS["generate_lookup"]


def test_stages_are_all_of_a_tokens_time():
    seconds = {"prefill": 2.0, "draft": 1.0, "verify": 8.0, "model": 7.0, "other": 1.0}
    found = stage_milliseconds({"tokens": 100, "tokens_per_second": 10.0, "seconds": seconds})
    assert found == {"prefill": 20.0, "drafting": 10.0, "model's passes": 70.0, "the rest": 20.0}
    del seconds["model"]  # on a GPU passes are not seen from outside
    found = stage_milliseconds({"tokens": 100, "tokens_per_second": 10.0, "seconds": seconds})
    assert (found["model's passes"], found["the rest"]) == (80.0, 10.0)
    stock = {"tokens": 100, "tokens_per_second": 10.0, "seconds": {"prefill": 2.0, "other": 0.0}}
    assert stage_milliseconds(stock)["model's passes"] == 100.0


def test_shares_of_lengths_are_of_all_passes():
    found = shares({"1": 50, "3": 20, str(LONGEST): 10, str(LONGEST + 1): 15, "40": 5})
    assert found == [50.0, 0.0, 20.0, *[0.0] * (LONGEST - 4), 10.0, 20.0]
    assert shares({}) == [0.0] * (LONGEST + 1)
