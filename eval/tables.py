"""Tables: each kind of result in Markdown."""

from __future__ import annotations

from typing import Any

from eval.markdown import ratio_cell as _ratio
from eval.markdown import table

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
    """Lay out a speed result: one row a contender, decoding first, then prefill included."""
    peaks = any("peak_bytes" in figures for figures in document["contenders"].values())
    static = any("ratio_static" in figures for figures in document["contenders"].values())
    titles = [
        *("decoder", "tokens/s", "x plain", "x `generate`", *["x static cache"] * static),
        *("x copying", "acceptance length", "efficiency", "with prefill: tokens/s", "x plain"),
        *("x `generate`", "same tokens", *["peak memory"] * peaks),
    ]
    rows = []
    for name, figures in document["contenders"].items():
        whole = figures["end_to_end"]
        same = figures["identical_to_generate"]
        cells = [
            NAMES.get(name, name),
            f"{figures['tokens_per_second']:.1f}",
            _ratio(figures, "ratio"),
            _ratio(figures, "ratio_generate"),
            *[_ratio(figures, "ratio_static")] * static,
            _ratio(figures, "ratio_copying"),
            f"{figures['acceptance_length']:.2f}",
            _ratio(figures, "efficiency"),
            f"{whole['tokens_per_second']:.1f}",
            _ratio(whole, "ratio"),
            _ratio(whole, "ratio_generate"),
            "" if same is None else f"{100 * same:.0f} %",
            *[f"{figures.get('peak_bytes', 0) / 1e9:.1f} GB"] * peaks,
        ]
        rows.append(cells)
    return f"{table(titles, rows)}\n\n{seconds_table(document)}"


def seconds_table(document: dict[str, Any]) -> str:
    """Lay out where the time went, in seconds over all runs."""
    remembering = any("remember" in one["seconds"] for one in document["contenders"].values())
    stages = [
        *("prefill", "draft", "verify", "model", *["remember"] * remembering, "other", "forcing")
    ]
    rows = []
    for name, figures in document["contenders"].items():
        seconds = figures["seconds"]
        cells = [f"{seconds[stage]:.2f}" if stage in seconds else "" for stage in stages]
        rows.append([NAMES.get(name, name), *cells])
    return table(["seconds", *stages], rows)


def frameworks_table(document: dict[str, Any]) -> str:
    """Lay out how fast an answer is inside a framework's chain, against outside."""
    names = {
        "bare": "`LLM.generate`",
        "langchain": "LangChain chain",
        "llama_index": "LlamaIndex query engine",
    }
    rows = [
        [
            names[name],
            f"{1000 * figures['seconds']:.0f}",
            _ratio(figures, "ratio"),
            f"{figures['same_text']} of {figures['examples']}",
        ]
        for name, figures in document["contenders"].items()
    ]
    return table(["asked through", "ms an answer", "speed x `LLM.generate`", "same text"], rows)


def indexing_table(document: dict[str, Any]) -> str:
    """Lay out what indexing a folder took, and a query on it."""
    figures = document["figures"]
    cells = {
        "files": f"{figures['files']:,}",
        "passages": f"{figures['passages']:,}",
        "from nothing": f"{figures['first_seconds']:.0f} s",
        "of it embedding": f"{100 * figures['embed_share']:.0f} %",
        "peak memory": f"{figures['peak_mb']:.0f} MB",
        "unchanged": f"{figures['unchanged_seconds']:.1f} s",
        "one edit": f"{figures['edit_seconds']:.1f} s",
        "a query, loaded": f"{figures['query_ms_median']:.0f} ms",
    }
    return table(list(cells), [list(cells.values())])


