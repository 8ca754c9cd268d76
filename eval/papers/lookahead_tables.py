"""Lookahead's tables: our figures on its experiments, and what was published, in Markdown."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from eval.markdown import table
from eval.papers.published import published_table
from eval.recordings import is_fitted_to

Entry = dict[str, Any]

KNOWN = {
    "cold": "knowing the request's own texts alone",
    "grown": "knowing the requests before it too",
}
MODES = {
    "one": "one branch",
    "parallel": "parallel: branches apart, shared prefixes paid for in each",
    "parting": "parallel: branches of different first tokens",
    "hierarchical": "hierarchical: one merged tree",
}
CLAIM = 32  # the length beyond which Lookahead says drafts still gain, to the next power of two
DIFFERENCES = (
    "Theirs are tokens a second, of other models on other sets (the last three on private ones), "
    "over transformers' eager greedy search, with a trie that was warmed before anything was "
    "measured (with answers of the train set, or with all of the set but 1,000 samples) and "
    "settings tuned by grid search. Ours are tokens a verify pass of recorded answers, which other "
    "models or people gave, by our own trie drafter, which ranks guesses by their estimated chance "
    "and not by frequency. Compare how figures change with a setting, not figures."
)


def sweep_table(document: Entry) -> str:
    """Lay out the sweep by decoding_length, by branch_length and in wall time."""
    grid = document["grid"]
    parts = []
    for memory in document["settings"]["memory"]:
        own = [entry for entry in grid if entry["memory"] == memory]
        longest = max(entry["branch_length"] for entry in own)
        size = nearest(64, {entry["decoding_length"] for entry in own})
        parts += [
            f"Tokens a pass, {KNOWN[memory]}, by decoding_length (branch_length {longest}):",
            by_length(own, "decoding_length", ("branch_length", longest)),
            gains(own, longest),
            f"By branch_length (decoding_length {size}):",
            by_length(own, "branch_length", ("decoding_length", size)),
        ]
    for name, times in document.get("beside", {}).items():
        parts += timed_parts(name, times, document)
    return "\n\n".join([*filter(None, parts), *beside(document)])


def nearest(wanted: int, lengths: set[int]) -> int:
    """The length that is nearest to another."""
    return min(lengths, key=lambda length: abs(length - wanted))


def by_length(entries: list[Entry], axis: str, fixed: tuple[str, int]) -> str:
    """Lay out tokens a pass along one length, the other fixed: one row a length, a column a set."""
    kept = [entry for entry in entries if entry[fixed[0]] == fixed[1]]
    cells = {(entry["set"], entry[axis]): entry["tokens_per_pass"] for entry in kept}
    sets = list(dict.fromkeys(entry["set"] for entry in kept))
    lengths = sorted({entry[axis] for entry in kept})
    rows = [[str(length), *(f"{cells[name, length]:.2f}" for name in sets)] for length in lengths]
    return table([axis, *sets], rows)


def gains(entries: list[Entry], branch_length: int) -> str:
    """Say what drafts beyond 32 tokens gain, over all sets; nothing where none is longer."""
    kept = [entry for entry in entries if entry["branch_length"] == branch_length]
    cells = {(entry["set"], entry["decoding_length"]): entry["tokens_per_pass"] for entry in kept}
    longer = sorted({length for _, length in cells if length > CLAIM})
    if not longer or CLAIM not in {length for _, length in cells}:
        return ""
    told = []
    for length in longer:
        over = [
            100 * (cells[name, length] / cells[name, CLAIM] - 1)
            for name in dict.fromkeys(name for name, _ in cells)
        ]
        told.append(
            f"{length} guesses give {fmean(over):+.0f} % tokens a pass over {CLAIM} "
            f"({min(over):+.0f} to {max(over):+.0f} % by set)"
        )
    return f"Beyond {CLAIM}: {'; '.join(told)}."


def timed_parts(name: str, beside: Entry, document: Entry) -> list[str]:
    """Lay out wall time on a set: a row a decoding_length, a column a branch_length."""
    timed = [entry for entry in document["grid"] if entry["set"] == name and "ratio" in entry]
    if not timed:
        return []
    branches = sorted({entry["branch_length"] for entry in timed})
    cells = {(e["decoding_length"], e["branch_length"]): e for e in timed}
    rows = [
        [str(length), *(speed_of(cells[length, branch]) for branch in branches)]
        for length in sorted({entry["decoding_length"] for entry in timed})
    ]
    plain, by_cost = beside["ours_plain"], beside["ours_trie"]
    best = max(timed, key=lambda entry: entry["ratio"])
    return [
        f"Wall time, {document['settings']['timed']}, {plain['timed_answers']} answers of {name} "
        "followed, drafts in full length: tokens a second (x our plain decoding):",
        table(["decoding_length \\ branch_length", *map(str, branches)], rows),
        f"Plain: {plain['tokens_per_second']:.1f} tokens/s. Fastest of these: decoding_length "
        f"{best['decoding_length']}, branch_length {best['branch_length']}. Cut by the measured "
        f"cost of a pass instead: {speed_of(by_cost)}.",
    ]


def speed_of(entry: Entry) -> str:
    """Tokens a second, and over plain decoding."""
    return f"{entry['tokens_per_second']:.1f} ({entry['ratio']:.2f})"


def branches_table(document: Entry) -> str:
    """Lay out the ways to branch: one row a way and size, one column a set."""
    parts = []
    for memory in document["settings"]["memory"]:
        own = [entry for entry in document["grid"] if entry["memory"] == memory]
        cells = {(e["set"], e["decoding_length"], e["mode"]): e["tokens_per_pass"] for e in own}
        sets = list(dict.fromkeys(entry["set"] for entry in own))
        rows = [
            [title, str(size), *(f"{cells[name, size, mode]:.2f}" for name in sets)]
            for size in document["settings"]["decoding_lengths"]
            for mode, title in MODES.items()
        ]
        parts.append(f"Tokens a pass, {KNOWN[memory]}:")
        parts.append(table(["branches", "rows at most", *sets], rows))
    return "\n\n".join([*parts, *beside(document)])


def memory_states_table(document: Entry) -> str:
    """Lay out the states of memory: one row a state and size, one column a set."""
    grid = document["grid"]
    sets = list(document["sets"])
    places = {state: at for at, state in enumerate(dict.fromkeys(e["state"] for e in grid))}
    cells = {(row_of(entry), entry["set"]): entry["tokens_per_pass"] for entry in grid}
    ordered = sorted(grid, key=lambda entry: (places[entry["state"]], *detail_of(entry)))
    rows = [
        [*row, *(change_of(cells, row, name) for name in sets)]
        for row in dict.fromkeys(map(row_of, ordered))
    ]
    asked = ", ".join(f"{name} {about['asked']}" for name, about in document["sets"].items())
    told = (
        f"Requests asked: {asked}. In brackets, the difference to cold. Empty: the set has too few "
        "other requests. No request that warms shares a passage with one that is asked."
    )
    titles = ["known besides the request's own texts", "requests", *sets]
    return "\n\n".join([table(titles, rows), told, *beside(document)])


def detail_of(entry: Entry) -> tuple[bool, int]:
    """The order within a state: whole requests before answers, fewer before more."""
    return entry.get("remembered") == "answers", entry["warm_rows"]


def row_of(entry: Entry) -> tuple[str, str]:
    """The row of the table that an entry stands in: what is known, and how many requests."""
    state, rows = entry["state"], str(entry["warm_rows"])
    if state in ("cold", "grown"):
        return ("nothing (cold)", "0") if state == "cold" else ("the requests before it", "grows")
    what = "" if entry["remembered"] == "requests" else ", answers alone"
    return f"requests of {'its set' if state == 'same set' else state}{what}", rows


def change_of(cells: dict[tuple[tuple[str, str], str], float], row: Any, name: str) -> str:
    """A figure, and its difference to cold."""
    if (row, name) not in cells:
        return ""
    found, cold = cells[row, name], cells[("nothing (cold)", "0"), name]
    return f"{found:.2f}" if row[1] == "0" else f"{found:.2f} ({found - cold:+.2f})"


def beside(document: Entry) -> list[str]:
    """What was published, and how it differs."""
    told = f"{DIFFERENCES} {weights(document)}"
    return ["Published:", published_table(document["published"]), told]


def weights(document: Entry) -> str:
    """Say what our drafter's weights were fitted to. A memory is asked rows they were not."""
    rows = {name: n if isinstance(n, int) else 1 for name, n in document["sets"].items()}
    fitted = ", ".join(name for name, num in rows.items() if is_fitted_to(name, num))
    but = f", but for some of {fitted}, which may flatter it there" if fitted else ""
    return f"What a match is worth to it was fitted to other rows than these{but}."
