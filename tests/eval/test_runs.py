"""Every run once, on tiny models: the figures that its result promises, and its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hash_embedder import HashEmbedder
from space_models import random_adapter

from eval.__main__ import RUNS, find_run, main
from eval.experiments.frameworks import STREAMING, is_installed
from eval.report import build
from eval.report.tables import show
from ragaccel.models import bundled_reader_path, load_model
from recipes.reader.corpus import DEVELOPMENT, HELD_OUT, Corpus, Paragraph, Question

ROOT = Path(__file__).parents[2]
NAMES = [name for runs in RUNS.values() for name in runs]
TOKENS = "--max-new-tokens=12"
PARAGRAPHS = [
    Paragraph(
        f"Station {n}",
        tuple(f"The keeper of lamp {n} trims wick {i} at {i + n} o'clock." for i in range(9)),
        f"station {n}",
        (HELD_OUT, DEVELOPMENT)[n % 2],
    )
    for n in range(12)
]
QUESTIONS = [
    Question(f"Who trims wick 2 of lamp {n} at {n + 2} o'clock?", n, 2, f"lamp {n}", "lamps")
    for n in range(12)
]
needs_frameworks = pytest.mark.skipif(
    not all(map(is_installed, ("langchain", "llama_index"))), reason="both frameworks are needed"
)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Replace what takes long: embedders, compilers, and processes of their own."""
    for module in ("rag", "retrieval", "answers"):
        monkeypatch.setattr(
            f"eval.experiments.{module}.load_embedder", lambda *_given: HashEmbedder()
        )
    monkeypatch.setattr("eval.papers.space.load_embedder", HashEmbedder)
    corpus = Corpus(PARAGRAPHS, QUESTIONS)
    for module in ("experiments.answers", "papers.space"):
        monkeypatch.setattr(f"eval.{module}.load_corpus", lambda _data: corpus)
    monkeypatch.setattr(
        "eval.experiments.memory.in_own_process", lambda function, *given: function(*given)
    )
    first = {"compiling_seconds": 9.0, "compiled_seconds": 0.3}
    monkeypatch.setattr("eval.experiments.drafting.first_drafts", lambda: first)
    monkeypatch.setattr("eval.experiments.drafting.FITTED", {"lamps": range(3)})


def all_positive(figures, *names):
    return all(figures[name] > 0 for name in names)


