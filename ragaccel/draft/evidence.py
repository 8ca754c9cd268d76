"""Evidence: what an earlier place whose context matches is worth for guessing the next token."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

REFERENCE, PROMPT, OUTPUT, PAST_PROMPT, PAST_ANSWER, FREQUENT = range(6)
SOURCES = ("reference", "prompt", "output", "past prompt", "past answer", "frequent")
"""Names of the kinds of text a token can be guessed from; the last is no text: common tokens."""
LONGEST_SUPPORT = 8  # log2 of the number of equally long matches

Table = npt.NDArray[np.float64]


class Evidence(NamedTuple):
    """Weights of votes. Every matching place votes for the token that follows it.

    A token's chance is its votes over all votes and the *doubt*, the weight of what no match
    foretells. It is attention over all earlier places with a learned key: how long the match is
    (``length`` [5 kinds, 17]) and how much agrees beyond the first token that differs (``beyond``
    [this request or past ones, 5 lengths, 9]).

    The doubt is a product, for this request and past ones each: ``doubt`` [2, 17] goes by the
    longest match, ``support`` [2, 9] by how many are as long. It is shared out to what followed the
    last token in past requests, less the more often that was something new (``frequency[2]`` times
    that); what is left goes to tokens by their frequency in this request (``frequency[0]``) and in
    past ones (``frequency[1]``), and to tokens never seen.

    Fitted to recorded answers by ``python -m eval.fit_evidence``.
    """

    length: Table
    beyond: Table
    doubt: Table
    support: Table
    frequency: Table


@cache
def default_evidence() -> Evidence:
    """Load the weights that ship; the file holds logarithms."""
    path = Path(__file__).with_name("evidence.json")
    tables = json.loads(path.read_text(encoding="utf-8"))
    return Evidence(*(np.exp(np.array(tables[name])) for name in Evidence._fields))
