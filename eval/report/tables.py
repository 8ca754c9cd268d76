"""Markdown tables of each kind of result: one table of tables, and the functions that read it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import StatisticsError, correlation
from typing import Any

from eval.data import is_fitted_to
from eval.decoders import BASELINE, LOOKUP, PLAIN, STATIC
from eval.runner import place_of

Document = Mapping[str, Any]
Row = Mapping[str, Any]
Cell = str | Callable[[Row], str]
Column = tuple[str, Cell]
Rows = Callable[[Document], Iterable[Row]]


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a kind of result: the rows that a result has for it, and its columns.

    A cell is a format string with names of the row's values, or a function of the row. With
    ``across`` the table has a further column for each value of that cell, with ``cell`` in it, and
    one line for all rows whose other columns are equal. Columns without any text are left out.
    ``title`` and ``note`` stand above and below.
    """

    rows: Rows
    columns: Sequence[Column]
    across: Cell = ""
    cell: Cell = ""
    title: str = ""
    note: str | Callable[[Document], str] = ""

    def shown(self, document: Document) -> Iterator[str]:
        """Yield the title, the table and the note; nothing without rows."""
        rows = list(self.rows(document))
        if not rows:
            return
        yield self.title
        yield self._pivot(rows) if self.across else self._table(rows)
        yield self.note if isinstance(self.note, str) else self.note(document)

    def _table(self, rows: Sequence[Row]) -> str:
        lines = [[_text(cell, row) for _, cell in self.columns] for row in rows]
        return plain_table([title for title, _ in self.columns], lines)

    def _pivot(self, rows: Sequence[Row]) -> str:
        lines: dict[tuple[str, ...], dict[str, str]] = {}
        for row in rows:
            head = tuple(_text(cell, row) for _, cell in self.columns)
            lines.setdefault(head, {})[_text(self.across, row)] = _text(self.cell, row)
        across = list(dict.fromkeys(name for cells in lines.values() for name in cells))
        titles = [*(title for title, _ in self.columns), *across]
        cells = [[*head, *(own.get(one, "") for one in across)] for head, own in lines.items()]
        return plain_table(titles, cells)


def show(document: Document) -> str:
    """Return the tables of a result in Markdown."""
    parts = (part for one in TABLES[document["kind"]] for part in one.shown(document))
    return "\n\n".join(filter(None, parts))