# name of the run: (arguments, given the world; check of the document; text of the table)
EXPERIMENTS = {
    "speed": (
        lambda w: [*w.tiny, w.task, TOKENS, "--cost-repeats=1"],
        lambda d: (
            list(d["decoders"]) == "ours ours_paper ours_plain generate generate_lookup".split()
            and all(one["identical_to_generate"] == 1.0 for one in d["decoders"].values())
            and all(
                all_positive(one, "tokens_per_second", "ratio", "ratio_generate")
                for one in d["decoders"].values()
            )
            and d["decoders"]["ours_plain"]["ratio"] == 1.0
            and {name for name, one in d["decoders"].items() if "efficiency" in one}
            == {"ours", "ours_paper"}
            and d["settings"]["forced"]
            and d["milliseconds"]["1"] > 0
        ),
        "| ours, copying |",
    ),
    "batch": (
        lambda w: [*w.tiny, w.task, TOKENS, "--sizes=2,3", "--groups=1"],
        lambda d: all(
            [one["tokens"] for one in size["decoders"].values()]
            == [12 * int(n), 12 * int(n), 12 * int(n), 11 * int(n)]
            and all(one["value"] > 0 for one in size["together_over"].values())
            for n, size in d["sizes"].items()
        ),
        "\n| 3 | ",
    ),
    "never_slower": (
        lambda w: [
            *w.tiny, "--tasks=gsm8k,random_tokens", "--limit=2", "--min-answer=5",
            "--max-new-tokens=24", "--cost-repeats=1",
        ],
        lambda d: all(
            one["requests"] == 2 and all_positive(one, "ratio", "modelled")
            for one in d["sets"].values()
        ),
        "| random_tokens | 2 |",
    ),
    "roofline": (
        lambda w: [*w.tiny, "--contexts=40,4000", "--repeats=1", "--steps=8", "--rows=1,8"],
        lambda d: list(d["contexts"]) == ["40"]
        and d["contexts"]["40"]["state_bytes"] == 40 * 2 * 2 * 2 * 8 * 4
        and d["contexts"]["40"]["ways"]["launched"]["share_of_limit"] > 0
        and list(d["contexts"]["40"]["ways"]["transformers"]["milliseconds"]) == ["1", "8"],
        "| 40 | launched one by one |",
    ),
    "memory": (
        lambda w: [*w.tiny, w.task, "--requests=6", "--every=2", "--max-new-tokens=4"],
        lambda d: all(
            [one["requests"] for one in process["readings"]] == [2, 4, 6]
            for process in d["processes"].values()
        )
        and d["processes"]["default"]["remembered_growth_bytes"] > 0
        and d["processes"]["remember=False"]["remembered_growth_bytes"] == 0,
        "MB after 2 requests |",
    ),
    "peak_memory": (
        lambda w: [*w.tiny, w.task, "--decoders=generate,ours_tree", TOKENS],
        lambda d: all(
            one["peak_bytes"] >= one["loaded_bytes"] > 50e6 for one in d["decoders"].values()
        ),
        "| ours, trees |",
    ),
    "registry": (
        lambda w: ["--texts", "200", "--prompts=1"],
        lambda d: [prompt[how]["recall"] for prompt in d["figures"][0]["prompts"]
                   for how in ("whole", "cut")] == [1] * 6,
        "| 200 |",
    ),
    "generation": (
        lambda w: [
            w.saved, f"--tasks={w.folder / 'talk.jsonl'},code,chat", "--limit=2",
            "--dtype=float64", "--max-new-tokens=6", "--threads=1",
        ],
        lambda d: [(one["kind"], one["task"], one["prompts"]) for one in d["groups"]]
        == [
            ("multi-turn", "chat", 2), ("multi-turn", "talk.jsonl", 1), ("code", "code", 2),
            ("chat", "chat", 2), ("other", "talk.jsonl", 1),
        ]
        and all(
            same["identical"] == one["prompts"] for one in d["groups"] for same in one["same"]
        ),
        "| multi-turn | talk.jsonl | 1 | 6 | ours, trees and memory |",
    ),
    "lossless": (
        lambda w: [
            *w.tiny, w.task.replace("--task", "--tasks"), "--decoders=ours_full,ours_paper",
            "--dtypes=float64,float32", TOKENS,
        ],
        lambda d: [(one["dtype"], one["found"]) for one in d["comparisons"]]
        == [(t, n) for t in ("float64", "float32") for n in ("ours_full", "ours_paper")]
        and all(
            one["identical"] == one["answers"] == 3
            for one in d["comparisons"]
            if one["dtype"] == "float64"
        ),
        "| float64 | ours, trees and memory | 3 | 3 |",
    ),
    "exactness": (
        lambda w: [*w.tiny, w.task, "--limit=2", "--dtype=float64", "--max-new-tokens=8"],
        lambda d: [(one["answers"], one["identical"]) for one in d["pairs"]] == [(2, 2)] * 5
        and all(all_positive(one, "decode_seconds", "passes") for one in d["costs"]),
        "| ours, exact | ours, exact and plain | 2 | 2 |",
    ),
    "architectures": (
        lambda w: ["--families=llama,bart", "--count=2"],
        lambda d: [one["status"] for one in d["rows"]] == ["equal", "refused"]
        and "sliding_window" in d["rows"][1]["why"],
        "",
    ),
    "replay": (
        lambda w: [*w.words, "--sets=lamps"],
        lambda d: d["lamps"]["ours_64_history"] > d["lamps"]["copy"] > 1 and len(d["lamps"]) == 6,
        "",
    ),
    "peers": (
        lambda w: [*w.words, "--sets=lamps"],
        lambda d: d["sets"]["lamps"]["budgets"]["16"]["ours_chain"]["tokens_per_step"]
        > d["sets"]["lamps"]["budgets"]["16"]["sglang"]["tokens_per_step"]
        and d["sets"]["lamps"]["advantage"].keys() >= {"ours_chain", "as_many"},
        "| 16 | vLLM ngram, best setting |",
    ),
    "ablation": (
        lambda w: [*w.words, "--sets=lamps"],
        lambda d: d["drafters"]["16"]["full"]["lamps"]["difference"] == 0.0
        and d["drafters"]["16"]["no_prompt"]["lamps"]["tokens_per_pass"] > 1
        and "no_successors" in d["drafters"]["64_history"],
        "| tree, 16 draft tokens | all | ",
    ),
    "reliability": (
        lambda w: [*w.words, "--sets=lamps"],
        lambda d: all(
            0 <= share <= 1 for one in d["sources"].values() for _, share, _ in one["bins"]
        )
        and d["sources"],
        "| drafted from |",
    ),
    "drafting": (
        lambda w: [*w.words, "--context=100", "--past-tokens=900"],
        lambda d: list(d["budgets"]) == ["16", "64"]
        and d["budgets"]["16"]["past"]["steps"] > 0
        and d["settings"]["past_tokens"] >= 900,
        "9.0 s while it is compiled",
    ),
    "fit_evidence": (
        lambda w: [w.words[0], "--steps=2"],
        lambda d: {"length", "beyond", "backoff", "support", "frequency"} == d.keys(),
        "",
    ),
    "quality": (
        lambda w: [w.words[0], "--sets=squad,msmarco"],
        lambda d: d["sets"]["squad"]["questions"] == 4
        and d["sets"]["squad"]["modes"]["fused"]["hit@10"] == [1.0, 1.0, 1.0]
        and d["sets"]["msmarco"]["relevant"] == 2.0,
        "fused less this",
    ),
    "reader": (
        lambda w: [w.words[0], "--examples=2"],
        lambda d: d["parameters"] > 1e6 and d["figures"],
        "",
    ),
    "questions": (
        lambda w: ["--questions", _questions(w), "--folder", w.folder / "documents"],
        lambda d: d["figures"]["answerable"] == 2
        and d["figures"]["acceptance_length"] >= 1
        and d["figures"]["not_verbatim"] == 0,
        "",
    ),
    "quotes": (
        lambda w: [w.words[0], "--count=6"],
        lambda d: set(d["questions"].values()) == {6}
        and set(d["weights"]) == {"relevance", "lead"}
        and isinstance(d["choice"], float)
        and d["curve"][0]["off topic"] >= d["curve"][-1]["off topic"],
        "",
    ),
    "llma_tables": (
        lambda w: [*w.words, "--sets=turns"],
        lambda d: len(d["grid"]) == 3 + 3 * 3
        and d["grid"][0]["passes"] == d["grid"][0]["tokens"]
        and d["same_answers"] == {"mtrag_human_answers": 2}
        and "ratio" not in d["grid"][0],
        "arXiv 2304.04487",
    ),
    "llma_sweep": (
        lambda w: [*w.tiny, "--sets=turns", "--limit=2", "--n=1,2", "--k=2,20"],
        lambda d: [(one["n"], one["k"]) for one in d["grid"]]
        == [(1, 2), (1, 20), (2, 2), (2, 20)]
        and all(one["timed_passes"] == one["passes"] for one in d["grid"]),
        "speed-up over plain decoding",
    ),
    "llma_dialogue": (
        lambda w: [*w.words, "--sets=turns"],
        lambda d: len(d["grid"]) == 3 * 2 * 3
        and {one["turn"] for one in d["grid"]} == {"1", "2", "all"},
        "and earlier answers",
    ),
    "lookahead_sweep": (
        lambda w: [
            *w.tiny, "--sets=lamps,gsm8k", "--limit=2", "--decoding-lengths=2,8",
            "--branch-lengths=2,8",
        ],
        lambda d: len(d["grid"]) == 2 * 2 * 4
        and all(("ratio" in one) == (one["memory"] == "cold") for one in d["grid"])
        and d["beside"].keys() == d["sets"].keys(),
        "On gsm8k, 2 answers: plain",
    ),
    "lookahead_branches": (
        lambda w: [*w.words, "--sets=lamps,gsm8k", "--decoding-lengths=4,8", "--limit=1"],
        lambda d: len(d["grid"]) == 2 * 2 * 2 * 4,
        "| one merged tree | 8 | ",
    ),
    "lookahead_memory": (
        lambda w: [*w.words, "--sets=squad_like,turns", "--limit=2", "--warm-rows=1,50"],
        lambda d: d["grid"][0]["state"] == "cold"
        and {one["warm_rows"] for one in d["grid"]} == {0, 1},
        "| nothing (cold) | 0 | ",
    ),
    "space_reader": (
        lambda w: [
            w.words[0], f"--adapter={_adapter(w)}", "--limit=2", "--max-new-tokens=6",
            "--threads=1",
        ],
        lambda d: all(
            one["identical"] == 2 for one in d["sets"]["held-out questions"]["sampled"].values()
        )
        and len(d["sets"]["held-out questions"]["greedy"]) == 1 + 2 + 6,
        "SPACE as published, k = 2",
    ),
    "space_curves": (
        lambda w: [f"--run={_training_run(w)}"],
        lambda d: [one["step"] for one in d["curve"]] == [20, 40]
        and d["curve"][-1]["tokens_per_pass"] == [1.71, 1.91, 1.96],
        "40 held-out answers",
    ),
    "host_step": (
        lambda w: ["--repeats=1"],
        lambda d: len(d["steps"]) == 3
        and all(0 < one["us_per_step_least"] < 1e5 for one in d["steps"].values()),
        "",
    ),
    "kills": (
        lambda w: ["--kinds", "history", "collection", "build", "--count=2"],
        lambda d: (d["kills"], d["lost"], d["failed"]) == (6, 0, 0)
        and d["kinds"]["build"]["runs let end"] >= 1,
        "",
    ),
}  # fmt: skip


