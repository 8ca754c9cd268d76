"""Markdown tables of each kind of result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Document = dict[str, Any]
Cell = str | Callable[[Mapping[str, Any]], str]
Column = tuple[str, Cell]


def table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a Markdown table of rows of figures.

    Args:
        columns: The title and the cell of each column. A cell is a format string with names of the
            row's values, or a function of the row.
        rows: The figures of each row by name.
    """
    cells = (
        [make.format_map(row) if isinstance(make, str) else make(row) for _, make in columns]
        for row in rows
    )
    return plain_table([title for title, _ in columns], cells)


def plain_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table of cells below the titles of their columns."""
    lines = [_line(titles), "|---" * len(titles) + "|", *map(_line, rows)]
    return "\n".join(lines)


def pivot(
    heads: Sequence[str], cells: Mapping[tuple[Any, Any], str], rows: Iterable[Any] = ()
) -> str:
    """Return a Markdown table of cells by row and column; a row is a text, or several in a tuple.

    Rows and columns are in the order of the cells, unless the ``rows`` are given.
    """
    columns = dict.fromkeys(column for _, column in cells)
    lines = [
        [
            *(map(str, row) if isinstance(row, tuple) else [str(row)]),
            *(cells.get((row, column), "") for column in columns),
        ]
        for row in list(rows) or dict.fromkeys(row for row, _ in cells)
    ]
    return plain_table([*heads, *map(str, columns)], lines)


def _line(cells: Iterable[str]) -> str:
    escaped = (cell.replace("|", r"\|") for cell in cells)  # a bar would end the cell
    return f"| {' | '.join(escaped)} |"


def ratio_cell(figures: Mapping[str, Any], label: str, digits: int = 2) -> str:
    """Return a cell of a ratio with its interval, or an empty one if it was not measured."""
    if label not in figures:
        return ""
    low, high = (f"{bound:.{digits}f}" for bound in figures[f"{label}_interval"])
    return f"{figures[label]:.{digits}f} ({low} to {high})"


def ratio(label: str, digits: int = 2, *, of: str | None = None) -> Cell:
    """Return the cells of a column of ratios with intervals; ``of`` is the row's part with them."""
    return lambda row: ratio_cell(row[of] if of else row, label, digits)


def scaled(label: str, factor: float, form: str) -> Cell:
    """Return the cells of a column of a figure times a factor; ``form`` formats the product."""
    return lambda row: form.format(factor * row[label])


