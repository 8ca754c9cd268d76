"""A data folder with a set of questions and one of prompts, as replays of whole sets read it."""

import json

from recorded import SENTENCE, write_inputs

SMALL = ["--decoding-lengths=2,8", "--branch-lengths=2,8"]


def write_sets(folder):
    """Write a model, a set of questions and one of prompts; return the arguments for both."""
    arguments = write_inputs(folder)
    line = {"question": "Who?", "passages": [{"text": SENTENCE}], "answer": SENTENCE}
    for name in ("rag", "prompts"):
        (folder / "data" / name).mkdir()
    rows = "".join(json.dumps({"id": str(i), **line}) + "\n" for i in range(2))
    (folder / "data" / "rag" / "lamps.jsonl").write_text(rows)
    sums = {"question": "How much is 2 and 2?", "answer": "2 and 2 is 2 and 2, which is 4."}
    (folder / "data" / "prompts" / "gsm8k_test.jsonl").write_text(json.dumps(sums) + "\n")
    return [arguments[1], "--sets=lamps,gsm8k", "--tokenizer=words"], arguments[0]