def _questions(world):
    path = world.folder / "questions.jsonl"
    rows = [
        {"question": "Who saw ships in 3?", "answer": f"In 3 the keeper of light {n}", "file": ""}
        for n in (1, 2)
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def _adapter(world):
    model, _ = load_model(bundled_reader_path())
    random_adapter(model.model, 2).save(world.folder / "adapter")
    return world.folder / "adapter"


def _training_run(world):
    def figures(*lengths):
        seen = {"samples": 40, "right": [0.5, 0.25, 0.1], "own": 0.987}
        return {"tokens_per_pass": lengths, **seen, "with_prompt": [1.8, 2.0, 2.1]}

    recipe = {"mode": "gated", "rank": 32, "num_masks": 3, "shared_mask": False, "num_cuts": 24}
    recipe |= {"distill": True, "learning_rate": 2e-3}
    log = [
        {"step": 10, "loss": 5.0},
        {"step": 20, "figures": figures(1.2, 1.3, 1.31)},
        {"step": 40, "figures": figures(1.7, 1.9, 1.95)},
        {"step": 40, "figures": figures(1.71, 1.91, 1.96)},
    ]
    whole = {"recipe": recipe, "model": {"model_type": "llama"}, "samples": {"count": 3000}}
    folder = world.folder / "adapter-run"
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(whole))
    (folder / "log.json").write_text(json.dumps(log))
    return folder


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] * (one == "kills")) for one in EXPERIMENTS]
)
def test_a_run_keeps_its_figures_and_is_reported(name, world, run):
    arguments, check, text = EXPERIMENTS[name]
    done = run(name, *arguments(world))
    assert done.code in (None, 0), done.printed.err
    assert check(done.document)
    if name in ("replay", "fit_evidence"):  # another program reads what they write
        return
    assert {"kind", "machine", "run"} <= done.document.keys()
    assert done.document["run"]["command"].startswith(f"python -m eval {name}")
    assert str(world.folder) not in done.out.read_text()
    if text:
        build.run_report([f"--results={done.out.parent}"])
        assert text in (done.out.parent / "RESULTS.md").read_text()


