"""SPACE's layout: what its experiments came to, in Markdown, the published figures below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eval.answer_tables import largest_gap
from eval.contenders import PLAIN
from eval.markdown import ratio_cell, table
from eval.papers.space_decoders import BOTH, COPY, GUESSES, PAPER, TREE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Document = dict[str, Any]
    Figures = dict[str, Any]

THEIR_MASKS = 5  # as their training script has it
LABELS = {TREE: "SPACE, trees", COPY: "copying", BOTH: "copying and SPACE"}
COUNTED = (
    "Counted are the rows of verify passes. Our trees have their first guesses from mask tokens "
    "that are read with the prompt; as published the first pass has none."
)
THEIRS = (
    "Theirs are models of 6 to 70 billion parameters, which had learned from far more text, with "
    "all weights tuned further (on alpaca_gpt4_en and lima, as their repository's script has it), "
    "and other sets: figures of so different models and texts cannot be compared one by one. What "
    "they call lossless is against the model so tuned. Ours is against the model as it was: its "
    "weights are frozen, and what was trained acts on mask tokens' rows alone."
)


def space_reader_table(document: Document) -> str:
    """Lay out SPACE on the bundled reader: every decoder, what was asked, what was published."""
    kinds = ", ".join(f"{number} of {kind}" for kind, number in document["kinds"].items())
    parts = [f"Questions that count: {kinds}. {COUNTED}"]
    for title, figures in document["sets"].items():
        parts += set_parts(title, figures, document["settings"])
    (figures,) = document["sets"].values()
    asked, greedy = document["asked"], figures["greedy"]
    best = max(papers(greedy).values(), key=_length)
    over = (
        greedy[f"{BOTH}_{GUESSES}"]["tokens_per_pass"]
        / greedy[f"{COPY}_{GUESSES}"]["tokens_per_pass"]
    )
    parts.append(
        f"Asked: SPACE alone {asked['space']} tokens a pass or more; as published it has "
        f"{_length(best):.2f}, our trees {greedy[f'{TREE}_{GUESSES}']['tokens_per_pass']:.2f}. "
        f"Copying and SPACE {asked['beside_copying']} times copying's tokens a pass or more: "
        f"{over:.3f} with {GUESSES} guesses."
    )
    return "\n\n".join([*parts, *beside(document)])


def space_scratch_table(document: Document) -> str:
    """Lay out SPACE on a model trained from scratch: how it was trained, then each set."""
    trained = document["trained"]
    parts = [
        f"The model: {document['parameters'] / 1e6:.0f} million parameters, trained from nothing "
        f"for {trained['seconds'] / 60:.1f} minutes on {trained['tokens_seen'] / 1e6:.1f} million "
        f"tokens, drawn from {trained['text_tokens'] / 1e6:.1f} million of {trained['text']}; loss "
        f"{trained['held_in_loss']:.2f} nats a token on text it learned, "
        f"{trained['held_out_loss']:.2f} on held-out text. {COUNTED}"
    ]
    for title, figures in document["sets"].items():
        parts += set_parts(title, figures, document["settings"])
    if document["curve"]:
        parts += ["Over the adapter's training:", steps_table(document["curve"])]
    return "\n\n".join([*parts, *beside(document)])


def set_parts(title: str, figures: Figures, settings: Mapping[str, Any]) -> Iterator[str]:
    """Lay out one set: all greedy decoders, then the sampled ones."""
    greedy = figures["greedy"]
    yield f"**{title}**: {figures['answers']} answers, greedy"
    yield decoders_table(greedy, figures["answers"])
    yield gains(greedy)
    yield f"**{title}**, sampled at temperature {settings['temperature']} with plain's seeds"
    yield decoders_table(figures["sampled"], figures["answers"])


def decoders_table(decoders: Mapping[str, Figures], answers: int) -> str:
    """Lay out decoders: one row each."""
    rows = [
        [
            label_of(name),
            f"{figures['tokens_per_pass']:.2f}",
            f"{figures['guesses_per_pass']:.1f}",
            f"{figures['masks_per_pass']:.1f}",
            f"{figures['identical']} of {answers}",
            largest_gap(figures) if figures.get("differences") else "",
            f"{figures['tokens_per_second']:.1f}",
            "" if name == PLAIN else ratio_cell(figures, "ratio"),
            "" if name == PLAIN else ratio_cell(figures["end_to_end"], "ratio"),
        ]
        for name, figures in decoders.items()
    ]
    titles = ["decoder", "tokens a pass", "guesses a pass", "mask tokens a pass"]
    titles += ["same as plain", "largest gap of logits", "tokens/s", "x plain"]
    return table([*titles, "x plain, the prompt's pass included"], rows)


def label_of(name: str) -> str:
    """What a decoder is called in a table."""
    if name == PLAIN:
        return "plain"
    if name.startswith(PAPER):
        return f"SPACE as published, k = {name.rpartition('_')[2]}"
    kind = name.removesuffix(f"_{GUESSES}")
    return f"{LABELS[kind]}, {'by cost' if kind == name else f'{GUESSES} guesses'}"


def gains(greedy: Mapping[str, Figures]) -> str:
    """Say what SPACE adds to copying."""
    told = []
    for suffix, words in ((f"_{GUESSES}", f"with {GUESSES} guesses"), ("", "by cost")):
        both, alone = greedy[BOTH + suffix], greedy[COPY + suffix]
        more = 100 * (both["tokens_per_pass"] / alone["tokens_per_pass"] - 1)
        times = both["ratio"] / alone["ratio"]
        told.append(f"{words} {more:+.1f} % tokens a pass, {times:.2f} times its median speed")
    return f"SPACE beside copying: {'; '.join(told)}."


def papers(decoders: Mapping[str, Figures]) -> dict[int, Figures]:
    """The paper's decoders by their number of mask tokens."""
    return {
        int(name.rpartition("_")[2]): figures
        for name, figures in decoders.items()
        if name.startswith(PAPER)
    }


