"""Architectures: which models of transformers are answered for token by token, one row each.

    python -m eval.architectures --out eval/results --page docs/models.md

Every decoder-only family of the installed transformers is built small and random, without windows,
with sliding ones, with a window that its code ignores, with several kinds of rope, and with all
lengths at which it changes made short. Answers run past all of these: alone and in a batch of
unequal lengths, with and without drafts of the mutated answer, against ``model.generate``. A row
says *equal*, *refused* with the cause, *wrong*, or *not tried* with the reason. Models are of
float64; of float32 where that is refused or does not run, and then a near tie may fall either way.

Rows stand beside the result until it is whole, so that a run that was stopped goes on, and one with
a larger ``--count`` as well. ``--tree`` runs the same models with the ragaccel of another checkout.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import warnings
from argparse import Namespace
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import transformers

from eval.ledger import kept_beside
from eval.script import in_folder, measured, new_parser, note, result
from eval.small_models import (
    VOCAB,
    Configuration,
    NotBuildableError,
    build,
    configurations,
    families,
    first_line,
    mutated,
    random_prompt,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Row = dict[str, Any]

RESULTS = Path(__file__).parent.resolve() / "results"
NAME, BEFORE = "architectures.json", "architectures-before.json"
EQUAL, REFUSED, WRONG, NOT_TRIED = "equal", "refused", "wrong", "not tried"
LENGTHS = (3, 21, 46)  # of the prompts of a batch; each is asked alone as well
NEW_TOKENS = 24
PATIENCE = 45  # seconds for a configuration
NEAR_TIE = 1e-4  # of the spread of the logits; only in float32


class OverdueError(Exception):
    """A configuration takes too long."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.tree:
        sys.exit(
            run_with_tree(options.tree, list(sys.argv[1:] if arguments is None else arguments))
        )
    options.out = in_folder(options.out, NAME)
    if options.kept:
        document = json.loads((RESULTS / NAME).read_text(encoding="utf-8"))
    else:
        document = measured("architectures", measure, options)
        if options.out and not options.count:  # the result has all of them
            options.out.with_suffix(".rows.jsonl").unlink(missing_ok=True)
    if options.page:
        options.page.write_text(models_page(document), encoding="utf-8")
    print(json.dumps({"summary": document["summary"], "compared": document.get("compared")}))
    if document["summary"].get(WRONG):
        sys.exit(1)


def parse(arguments: Sequence[str] | None) -> Namespace:
    parser = new_parser("architectures", __doc__)
    add = parser.add_argument
    add("--families", help="comma-separated model types (default: all)")
    add("--variants", help="comma-separated; only these variants")
    add("--count", type=int, help="most configurations to try")
    add("--before", type=Path, help="an earlier result to compare with, where there is one")
    add("--tree", type=Path, help="a checkout whose ragaccel is tried in place of this one")
    add("--out", type=Path, help=f"result file, or its folder: {NAME} then")
    add("--page", type=Path, help="also write the page of supported models")
    add("--kept", action="store_true", help="try nothing, write the page of the committed result")
    return parser.parse_args(arguments)


def run_with_tree(tree: Path, arguments: Sequence[str]) -> int:
    """Run this module beside another checkout's package; return the exit code."""
    at = next(i for i, argument in enumerate(arguments) if argument.startswith("--tree"))
    rest = [*arguments[:at], *arguments[at + (1 if "=" in arguments[at] else 2) :]]
    for i, argument in enumerate(rest):
        if i and rest[i - 1] in ("--out", "--page", "--before"):
            rest[i] = str(Path(argument).resolve())
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "ragaccel").symlink_to(tree.resolve() / "ragaccel")
        (Path(folder) / "eval").symlink_to(Path(__file__).parent.resolve())
        command = [sys.executable, "-m", "eval.architectures", *rest]
        return subprocess.run(command, cwd=folder, check=False).returncode


def measure(options: Namespace) -> dict[str, Any]:
    """Try the configurations one after another; sum up, and compare with an earlier result."""
    with _quiet():
        return _measured(options)