RAG_ARGUMENTS = ("--k=2", "--max-new-tokens=30")


@needs_frameworks
@pytest.mark.usefixtures("no_event_loop_is_left")
def test_chains_give_the_recording_and_are_reported(world, run):
    done = run("rag_speedup", *world.tiny, world.task, *RAG_ARGUMENTS)
    decoders = done.document["decoders"]
    assert list(decoders) == [
        "generate", *(f"{way}{how}" for way in STREAMING for how in ("_plain", "")), "bare_again",
    ]  # fmt: skip
    for name, figures in decoders.items():
        assert figures["same_text"] == figures["answers"] == 3
        assert sum(figures["stages"].values()) == pytest.approx(figures["total_seconds_mean"])
        is_plain = name == "generate" or name.endswith("_plain")
        assert (figures["acceptance_length"] == 1.0) == is_plain
    assert show(done.document).count("| 3 of 3 |") == len(decoders)
    done = run("frameworks", *world.tiny, world.task, "--rounds=1", TOKENS)
    assert all(figures["same_text"] == 3 for figures in done.document["decoders"].values())


def test_names_are_distinct_listed_and_tell_their_options(capsys, monkeypatch):
    assert len(set(NAMES)) == len(NAMES)
    assert main([]) == 0
    shown = capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["eval"])
    for name in NAMES:
        assert f"  {name} " in shown
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        assert f"usage: python -m eval {name} " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no run 'luck'"):
        main(["luck"])