def plain_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table of cells below the titles of the columns that are not empty."""
    lines = list(rows)
    kept = [at for at in range(len(titles)) if any(line[at] for line in lines)]
    shown = [[line[at] for at in kept] for line in (titles, *lines)]
    return "\n".join([_line(shown[0]), "|---" * len(kept) + "|", *map(_line, shown[1:])])


def _line(cells: Iterable[str]) -> str:
    escaped = (cell.replace("|", r"\|") for cell in cells)  # a bar would end the cell
    return f"| {' | '.join(escaped)} |"


def _text(cell: Cell, row: Row) -> str:
    return cell.format_map(row) if isinstance(cell, str) else cell(row)


def ratio(label: str, digits: int = 2, *, of: str = "", between: str = " ") -> Cell:
    """Return the cells of ratios with their intervals, empty where a ratio was not measured.

    ``of`` is the part of the row that has the ratios.
    """

    def cell(row: Row) -> str:
        figures = row.get(of, {}) if of else row
        if label not in figures:
            return ""
        low, high = (f"{bound:.{digits}f}" for bound in figures[f"{label}_interval"])
        return f"{figures[label]:.{digits}f}{between}({low} to {high})"

    return cell


def scaled(label: str, factor: float, form: str) -> Cell:
    """Return the cells of a figure times a factor; ``form`` formats the product."""
    return lambda row: form.format(factor * row[label])


def optional(label: str, form: str) -> Cell:
    """Return the cells of a figure that some rows lack."""
    return lambda row: "" if row.get(label) is None else form.format(row[label])


def spread(*path: str, signed: bool = False) -> Cell:
    """Return the cells of a mean with its interval, at a path in the row."""
    form = "{:+.3f} ({:+.3f} to {:+.3f})" if signed else "{:.3f} ({:.3f} to {:.3f})"

    def cell(row: Any) -> str:
        for part in path:
            row = row.get(part, {})
        return form.format(*row) if row else ""

    return cell


def interval(*path: str) -> Cell:
    """Return the cells of a paired ratio with its interval, at a path in the row."""
    at = "".join(f"[{part}]" for part in path[1:])
    low, high = (f"{{{path[0]}{at}[{bound}]:.2f}}" for bound in ("low", "high"))
    return f"{{{path[0]}{at}[value]:.2f}} ({low} to {high})"


def named(part: str) -> Rows:
    """Return the rows of a part {name: figures}, each with its ``name`` as it is shown."""
    return lambda document: [
        {**figures, "name": NAMES.get(name, name)} for name, figures in document[part].items()
    ]


def listed(part: str) -> Rows:
    """Return the rows of a part that is a list."""
    return lambda document: document[part]


def shown_name(label: str) -> Cell:
    """Return the cells of a decoder's or drafter's name."""
    return lambda row: NAMES.get(row[label], row[label])


NAMES = {
    "ours": "ours, copying",
    "ours_tree": "ours, trees",
    "ours_full": "ours, trees and memory",
    "ours_warm": "ours, memory warm",
    "ours_space": "ours, trees, memory and SPACE",
    "ours_paper": "ours, LLMA's settings",
    "ours_plain": "ours, plain",
    "ours_exact": "ours, exact",
    "ours_exact_plain": "ours, exact and plain",
    "generate": "`model.generate`",
    "generate_lookup": "`model.generate`, prompt lookup",
    "generate_static": "`model.generate`, static cache, compiled",
    # frameworks
    "bare": "`LLM.generate`",
    "langchain": "LangChain chain",
    "llama_index": "LlamaIndex query engine",
    # ways of running a pass
    "compiled": "graphs, compiled",
    "graphs": "graphs",
    "launched": "launched one by one",
    "transformers": "transformers' own pass",
    # replayed drafters, and the full one without one of its parts
    "ours_64_history": "tree, 64 draft tokens, past rows known",
    "ours_64": "tree, 64 draft tokens",
    "ours_16": "tree, 16 draft tokens",
    "copy": "one copied span",
    "llma": "LLMA as published",
    "lookup": "prompt lookup",
    "full": "all",
    "longest_only": "only the longest matches",
    "no_beyond": "no agreement beyond a change",
    "one_branch": "one branch",
    "parallel_branches": "branches parting at the root only",
    "no_calibration": "no calibration",
    "no_support": "no count of equally long matches",
    "no_frequent": "no frequent tokens",
    "no_reference": "not from references",
    "no_prompt": "not from the rest of the prompt",
    "no_output": "not from the answer so far",
    "no_past_prompt": "not from past prompts",
    "no_past_answer": "not from past answers",
    "no_successors": "no successors in past requests",
    "no_past": "no past requests at all",
    # replayed rules of other engines beside ours
    "ours_chain": "ours, chain",
    "ours_chain_history": "ours, chain, past rows known",
    "ours_chain_long": "ours, long chain",
    "ours_chain_long_history": "ours, long chain, past rows known",
    "ours_tree_history": "ours, trees, past rows known",
    "arctic": "Arctic's suffix decoding",
    "arctic_history": "Arctic's suffix decoding, past rows known",
    "sglang": "SGLang NGRAM, this row's output",
    "sglang_history": "SGLang NGRAM, past outputs known",
    "sglang_prompt": "SGLang NGRAM, the prompt entered too",
    "llamacpp_simple": "llama.cpp ngram-simple",
    "llamacpp_simple_3": "llama.cpp ngram-simple, 3 tokens",
    "llamacpp_mod_history": "llama.cpp ngram-mod, past rows known",
    "llamacpp_mod_16_history": "llama.cpp ngram-mod, 16 tokens, past rows known",
    "vllm_ngram_default": "vLLM ngram, its default",
    "vllm_ngram": "vLLM ngram, best setting",
    "vllm_ngram_as_many": "vLLM ngram, as many draft tokens as our chain",
    # the papers' experiments
    "ours_trie": "ours, trees",
    "answers": "other answers",
    "both": "other answers and passages",
    "cold": "the request's own texts",
    "grown": "the requests before it too",
    "one": "one branch",
    "parallel": "branches apart, shared prefixes paid for in each",
    "parting": "branches of different first tokens",
    "hierarchical": "one merged tree",
}
COLUMNS = {
    BASELINE: "HF greedy",
    STATIC: "HF compiled greedy",
    LOOKUP: "HF prompt lookup",
    "ours_plain": "ours plain",
    "ours_paper": "ours LLMA",
    "ours_tree": "ours trie",
    "ours_full": "ours full, memory cold",
    "ours_warm": "ours full, memory warm",
    "ours_space": "ours full and SPACE",
}
"""The decoders of a matrix, in the order of its columns, with the columns' titles."""
PEERS = {BASELINE: "ratio_generate", STATIC: "ratio_static", LOOKUP: "ratio_lookup"}
MIN_EXAMPLES = 6  # with fewer examples the true median is outside their range in over 5 % of cases
DEFAULTS = ("ours_full", "ours_tree", "ours")  # older results lack ours_full


def column_of(decoder: str) -> str:
    """Return a decoder's name for the head of a column or the label of a bar."""
    return COLUMNS.get(decoder) or NAMES.get(decoder, decoder).replace("`", "")


def matrices(documents: Mapping[str, Document]) -> dict[str, Document]:
    """Return the speed results as matrices of sets against decoders, by the stem of their pictures.

    There is one matrix for each model, dtype and machine. The results are those named ``matrix-``;
    in a folder without such files, all speed results with ``model.generate`` are used.
    """
    speed = {stem: one for stem, one in documents.items() if one["kind"] == "speed"}
    chosen = {stem: one for stem, one in speed.items() if stem.startswith("matrix-")}
    chosen = chosen or {s: one for s, one in speed.items() if BASELINE in one["decoders"]}
    groups: dict[tuple[str, str, str], dict[str, Document]] = {}
    for stem, one in chosen.items():
        settings = one["settings"]
        group = groups.setdefault((settings["model"], settings["dtype"], place_of(one)), {})
        task = settings["task"]
        group[f"{task} ({stem})" if task in group else task] = one
    found: dict[str, Document] = {}
    for (model, dtype, _), sets in groups.items():
        device = next(iter(sets.values()))["settings"].get("device", "cpu")
        shape = model.removeprefix("random:").replace("/", "-")
        stem = f"matrix-{shape}-{dtype}-{device}"
        alike = sum(other.startswith(stem) for other in found)  # the same on another machine
        settings = {"model": model, "dtype": dtype}
        found[f"{stem}-{alike + 1}" if alike else stem] = {
            "kind": "matrix", "settings": settings, "sets": sets,
        }  # fmt: skip
    return found


