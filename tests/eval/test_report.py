import importlib.util
import json
import re
from html.parser import HTMLParser

import pytest

from eval.report import build
from eval.report.matrices import matrices, matrix_tables, verdict
from eval.report.page import SECTION_KINDS, Picture, group_by_section, html_of, page
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


def test_a_matrix_has_a_row_a_set_and_leaves_other_results_out(folder):
    (matrix,) = matrices(build.read_results(folder))
    assert list(matrix.sets) == ["<script>", "sums"]
    tables = matrix_tables(matrix)
    row = "| sums | faster than all of HF's | 10.0 | 12.0<br>1.20<br>(1.10 to 2.20) |"
    assert row in tables
    assert "| sums | 1.00<br>(0.90 to 1.10) | 1.00<br>(0.90 to 1.10) | 3.30<br>(3.20 to" in tables
    assert "| sums | 0.60<br>(0.55 to 1.20) |" in tables


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


def test_a_strangers_results_have_their_report_beside_them_and_it_is_always_the_same(
    folder, capsys
):
    committed = build.README.read_bytes(), build.RESULTS_PAGE.read_bytes()
    build.run_report(["--results", str(folder)])
    written = {path: path.read_bytes() for path in folder.rglob("*.*") if path.suffix != ".json"}
    names = {path.name for path in written}
    assert {"RESULTS.md", "report.html", "pass-cost.svg"} <= names
    text = (folder / "RESULTS.md").read_text()
    linked = set(re.findall(r"\]\(plots/([^)]+)\)", text))
    assert linked == {name for name in names if name.endswith(".svg")}
    assert all(f"](#{one})" in text for one in ("sets-against-decoders", "what-a-pass-costs"))
    build.run_report(["--results", str(folder)])
    assert all(path.read_bytes() == before for path, before in written.items())
    assert (build.README.read_bytes(), build.RESULTS_PAGE.read_bytes()) == committed
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["pictures"] == len(linked)


def test_tables_need_no_matplotlib(folder, monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(build, "find_spec", lambda n: None if n == "matplotlib" else found(n))
    build.run_report(["--results", str(folder)])
    assert "pip install ragaccel[eval]" in capsys.readouterr().err
    assert "| sums | faster than all of HF's |" in (folder / "RESULTS.md").read_text()
    assert "<img" not in (folder / "report.html").read_text()


def test_the_readme_shows_matrices_first_and_keeps_its_own_text(folder, tmp_path, monkeypatch):
    readme, own = tmp_path / "README.md", "own text\n"
    readme.write_text(f"# Title\n\n{build.BEGIN}\nshown before\n{build.END}\n{own}")
    monkeypatch.setattr(build, "RESULTS", folder)
    monkeypatch.setattr(build, "README", readme)
    monkeypatch.setattr(build, "RESULTS_PAGE", tmp_path / "RESULTS.md")
    build.run_report([])
    text = readme.read_text()
    assert text.startswith(f"# Title\n\n{build.BEGIN}\n\n### random:tiny, float32: sets")
    assert text.endswith(f"{build.END}\n{own}")
    assert "shown before" not in text
    pictures = re.findall(r"\]\(([^)]+\.svg)\)", text)
    assert [name.rpartition("-")[2] for name in pictures] == ["speed.svg", "cost.svg"]
    assert all(
        (tmp_path.parent / folder.name / "plots" / p.split("/")[-1]).exists() for p in pictures
    )


def test_what_cannot_be_read_is_left_out_and_said_to_be(folder, capsys):
    (folder / "cut.json").write_text('{"kind": "spe')
    (folder / "list.json").write_text("[1]")
    old = speed_result(task="old", generate={"tokens_per_second": 1.0})
    (folder / "matrix-tiny-old.json").write_text(json.dumps(old))
    build.run_report(["--results", str(folder)])
    told = capsys.readouterr().err
    assert "cut.json is left out" in told
    assert "matrix-tiny-old.json is left out: it lacks 'acceptance_length'" in told
    text = (folder / "RESULTS.md").read_text()
    assert "| sums | faster than all of HF's |" in text
    assert "task old" not in text


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


def test_a_folder_without_results_is_no_report(tmp_path):
    with pytest.raises(SystemExit, match="no results in"):
        build.run_report(["--results", str(tmp_path)])
    assert not list(tmp_path.iterdir())


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
    text = page("t", "lead", group_by_section([], [shown]))
    assert Page(text).alts == [said]
    assert "<script" not in text


def test_every_kind_of_result_has_a_title_and_no_two_places():
    assert build.TABLES.keys() <= build.TITLES.keys()
    placed = [kind for kinds in SECTION_KINDS.values() for kind in kinds]
    assert len(set(placed)) == len(placed)


def test_committed_pictures_are_all_shown():
    shown = build.RESULTS_PAGE.read_text() + build.README.read_text()
    for path in (build.RESULTS / build.PICTURES).iterdir():
        assert f"(results/{build.PICTURES}/{path.name})" in shown, f"{path.name} is left over"


def test_committed_tables_are_what_the_committed_results_say():
    """After new results, or another way to lay them out: ``python -m eval report``."""
    documents = build.read_results(build.RESULTS)
    told = build.RESULTS_PAGE.read_text(encoding="utf-8")
    readme = build.README.read_text(encoding="utf-8")
    for stem, document in documents.items():
        assert str(build.result_tables(stem, document)) in told, stem
    for section in build.matrix_tables_of(documents):
        assert str(section) in told, section.stem
        assert str(section) in readme, section.stem