REFUSED = (
    ("speed", "--task=poems", "no task 'poems': take one of chat, clapnq, code, demo"),
    ("speed", "--task=llma", "RAGACCEL_DATA"),
    ("speed", "--decoders=luck", "no decoder 'luck'"),
    ("speed", "--decoders=ours_warm", "rows that are not measured"),
    ("speed", "--model=random:gpt-9", "no shape 'gpt-9': take one of"),
    ("never_slower", "--min-answer=999", "no answers of 999 tokens"),
    ("memory", "--requests=100", "twice --every"),
    ("roofline", "--contexts=4000", "choose shorter"),
    ("batch", "--sizes=9", "has 3 recorded answers"),
    ("lossless", "--dtypes=float8", "no dtype 'float8'"),
    ("generation", "--limit=1", "random model's own answers mean nothing"),
    ("rag_speedup", "--ways=haystack", "no way 'haystack'"),
    ("architectures", "--families=nonsense", "no model type nonsense"),
    ("quality", "--sets=oil,demo", "no set oil: take of squad"),
    ("ablation", "--sets=poems", "holds no rag/poems"),
    ("llma_tables", "--cached=alone", "holds no rag/alone"),
    ("report", "--results=nowhere", "no results in"),
)
TAKES_NO_MODEL = ("architectures", "quality", "report")


@pytest.mark.parametrize(
    ("name", "argument", "said"), REFUSED, ids=[" ".join(r[:2]) for r in REFUSED]
)
def test_what_cannot_be_done_ends_in_one_line(name, argument, said, world, monkeypatch):
    monkeypatch.delenv("RAGACCEL_DATA", raising=False)
    own = {
        "ablation": world.words,
        "llma_tables": [*world.words, "--sets=turns"],
        "never_slower": [*world.tiny, "--tasks=gsm8k"],
        "lossless": [*world.tiny, world.task.replace("--task", "--tasks")],
        "generation": world.tiny,
        "roofline": world.tiny,
    }
    given = [] if name in TAKES_NO_MODEL else own.get(name, [*world.tiny, world.task])
    if argument == "--task=llma":
        given = []
    with pytest.raises(SystemExit, match=said):
        find_run(name)([*given, argument])