def decoders_of(matrix: Document) -> list[str]:
    """Return the decoders that ran on any set, known ones first in their order."""
    seen = {name: None for one in matrix["sets"].values() for name in one["decoders"]}
    return [*(name for name in COLUMNS if name in seen), *(n for n in seen if n not in COLUMNS)]


def _matrix_rows(over: str = "") -> Rows:
    """Return a row for every set and decoder; ``over`` is a decoder without a row, if any."""

    def rows(matrix: Document) -> Iterator[Row]:
        names = decoders_of(matrix)
        default = next((name for name in DEFAULTS if name in names), "")
        for title, one in matrix["sets"].items():
            said = verdict(one["decoders"], default)
            for name in names:
                figures = one["decoders"].get(name)
                if name != over and figures and (not over or over in one["decoders"]):
                    yield {**figures, "set": title, "verdict": said, "column": column_of(name)}

    return rows


def verdict(decoders: Mapping[str, Row], default: str) -> str:
    """Return text on the decoders of transformers that our default does not beat on a set.

    Our decoder is slower if it has fewer tokens per second over all examples, and not clearly
    faster if the interval of its paired ratios reaches down to 1. The text also says if the set has
    fewer than ``MIN_EXAMPLES`` examples.
    """
    ours = decoders.get(default)
    peers = {name: decoders[name] for name in PEERS if name in decoders}
    if ours is None or not peers:
        return ""
    slower = [
        name for name, one in peers.items() if ours["tokens_per_second"] < one["tokens_per_second"]
    ]
    unclear = [
        name
        for name, one in peers.items()
        if name not in slower and not _clearly_faster(ours, name, one)
    ]
    said = [
        f"{words} {', '.join(map(column_of, names))}"
        for words, names in (("**slower than**", slower), ("not clearly faster than", unclear))
        if names
    ]
    if not said:
        all_beaten = list(peers) == list(PEERS)
        said = [f"faster than {'all of HF' if all_beaten else ', '.join(map(column_of, peers))}"]
        said[0] += "'s" * all_beaten
    examples = ours.get("examples", MIN_EXAMPLES)
    if examples < MIN_EXAMPLES:
        said.append(f"too few examples to be sure: {examples}")
    return "; ".join(said)


def _clearly_faster(ours: Row, name: str, other: Row) -> bool:
    paired = ours.get(f"{PEERS[name]}_interval")
    if paired is not None:
        return bool(paired[0] > 1.0)
    over = ours.get("ratio_generate_interval")  # older results lack the ratio to prompt lookup
    return over is not None and bool(over[0] > other["ratio_generate"])


def _matrix_speed(row: Row) -> str:
    over = "" if row["column"] == COLUMNS[BASELINE] else ratio("ratio_generate", between="<br>")
    return "<br>".join(filter(None, (f"{row['tokens_per_second']:.1f}", _text(over, row))))


STAGES = ("prefill", "draft", "verify", "model", "remember", "other", "forcing")


def _seconds_rows(document: Document) -> Iterator[Row]:
    for name, one in document["decoders"].items():
        yield {**one["seconds"], "name": NAMES.get(name, name)}


def _replay_rows(document: Document) -> Iterator[Row]:
    for title, row in document["sets"].items():
        for name, tokens in row.items():
            yield {"set": title, "name": NAMES.get(name, name), "tokens": tokens}


def _peers_rows(document: Document) -> Iterator[Row]:
    for title, one in document["sets"].items():
        for budget, drafters in one["budgets"].items():
            for name, figures in drafters.items():
                yield {**figures, "set": title, "budget": budget, "name": NAMES[name]}


def _peers_note(document: Document) -> str:
    rules = document["settings"]["rules"]
    return (
        "Tokens a step; in brackets draft tokens a step. Our chain ends where its estimated chance "
        "falls below {min_prob}, the long one at {low_prob}. The rules were written anew from "
        "those of {} (Arctic's is its own code)."
    ).format(", ".join(rules.values()), **document["settings"])


def _lacking_note(document: Document) -> str:
    lacking = document.get("lacking", {})
    return " ".join(f"{dtype} cannot be computed here: {why}." for dtype, why in lacking.items())


def largest_gap(figures: Row) -> str:
    """Return a cell with the largest gap of the two logits at any first difference."""
    gaps = [difference["gap"] for difference in figures.get("differences", ())]
    return f"{max(gaps):.2g}" if gaps and None not in gaps else "not a tie" if gaps else ""


def _registry_rows(document: Document) -> Iterator[Row]:
    for figures in document["figures"]:
        for prompt in figures["prompts"]:
            for shown in ("whole", "cut"):
                yield {**figures, **prompt, **prompt[shown], "shown": shown}


def _memory_rows(document: Document) -> Iterator[Row]:
    """Return a row for each process, with its first and last reading."""
    for name, one in document["processes"].items():
        first, last = one["readings"][0], one["readings"][-1]
        yield {**one, "name": name, "first": first, "last": last}


def _resident(reading: str) -> Cell:
    form = "{:.1f} MB after {:,} requests"
    return lambda row: form.format(row[reading]["resident_bytes"] / 1e6, row[reading]["requests"])


def _roofline_rows(document: Document) -> Iterator[Row]:
    for context, figures in document["contexts"].items():
        for way, found in figures["ways"].items():
            limit = 1e3 * figures["limit_seconds"]
            yield {**found, "context": int(context), "name": NAMES[way], "limit": limit}


def _one_row_ms(milliseconds: Mapping[str, float] | None) -> str:
    return f"{milliseconds['1']:.2f} ms" if milliseconds else ""


