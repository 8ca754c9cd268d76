"""Compare small random models of every decoder-only family with ``generate``.

``configurations`` lists the variants of each family: without sliding windows, with them, with a
``sliding_window`` that its code ignores, with every kind of rope that it supports, and with short
values for all lengths at which the computation changes.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from eval import cli
from eval.runner import note, open_results_log, result

SMALL = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""How models are made small.

``sizes`` are fields of every config that has them. ``families`` has other fields of single
families; null keeps the family's default. ``ropes`` are the kinds of rope, and ``lengths`` are the
fields, besides windows, at which a model's computation changes. ``special`` are variants, [family,
variant, changes], in which single faults were found.
"""
VOCAB = SMALL["sizes"]["vocab_size"]
POSITIONS = SMALL["sizes"]["max_position_embeddings"]
WINDOW = 28  # longer than a check of a few tokens, shorter than the answers here
MAX_PARAMETERS = 20_000_000
FULL, SLIDING = "full_attention", "sliding_attention"
EVERY_ROPE = ("llama", "mistral", "qwen2", "qwen3", "gpt_neox", "gpt_oss", "olmo2")
_OF_ONE_KIND = ("qwen4_exp_text",)  # hybrids that cannot have one layer of each kind
EAGER = ("llama", "mistral", "gemma2", "qwen2", "gpt2", "gpt_neox", "cohere2", "phi3")


@dataclass(frozen=True)
class Configuration:
    """One row of the table: a family, the changes to its config, and its attention."""

    family: str
    variant: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    attention: str | None = None

    @property
    def name(self) -> str:
        """Return the configuration's name in the table."""
        return f"{self.family}, {self.variant}"


class NotBuildableError(Exception):
    """No small model of a family can be built; the message says why."""


def families() -> list[str]:
    """Return all families that transformers maps to a causal language model."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def configurations(family: str) -> Iterator[Configuration]:
    """Yield the configurations of a family; the first is always the plain one."""
    config = _base_or_none(family)
    kinds = set(getattr(config, "layer_types", None) or ())
    has_window = hasattr(config, "sliding_window")
    is_mixable = bool(kinds) and kinds <= {FULL, SLIDING}
    plain: dict[str, Any] = {"layer_types": [FULL] * _layers(config)} if is_mixable else {}
    if has_window and not is_mixable:
        plain["sliding_window"] = None if _builds(family, {"sliding_window": None}) else POSITIONS
    if kinds & {"linear_attention", "conv"} and family not in _OF_ONE_KIND:
        mixed = {"layer_types": [*config.layer_types[:1], *[FULL] * (_layers(config) - 1)]}
        plain |= mixed if _builds(family, mixed) else {}
    yield Configuration(family, "plain", plain)
    if config is None or config.is_encoder_decoder or hasattr(config, "text_config"):
        return
    all_full = {"layer_types": [FULL] * (_layers(config) if kinds else 0)}
    if kinds - {FULL, SLIDING} and _builds(family, all_full):
        yield Configuration(family, "all attention", all_full)
    if is_mixable:
        mixed = [SLIDING, FULL] * _layers(config)
        window = {"sliding_window": WINDOW, "use_sliding_window": True}
        yield Configuration(
            family, "mixed windows", {**window, "layer_types": mixed[: _layers(config)]}
        )
        yield Configuration(
            family, "all sliding", {**window, "layer_types": [SLIDING] * _layers(config)}
        )
    elif has_window and not kinds:
        yield Configuration(family, "sliding window", {"sliding_window": WINDOW})
    elif not kinds:
        yield Configuration(family, "leftover window", {"sliding_window": WINDOW})
    yield from _rope_configurations(family, config, plain)
    lengths = {
        name: length for name, length in SMALL["lengths"].items() if _is_length(config, name)
    }
    if lengths:
        yield Configuration(family, "short lengths", lengths)
    for owner, variant, changes in SMALL["special"]:
        if owner == family:
            yield Configuration(family, variant, changes)
    if family in EAGER:
        window = {"sliding_window": WINDOW} if has_window else {}
        yield Configuration(family, "eager attention", window, "eager")


def build(configuration: Configuration, dtype: torch.dtype) -> Any:
    """Build the model with random weights whose answers vary from token to token."""
    try:
        config = small_config(configuration.family, configuration.changes)
        if config.is_encoder_decoder:
            raise NotBuildableError("an encoder-decoder, or the decoder of one")
        _refuse_large(config)
        if dtype == torch.float64:
            config._experts_implementation = "eager"  # the others have no float64
        torch.manual_seed(7)
        model: Any = AutoModelForCausalLM.from_config(
            config, attn_implementation=configuration.attention
        )
    except NotBuildableError:
        raise
    except Exception as error:
        raise NotBuildableError(
            f"not built: {type(error).__name__}: {first_line(error)}"
        ) from error
    model = _with_wandering_weights(model.eval()).to(dtype)
    for holder in (model.config, model.generation_config):
        holder.eos_token_id = None
    model.generation_config.pad_token_id = 2
    return model


def small_config(family: str, changes: Mapping[str, Any] | None = None) -> Any:
    """Return the config of a family's small model; ``changes`` override its fields."""
    kind = CONFIG_MAPPING[family]
    known = kind()
    own = SMALL["families"].get(family, {})
    sizes = {
        name: value for name, value in {**SMALL["sizes"], **own}.items() if _takes(known, name, own)
    }
    if "kv_lora_rank" in sizes:  # latent attention: keys for every head
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    changed = changes or {}
    fields = {name: value for name, value in sizes.items() if value is not None}
    return kind(**{**fields, **changed})