def registry_table(document: dict[str, Any]) -> str:
    """Lay out what registering texts took, and finding them in prompts: one row a prompt's size."""
    titles = [
        *("texts", "register one", "prompt", "passages in it", "match", "99 of 100", "slowest"),
        *("collecting garbage", "found", "besides"),
    ]
    rows = [
        [
            f"{figures['texts']:,} {figures['kind']}",
            f"{figures['register_us_median']:.0f} µs",
            f"{prompt['characters']:,} characters",
            f"{found['passages']} {shown}",
            f"{found['match_ms_median']:.2f} ms",
            f"{found['match_ms_p99']:.2f} ms",
            f"{found['match_ms_worst']:.2f} ms",
            f"{found['collected_ms_worst']:.2f} ms",
            f"{100 * found['recall']:.1f} %",
            str(found["extra"]),
        ]
        for figures in document["figures"]
        for prompt in figures["prompts"]
        for shown, found in ((shown, prompt[shown]) for shown in ("whole", "cut"))
    ]
    return table(titles, rows)


def never_slower_table(document: dict[str, Any]) -> str:
    """Lay out what drafting costs where nothing is copied: one row a set."""
    titles = [
        *("set", "requests", "x plain", "slowest", "modelled time / plain", "highest"),
        *("acceptance length", "rows a pass", "drafting a pass"),
    ]
    rows = [
        [
            title,
            str(figures["requests"]),
            _ratio(figures, "ratio", 3),
            f"{figures['ratio_worst']:.2f}",
            f"{figures['modelled']:.3f}",
            f"{figures['modelled_worst']:.3f}",
            f"{figures['acceptance_length']:.2f}",
            f"{figures['rows_per_pass']:.1f}",
            f"{figures['draft_us_per_pass']:.0f} µs",
        ]
        for title, figures in document["sets"].items()
    ]
    asked = document["asked"]
    wanted = (
        f"Asked: a median of {asked['ratio']} or more, its lower bound {asked['ratio_low']} or "
        f"more, a modelled time of {asked['modelled']} or less."
    )
    return f"{table(titles, rows)}\n\n{wanted}"


def batch_table(document: dict[str, Any]) -> str:
    """Lay out how much sooner answers are there that share passes: one row a size."""
    titles = [
        *("sequences", "together: tokens/s", "tokens a pass", "x one by one", "x together, plain"),
        *("x `generate`, padded", "plain x `generate`, padded"),
    ]
    rows = []
    for size, figures in document["sizes"].items():
        together, over = figures["contenders"]["together"], figures["together_over"]
        ratios = [over["one_by_one"], over["together_plain"], over["generate"]]
        cells = [
            size,
            f"{together['tokens_per_second']:.1f}",
            f"{together['tokens_per_pass']:.1f}",
            *(_spread(one) for one in (*ratios, figures["plain_over_generate"])),
        ]
        rows.append(cells)
    return table(titles, rows)


WAYS = {
    "compiled": "graphs, compiled",
    "graphs": "graphs",
    "launched": "launched one by one",
    "transformers": "transformers' own pass",
}


def roofline_table(document: dict[str, Any]) -> str:
    """Lay out what passes take against the bandwidth's limit: one row a context and way."""
    titles = [
        *("context", "passes", "limit, one row", "t(1)", "of the limit", "t(64) / t(1)"),
        *("beside the device, a step", "peak memory"),
    ]
    rows = []
    for context, figures in document["contexts"].items():
        for way, found in figures["ways"].items():
            cells = [f"{int(context):,}", WAYS[way], f"{1e3 * figures['limit_seconds']:.2f} ms"]
            rows.append([*cells, *_roofline_cells(found)])
    gigabytes = document["bandwidth_bytes_per_second"] / 1e9
    told = (
        f"Memory is read at {gigabytes:,.0f} GB/s as measured; a pass reads "
        f"{document['weight_bytes'] / 1e9:.2f} GB of weights and the states of its context."
    )
    return f"{table(titles, rows)}\n\n{told}"


def _roofline_cells(found: dict[str, Any]) -> list[str]:
    if "error" in found:
        return [found["error"], "", "", "", ""]
    step, peak = found.get("step"), found["peak_bytes"]
    return [
        f"{found['milliseconds']['1']:.2f} ms",
        f"{100 * found['share_of_limit']:.0f} %",
        f"{found['most_rows_over_one']:.2f}",
        f"{100 * step['beside_device']:.1f} %" if step else "",
        f"{peak / 1e9:.1f} GB" if peak is not None else "",
    ]


def _spread(ratio: dict[str, float]) -> str:
    return f"{ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