def _roofline_note(document: Document) -> str:
    return (
        f"Memory is read at {document['bandwidth_bytes_per_second'] / 1e9:,.0f} GB/s as measured; "
        f"a pass reads {document['weight_bytes'] / 1e9:.2f} GB of weights and the states of its "
        "context."
    )


def _group_rows(document: Document) -> Iterator[Row]:
    """Return a row for each kind of prompt, task and decoder."""
    for group in document["groups"]:
        same = {one["found"]: one for one in group["same"]}
        for name, figures in group["decoders"].items():
            held = same.get(name, {})
            identical = f"{held['identical']} of {held['answers']}" if held else ""
            yield {
                **group, **figures, **held, "name": NAMES.get(name, name), "identical": identical,
            }  # fmt: skip


READER_NOTE = (
    "The bundled reader quotes one sentence and names its passage, or says that the passages do "
    "not tell. It was trained for nothing else: on code, chats and summaries its words make no "
    "sense, and these rows tell how short texts are decoded and nothing about longer ones."
)


def _generation_note(document: Document) -> str:
    settings = document["settings"]
    asked = "the model's chat template" if settings["chat_template"] else "plain text"
    told = [
        f"Greedy, at most {settings['max_new_tokens']} new tokens, prompts as {asked}. Every task "
        "begins with nothing learned; a second turn follows `generate`'s first answer."
    ]
    left_out = document.get("left_out", {})
    told += [f"Not asked, as they do not fit: {num} of {task}." for task, num in left_out.items()]
    return " ".join([*told, *[READER_NOTE] * (settings["model"] == "reader")])


def _never_slower_note(document: Document) -> str:
    asked = document["asked"]
    return (
        f"Asked: a median of {asked['ratio']} or more, its lower bound {asked['ratio_low']} or "
        f"more, a modelled time of {asked['modelled']} or less."
    )


def _drafting_rows(document: Document) -> Iterator[Row]:
    pasts = {"no_past": "none", "past": f"{document['settings']['past_tokens']:,} tokens"}
    for budget, by_past in document["budgets"].items():
        for label, figures in by_past.items():
            yield {**figures, "budget": budget, "past": pasts[label]}


def _drafting_note(document: Document) -> str:
    first = document["first_draft"]
    return (
        f"The first draft of a process takes {first['compiling_seconds']:.1f} s while it is "
        f"compiled, once, and {first['compiled_seconds']:.1f} s later; to remember a request takes "
        f"{document['add_ms']:.1f} ms where so much is remembered."
    )


def _ablation_rows(document: Document) -> Iterator[Row]:
    for label, variants in document["drafters"].items():
        drafter = NAMES.get(f"ours_{label}", label)
        for variant, row in variants.items():
            for name, figures in row.items():
                yield {**figures, "drafter": drafter, "variant": NAMES[variant], "set": name}


def _search_rows(document: Document) -> Iterator[Row]:
    for name, figures in document["sets"].items():
        for mode, shown in {"dense": "dense", "text": "full-text", "fused": "fused"}.items():
            values = {metric: value[0] for metric, value in figures["modes"][mode].items()}
            over = figures["fused_over"].get(mode, {})
            yield {**figures, "set": name, "mode": shown, "values": values, "over": over}


_SHOWN = ("hit@1", "hit@6", "hit@10", "mrr@10", "ndcg@10", "recall@10")
_ANSWERS = {
    "answers_held_out": "XQuAD, articles not trained on; the short answer",
    "answers_demo": "demo; the sentence that answers",
}
_WHOSE = {
    "answer": "what the reader says",
    "answer_when_found": "of it, where its passages hold the sentence",
    "quotation": "the sentence itself, the best a quotation can do",
}
_LEGEND = """One relevant passage a question, the one it was written on: another that answers it \
counts as wrong. `msmarco`: the ten passages that a search engine gave for the question, all \
counted as relevant, for no judgement of them is recorded. SQuAD's questions were written with the \
passage in sight, so that they share its words; the embedding model was trained on SQuAD, Natural \
Questions and MS MARCO too, says its model card. In brackets 95 % of the means of other draws of \
articles."""


def _answer_rows(document: Document) -> Iterator[Row]:
    for name, figures in document["answers"].items():
        for whose, shown in _WHOSE.items():
            if figures[whose]:
                asked = figures["found" if whose == "answer_when_found" else "questions"]
                yield {**figures[whose], "set": _ANSWERS[name], "asked": asked, "scored": shown}


def _judged(document: Document) -> str:
    return "\n".join(
        f"Of {one['questions']}: right sentence {one['right'][0]:.1%}, right file cited "
        f"{one['cited'][0]:.1%}; {one['refused']} of {one['unanswerable']} unanswerable refused.\n"
        for one in document["answers"].values()
    )


RAG_STAGES = ("embed", "search", "prompt", "prefill", "draft", "verify", "rest")
_DECODING = {"_plain": "plain", "_again": "accelerated, asked again", "": "accelerated"}


def _rag_rows(document: Document) -> Iterator[Row]:
    for name, figures in document["decoders"].items():
        suffix = next(suffix for suffix in _DECODING if name.endswith(suffix))
        way = name.removesuffix(suffix)
        through = {"generate": "the same passages", "bare": "`ragaccel.RAG`"}.get(way, NAMES[way])
        decoding = "`model.generate`" if way == "generate" else _DECODING[suffix]
        yield {**figures, "through": through, "decoding": decoding}


def _stage(name: str) -> Cell:
    return lambda row: f"{1000 * row['stages'][name]:,.1f}" if name in row["stages"] else ""