def _measured(options: Namespace) -> dict[str, Any]:
    chosen = list(_chosen(options))
    settings = {"tree": _commit_of_tree(), "prompts": list(LENGTHS), "new_tokens": NEW_TOKENS}
    ledger = kept_beside(options.out, {**settings, "transformers": transformers.__version__})
    known = {(row["family"], row["variant"]): row for row in ledger.rows}
    if any((one.family, one.variant) not in known for one in chosen):
        _draft_once()
    rows = []
    for number, configuration in enumerate(chosen, 1):
        row = known.get((configuration.family, configuration.variant))
        if row is None:
            row = try_configuration(configuration)
            ledger.add(row)
            told = f"{row['status']} {row.get('why', '')}"
            note(f"{number}/{len(chosen)} {configuration.name}: {told}")
        rows.append(row)
    document = result(
        "architectures",
        settings,
        summary=dict(Counter(row["status"] for row in rows)),
        accepted_tokens=sum(row.get("accepted", 0) for row in rows),
        rows=rows,
    )
    before = options.before
    if before is None and (RESULTS / BEFORE).exists():
        before = RESULTS / BEFORE
    if before is not None and before.exists():
        document["compared"] = compare(json.loads(before.read_text(encoding="utf-8")), document)
    return document


def try_configuration(configuration: Configuration) -> Row:
    """Try one configuration in float64, and in float32 where that does not go."""
    row = _tried(configuration, torch.float64)
    if row["status"] not in (REFUSED, NOT_TRIED):
        return row
    other = _tried(configuration, torch.float32)
    if other["status"] in (EQUAL, WRONG) or row["status"] == NOT_TRIED:
        return {**other, "float64": row["why"]} if other["status"] != NOT_TRIED else other
    return row