def _length(figures: Figures) -> float:
    return float(figures["tokens_per_pass"])


def space_curves_table(document: Document) -> str:
    """Lay out held-out tokens a pass over training steps, and by mask tokens at the end."""
    curve, held_out = document["curve"], document["curve"][-1]["samples"]
    last = curve[-1]
    ks = range(1, len(last["tokens_per_pass"]) + 1)
    with_prompt = last.get("with_prompt")
    told = "tokens a pass, the first guesses read with the prompt"
    rows = [
        ["tokens a pass", *(f"{value:.2f}" for value in last["tokens_per_pass"])],
        *[[told, *(f"{value:.2f}" for value in with_prompt or ())]] * bool(with_prompt),
        ["right guesses of the k-th mask token", *(f"{100 * v:.0f} %" for v in last["right"])],
    ]
    return "\n\n".join(
        [
            f"Tokens a pass by the paper's layout, walked over {held_out} held-out answers without "
            f"decoding; {100 * last['own']:.1f} % of their tokens are the model's own choice:",
            steps_table(curve),
            f"After {last['step']:,} steps, by the number of mask tokens:",
            table(["", *(f"k = {k}" for k in ks)], rows),
            recipe_line(document["recipe"], document["samples"]["count"]),
        ]
    )


def steps_table(curve: Sequence[Mapping[str, Any]]) -> str:
    """Lay out tokens a pass: one row an evaluation, one column a number of mask tokens."""
    ks = range(1, len(curve[-1]["tokens_per_pass"]) + 1)
    rows = [
        [f"{one['step']:,}", *(f"{value:.2f}" for value in one["tokens_per_pass"])] for one in curve
    ]
    return table(["steps", *(f"k = {k}" for k in ks)], rows)


def recipe_line(recipe: Mapping[str, Any], samples: int) -> str:
    """Say by which recipe an adapter was trained."""
    learned = "the model's own distribution" if recipe["distill"] else "the recorded tokens"
    return (
        f"Trained: mode {recipe['mode']}, rank {recipe['rank']}, {recipe['num_masks']} mask tokens "
        f"that {'share one embedding' if recipe['shared_mask'] else 'have one embedding each'}, "
        f"{samples:,} samples, up to {recipe['num_cuts']} places of each, learning {learned}, "
        f"rate {recipe['learning_rate']:g}."
    )


def beside(document: Document) -> Iterator[str]:
    """How the adapter was trained, our figures beside published ones, and how the two differ."""
    adapter, training = document["adapter"], document["adapter"]["training"]
    told = [
        f"The adapter: {adapter['parameters'] / 1e6:.2f} million numbers beside the model's "
        f"{document['parameters'] / 1e6:.1f} million; our trees take {adapter['num_useful']} of "
        f"its {adapter['num_masks']} mask tokens."
    ]
    if "recipe" in training:
        told.append(recipe_line(training["recipe"], training["samples"]))
        told.append(f"{training['steps']:,} steps over {training['tokens']:,} tokens in all.")
    yield " ".join(told)
    k = min(THEIR_MASKS, adapter["num_masks"])
    yield f"SPACE alone, greedy, ours with {k} mask tokens:"
    titles = ["model", "trained", "sets", "tokens a pass", "speed-up over plain"]
    yield table(titles, [*_our_rows(document, k), *_their_rows(document["published"])])
    yield THEIRS


def _our_rows(document: Document, k: int) -> Iterator[list[str]]:
    size, rank = document["parameters"] / 1e6, document["adapter"]["rank"]
    for title, figures in document["sets"].items():
        found = papers(figures["greedy"])[k]
        yield [
            f"ours: {document['settings']['model']}, {size:.0f} million",
            f"gated changes of rank {rank}, base frozen",
            title,
            f"{found['tokens_per_pass']:.2f}",
            f"{found['ratio']:.2f}",
        ]


def _their_rows(figures: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """One row a model; what its figures are of stands behind the last comma of their setting."""
    by_model: dict[str, list[Mapping[str, Any]]] = {}
    for figure in figures:
        by_model.setdefault(figure["setting"].rpartition(", ")[0], []).append(figure)
    return [
        [
            f"{model} ({own[0]['source']})",
            "all weights",
            " / ".join(one["setting"].rpartition(", ")[2] for one in own),
            " / ".join(f"{one['tokens_per_pass']:.2f}" for one in own),
            " / ".join(one["speedup"] for one in own),
        ]
        for model, own in by_model.items()
    ]
