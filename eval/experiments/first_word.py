"""Measure what the first word costs in a new process, beside transformers."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from statistics import median
from typing import Any

import torch

from eval import cli
from eval.models import DTYPES, build_random_model, load_tokenizer, read_shape, shown_name
from eval.runner import ROOT, note, result, settings_of

PROGRAMS = {
    "ours": """
from ragaccel import LLM
llm = LLM.load(folder)
next(iter(llm.stream(prompt, references=[text], max_new_tokens=16)))
""",
    "transformers": """
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
words = AutoTokenizer.from_pretrained(folder)
ids = words(prompt, return_tensors="pt")
words.decode(model.generate(**ids, max_new_tokens=1, do_sample=False)[0])
""",
}
WARM_UP = "from ragaccel import LLM\nLLM.load(folder).warm_up()\n"
START = "import os, sys\nfolder, text, prompt = sys.argv[1:]\n"
END = "\nprint(sum(os.times()[:4]), flush=True)\nos._exit(0)\n"


@cli.experiment(
    cli.DATA,
    cli.option("--model", default="llama-135m", help="a shape, given random weights"),
    cli.option("--tokenizer", default="gpt2", help="of the data folder"),
    cli.DTYPE,
    cli.integer("--repeats", 7, "processes of each side"),
    cli.integer("--threads", 1, "processor threads"),
    shown=("cpu_seconds", "ratio"),
    dtype="bfloat16",
)
def run_first_word(options: Namespace) -> dict[str, Any]:
    """Measure the CPU seconds of a new process until the first word of an answer.

        python -m eval first_word --data DATA --out eval/results

    ``LLM.load`` and ``LLM.stream`` against ``from_pretrained`` and ``generate`` of one token, in
    turns, over the same saved weights and some 300 tokens of text. First, unmeasured processes
    compile the drafter and check the model, as once a machine, and answer once. The ratios are of
    the least and of the median seconds.
    """
    document = ROOT / "demos" / "documents" / "about-the-service.md"
    text = document.read_text(encoding="utf-8")[:1200]
    prompt = f"{text}\n\nQuestion: Who trims the wick of the lamp, and when?\nAnswer:"
    seconds: dict[str, list[float]] = {side: [] for side in PROGRAMS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = os.path.join(temporary, "model")
        config, dtype = read_shape(options.model)["config"], DTYPES[options.dtype]
        build_random_model(config, dtype, torch.device("cpu")).save_pretrained(folder)
        words = load_tokenizer(options.tokenizer, options.data)
        words.tokenizer.save_pretrained(folder)
        given = [folder, text, prompt]
        run_program(WARM_UP, given, options.threads)
        for turn in range(options.repeats + 1):
            for side, program in PROGRAMS.items():
                spent = run_program(program, given, options.threads)
                seconds[side] += [spent] if turn else []
            note(f"turn {turn} of {options.repeats}: {seconds}")
    found = {side: {"least": min(all_), "median": median(all_)} for side, all_ in seconds.items()}
    ratio = {key: round(found["ours"][key] / s, 3) for key, s in found["transformers"].items()}
    settings = settings_of(options, "tokenizer", "dtype", "repeats", "threads")
    settings["model"] = shown_name(options.model)
    return result("first_word", settings, cpu_seconds=found, ratio=ratio, measured=seconds)


def run_program(program: str, given: list[str], threads: int) -> float:
    """Run a program in a new process; return its CPU seconds, those of all its threads."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "RAGACCEL_HOME": f"{given[0]}-home",
    }
    command = [sys.executable, "-c", START + program + END, *given]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, cwd=ROOT)
    return round(float(done.stdout), 3)
