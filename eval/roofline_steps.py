"""Roofline steps: which share of a drafted decoding's steps the device does not compute."""

from __future__ import annotations

import random
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from eval.forced import following
from eval.passes import synchronize, watching
from ragaccel.decoding.request import Reference, Request
from ragaccel.decoding.session import Session
from ragaccel.drafting.trie import TrieDrafter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from eval.forced import Forcing
    from ragaccel.engine.engine import Engine
    from ragaccel.models.hf_model import HuggingFaceModel

_SPANS = (4, 24)  # shortest and longest run of tokens copied at a time
_OWN = 3  # tokens between two runs


class DeviceTime:
    """How long a device computes passes: by its own events on a GPU, by the clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[tuple[Any, Any]] = []
        self._seconds = 0.0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Count what is launched while the context is open."""
        if self._device.type != "cuda":
            started = perf_counter()
            yield
            self._seconds += perf_counter() - started
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._events.append((begin, end))

    @property
    def seconds(self) -> float:
        """All of it, once the device has finished."""
        return self._seconds + sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3


def measure_step(
    engine: Engine, ours: HuggingFaceModel, context: int, num_tokens: int
) -> dict[str, float] | None:
    """Decode an answer that copies from its prompt, twice; tell the second time's mean step.

    ``beside_device`` is the share of a step in which the device does not compute the pass:
    drafting, building the pass, choosing and reading the choices; forcing is left out. None where
    passes are launched one by one, as the device waits within them too.
    """
    if ours.graphs is None:
        return None
    if engine.max_tokens is not None:
        context = min(context, engine.max_tokens - num_tokens - engine.max_rows)
    prompt, answer = copied_answer(context, num_tokens, engine.model.vocab_size)
    request = Request(prompt, references=(Reference(prompt),), max_new_tokens=len(answer))
    drafter = TrieDrafter()
    for _ in range(2):
        session = Session(engine.open(request), drafter, request)
        with following(ours.network, prompt, answer, ours.graphs) as forcing:
            step = _timed(engine, ours, session, forcing)
    return step


def _timed(
    engine: Engine, ours: HuggingFaceModel, session: Session, forcing: Forcing
) -> dict[str, float]:
    graphs, device = ours.graphs, engine.model.device
    timer = DeviceTime(device)
    try:
        session.prefill()
        synchronize(device)
        if graphs is not None:
            usual, graphs.running = graphs.running, timer
        with watching(ours.network, graphs) as passes:
            started, forced = perf_counter(), forcing.seconds
            for _ in session:
                pass
            synchronize(device)
            seconds = perf_counter() - started - (forcing.seconds - forced)
    finally:
        if graphs is not None:
            graphs.running = usual
        session.verifier.close()  # type: ignore[attr-defined]
    steps = session.stats.verify_passes
    return {
        "steps": steps,
        "tokens": len(session.token_ids),
        "rows": passes.rows / steps,
        "seconds": seconds / steps,
        "draft_seconds": session.stats.draft_seconds / steps,
        "device_seconds": timer.seconds / steps,
        "beside_device": 1 - timer.seconds / seconds,
    }


def copied_answer(
    context: int, num_tokens: int, vocab_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw a prompt, and an answer made of runs of it with tokens of its own in between."""
    rng = random.Random(0)
    prompt = tuple(rng.randrange(vocab_size) for _ in range(context))
    answer: list[int] = []
    while len(answer) < num_tokens:
        first, length = rng.randrange(context), rng.randint(*_SPANS)
        answer += [*prompt[first : first + length], *rng.choices(range(vocab_size), k=_OWN)]
    return prompt, tuple(answer[:num_tokens])
