"""Fit what matches are worth: the weights of the trie drafter, from recorded answers.

    python -m eval.fit_evidence --data DATA --out ragaccel/drafting/match_weights.json

At each token of each answer all votes are gathered, as the drafter would have them, and the weights
follow the gradient of the log-loss of the token that came. The rows are ``recordings.FITTED``:
those of other files than are reported, and rows after the first 150. What reports more than that
(answers of other models as references, conversations turn by turn) says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from eval.recordings import FITTED, read_recorded, set_files, set_tokenizer
from eval.script import new_parser, note
from ragaccel.decoding.session import Context
from ragaccel.drafting.arrays import compiled
from ragaccel.drafting.expansion import (
    MAX_BEYOND_MATCH,
    MAX_MATCHES,
    MAX_PAST_MATCHES,
    MAX_SUPPORT,
    MIN_CLEAR_MATCH,
    MIN_PAST_MATCH,
    PAST_PROMPT,
)
from ragaccel.drafting.history import History
from ragaccel.drafting.suffix_array import (
    MAX_GAP,
    MAX_MATCH,
    Ids,
    SuffixArray,
    insertion_rank,
    match_beyond,
    match_length,
)  # fmt: skip
from ragaccel.drafting.trie import RequestText

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from eval.recordings import Recorded

SAME, LENGTH, KIND, BEYOND = range(4)
VOCABULARY = 32_000  # over which tokens never seen are alike


@compiled
def gather(
    suffix_array: SuffixArray,
    context: Ids,
    end: int,
    least: int,
    true: int,
    found: npt.NDArray[np.int8],
) -> int:
    """Write what is known of each match to ``found`` [votes, 4]; return the longest's length."""
    at = insertion_rank(suffix_array, context, end)
    before, after, num, longest = at - 1, at, 0, 0
    while num < len(found):
        left = right = 0
        if before >= 0:
            left = match_length(
                suffix_array.token_ids, suffix_array.positions[before], context, end
            )
        if after < suffix_array.num_positions:
            right = match_length(
                suffix_array.token_ids, suffix_array.positions[after], context, end
            )
        length = max(left, right)
        longest = max(longest, length)
        if length < least:
            break
        if left >= right:
            position = suffix_array.positions[before]
            before -= 1
        else:
            position = suffix_array.positions[after]
            after += 1
        found[num, SAME] = suffix_array.token_ids[position] == true
        found[num, LENGTH], found[num, KIND] = length, suffix_array.kinds[position]
        found[num, BEYOND] = match_beyond(
            suffix_array.token_ids, position - length, context, end - length
        )
        num += 1
    return longest


def observe(recorded: Iterable[Recorded]) -> tuple[Tensor, Tensor]:
    """Gather votes [P, votes, 4] and figures [P, 7] at each token of the answers of one file."""
    history, votes, figures = History(), [], []
    for one in recorded:
        context = Context(one.prompt_ids, one.references)
        text, past, pairs = RequestText(context), history.suffix_array(), history.bigrams()
        before = history.counts()
        for token in one.answer_ids:
            own = np.full((MAX_MATCHES, 4), -1, np.int8)
            old = np.full((MAX_PAST_MATCHES, 4), -1, np.int8)
            ids = text.suffix_array.token_ids[: text.end]
            longest = gather(text.suffix_array, ids, text.end, 1, token, own)
            longest_past = 0
            if longest < MIN_CLEAR_MATCH:
                longest_past = gather(past, ids, text.end, MIN_PAST_MATCH, token, old)
            here = text.counts(0)
            share = here[token] / here.sum() if token < len(here) else 0.0
            share_before = before[token] / before.sum() if token < len(before) else 0.0
            last = int(ids[-1])
            row = pairs.row_of[last] if last < len(pairs.row_of) else -1
            times = pairs.counts[row][pairs.token_ids[row] == token].sum() if row >= 0 else 0.0
            total, distinct = (pairs.totals[row], pairs.distinct[row]) if row >= 0 else (0.0, 0.0)
            votes.append(np.concatenate([own, old]))
            figures.append((longest, longest_past, share, share_before, times, total, distinct))
            context.token_ids.append(token)
            text.advance()
        history.add(one.prompt_ids, one.answer_ids)
    return torch.from_numpy(np.array(votes)), torch.tensor(figures, dtype=torch.float32)