def _rag_note(document: Document) -> str:
    index, k = document["index"], document["settings"]["k"]
    told = f"{index['passages']:,} passages in the index, {k} in a prompt"
    if "own_found" not in index:
        return f"{told}."
    return f"{told}; of those that answers were written from, {index['own_found']:.0%} are found."


def published_note(told: str = "") -> Table:
    """Return the table of a paper's published figures; ``told`` says how theirs differ."""

    def note(document: Document) -> str:
        return " ".join(filter(None, (told, fitted_note(document))))

    return Table(
        listed("published"),
        (
            ("published", "{system}"),
            ("setting", "{setting}"),
            ("speed-up", optional("speedup", "{} ×")),
            ("tokens/s, plain", optional("plain", "{}")),
            ("tokens/s, accelerated", optional("accelerated", "{}")),
            ("tokens a pass", optional("tokens_per_pass", "{}")),
            ("source", "{source}"),
        ),
        note=note,
    )


def fitted_note(document: Document) -> str:
    """Return a sentence on the sets of a grid that our trees' weights were fitted to, if any."""
    counts = {
        name: num if isinstance(num, int) else 1 for name, num in document.get("sets", {}).items()
    }
    counts |= {
        point["set"]: point["answers"] for point in document.get("grid", ()) if "answers" in point
    }
    fitted = [name for name, num in counts.items() if is_fitted_to(name, num)]
    if not fitted:
        return ""
    return (
        "What a match is worth to our trees was fitted to recorded answers, some of "
        f"{', '.join(fitted)} among them, which may flatter them there."
    )


_CACHED = (
    "The outputs that the paper replays for cache-assisted generation are unpublished: here other "
    "answers to the same task are the references, those of other models where the set is "
    "mtrag_human_answers, and the answer itself is left out. With them alone the prompt holds no "
    "passages. Answers that stand word for word among the others: "
)
_TIMED = (
    ("answers timed", optional("timed_answers", "{}")),
    ("tokens/s", optional("tokens_per_second", "{:.1f}")),
    ("x plain", ratio("ratio")),
)


def _same_answers(document: Document) -> str:
    same = ", ".join(f"{num} of {name}" for name, num in document["same_answers"].items())
    return f"{_CACHED}{same}."


def _swept(quantity: str, title: str, form: str) -> Table:
    """Return the table of one quantity of LLMA's sweep, n downwards and k across, by set."""

    def rows(document: Document) -> list[Row]:
        points = [point for point in document["grid"] if quantity in point]
        return sorted(points, key=lambda point: (point["set"], point["n"], point["k"]))

    return Table(
        rows,
        ((f"{title}, of", "{set}"), ("", "n = {n}")),
        across="k = {k}",
        cell=f"{{{quantity}:{form}}}",
    )


def follows(document: Document) -> str:
    """Return a sentence on how speed-up follows the reduction of steps, if it was timed."""
    timed = [point for point in document["grid"] if "ratio" in point]
    steps, speed = ([point[name] for point in timed] for name in ("tokens_per_pass", "ratio"))
    try:
        together = correlation(steps, speed)
    except StatisticsError:
        return ""
    return (
        f"The paper claims that speed-up follows the reduction of decoding steps: over "
        f"{len(timed)} points their correlation is {together:.2f}."
    )


_TURNS = {
    "passages": "this turn's passages",
    "answers": "and earlier answers",
    "earlier passages": "and earlier passages",
}


def _by_memory_and_length(document: Document) -> list[Row]:
    return sorted(document["grid"], key=lambda entry: (entry["memory"], entry["decoding_length"]))


def _at_longest_branch(document: Document) -> list[Row]:
    longest = max(entry["branch_length"] for entry in document["grid"])
    rows = _by_memory_and_length(document)
    return [entry for entry in rows if entry["branch_length"] == longest]


def _lookahead_timed(document: Document) -> list[Row]:
    timed = [entry for entry in document["grid"] if "ratio" in entry]
    return sorted(timed, key=lambda e: (e["set"], e["decoding_length"], e["branch_length"]))


def _lookahead_beside(document: Document) -> str:
    """Return a sentence on plain decoding and on drafts that are cut by the cost of a pass."""
    return " ".join(
        f"On {name}, {times[PLAIN]['timed_answers']} answers: plain "
        f"{times[PLAIN]['tokens_per_second']:.1f} tokens/s, drafts cut by the measured cost of a "
        f"pass {times['ours_trie']['tokens_per_second']:.1f} ({times['ours_trie']['ratio']:.2f})."
        for name, times in document.get("beside", {}).items()
        if times
    )


def _memory_states(document: Document) -> list[Row]:
    """Return the entries by state, with the difference of each to its set's cold one."""
    grid = document["grid"]
    states = list(dict.fromkeys(entry["state"] for entry in grid))
    cold = {e["set"]: e["tokens_per_pass"] for e in grid if e["state"] == "cold"}
    rows = [{**e, "more": e["tokens_per_pass"] - cold[e["set"]], **_known(e)} for e in grid]
    return sorted(rows, key=lambda r: (states.index(r["state"]), r["alone"], r["warm_rows"]))


def _known(entry: Row) -> Row:
    """Return what a state's drafter knows besides the request's own texts."""
    state, alone = entry["state"], entry.get("remembered") == "answers"
    told = {"cold": "nothing (cold)", "grown": "the requests before it"}.get(
        state, f"requests of {'its set' if state == 'same set' else state}"
    )
    return {"known": told + ", answers alone" * alone, "alone": alone}