def compare(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Tell which rows changed since an earlier result, and what the earlier one counted."""
    earlier = {(row["family"], row["variant"]): row for row in before["rows"]}
    changes = []
    for row in now["rows"]:
        old = earlier.get((row["family"], row["variant"]))
        if old is not None and old["status"] != row["status"]:
            change = {"row": f"{row['family']}, {row['variant']}", "was": old["status"]}
            changes.append({**change, "is": row["status"], "why": row.get("why", "")})
    return {"summary_before": before["summary"], "changes": changes}


def models_page(document: dict[str, Any]) -> str:
    """Write the page of models that are decoded exactly, from a result."""
    rows, versions = document["rows"], document["machine"]["transformers"]
    by_family: dict[str, list[Row]] = {}
    for row in rows:
        by_family.setdefault(row["family"], []).append(row)
    equal = [name for name, own in by_family.items() if any(r["status"] == EQUAL for r in own)]
    lines = [
        "# Models",
        "",
        "<!-- written by: python -m eval.architectures --kept --page docs/models.md -->",
        "",
        f"Made from a table of {len(rows)} small random models of every decoder-only family of "
        f"transformers {versions}: answers past every length at which a model changes, alone and "
        "in a batch of unequal lengths, against `model.generate`, token for token "
        f"([eval/results/{NAME}](../eval/results/{NAME}); {_counted(document['summary'])}). At "
        "loading, a small copy of your model's architecture is checked in the same way, so a model "
        "that is not in the table is decoded exactly or refused with the cause.",
        "",
        "*Plain* has full attention in all layers, or a hybrid's own first two; *mixed windows* a "
        "sliding and a full layer; *leftover window* a `sliding_window` in the config of a model "
        "whose code knows none, which transformers' cache applies all the same: take it out of the "
        "config; *short lengths* has every other length at which the model changes made so short "
        "that answers pass it. The table has the cause of every refusal.",
        "",
        f"## Decoded exactly ({len(equal)} model types)",
        "",
        "| model type | equal | refused |",
        "|---|---|---|",
    ]
    for name in equal:
        own = by_family[name]
        lines.append(f"| {name} | {_variants(own, EQUAL)} | {_variants(own, REFUSED)} |")
    lines += ["", "## Refused when they are loaded", "", "| model type | cause |", "|---|---|"]
    for name, own in by_family.items():
        causes = [row["why"] for row in own if row["status"] == REFUSED]
        if causes and name not in equal:
            lines.append(f"| {name} | {_cell(causes[0])} |")
    lines += ["", "## Not tried", "", "| model type | why |", "|---|---|"]
    for name, own in by_family.items():
        if all(row["status"] == NOT_TRIED for row in own):
            lines.append(f"| {name} | {_cell(own[0]['why'])} |")
    return "\n".join(lines) + "\n"


def _counted(summary: dict[str, int]) -> str:
    return ", ".join(f"{summary.get(status, 0)} {status}" for status in (EQUAL, REFUSED, WRONG))


def _variants(rows: Sequence[Row], status: str) -> str:
    return ", ".join(row["variant"] for row in rows if row["status"] == status)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _chosen(options: Namespace) -> Iterator[Configuration]:
    wanted = options.families.split(",") if options.families else families()
    unknown = sorted(set(wanted) - set(families()))
    if unknown:
        raise ValueError(f"no model type {', '.join(unknown)} in this transformers")
    variants = options.variants.split(",") if options.variants else None
    number = 0
    for family in wanted:
        for configuration in configurations(family):
            if variants is None or configuration.variant in variants:
                number += 1
                if options.count is None or number <= options.count:
                    yield configuration


def _tried(configuration: Configuration, dtype: torch.dtype) -> Row:
    row: Row = {
        "family": configuration.family,
        "variant": configuration.variant,
        "dtype": str(dtype).removeprefix("torch."),
    }
    started = perf_counter()
    try:
        with _in_time(PATIENCE), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row.update(_compared(build(configuration, dtype)))
    except (NotBuildableError, OverdueError) as error:
        row.update(status=NOT_TRIED, why=str(error))
    row["seconds"] = round(perf_counter() - started, 1)
    return row


def _compared(model: Any) -> Row:
    """Answer alone and together, drafted and not, and say what came of it."""
    from ragaccel import LLM, NoDrafter, Reference
    from ragaccel.errors import UnsupportedModelError

    chance = random.Random(5)
    prompts = [random_prompt(chance, length) for length in LENGTHS]
    try:
        wanted = [_generated(model, prompt) for prompt in prompts]
    except OverdueError:
        raise
    except Exception as error:
        raise NotBuildableError(
            f"its own generate fails: {type(error).__name__}: {first_line(error)}"
        ) from error
    row: Row = {"distinct": min(len(set(tokens)) for tokens in wanted)}
    guesses = [
        [Reference(tuple(mutated(prompt[-8:] + tokens, chance))) for _ in range(4)]
        for prompt, tokens in zip(prompts, wanted, strict=True)
    ]
    try:
        llm = LLM(model, _tokenizer(), keep_costs=False, token_budget=24)
        plain = [llm.generate(prompt, drafter=NoDrafter(), **_SETTINGS) for prompt in prompts]
        alone = [
            llm.generate(prompt, references=own, **_SETTINGS)
            for prompt, own in zip(prompts, guesses, strict=True)
        ]
        batch = llm.generate(prompts, references=guesses, **_SETTINGS)
    except OverdueError:
        raise
    except UnsupportedModelError as error:
        return {**row, "status": REFUSED, "why": first_line(error)}
    except Exception as error:  # one of ours as well: what was accepted at load must be answered
        return {**row, "status": WRONG, "why": f"{type(error).__name__}: {first_line(error)}"}
    answers = [*alone, *batch]
    row["accepted"] = sum(answer.stats.accepted_tokens for answer in answers)
    found = {"without drafts": plain, "with drafts": alone, "in a batch": batch}
    where = [
        f"{way}, prompt of {len(prompts[i])}"
        for way, those in found.items()
        for i, answer in enumerate(those)
        if not _same(model, prompts[i], answer.token_ids, wanted[i])
    ]
    return {**row, "status": WRONG, "why": "; ".join(where)} if where else {**row, "status": EQUAL}


_SETTINGS = {"max_new_tokens": NEW_TOKENS}


def _generated(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=2,
        )
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


def _same(model: Any, prompt: Sequence[int], found: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether answers are the same, or part in float32 where two tokens are nearly tied."""
    pairs = enumerate(zip(found, wanted, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), None)
    if place is None:
        return len(found) == len(wanted)
    if model.dtype != torch.float32:
        return False
    ids = torch.tensor([[*prompt, *wanted[:place]]])
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0, -1].double()
    gap = abs(float(logits[found[place]] - logits[wanted[place]]))
    return gap < NEAR_TIE * float(logits.std())


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(VOCAB)}
    made = Tokenizer(models.WordLevel(words, unk_token="w3"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w3")


def _draft_once() -> None:
    """Have the drafting functions compiled, so that every configuration is drafted for by trees."""
    from ragaccel import LLM

    model = build(Configuration("llama", "plain"), torch.float32)
    LLM(model, _tokenizer(), keep_costs=False).warm_up()


def _commit_of_tree() -> str:
    """The commit of the checkout whose ragaccel is tried."""
    import ragaccel

    folder = Path(ragaccel.__file__).resolve().parent
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


@contextmanager
def _quiet() -> Iterator[None]:
    """Say nothing of what is found odd in random models, and ask no hub; as before afterwards."""
    ours, theirs = logging.getLogger("ragaccel"), transformers.logging.get_verbosity()
    level, offline = ours.level, os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers.logging.set_verbosity(logging.CRITICAL)
    ours.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        ours.setLevel(level)
        transformers.logging.set_verbosity(theirs)
        os.environ.pop("HF_HUB_OFFLINE")
        if offline is not None:
            os.environ["HF_HUB_OFFLINE"] = offline


@contextmanager
def _in_time(seconds: int) -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise OverdueError(f"took longer than {seconds} s")

    if not hasattr(signal, "SIGALRM"):
        yield
        return
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    main()
