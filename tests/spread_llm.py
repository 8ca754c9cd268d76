"""A user's script, started by ``torchrun``: ``spread_llm.py FOLDER OUTPUT``."""

import json
import os
import sys
from pathlib import Path

from ragaccel import LLM

TEXT = "The lamp burns rapeseed oil. Its keeper trims the wick at dusk, and again at midnight."
PROMPTS = ["The lamp burns", "Who trims the wick? Its keeper", "The tide rises four metres"]
SETTINGS = ({}, {"temperature": 0.9, "seed": 4}, {"repetition_penalty": 1.3})


def answers(llm):
    return [
        answer.text
        for settings in SETTINGS
        for answer in llm.generate(PROMPTS, references=[TEXT], max_new_tokens=24, **settings)
    ]


if __name__ == "__main__":
    folder, output = sys.argv[1:]
    llm = LLM.load(folder, dtype="float64", tensor_parallel=2)
    found = {"spread": answers(llm), "alone": answers(LLM.load(folder, dtype="float64"))}
    found["guesses"] = llm.generate(PROMPTS[0], references=[TEXT]).stats.draft_tokens
    Path(output, f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