_THEIR_TRIES = (
    "Theirs are tokens a second, of other models on other sets (the last three on private ones), "
    "over transformers' eager greedy search, with a trie that was warmed before anything was "
    "measured and settings tuned by grid search. Ours are tokens a verify pass of recorded "
    "answers, by our own trie drafter. Compare how figures change with a setting, not figures."
)
_THEIR_SPACE = (
    "Theirs are models of 6 to 70 billion parameters with all weights tuned further, on other "
    "sets: figures of so different models and texts cannot be compared one by one. What they call "
    "lossless is against the model so tuned. Ours is against the model as it was: its weights are "
    "frozen, and what was trained acts on mask tokens' rows alone."
)


def _space_rows(document: Document) -> Iterator[Row]:
    for figures in document["sets"].values():
        for how in ("greedy", "sampled"):
            for name, one in figures[how].items():
                answers = figures["answers"]
                yield {**one, "how": how, "name": space_label(name), "answers": answers}


def space_label(name: str) -> str:
    """Return the name of a decoder of SPACE's experiments."""
    if name == PLAIN:
        return "plain"
    if name.startswith("space_paper"):
        return f"SPACE as published, k = {name.rpartition('_')[2]}"
    kind, _, draft_tokens = name.rpartition("_")
    width = f"{draft_tokens} draft tokens" if draft_tokens.isdigit() else "by cost"
    kinds = {"space_tree": "SPACE, trees", "copy": "copying", "copy_space": "copying and SPACE"}
    return f"{kinds[kind if draft_tokens.isdigit() else name]}, {width}"


def _space_note(document: Document) -> str:
    asked, adapter = document["asked"], document["adapter"]
    return (
        "Counted are the rows of verify passes. Our trees have their first draft tokens from mask "
        "tokens that are read with the prompt; as published the first pass has none. Asked: SPACE "
        f"alone {asked['space']} tokens a pass or more, beside copying {asked['beside_copying']} "
        f"times copying's or more. The adapter: {adapter['parameters'] / 1e6:.2f} million numbers "
        f"beside the model's {document['parameters'] / 1e6:.1f} million; our trees take "
        f"{adapter['num_useful']} of its {adapter['num_masks']} mask tokens."
    )


def _curve_rows(document: Document) -> Iterator[Row]:
    for one in document["curve"]:
        for k, tokens in enumerate(one["tokens_per_pass"], start=1):
            yield {"step": one["step"], "k": k, "tokens": tokens}


def _curve_note(document: Document) -> str:
    last = document["curve"][-1]
    return (
        f"Tokens a pass by the paper's layout with k mask tokens, walked over {last['samples']} "
        f"held-out answers without decoding; {last['own']:.1%} of their tokens are the model's own "
        "choice."
    )