def random_prompt(chance: random.Random, length: int) -> list[int]:
    """Return random tokens with repeated spans, so that copying finds matches."""
    start = [chance.randrange(5, VOCAB) for _ in range(max(1, length // 2))]
    tokens = list(start)
    while len(tokens) < length:
        at = chance.randrange(len(start))
        tokens += start[at : at + chance.randrange(1, 12)]
    return tokens[:length]


def mutated(tokens: Sequence[int], chance: random.Random, rate: float = 0.12) -> list[int]:
    """Return a copy with some tokens dropped, inserted or replaced, so that some drafts fail."""
    found: list[int] = []
    for token in tokens:
        drawn = chance.random()
        if drawn < rate / 3:
            continue
        if drawn < rate:
            found.append(chance.randrange(VOCAB))
        if not rate / 3 <= drawn < 2 * rate / 3:
            found.append(token)
    return found


def first_line(error: Exception) -> str:
    """Return the first two lines of an error's message as one line."""
    lines = str(error).strip().split("\n")
    return " ".join(" ".join(lines[:2]).split())[:500]


def _base_or_none(family: str, changes: Mapping[str, Any] | None = None) -> Any:
    try:
        return small_config(family, changes)
    except Exception:  # reported when it is built
        return None


def _builds(family: str, changes: Mapping[str, Any]) -> bool:
    return _base_or_none(family, changes) is not None


def _takes(known: Any, name: str, own: Mapping[str, Any]) -> bool:
    try:
        return name in own or hasattr(known, name)
    except Exception:  # configs may raise for fields that differ by layer
        return False


def _layers(config: Any) -> int:
    return len(config.layer_types)


def _is_length(config: Any, name: str) -> bool:
    return isinstance(getattr(config, name, None), int)


def _rope_configurations(
    family: str, config: Any, plain: Mapping[str, Any]
) -> Iterator[Configuration]:
    rope = getattr(config, "rope_parameters", None)
    if (
        not rope or "rope_theta" not in rope or not hasattr(config, "hidden_size")
    ):  # none, or one for each kind of layer
        return
    names = list(SMALL["ropes"])
    chosen = names if family in EVERY_ROPE else [names[sum(map(ord, family)) % len(names)]]
    chosen = ["longrope"] if family.startswith("phi3") else chosen  # supports no other
    for name in chosen:
        fields = {**rope, **SMALL["ropes"][name], "rope_type": name}
        dims = int(_rotary_dim(config) * rope.get("partial_rotary_factor", 1.0)) // 2
        if name == "longrope":
            fields.update(short_factor=[1.0] * dims, long_factor=[2.0] * dims)
        changes: dict[str, Any] = {**plain, "rope_parameters": fields}
        if hasattr(config, "original_max_position_embeddings"):
            changes["original_max_position_embeddings"] = fields.get(
                "original_max_position_embeddings", POSITIONS
            )
        yield Configuration(family, f"rope {name}", changes)


def _rotary_dim(config: Any) -> int:
    found = getattr(config, "qk_rope_head_dim", None) or getattr(config, "head_dim", None)
    return int(found or config.hidden_size // config.num_attention_heads)


def _refuse_large(config: Any) -> None:
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    count = sum(weight.numel() for weight in model.parameters())
    if count > MAX_PARAMETERS:
        text = getattr(config, "text_config", None)
        own = getattr(text, "model_type", "")
        where = f"; its text model is tried as {own}" if own in families() else ""
        raise NotBuildableError(f"has parts that are not text{where}")


def _with_wandering_weights(model: Any) -> Any:
    """Set large random weights, so that greedy answers depend on the whole context."""
    chance = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=chance, dtype=torch.float32)
            if weight.dim() < 2:
                weight.add_(0.1 * noise.to(weight.dtype))
                continue
            is_table = any(part in name for part in ("embed", "wte", "wpe", "embd"))
            scale = 1.0 if is_table else 1.8 / weight.shape[-1] ** 0.5
            weight.copy_((scale * noise).to(weight.dtype))
        head = model.get_output_embeddings()
        given = model.get_input_embeddings()
        if head is not None and given is not None and head.weight is given.weight:
            # With tied weights every token would be its own likeliest successor.
            head.weight = torch.nn.Parameter(given.weight.roll(1, 0).clone())
    return model


Row = dict[str, Any]

RESULTS = Path(__file__).resolve().parents[1] / "results"
RESULT_NAME = "architectures.json"
EQUAL, REFUSED, WRONG, NOT_TRIED = "equal", "refused", "wrong", "not tried"
PROMPT_LENGTHS = (3, 21, 46)  # tokens of each prompt, alone and in a batch
NEW_TOKENS = 24
PATIENCE = 45  # seconds for a configuration
NEAR_TIE = 1e-4  # share of the logits' standard deviation; for float32


class OverdueError(Exception):
    """A configuration exceeded its time limit."""


@cli.experiment(
    cli.option("--families", help="comma-separated model types (default: all)"),
    cli.option("--variants", help="comma-separated; only these variants"),
    cli.option("--count", type=int, help="most configurations to try"),
    cli.option("--page", type=Path, help="also write the page of supported models"),
    cli.option("--kept", action="store_true", help="only write the page of the committed result"),
    shown=("summary",),
    broken=lambda document: document["summary"].get(WRONG),
)
def run_architectures(options: Namespace) -> dict[str, Any]:
    """Architectures: for which models of transformers are answers exact, one row each?

        python -m eval architectures --out eval/results --page docs/models.md

    Every decoder-only family of the installed transformers is built small and random: without
    sliding windows, with them, with a window that its code ignores, with several kinds of rope, and
    with short values for all lengths at which its computation changes. Answers are longer than all
    of these lengths. They are compared to ``model.generate``, alone and in a batch of unequal
    lengths, with and without drafts of the mutated answer. A row says *equal*, *refused* with the
    cause, *wrong*, or *not tried* with the reason. Models are in float64, or in float32 if that is
    refused or does not run; then near ties may differ.

    Rows are kept beside the result until it is complete, so that an interrupted run continues, and
    one with a larger ``--count`` too.
    """
    if options.kept:
        document = json.loads((RESULTS / RESULT_NAME).read_text(encoding="utf-8"))
    else:
        with _quiet():
            document = _measured(options)
        if options.out and not options.count:  # the result has all rows
            options.out.with_suffix(".rows.jsonl").unlink(missing_ok=True)
    if options.page:
        options.page.write_text(models_page(document), encoding="utf-8")
    return document


def _measured(options: Namespace) -> dict[str, Any]:
    chosen = list(_chosen(options))
    settings = {
        "prompts": list(PROMPT_LENGTHS),
        "new_tokens": NEW_TOKENS,
    }
    results_log = open_results_log(
        options.out, {**settings, "transformers": transformers.__version__}
    )
    known = {(row["family"], row["variant"]): row for row in results_log.rows}
    if any((one.family, one.variant) not in known for one in chosen):
        _draft_once()
    rows = []
    for number, configuration in enumerate(chosen, 1):
        row = known.get((configuration.family, configuration.variant))
        if row is None:
            row = try_configuration(configuration)
            results_log.add(row)
            told = f"{row['status']} {row.get('why', '')}"
            note(f"{number}/{len(chosen)} {configuration.name}: {told}")
        rows.append(row)
    return result(
        "architectures",
        settings,
        summary=dict(Counter(row["status"] for row in rows)),
        accepted_tokens=sum(row.get("accepted", 0) for row in rows),
        rows=rows,
    )


def try_configuration(configuration: Configuration) -> Row:
    """Try one configuration in float64, and in float32 if that is refused or not built."""
    row = _tried(configuration, torch.float64)
    if row["status"] not in (REFUSED, NOT_TRIED):
        return row
    other = _tried(configuration, torch.float32)
    if other["status"] in (EQUAL, WRONG) or row["status"] == NOT_TRIED:
        return {**other, "float64": row["why"]} if other["status"] != NOT_TRIED else other
    return row


def models_page(document: dict[str, Any]) -> str:
    """Return the Markdown page of models that are decoded exactly, from a result."""
    rows, versions = document["rows"], document["machine"]["transformers"]
    by_family: dict[str, list[Row]] = {}
    for row in rows:
        by_family.setdefault(row["family"], []).append(row)
    equal = [name for name, own in by_family.items() if any(r["status"] == EQUAL for r in own)]
    lines = [
        "# Models",
        "",
        "<!-- written by: python -m eval architectures --kept --page docs/models.md -->",
        "",
        "This page lists the model types that are decoded exactly: ragaccel gave the same "
        "tokens as `model.generate`. A type that is not listed may work, too: when a model is "
        "loaded, a small copy of its architecture is checked in the same way, and the model is "
        "refused with the cause if the tokens differ.",
        "",
        "On a CPU a model that passed is not checked again until its files, the versions or the "
        "processor change; `ragaccel doctor --load` checks it again.",
        "",
        "What was tried in each model type:",
        "",
        "| name | the model has |",
        "|---|---|",
        "| plain | full attention in all layers, or a hybrid's own first two layers |",
        "| mixed windows, all sliding | sliding windows in one layer, or in all |",
        "| leftover window | a `sliding_window` in its config, though its code has none; "
        "transformers' cache applies it all the same. Take it out of the config |",
        "| short lengths | every other length at which it changes made so short that the answers "
        "pass it |",
        "| rope … | another scaling of its positions |",
        "",
        f"Measured with {len(rows)} small random models of every decoder-only family of "
        f"transformers {versions}, alone and in a batch: {_counted(document['summary'])} "
        f"([every one](../eval/results/{RESULT_NAME})).",
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
    try:
        with _in_time(PATIENCE), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row.update(_compared(build(configuration, dtype)))
    except (NotBuildableError, OverdueError) as error:
        row.update(status=NOT_TRIED, why=str(error))
    return row


def _compared(model: Any) -> Row:
    """Compare answers alone and in a batch, with and without drafts; return the outcome's row."""
    from ragaccel import LLM, NoDrafter, Reference
    from ragaccel.errors import UnsupportedModelError

    chance = random.Random(5)
    prompts = [random_prompt(chance, length) for length in PROMPT_LENGTHS]
    try:
        wanted = [_generated(model, prompt) for prompt in prompts]
    except OverdueError:
        raise
    except Exception as error:
        raise NotBuildableError(
            f"its own generate fails: {type(error).__name__}: {first_line(error)}"
        ) from error
    row: Row = {"distinct": min(len(set(tokens)) for tokens in wanted)}
    draft_tokens = [
        [Reference(tuple(mutated(prompt[-8:] + tokens, chance))) for _ in range(4)]
        for prompt, tokens in zip(prompts, wanted, strict=True)
    ]
    try:
        llm = LLM(model, _tokenizer(), save_measurements=False, token_budget=24)
        plain = [llm.generate(prompt, drafter=NoDrafter(), **_SETTINGS) for prompt in prompts]
        alone = [
            llm.generate(prompt, references=own, **_SETTINGS)
            for prompt, own in zip(prompts, draft_tokens, strict=True)
        ]
        batch = llm.generate(prompts, references=draft_tokens, **_SETTINGS)
    except OverdueError:
        raise
    except UnsupportedModelError as error:
        return {**row, "status": REFUSED, "why": first_line(error)}
    except Exception as error:  # even ours: an accepted model must answer
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
    """Return whether answers are equal or, in float32, first differ at a near tie."""
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
    """Compile the drafting functions, so that every configuration gets draft trees."""
    from ragaccel import LLM

    model = build(Configuration("llama", "plain"), torch.float32)
    LLM(model, _tokenizer(), save_measurements=False).warm_up()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings about random models and the hub while the context is open."""
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
