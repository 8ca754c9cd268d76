"""Wild settings, prompts, references and callbacks: calls of the library."""

from __future__ import annotations

import decimal
import fractions
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eval.robustness.fuzz import Case, Kind, Make, OutcomeError
from eval.robustness.stand_ins import save_tiny_model
from ragaccel import LLM, RAG, Passage, Reference, build_prompt
from ragaccel.config import CHECKS, OPTION_CHECKS
from ragaccel.errors import RagaccelError

Call = tuple[str, Callable[[], object]]

_QUESTION = "Who trims the wick?"
_PASSAGE = Passage("lamp", "The keeper trims the wick at dusk.", score=0.5)


class _Found:
    """A retriever that returns fixed passages."""

    def __init__(self, found: object) -> None:
        self.found = found

    def search(self, query: str, k: int = 6) -> Any:  # noqa: ARG002
        return self.found


class _Odd:
    """An object of an unrelated type whose ``repr`` raises an error."""

    def __repr__(self) -> str:
        raise RuntimeError("this object has no repr")


def open_settings(folder: Path) -> Make:
    """Load a tiny model; return the function that makes calls with wild arguments."""
    llm = LLM.load(save_tiny_model(folder / "model"), save_measurements=False)
    wanted = answer(llm)
    kinds = [_setting] * 10 + [_prompt] * 3 + [_references] * 3
    kinds += [_callback, _callback, _option, _option, _rag, _rag, _reference, _layout]

    def make(_number: int, rng: random.Random) -> Case:
        kind = rng.choice(kinds)
        label, call = kind(llm, rng, folder)

        def use() -> None:
            try:
                call()
            finally:
                if answer(llm) != wanted:
                    raise OutcomeError("changed: a fixed question is answered otherwise afterwards")

        return kind.__name__.removeprefix("_"), label, use

    return make


def answer(llm: LLM) -> tuple[int, ...]:
    """Answer the fixed question."""
    return llm.generate(_QUESTION, max_new_tokens=8, remember=False).token_ids


def _setting(llm: LLM, rng: random.Random, _: Path) -> Call:
    names = rng.sample(sorted(CHECKS), rng.choice((1, 1, 1, 2, 3)))
    settings: dict[str, Any] = {"max_new_tokens": 4, "remember": False}
    if rng.random() < 0.4:
        settings["temperature"] = 0.7
    settings |= {name: wild(rng) for name in names}
    label = ", ".join(f"{name}={_shown(settings[name])}" for name in names)
    prompt: Any = _QUESTION if rng.random() < 0.8 else [_QUESTION, "And when?"]
    if rng.random() < 0.3 and isinstance(prompt, str):
        return f"stream {label}", lambda: llm.stream(prompt, **settings).finish()
    return label, lambda: llm.generate(prompt, **settings)


def _prompt(llm: LLM, rng: random.Random, _: Path) -> Call:
    prompt = rng.choice((wild, _message, _messages, _ids))(rng)
    call = rng.choice((llm.generate, _streamed(llm)))
    return f"prompt {_shown(prompt)}", lambda: call(prompt, max_new_tokens=3, remember=False)


def _streamed(llm: LLM) -> Callable[..., object]:
    return lambda prompt, **settings: llm.stream(prompt, **settings).finish()


def _references(llm: LLM, rng: random.Random, _: Path) -> Call:
    references: Any = wild(rng)
    if rng.random() < 0.7:
        one = rng.choice((wild, _passage, _any_reference))
        references = [one(rng) for _ in range(rng.choice((1, 2)))]
    prompt: Any = _QUESTION if rng.random() < 0.8 else [_QUESTION, "And when?"]
    return f"references {_shown(references)}", lambda: llm.generate(
        prompt, references=references, max_new_tokens=6, remember=False
    )


def _callback(llm: LLM, rng: random.Random, _: Path) -> Call:
    returned = _scores(rng)
    name = rng.choice(("logits_processors", "stopping_criteria"))
    settings: dict[str, Any] = {name: [lambda *_, **__: returned]}
    return f"{name} returns {_shown(returned)}", lambda: llm.generate(
        _QUESTION, max_new_tokens=4, remember=False, **settings
    )


def _option(llm: LLM, rng: random.Random, folder: Path) -> Call:
    name = rng.choice([*sorted(OPTION_CHECKS), "model", "tokenizer", "dtype", "device", "name"])
    value = wild(rng)
    label = f"option {name}={_shown(value)}"
    if name in ("model", "tokenizer"):
        parts = {"model": llm.model, "tokenizer": llm.tokenizer, name: value}
        return label, lambda: LLM(**parts, save_measurements=False)
    if name in ("dtype", "device", "name"):
        given = {name: value} if name != "name" else {}
        source = folder / "model" if name != "name" else value
        if source is None:
            return label, lambda: None  # the bundled reader
        return label, lambda: LLM.load(source, save_measurements=False, **given)
    if name == "memory" and isinstance(value, str):
        value = str(folder / "memory") + value[:20]
    given = {"save_measurements": False, name: value}
    return label, lambda: LLM(llm.model, llm.tokenizer, **given).generate("a", max_new_tokens=2)