TABLES: dict[str, Sequence[Table]] = {
    "matrix": [
        Table(_matrix_rows(), (("set", "{set}"), ("our default is", "{verdict}")),
            across="{column}", cell=_matrix_speed,
            title="Decoding, tokens/s; below it x HF greedy, median of pairs, 95 % interval:"),
        Table(_matrix_rows(over=BASELINE), (("set", "{set}"),), across="{column}",
            cell=ratio("ratio_generate", of="end_to_end", between="<br>"),
            title="The whole answer, the prompt's pass included, x HF greedy:"),
    ],
    "speed": [
        Table(named("decoders"), (
            ("decoder", "{name}"), ("tokens/s", "{tokens_per_second:.1f}"),
            ("x plain", ratio("ratio")), ("x `generate`", ratio("ratio_generate")),
            ("x static cache", ratio("ratio_static")), ("x copying", ratio("ratio_copying")),
            ("acceptance length", "{acceptance_length:.2f}"), ("efficiency", ratio("efficiency")),
            ("with prefill: tokens/s", "{end_to_end[tokens_per_second]:.1f}"),
            ("x plain", ratio("ratio", of="end_to_end")),
            ("x `generate`", ratio("ratio_generate", of="end_to_end")),
            ("same tokens", optional("identical_to_generate", "{:.0%}")),
            ("peak bytes", optional("peak_bytes", "{:.2e}")),
        )),
        Table(_seconds_rows, (
            ("seconds", "{name}"), *((stage, optional(stage, "{:.2f}")) for stage in STAGES),
        )),
    ],
    "frameworks": [Table(named("decoders"), (
        ("asked through", "{name}"), ("ms an answer", scaled("seconds", 1000, "{:.0f}")),
        ("speed x `LLM.generate`", ratio("ratio")), ("same text", "{same_text} of {examples}"),
    ))],
    "indexing": [Table(lambda document: [document["figures"]], (
        ("files", "{files:,}"), ("passages", "{passages:,}"),
        ("from nothing", "{first_seconds:.0f} s"), ("of it embedding", "{embed_share:.0%}"),
        ("peak memory", "{peak_mb:.0f} MB"), ("unchanged", "{unchanged_seconds:.1f} s"),
        ("one edit", "{edit_seconds:.1f} s"), ("a query, loaded", "{query_ms_median:.0f} ms"),
    ))],
    "registry": [Table(_registry_rows, (
        ("texts", "{texts:,}"), ("register one", "{register_us_median:.0f} µs"),
        ("prompt", "{characters:,} characters"), ("passages in it", "{passages} {shown}"),
        ("match", "{match_ms_median:.2f} ms"), ("99 of 100", "{match_ms_p99:.2f} ms"),
        ("slowest", "{match_ms_worst:.2f} ms"),
        ("found", "{recall:.1%}"), ("besides", "{extra}"),
    ))],
    "never_slower": [Table(named("sets"), (
        ("set", "{name}"), ("requests", "{requests}"), ("x plain", ratio("ratio", 3)),
        ("slowest", "{ratio_worst:.2f}"), ("modelled time / plain", "{modelled:.3f}"),
        ("highest", "{modelled_worst:.3f}"), ("acceptance length", "{acceptance_length:.2f}"),
        ("rows a pass", "{rows_per_pass:.1f}"), ("drafting a pass", "{draft_us_per_pass:.0f} µs"),
    ), note=_never_slower_note)],
    "batch": [Table(named("sizes"), (
        ("sequences", "{name}"),
        ("together: tokens/s", "{decoders[together][tokens_per_second]:.1f}"),
        ("tokens a pass", "{decoders[together][tokens_per_pass]:.1f}"),
        ("x one by one", interval("together_over", "one_by_one")),
        ("x together, plain", interval("together_over", "together_plain")),
        ("x `generate`, padded", interval("together_over", "generate")),
        ("plain x `generate`, padded", interval("plain_over_generate")),
    ))],
    "roofline": [Table(_roofline_rows, (
        ("context", "{context:,}"), ("passes", "{name}"), ("failed", optional("error", "{}")),
        ("limit, one row", "{limit:.2f} ms"),
        ("t(1)", lambda row: _one_row_ms(row.get("milliseconds"))),
        ("of the limit", optional("share_of_limit", "{:.0%}")),
        ("t(64) / t(1)", optional("widest_over_one", "{:.2f}")),
        ("beside the device, a step", optional("step", "{[beside_device]:.1%}")),
        ("peak bytes", optional("peak_bytes", "{:.2e}")),
    ), note=_roofline_note)],
    "lossless": [Table(listed("comparisons"), (
        ("task", "{task}"), ("dtype", "{dtype}"), ("decoder", shown_name("found")),
        ("answers", "{answers}"), ("identical", "{identical}"),
        ("acceptance length", "{acceptance_length:.2f}"),
        ("largest gap of logits at a first difference", largest_gap),
    ), note=_lacking_note)],
    "exactness": [
        Table(listed("pairs"), (
            ("decoder", shown_name("found")), ("compared with", shown_name("wanted")),
            ("answers", "{answers}"), ("identical", "{identical}"),
            ("largest top-2 gap at a difference", largest_gap),
        )),
        Table(listed("costs"), (
            ("costs", shown_name("decoder")), ("against", shown_name("against")),
            ("decoding", ratio("decode_seconds")), ("prefill", ratio("prefill_seconds")),
            ("passes", "{passes:.2f}"),
        ), note="Costs are times those of the other: seconds and passes a token, a prompt's."),
    ],
    "generation": [Table(_group_rows, (
        ("kind", "{kind}"), ("task", "{task}"), ("prompts", "{prompts}"),
        ("tokens an answer", "{answer_tokens:.0f}"), ("decoder", "{name}"),
        ("tokens/s", "{tokens_per_second:.1f}"), ("x `generate`", ratio("ratio_generate")),
        ("x plain", ratio("ratio")),
        ("with prefill: x `generate`", ratio("ratio_generate", of="end_to_end")),
        ("acceptance length", "{acceptance_length:.2f}"), ("identical", "{identical}"),
        ("largest gap of logits at a first difference", largest_gap),
    ), note=_generation_note)],
    "replay": [Table(_replay_rows, (("set", "{set}"),), across="{name}", cell="{tokens:.2f}")],
    "peers": [Table(_peers_rows, (("draft tokens, at most", "{budget}"), ("drafter", "{name}")),
        across="{set}", cell="{tokens_per_step:.2f} ({drafted_per_step:.1f})",
        note=_peers_note)],
    "ablation": [Table(_ablation_rows, (("drafter", "{drafter}"), ("without", "{variant}")),
        across="{set}", cell="{tokens_per_pass:.2f} ({difference:+.2f})")],
    "reliability": [Table(named("sources"), (
        ("drafted from", "{name}"), ("draft tokens", "{draft_tokens:,}"),
        ("accepted", "{accepted:.1%}"), ("calibration error", "{calibration_error:.4f}"),
        ("log-loss below a constant's", "{below_constant:.0%}"),
    ))],
    "drafting": [Table(_drafting_rows, (
        ("draft tokens", "{budget}"), ("past requests", "{past}"),
        ("a step, median", "{median_us:.0f} µs"), ("95 % below", "{p95_us:.0f} µs"),
        ("first step of a request", "{first_step_ms:.1f} ms"),
    ), note=_drafting_note)],
    "memory": [Table(_memory_rows, (
        ("setting", "{name}"), ("resident", _resident("first")), ("later", _resident("last")),
        ("growth", scaled("growth_bytes", 1e-6, "{:.1f} MB")),
        ("of it remembered", scaled("remembered_growth_bytes", 1e-6, "{:.1f} MB")),
        ("of it kept prefixes", scaled("kept_growth_bytes", 1e-6, "{:.1f} MB")),
    ))],
    "peak_memory": [Table(named("decoders"), (
        ("decoder", "{name}"), ("before the answer", scaled("loaded_bytes", 1e-6, "{:,.0f} MB")),
        ("at most", scaled("peak_bytes", 1e-6, "{:,.0f} MB")),
        ("more", lambda row: f"{(row['peak_bytes'] - row['loaded_bytes']) / 1e6:,.0f} MB"),
    ))],
    "quality": [
        Table(_search_rows, (
            ("set", "{set}"), ("passages", "{passages:,}"), ("questions", "{questions:,}"),
            ("search", "{mode}"), *((metric, f"{{values[{metric}]:.3f}}") for metric in _SHOWN),
            ("fused less this, nDCG@10", spread("over", "ndcg@10", signed=True)),
        ), note=_LEGEND),
        Table(_answer_rows, (
            ("questions", "{set}"), ("asked", "{asked:,}"), ("scored", "{scored}"),
            ("exact match", spread("exact")), ("F1", spread("f1")),
            ("answer contained", spread("contains")),
        ), note=_judged),
    ],
    "rag_speedup": [Table(_rag_rows, (
        ("asked through", "{through}"), ("decoding", "{decoding}"),
        ("first word, ms", scaled("first_token_seconds", 1000, "{:,.0f}")),
        ("x plain", ratio("ratio_first_token")),
        ("answer, ms", scaled("total_seconds", 1000, "{:,.0f}")), ("x plain", ratio("ratio")),
        ("x `generate`", ratio("ratio_generate")), ("tokens a pass", "{acceptance_length:.2f}"),
        *((stage, _stage(stage)) for stage in RAG_STAGES),
        ("same text", "{same_text} of {answers}"),
    ), note=_rag_note)],
    "llma_tables": [
        Table(listed("grid"), (
            ("table", "{table}"), ("set", "{set}"), ("references", shown_name("references")),
            ("decoder", shown_name("decoder")), ("answers", "{answers}"), ("tokens", "{tokens:,}"),
            ("decoding steps", "{passes:,}"), ("tokens a step", "{tokens_per_pass:.2f}"),
            ("steps with a draft", "{triggered:.0%}"),
            ("accepted of one", "{accepted_per_trigger:.2f}"), *_TIMED,
        ), note=_same_answers),
        published_note(),
    ],
    "llma_sweep": [
        _swept("passes", "decoding steps", ","),
        _swept("tokens_per_pass", "tokens a decoding step", ".2f"),
        _swept("triggered", "share of steps with a draft", ".2f"),
        _swept("accepted_per_trigger", "tokens accepted of a draft", ".2f"),
        _swept("ratio", "speed-up over plain decoding", ".2f"),
        Table(lambda document: document["plain"].values(), (
            ("plain decoding of", "{set}"), ("answers", "{answers}"),
            ("decoding steps", "{passes:,}"), *_TIMED[1:2],
        ), note=follows),
        published_note(),
    ],
    "llma_dialogue": [
        Table(listed("grid"), (("set", "{set}"), ("turn", "{turn}"), ("answers", "{answers}")),
            across=lambda row: f"{NAMES[row['decoder']]}: {_TURNS[row['references']]}",
            cell="{tokens_per_pass:.2f}", title="Tokens a decoding step:"),
        Table(lambda document: [point for point in document["grid"] if "ratio" in point], (
            ("set", "{set}"), ("decoder", shown_name("decoder")),
            ("references", lambda row: _TURNS[row["references"]]), *_TIMED,
        )),
        published_note(),
    ],
    "lookahead_sweep": [
        Table(_at_longest_branch, (
            ("known", shown_name("memory")), ("decoding_length", "{decoding_length}"),
        ), across="{set}", cell="{tokens_per_pass:.2f}",
            title="Tokens a pass, with the longest branch_length:"),
        Table(_lookahead_timed, (
            ("timed", "{set}"), ("decoding_length \\ branch_length", "{decoding_length}"),
        ), across="{branch_length}", cell="{tokens_per_second:.1f} ({ratio:.2f})",
            title="Wall time, drafts in full length: tokens a second (x our plain decoding):",
            note=_lookahead_beside),
        published_note(_THEIR_TRIES),
    ],
    "lookahead_branches": [
        Table(_by_memory_and_length, (
            ("known", shown_name("memory")), ("branches", shown_name("mode")),
            ("rows at most", "{decoding_length}"),
        ), across="{set}", cell="{tokens_per_pass:.2f}", title="Tokens a pass:"),
        published_note(_THEIR_TRIES),
    ],
    "lookahead_memory": [
        Table(_memory_states, (
            ("known besides the request's own texts", "{known}"),
            ("requests", lambda r: "grows" if r["state"] == "grown" else str(r["warm_rows"])),
        ), across="{set}", cell="{tokens_per_pass:.2f} ({more:+.2f})",
            title="Tokens a pass, in brackets the difference to cold:",
            note="Empty: the set has too few other requests. No request that warms shares a "
            "passage with one that is asked."),
        published_note(_THEIR_TRIES),
    ],
    "space_reader": [
        Table(_space_rows, (
            ("answers", "{how}"), ("decoder", "{name}"),
            ("tokens a pass", "{tokens_per_pass:.2f}"),
            ("draft tokens a pass", "{draft_tokens_per_pass:.1f}"),
            ("mask tokens a pass", "{masks_per_pass:.1f}"),
            ("same as plain", "{identical} of {answers}"), ("largest gap of logits", largest_gap),
            ("tokens/s", "{tokens_per_second:.1f}"), ("x plain", ratio("ratio")),
            ("x plain, the prompt's pass included", ratio("ratio", of="end_to_end")),
        ), note=_space_note),
        published_note(_THEIR_SPACE),
    ],
    "space_curves": [Table(_curve_rows, (("steps", "{step:,}"),), across="k = {k}",
        cell="{tokens:.2f}", note=_curve_note)],
}  # fmt: skip
"""The tables of each kind of result."""
