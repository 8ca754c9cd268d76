import re
from xml.etree import ElementTree

from eval.report.page import Picture
from eval.report.plots import (
    LONGEST,
    LOOKS,
    WIDTH,
    Curve,
    answer_stages_svg,
    cost_svg,
    curves_of,
    grid_svg,
    looks_of,
    reliability_svg,
    roofline_svg,
    sets_of,
    shares,
    stage_milliseconds,
)

SETTINGS = {"model": "random:tiny", "dtype": "float32", "device": "cpu"}


def texts(svg):
    root = ElementTree.fromstring(svg)
    return [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]


def speed(milliseconds, **settings):
    return {"kind": "speed", "settings": SETTINGS | settings, "milliseconds": milliseconds}


def roofline(limit):
    ways = {"launched": {"milliseconds": {"1": 10.0, "64": 30.0}}, "compiled": {"error": "E"}}
    contexts = {
        c: {"limit_seconds": limit * (1 + i), "ways": ways} for i, c in enumerate(("99", "2048"))
    }
    return {"kind": "roofline", "settings": SETTINGS, "contexts": contexts}


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


def test_costs_are_medians_and_have_the_limit_of_their_own_model():
    documents = [speed({"1": ms, "64": 3 * ms}) for ms in (10.0, 12.0, 30.0)]
    documents += [speed({"1": 5.0, "64": 9.0}, dtype="bfloat16"), roofline(0.006)]
    first, second = curves_of(documents)
    assert first == Curve("tiny, float32", {1: 12.0, 64: 36.0}, limit=6.0)
    assert second.limit is None
    shown = texts(cost_svg([first, second]))
    assert "limit of the bandwidth, 0.50" in shown
    assert "tiny, float32, t(1) = 12 ms" in shown
    assert {"64", "time of a pass, t(n) / t(1)"} <= set(shown)


def test_a_roofline_has_a_panel_a_context_and_leaves_out_what_failed():
    shown = texts(roofline_svg(roofline(0.006)))
    assert {"99 tokens of context", "2,048 tokens of context", "milliseconds a pass"} <= set(shown)
    assert {"limit of the bandwidth, 6 ms", "limit of the bandwidth, 12 ms"} <= set(shown)
    assert "graphs, compiled" not in shown


def test_maps_show_each_figure_in_its_cell_and_gaps_as_gaps():
    points = [
        {"set": s, "n": n, "k": k, "tokens_per_pass": n + k / 100, "triggered": None}
        for s, n, k in (("a", 1, 5), ("a", 1, 20), ("a", 2, 5), ("b", 1, 5))
    ]
    sets = sets_of({"grid": points})
    svg = grid_svg("llma_sweep", sets["a"])
    shown = texts(svg)
    assert [one for one in shown if one and one.count(".") == 1] == ["1.05", "1.20", "2.05"]
    assert {"match length, n", "tokens fed a pass, k", "tokens a pass"} <= set(shown)
    assert "share of passes with a draft" not in shown
    assert svg == grid_svg("llma_sweep", sets["a"])
    assert grid_svg("llma_sweep", sets["b"]) is None


def test_answers_are_named_by_the_way_they_were_asked():
    stages = {"stages": {"embed": 0.01, "prefill": 0.2, "verify": 0.5}}
    names = ("generate", "bare", "langchain_plain", "llama_index_again")
    shown = texts(answer_stages_svg({"decoders": dict.fromkeys(names, stages)}))
    assert {"HF greedy", "RAG", "LangChain, plain", "LlamaIndex, again"} <= set(shown)


def test_letters_are_legible_on_a_phone():
    estimates = {"draft_tokens": 9, "calibration_error": 0.1, "bins": [[0.001, 0.1, 9]]}
    for svg in (roofline_svg(roofline(0.01)), reliability_svg({"prompt": estimates})):
        sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", svg)]
        assert sizes
        shown = 358 / (72 * WIDTH)  # 390 pixels without their margins
        assert min(sizes) * shown >= 8.5


def test_file_names_need_no_escapes():
    names = {
        "llma-sweep-my set (new)": "llma-sweep-my-set-new",
        "c:m/x-cuda:0-1.5b": "c-m-x-cuda-0-1.5b",
    }
    for stem, name in names.items():
        assert Picture(stem, "", "", "", "", "", "").file == f"{name}.svg"