def _rag(llm: LLM, rng: random.Random, _: Path) -> Call:
    arguments: dict[str, Any] = {"k": 2, "max_new_tokens": 4}
    asked: dict[str, Any] = {"question": _QUESTION, "history": (), "remember": False}
    found: Any = [_PASSAGE]
    what = rng.choice(("found", "retriever", "k", "max_new_tokens", "template", "question"))
    what = rng.choice((what, "history", "setting"))
    value: Any = rng.choice((wild, wild, _messages))(rng)
    retriever: Any = _Found(found)
    if what == "found":
        value = rng.choice(([value], value, [_passage(rng)], [_PASSAGE, value]))
        retriever = _Found(value)
    elif what == "retriever":
        retriever = value
    elif what in arguments or what == "template":
        arguments[what] = value
    elif what in asked:
        asked[what] = value
    else:
        asked[rng.choice(sorted(CHECKS))] = value
    return f"RAG {what}={_shown(value)}", lambda: RAG(llm, retriever, **arguments).ask(**asked)


def _reference(_: LLM, rng: random.Random, __: Path) -> Call:
    fields = [wild(rng), wild(rng)] if rng.random() < 0.5 else [(1, 2), wild(rng)]
    return f"Reference{_shown(fields)}", lambda: Reference(*fields)


def _layout(llm: LLM, rng: random.Random, _: Path) -> Call:
    passages: Any = [rng.choice((_passage, wild))(rng)]
    question: Any = rng.choice((_QUESTION, wild(rng)))
    template = rng.choice((None, "{passages} {question}", wild(rng)))
    passages = passages if rng.random() < 0.8 else wild(rng)
    label = f"build_prompt {_shown(question)} {_shown(passages)} {_shown(template)}"
    tokenizer = llm.tokenizer
    return label, lambda: build_prompt(tokenizer, question, passages, template=template)


def wild(rng: random.Random) -> Any:
    """Draw a value that is invalid or unusual for almost every setting."""
    made: list[Callable[[], Any]] = [
        lambda: rng.choice((float("nan"), float("inf"), -float("inf"), 1e308, 5e-324, -0.0, 0.5)),
        lambda: rng.choice((-1, 0, 3, 2**31, 2**63, 2**64, -(2**63), 10**30, 10**400)),
        lambda: rng.choice(("", "x", "1", " ", "\x00", "\ud800", "a" * 10000, "\U0010ffff" * 9)),
        lambda: rng.choice((b"x", bytearray(b"1"), True, False, None, Ellipsis, 1 + 2j)),
        lambda: rng.choice((decimal.Decimal("0.5"), decimal.Decimal("nan"), fractions.Fraction(7))),
        lambda: rng.choice((np.float32("nan"), np.int64(-5), np.bool_(True), np.array([1, 2]))),
        lambda: rng.choice((torch.tensor(3), torch.tensor(float("nan")), torch.ones(2, 2))),
        lambda: rng.choice(([], (), {}, set(), [1], [None], ["x", 5], {"a": 1}, [[]], [[1], "a"])),
        lambda: rng.choice((object(), _Odd(), _Odd, len, lambda *_: None, np.ones, Exception())),
        lambda: rng.choice((iter([1, 2]), (n for n in "ab"), range(3), map(str, [1]), iter([]))),
        lambda: [wild(rng) for _ in range(rng.choice((1, 2)))],
        lambda: tuple(wild(rng) for _ in range(2)),
        lambda: {rng.choice(("role", "content", "text", 5)): wild(rng)},
    ]
    return rng.choice(made)()


def _message(rng: random.Random) -> Any:
    fields = {"role": "user", "content": "x", "tool_calls": [], "name": "n"}
    kept = {name: value for name, value in fields.items() if rng.random() < 0.7}
    kept |= {rng.choice(sorted(fields)): wild(rng)}
    return [kept]


def _messages(rng: random.Random) -> Any:
    return [*_message(rng), *_message(rng)]


def _ids(rng: random.Random) -> Any:
    ids: list[Any] = [rng.choice((0, 5, 256, 257, -1, 2**31, 2**70, 1.5, True)) for _ in range(3)]
    return rng.choice((ids, tuple(ids), [ids], [*ids, wild(rng)], [1] * 5000))


def _passage(rng: random.Random) -> Passage:
    fields: dict[str, Any] = {"passage_id": "p", "text": "The wick.", "title": "t", "score": 0.5}
    fields[rng.choice(sorted(fields))] = wild(rng)
    return Passage(**fields)


def _any_reference(rng: random.Random) -> Any:
    ids = rng.choice(((), (10**9,), (2**62,), (3, 2**40), tuple(range(257)) * 40, wild(rng)))
    try:
        return Reference(ids, rng.choice((1.0, -5.0, 1e308)))
    except RagaccelError:
        return "lamp oil " * 2000


def _scores(rng: random.Random) -> Any:
    shapes = (torch.ones(1, 3), torch.ones(257), torch.ones(2, 257), torch.ones(1, 257).long())
    fine = (torch.full((1, 257), float("nan")), torch.full((1, 257), -float("inf")))
    return rng.choice((*shapes, *fine, wild(rng), np.ones((1, 257))))


def _shown(value: Any) -> str:
    try:
        return ascii(value)[:60]
    except Exception:  # repr failed: name the type
        return type(value).__name__


KIND = Kind(open_settings, count=1000, seconds=20, megabytes=4000)