class Weights(nn.Module):
    """The logarithms of the weights, named as in ``MatchWeights``."""

    def __init__(self) -> None:
        super().__init__()
        self.length = nn.Parameter(torch.linspace(0, 3, MAX_MATCH + 1).repeat(5, 1))
        self.beyond = nn.Parameter(torch.zeros(2, MAX_BEYOND_MATCH + 1, MAX_GAP + 1))
        self.backoff = nn.Parameter(torch.ones(2, MAX_MATCH + 1))
        self.support = nn.Parameter(torch.zeros(2, MAX_SUPPORT + 1))
        self.frequency = nn.Parameter(torch.zeros(3))

    def forward(self, votes: Tensor, figures: Tensor) -> Tensor:
        """Return the logarithm of the chance of each true token: [P]."""
        same, length, kind, beyond = votes.long().unbind(-1)
        is_vote, past = kind >= 0, (kind >= PAST_PROMPT).long()
        kind, length, beyond = kind.clamp(min=0), length.clamp(min=0), beyond.clamp(min=0)
        scores = self.length[kind, length]
        scores = scores + self.beyond[past, length.clamp(max=MAX_BEYOND_MATCH), beyond]
        scores = scores.masked_fill(~is_vote, -1e9)
        backoff = self._backoff(is_vote, past, length, figures[:, :2].long())
        weight = torch.logsumexp(torch.cat([scores, backoff[:, None]], 1), 1)
        foretold = torch.logsumexp(scores.masked_fill(same != 1, -1e9), 1)
        return torch.logaddexp(foretold, backoff + self._share(figures).log()) - weight

    def _backoff(self, is_vote: Tensor, past: Tensor, length: Tensor, longest: Tensor) -> Tensor:
        backoff = self.backoff[0, longest[:, 0]] + self.backoff[1, longest[:, 1]]
        for i in (0, 1):
            as_long = is_vote & (past == i) & (length == longest[:, i : i + 1])
            backoff = backoff + self.support[i, (as_long.sum(1) + 1.0).log2().round().long()]
        return backoff

    def _share(self, figures: Tensor) -> Tensor:
        here, before, times, total, distinct = figures[:, 2:].unbind(1)
        parts = torch.softmax(torch.cat([self.frequency[:2], torch.zeros(1)]), 0)
        share = parts[0] * here + parts[1] * before + parts[2] / VOCABULARY
        seen = total + self.frequency[2].exp() * distinct + 1e-6
        return times / seen + (1 - total / seen) * share

    def tables(self) -> dict[str, list[object]]:
        """Give all weights, to be kept as JSON; shares of the doubt made to sum to one."""
        with torch.no_grad():
            whole = torch.logsumexp(torch.cat([self.frequency[:2], torch.zeros(1)]), 0)
            shift = torch.stack([whole, whole, torch.zeros(())])
            tables = dict(self.named_parameters())
            tables["frequency"] = nn.Parameter(self.frequency - shift)
            return {name: torch.round(t, decimals=3).tolist() for name, t in tables.items()}


def fit(sets: dict[str, tuple[Tensor, Tensor]], steps: int, per_set: int = 8_000) -> Weights:
    """Follow the gradient over all sets, each of equal weight."""
    torch.manual_seed(0)
    weights = Weights()
    optimizer = torch.optim.Adam(weights.parameters(), lr=0.05)
    parts = []
    for votes, figures in sets.values():
        chosen = torch.randperm(len(votes))[:per_set]
        parts.append((votes[chosen], figures[chosen]))
    votes, figures = (torch.cat(part) for part in zip(*parts, strict=True))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 if step < 2 * steps // 3 else 0.01
        rows = torch.randint(len(votes), (2_000,))
        rough = 1e-3 * (weights.beyond**2).mean()
        for table in (weights.length, weights.backoff):
            rough = rough + 1e-2 * ((table[:, 1:] - table[:, :-1]) ** 2).mean()
        loss = rough - weights(votes[rows], figures[rows]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    try:
        paths = set_files(list(FITTED), options.data)
    except FileNotFoundError as error:
        sys.exit(f"eval.fit_evidence: {error}")
    tokenizer = set_tokenizer("llama2", options.data)
    sets = {}
    for path, (name, rows) in zip(paths, FITTED.items(), strict=True):
        sets[name] = observe(read_recorded(path, tokenizer, rows.stop, rows.start))
        note(f"{name}: {len(sets[name][0]):,} tokens")
    weights = fit(sets, options.steps)
    with torch.no_grad():
        losses = {name: round(-weights(*given).mean().item(), 4) for name, given in sets.items()}
    options.out.write_text(json.dumps(weights.tables()) + "\n", encoding="utf-8")
    print(json.dumps({"nats_a_token": losses}))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser("fit_evidence", __doc__)
    add = parser.add_argument
    add("--data", type=Path, help="data folder; also the variable RAGACCEL_DATA")
    add("--steps", type=int, default=400)
    add("--out", type=Path, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