def decoder_rows(figures: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the figures of each decoder as rows, with the decoder's display name as ``name``."""
    return [{**one, "name": NAMES.get(name, name)} for name, one in figures.items()]


NAMES = {
    "ours": "ours, copying",
    "ours_tree": "ours, trees",
    "ours_full": "ours, trees and memory",
    "ours_warm": "ours, memory warm",
    "ours_space": "ours, trees, memory and SPACE",
    "ours_recycling": "ours, trees and recycling",
    "ours_paper": "ours, LLMA's settings",
    "ours_plain": "ours, plain",
    "ours_exact": "ours, exact",
    "ours_exact_plain": "ours, exact and plain",
    "generate": "`model.generate`",
    "generate_lookup": "`model.generate`, prompt lookup",
    "generate_static": "`model.generate`, static cache, compiled",
}


def speed_table(document: dict[str, Any]) -> str:
    """Return the tables of a speed result, by decoder: decoding alone, then with prefill."""
    decoders = document["decoders"].values()
    peaks = any("peak_bytes" in figures for figures in decoders)
    static = any("ratio_static" in figures for figures in decoders)
    columns: list[Column] = [
        ("decoder", "{name}"),
        ("tokens/s", "{tokens_per_second:.1f}"),
        ("x plain", ratio("ratio")),
        ("x `generate`", ratio("ratio_generate")),
        *[("x static cache", ratio("ratio_static"))] * static,
        ("x copying", ratio("ratio_copying")),
        ("acceptance length", "{acceptance_length:.2f}"),
        ("efficiency", ratio("efficiency")),
        ("with prefill: tokens/s", "{end_to_end[tokens_per_second]:.1f}"),
        ("x plain", ratio("ratio", of="end_to_end")),
        ("x `generate`", ratio("ratio_generate", of="end_to_end")),
        ("same tokens", _same_tokens),
        *[("peak memory", lambda row: f"{row.get('peak_bytes', 0) / 1e9:.1f} GB")] * peaks,
    ]
    rows = decoder_rows(document["decoders"])
    return f"{table(columns, rows)}\n\n{seconds_table(document)}"


def _same_tokens(row: Mapping[str, Any]) -> str:
    same = row["identical_to_generate"]
    return "" if same is None else f"{100 * same:.0f} %"


def seconds_table(document: dict[str, Any]) -> str:
    """Return a table of seconds by stage, summed over all runs."""
    remembering = any("remember" in one["seconds"] for one in document["decoders"].values())
    stages = [
        *("prefill", "draft", "verify", "model", *["remember"] * remembering, "other", "forcing")
    ]
    columns: list[Column] = [("seconds", "{name}"), *((one, _seconds_of(one)) for one in stages)]
    return table(columns, decoder_rows(document["decoders"]))


def _seconds_of(stage: str) -> Cell:
    return lambda row: f"{row['seconds'][stage]:.2f}" if stage in row["seconds"] else ""


def frameworks_table(document: dict[str, Any]) -> str:
    """Return a table of the speed of a framework's chain, relative to the LLM alone."""
    names = {
        "bare": "`LLM.generate`",
        "langchain": "LangChain chain",
        "llama_index": "LlamaIndex query engine",
    }
    columns: list[Column] = [
        ("asked through", "{name}"),
        ("ms an answer", scaled("seconds", 1000, "{:.0f}")),
        ("speed x `LLM.generate`", ratio("ratio")),
        ("same text", "{same_text} of {examples}"),
    ]
    return table(
        columns, ({**one, "name": names[name]} for name, one in document["decoders"].items())
    )


def indexing_table(document: dict[str, Any]) -> str:
    """Return a table of the times of indexing a folder and of a query."""
    columns: list[Column] = [
        ("files", "{files:,}"),
        ("passages", "{passages:,}"),
        ("from nothing", "{first_seconds:.0f} s"),
        ("of it embedding", scaled("embed_share", 100, "{:.0f} %")),
        ("peak memory", "{peak_mb:.0f} MB"),
        ("unchanged", "{unchanged_seconds:.1f} s"),
        ("one edit", "{edit_seconds:.1f} s"),
        ("a query, loaded", "{query_ms_median:.0f} ms"),
    ]
    return table(columns, [document["figures"]])


def registry_table(document: dict[str, Any]) -> str:
    """Return a table of registering texts and finding them, one row per size of the prompt."""
    columns: list[Column] = [
        ("texts", "{texts:,} {kind}"),
        ("register one", "{register_us_median:.0f} µs"),
        ("prompt", "{characters:,} characters"),
        ("passages in it", "{passages} {shown}"),
        ("match", "{match_ms_median:.2f} ms"),
        ("99 of 100", "{match_ms_p99:.2f} ms"),
        ("slowest", "{match_ms_worst:.2f} ms"),
        ("collecting garbage", "{collected_ms_worst:.2f} ms"),
        ("found", scaled("recall", 100, "{:.1f} %")),
        ("besides", "{extra}"),
    ]
    rows = (
        {**figures, **prompt, **prompt[shown], "shown": shown}
        for figures in document["figures"]
        for prompt in figures["prompts"]
        for shown in ("whole", "cut")
    )
    return table(columns, rows)


def never_slower_table(document: dict[str, Any]) -> str:
    """Return a table of the cost of drafting if nothing is copied, one row per set."""
    columns: list[Column] = [
        ("set", "{title}"),
        ("requests", "{requests}"),
        ("x plain", ratio("ratio", 3)),
        ("slowest", "{ratio_worst:.2f}"),
        ("modelled time / plain", "{modelled:.3f}"),
        ("highest", "{modelled_worst:.3f}"),
        ("acceptance length", "{acceptance_length:.2f}"),
        ("rows a pass", "{rows_per_pass:.1f}"),
        ("drafting a pass", "{draft_us_per_pass:.0f} µs"),
    ]
    rows = ({**figures, "title": title} for title, figures in document["sets"].items())
    asked = document["asked"]
    wanted = (
        f"Asked: a median of {asked['ratio']} or more, its lower bound {asked['ratio_low']} or "
        f"more, a modelled time of {asked['modelled']} or less."
    )
    return f"{table(columns, rows)}\n\n{wanted}"


def batch_table(document: dict[str, Any]) -> str:
    """Return a table of the speed-up of answers that share passes, one row per group size."""
    interval = "{value:.2f} ({low:.2f} to {high:.2f})"
    columns: list[Column] = [
        ("sequences", "{size}"),
        ("together: tokens/s", lambda row: f"{_together(row)['tokens_per_second']:.1f}"),
        ("tokens a pass", lambda row: f"{_together(row)['tokens_per_pass']:.1f}"),
        ("x one by one", lambda row: interval.format_map(row["together_over"]["one_by_one"])),
        (
            "x together, plain",
            lambda row: interval.format_map(row["together_over"]["together_plain"]),
        ),
        ("x `generate`, padded", lambda row: interval.format_map(row["together_over"]["generate"])),
        (
            "plain x `generate`, padded",
            lambda row: interval.format_map(row["plain_over_generate"]),
        ),
    ]
    return table(columns, ({**one, "size": size} for size, one in document["sizes"].items()))


def _together(row: Mapping[str, Any]) -> Any:
    return row["decoders"]["together"]


PASS_WAYS = {
    "compiled": "graphs, compiled",
    "graphs": "graphs",
    "launched": "launched one by one",
    "transformers": "transformers' own pass",
}


def roofline_table(document: dict[str, Any]) -> str:
    """Return a table of the times of passes and the bandwidth's limit, by context and way."""
    titles = [
        *("context", "passes", "limit, one row", "t(1)", "of the limit", "t(64) / t(1)"),
        *("beside the device, a step", "peak memory"),
    ]
    rows = []
    for context, figures in document["contexts"].items():
        for way, found in figures["ways"].items():
            cells = [
                f"{int(context):,}",
                PASS_WAYS[way],
                f"{1e3 * figures['limit_seconds']:.2f} ms",
            ]
            rows.append([*cells, *_roofline_cells(found)])
    gigabytes = document["bandwidth_bytes_per_second"] / 1e9
    told = (
        f"Memory is read at {gigabytes:,.0f} GB/s as measured; a pass reads "
        f"{document['weight_bytes'] / 1e9:.2f} GB of weights and the states of its context."
    )
    return f"{plain_table(titles, rows)}\n\n{told}"


def _roofline_cells(found: dict[str, Any]) -> list[str]:
    if "error" in found:
        return [found["error"], "", "", "", ""]
    step, peak = found.get("step"), found["peak_bytes"]
    return [
        f"{found['milliseconds']['1']:.2f} ms",
        f"{100 * found['share_of_limit']:.0f} %",
        f"{found['widest_over_one']:.2f}",
        f"{100 * step['beside_device']:.1f} %" if step else "",
        f"{peak / 1e9:.1f} GB" if peak is not None else "",
    ]


def lossless_table(document: dict[str, Any]) -> str:
    """Return the table of a lossless result, one row per task, dtype and decoder."""
    columns: list[Column] = [
        ("task", "{task}"),
        ("dtype", "{dtype}"),
        ("decoder", lambda row: NAMES.get(row["found"], row["found"])),
        ("answers", "{answers}"),
        ("identical", "{identical}"),
        ("acceptance length", "{acceptance_length:.2f}"),
        ("largest gap of logits at a first difference", largest_gap),
    ]
    lacking = document.get("lacking", {})
    told = [f"{dtype} cannot be computed here: {reason}." for dtype, reason in lacking.items()]
    return "\n\n".join([table(columns, document["comparisons"]), *told])


def exactness_table(document: dict[str, Any]) -> str:
    """Return tables of the decoders with equal answers, and of the cost of their modes."""
    pairs: list[Column] = [
        ("decoder", lambda row: NAMES[row["found"]]),
        ("compared with", lambda row: NAMES[row["wanted"]]),
        ("answers", "{answers}"),
        ("identical", "{identical}"),
        ("largest top-2 gap at a difference", largest_gap),
    ]
    costs: list[Column] = [
        ("costs", lambda row: NAMES[row["decoder"]]),
        ("against", lambda row: NAMES[row["against"]]),
        ("decoding", ratio("decode_seconds")),
        ("prefill", ratio("prefill_seconds")),
        ("passes", "{passes:.2f}"),
    ]
    told = "Costs are times those of the other: seconds and passes a token, seconds of a prompt."
    return "\n\n".join([table(pairs, document["pairs"]), table(costs, document["costs"]), told])


READER_NOTE = (
    "The bundled reader quotes one sentence and names its passage, or says that the passages do "
    "not tell, which takes nine tokens. On code, chats and most summaries that is all it says, so "
    "these rows tell how short answers are decoded and nothing about longer ones."
)


def generation_table(document: dict[str, Any]) -> str:
    """Return a table on a model's own answers, one row per kind of prompt, task and decoder."""
    titles = [
        *("kind", "task", "prompts", "tokens an answer", "decoder", "tokens/s", "x `generate`"),
        *("x plain", "with prefill: x `generate`", "acceptance length", "identical"),
        "largest gap of logits at a first difference",
    ]
    rows = [row for group in document["groups"] for row in _group_rows(group)]
    settings = document["settings"]
    asked = "the model's chat template" if settings["chat_template"] else "plain text"
    told = [
        f"Greedy, at most {settings['max_new_tokens']} new tokens, prompts as {asked}. Every task "
        "begins with nothing learned; a second turn follows `generate`'s first answer."
    ]
    left_out = document.get("left_out", {})
    told += [
        f"Not asked, as they do not fit: {number} of {task}." for task, number in left_out.items()
    ]
    if settings["model"] == "reader":
        told.append(READER_NOTE)
    return f"{plain_table(titles, rows)}\n\n{' '.join(told)}"


def _group_rows(group: dict[str, Any]) -> list[list[str]]:
    head = [group["kind"], group["task"], str(group["prompts"]), f"{group['answer_tokens']:.0f}"]
    same = {one["found"]: one for one in group["same"]}
    rows: list[list[str]] = []
    for name, figures in group["decoders"].items():
        held = same.get(name)
        rows.append(
            [
                *(head if not rows else [""] * len(head)),
                NAMES.get(name, name),
                f"{figures['tokens_per_second']:.1f}",
                ratio_cell(figures, "ratio_generate"),
                ratio_cell(figures, "ratio"),
                ratio_cell(figures["end_to_end"], "ratio_generate"),
                f"{figures['acceptance_length']:.2f}",
                f"{held['identical']} of {held['answers']}" if held else "",
                largest_gap(held) if held else "",
            ]
        )
    return rows


def largest_gap(figures: Mapping[str, Any]) -> str:
    """Return a cell with the largest gap of the two logits at any first difference."""
    gaps = [difference["gap"] for difference in figures["differences"]]
    return f"{max(gaps):.2g}" if gaps and None not in gaps else "not a tie" if gaps else ""


ABLATED = {
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
}
REPLAYED = {
    "ours_64_history": "tree, 64 draft tokens, past rows known",
    "ours_64": "tree, 64 draft tokens",
    "ours_16": "tree, 16 draft tokens",
    "copy": "one copied span",
    "llma": "LLMA as published",
    "lookup": "prompt lookup",
    "suffix": "suffix decoding, past rows known",
}


def replay_table(document: dict[str, Any]) -> str:
    """Return a table of tokens per verify pass, one row per set and one column per drafter."""
    cells = {
        (title, REPLAYED.get(name, name)): f"{figure:.2f}"
        for title, row in document["sets"].items()
        for name, figure in row.items()
    }
    return pivot(["set"], cells)


def ablation_table(document: dict[str, Any]) -> str:
    """Return a table of tokens per pass and differences to the full drafter, by variant."""
    parts = []
    for label, variants in document["drafters"].items():
        cells = {
            (ABLATED.get(variant, variant), name): f"{figures['tokens_per_pass']:.2f}"
            + (f" ({figures['difference']:+.2f})" if variant != "full" else "")
            for variant, row in variants.items()
            for name, figures in row.items()
        }
        parts.append(pivot([REPLAYED.get(f"ours_{label}", label)], cells))
    return "\n\n".join(parts)


def drafting_table(document: dict[str, Any]) -> str:
    """Return a table of the time of a step that drafts a tree."""
    columns: list[Column] = [
        ("draft tokens", "{budget}"),
        ("past requests", "{past}"),
        ("a step, median", "{median_us:.0f} µs"),
        ("95 % below", "{p95_us:.0f} µs"),
        ("first step of a request", "{first_step_ms:.1f} ms"),
    ]
    pasts = {"no_past": "none", "past": f"{document['settings']['past_tokens']:,} tokens"}
    rows = (
        {**figures, "budget": budget, "past": pasts[label]}
        for budget, by_past in document["budgets"].items()
        for label, figures in by_past.items()
    )
    first = document["first_draft"]
    told = (
        f"The first draft of a process takes {first['compiling_seconds']:.1f} s while it is "
        f"compiled, once, and {first['compiled_seconds']:.1f} s later; to remember a request takes "
        f"{document['add_ms']:.1f} ms where so much is remembered."
    )
    return f"{table(columns, rows)}\n\n{told}"


def reliability_table(document: dict[str, Any]) -> str:
    """Return a table of the calibration of estimated probabilities, one row per source."""
    columns: list[Column] = [
        ("drafted from", "{source}"),
        ("draft tokens", "{draft_tokens:,}"),
        ("accepted", scaled("accepted", 100, "{:.1f} %")),
        ("calibration error", "{calibration_error:.4f}"),
        ("log-loss below a constant's", scaled("below_constant", 100, "{:.0f} %")),
    ]
    return table(columns, ({**one, "source": name} for name, one in document["sources"].items()))


def memory_table(document: dict[str, Any]) -> str:
    """Return a table of a process's growth between two requests, one row per setting."""
    first, last = (
        f"{next(iter(document['processes'].values()))['readings'][at]['requests']:,} requests"
        for at in (0, -1)
    )
    megabytes = "{:.1f} MB"
    columns: list[Column] = [
        ("setting", "{name}"),
        (
            f"resident after {first}",
            lambda row: megabytes.format(row["readings"][0]["resident_bytes"] / 1e6),
        ),
        (
            f"after {last}",
            lambda row: megabytes.format(row["readings"][-1]["resident_bytes"] / 1e6),
        ),
        ("growth", scaled("growth_bytes", 1e-6, megabytes)),
        ("of it remembered", scaled("remembered_growth_bytes", 1e-6, megabytes)),
        ("of it kept prefixes", scaled("kept_growth_bytes", 1e-6, megabytes)),
    ]
    return table(columns, ({**one, "name": name} for name, one in document["processes"].items()))


def peak_memory_table(document: dict[str, Any]) -> str:
    """Return a table of each decoder's memory, one row per decoder."""
    columns: list[Column] = [
        ("decoder", "{name}"),
        ("before the answer", scaled("loaded_bytes", 1e-6, "{:,.0f} MB")),
        ("at most", scaled("peak_bytes", 1e-6, "{:,.0f} MB")),
        ("more", lambda row: f"{(row['peak_bytes'] - row['loaded_bytes']) / 1e6:,.0f} MB"),
    ]
    return table(columns, decoder_rows(document["decoders"]))


_SHOWN = ("hit@1", "hit@6", "hit@10", "mrr@10", "ndcg@10", "recall@10")
_MODES = {"dense": "dense", "text": "full-text", "fused": "fused"}
_ANSWERS = {
    "answers_held_out": "XQuAD, articles not trained on; the short answer",
    "answers_demo": "demo; the sentence that answers",
}
_WHOSE = {
    "answer": "what the reader says",
    "answer_when_found": "of it, where its passages hold the sentence",
    "quotation": "the sentence itself, the best a quotation can do",
}


def quality_table(document: Document) -> str:
    """Return tables of the quality of search and of the reader's answers."""
    parts = []
    if document["sets"]:
        titles = ["set", "passages", "questions", "search", *_SHOWN, "fused less this, nDCG@10"]
        parts += [plain_table(titles, _search_rows(document["sets"])), _LEGEND]
    if document["answers"]:
        titles = ["questions", "asked", "scored", "exact match", "F1", "answer contained"]
        parts.append(plain_table(titles, _answer_rows(document["answers"])))
        parts.append("\n".join(map(_judged, document["answers"].values())))
    return "\n\n".join(parts)


_LEGEND = """One relevant passage a question, the one it was written on: another that answers it \
counts as wrong. `msmarco`: the ten passages that a search engine gave for the question, all \
counted as relevant, for no judgement of them is recorded. SQuAD's questions were written with the \
passage in sight, so that they share its words; the embedding model was trained on SQuAD, Natural \
Questions and MS MARCO too, says its model card. In brackets 95 % of the means of other draws of \
articles."""


def _search_rows(sets: Document) -> Iterable[Sequence[str]]:
    for name, figures in sets.items():
        for mode, shown in _MODES.items():
            values = figures["modes"][mode]
            less = figures["fused_over"].get(mode)
            yield (
                name,
                f"{figures['passages']:,}",
                f"{figures['questions']:,}",
                shown,
                *(f"{values[metric][0]:.3f}" for metric in _SHOWN),
                _signed(less["ndcg@10"]) if less else "",
            )


def _answer_rows(answers: Document) -> Iterable[Sequence[str]]:
    for name, figures in answers.items():
        for whose, shown in _WHOSE.items():
            scores = figures[whose]
            if scores:
                asked = figures["found" if whose == "answer_when_found" else "questions"]
                cells = (_within(scores[score]) for score in ("exact", "f1", "contains"))
                yield (_ANSWERS.get(name, name), f"{asked:,}", shown, *cells)


def _judged(figures: Document) -> str:
    right, cited = (f"{figures[name][0]:.1%}".replace("%", " %") for name in ("right", "cited"))
    refused = ""
    if figures["unanswerable"]:
        refused = f"; {figures['refused']} of {figures['unanswerable']} unanswerable refused"
    return (
        f"Of {figures['questions']}: right sentence {right}, right file cited {cited}{refused}.\n"
    )


def _within(spread: Sequence[float]) -> str:
    value, low, high = spread
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


def _signed(spread: Sequence[float]) -> str:
    value, low, high = spread
    return f"{value:+.3f} ({low:+.3f} to {high:+.3f})"


RAG_WAYS = {
    "bare": "`ragaccel.RAG`",
    "langchain": "LangChain chain",
    "llama_index": "LlamaIndex query engine",
}
RAG_STAGES = ("embed", "search", "prompt", "prefill", "draft", "verify", "rest")
_DECODING = {"_plain": "plain", "_again": "accelerated, asked again", "": "accelerated"}


def rag_speedup_table(document: dict[str, Any]) -> str:
    """Return a RAG result's tables by way: median milliseconds, then mean ones by stage."""
    columns: list[Column] = [
        ("asked through", "{through}"),
        ("decoding", "{decoding}"),
        ("first word, ms", scaled("first_token_seconds", 1000, "{:,.0f}")),
        ("x plain", ratio("ratio_first_token")),
        ("answer, ms", scaled("total_seconds", 1000, "{:,.0f}")),
        ("x plain", ratio("ratio")),
        ("x `generate`", ratio("ratio_generate")),
        ("tokens a pass", "{acceptance_length:.2f}"),
        *((stage, _stage_milliseconds(stage)) for stage in RAG_STAGES),
        ("same text", "{same_text} of {answers}"),
    ]
    rows = []
    for name, figures in document["decoders"].items():
        through, decoding = _rag_names(name)
        rows.append({**figures, "through": through, "decoding": decoding})
    return f"{table(columns, rows)}\n\n{_rag_index(document)}"


def _stage_milliseconds(stage: str) -> Cell:
    return lambda row: f"{1000 * row['stages'][stage]:,.1f}" if stage in row["stages"] else ""


def _rag_index(document: dict[str, Any]) -> str:
    index, k = document["index"], document["settings"]["k"]
    told = f"{index['passages']:,} passages in the index, {k} in a prompt"
    if "own_found" not in index:
        return f"{told}."
    return f"{told}; of those that answers were written from, {index['own_found']:.0%} are found."


def _rag_names(name: str) -> tuple[str, str]:
    if name == "generate":
        return "the same passages", "`model.generate`"
    suffix = next(suffix for suffix in _DECODING if name.endswith(suffix))
    return RAG_WAYS[name.removesuffix(suffix)], _DECODING[suffix]
