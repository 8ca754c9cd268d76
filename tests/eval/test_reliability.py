import json
import random
import re
from xml.etree import ElementTree

import pytest
from eval_replayed import COPIED
from recorded import SENTENCE, write_inputs

from eval.experiments import replay
from eval.experiments.replay import ObservedDrafter, ReplayedDrafter, Tally, bins_of, figures
from eval.report import build
from eval.report.plots import reliability_svg
from ragaccel.drafting import TrieDrafter


def draft_tokens(bias=0.0, num=20_000):
    rng = random.Random(1)
    probs = [rng.random() for _ in range(num)]
    return [(min(1.0, prob + bias), rng.random() < prob) for prob in probs]


def test_honest_chances_have_no_error_and_others_have_theirs():
    honest, boastful = figures(draft_tokens()), figures(draft_tokens(bias=0.2))
    assert honest["calibration_error"] < 0.02
    assert boastful["calibration_error"] == pytest.approx(0.18, abs=0.03)
    assert honest["below_constant"] > 0.2
    assert boastful["log_loss"] > honest["log_loss"]


def test_bins_hold_as_many_each_and_all_together():
    bins = bins_of(draft_tokens(num=1003))
    assert sum(num for _, _, num in bins) == 1003
    assert max(num for _, _, num in bins) - min(num for _, _, num in bins) <= 1
    assert [estimate for estimate, _, _ in bins] == sorted(estimate for estimate, _, _ in bins)
    assert bins_of([(0.5, True)]) == [(0.5, 1.0, 1)]
    alike = [(0.5, number % 2 == 0) for number in range(40)]
    assert bins_of(alike) == [(0.5, 0.5, 4)] * 10


def test_outcomes_are_those_of_the_verify_passes():
    watched, tally = ObservedDrafter(TrieDrafter()), Tally()
    ReplayedDrafter(lambda: watched, 16).replay(COPIED, tally)
    seen = [token for source in watched.draft_tokens.values() for token in source]
    assert 0 < sum(came for _, came in seen) <= sum(tally.by_source.values())
    assert all(0.0 <= prob <= 1.0 for prob, _ in seen)


def dots(svg):
    """How many filled and how many hollow dots a diagram has."""
    uses = re.findall(r'<use [^>]*style="fill: (#\w+); stroke: #0072b2"', svg)
    return len(uses) - uses.count("#ffffff"), uses.count("#ffffff")


def test_dots_stand_for_bins_and_hollow_ones_below_what_is_shown():
    bins = [[0.01, 0.01, 5], [0.1, 0.1, 5], [1.0, 1.0, 5], [0.1, 0.0, 5]]
    figures = {"draft_tokens": 20_000, "calibration_error": 0.0123, "bins": bins}
    svg = reliability_svg({"past <answer>": figures, "prompt": figures})
    root = ElementTree.fromstring(svg)
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("20,000 draft tokens") == texts.count("error 0.0123") == 2
    assert {"past <answer>", "estimated chance of acceptance", "share accepted"} <= set(texts)
    assert dots(svg) == (6, 2)


def test_a_run_writes_figures_and_picture(tmp_path, capsys):
    write_inputs(tmp_path)
    (tmp_path / "data" / "rag").mkdir()
    asked = {"question": "Who?", "passages": [{"text": SENTENCE}]}
    answers = [f"{word.title()}: {SENTENCE} {word * 9}" for word in ("oil", "tide", "mole", "four")]
    lines = [{"id": answer, **asked, "answer": answer} for answer in answers]
    rows = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "data" / "rag" / "lamps.jsonl").write_text(rows)
    out, picture = tmp_path / "r" / "reliability.json", tmp_path / "r" / "reliability.svg"
    arguments = [f"--data={tmp_path / 'data'}", "--sets=lamps", "--tokenizer=words"]
    replay.run_reliability([*arguments, f"--out={out}", f"--picture={picture}"])
    shown = json.loads(capsys.readouterr().out)
    document = json.loads(out.read_text())
    assert document["kind"] == "reliability"
    assert document["sources"].keys() == shown.keys()
    assert str(tmp_path) not in out.read_text()
    num_bins = sum(len(figures["bins"]) for figures in document["sources"].values())
    assert sum(dots(picture.read_text())) == num_bins
    assert f"| {next(iter(shown))} | " in build.all_results(tmp_path / "r")
