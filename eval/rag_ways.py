"""Ways: a question from its embedding to the last word of its answer, through each chain, timed.

Every way searches the same index and streams. Ours have an ``LLM`` each over the same weights,
accelerated or plain; ``Generate`` is what one has without us: the same passages and the same
prompt, answered by ``model.generate`` with a streamer. A model that is to follow a recorded answer
does so whatever was retrieved: a chain makes its prompt itself, so the recording begins with what
the engine is asked to open.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from eval.chains import STREAMING, template_of, written
from eval.forced import following
from eval.jobs import Job
from eval.passes import synchronize
from eval.rag_clock import Clock
from eval.stock import greedy
from ragaccel import LLM, NoDrafter, build_prompt
from ragaccel.frameworks.prompt_parsing import is_documents_only

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from eval.rag_clock import Asked, TimedSource
    from eval.targets import Target
    from ragaccel import Passage, Stream
    from ragaccel.decoding.request import Request
    from ragaccel.models.tokenizer import Tokenizer


class Way(Protocol):
    """A way to have a question answered."""

    name: str

    def forget(self) -> None:
        """Know nothing of the questions before; what passes cost aside."""
        ...

    def ask(self, question: str, recorded: Sequence[int] = ()) -> Asked:
        """Answer a question, with exactly the ``recorded`` token ids if there are some.

        Raises:
            RuntimeError: the answer left the recording: the harness or the decoder is wrong.
            ValueError: the chain asked more than once, as where passages do not fit one prompt.
        """
        ...


class StreamedLLM(LLM):
    """An LLM that keeps the last stream it was asked for: a chain hands out its text alone."""

    streamed: Stream | None = None

    def stream(self, prompt: Any, **settings: Any) -> Stream:
        """Complete one prompt piece by piece."""
        self.streamed = super().stream(prompt, **settings)
        return self.streamed


class Ours:
    """One chain over our LLM.

    Args:
        name: what results call it.
        target: the model.
        source: what passages are found with.
        way: a name of ``STREAMING``.
        k: passages of a prompt.
        max_new_tokens: most tokens of an answer.
        accelerated: as the LLM comes; else the same loop without guesses, and nothing is
            registered or looked up for guessing, unless the model could not read its prompt then.
        again: each question is asked once before, unseen by the clock: what it taught is known,
            the states of its prompt are not.
    """

    def __init__(
        self,
        name: str,
        target: Target,
        source: TimedSource,
        *,
        way: str,
        k: int,
        max_new_tokens: int,
        accelerated: bool = True,
        again: bool = False,
    ) -> None:
        plain: dict[str, Any] = {"drafter": NoDrafter(), "token_budget": 0}
        self.llm = StreamedLLM(target.ours, target.tokenizer, **({} if accelerated else plain))
        self.llm.warm_up()
        self.name, self._target, self._source = name, target, source
        self._again = again
        self._unregistered = not accelerated and not is_documents_only(target.tokenizer)
        self._pieces = STREAMING[way](self.llm, source, k, max_new_tokens)

    def forget(self) -> None:
        """Forget what was said and the states of prompts; what a chain retrieved went with it."""
        self.llm.memory.clear()
        self.llm.engine.prefix_cache.clear()

    def ask(self, question: str, recorded: Sequence[int] = ()) -> Asked:
        """Answer a question, with exactly the ``recorded`` token ids if there are some."""
        if self._again:
            self._ask(question, recorded)
            self.llm.engine.prefix_cache.clear()
        return self._ask(question, recorded)

    def _ask(self, question: str, recorded: Sequence[int]) -> Asked:
        device = self._target.ours.device
        with self._opening(recorded) as opened, _unregistered(only_if=self._unregistered):
            synchronize(device)
            clock = Clock()
            text = clock.read(self._pieces(question))
            synchronize(device)
            clock.stop()
        if len(opened) != 1 or self.llm.streamed is None:
            raise ValueError(
                f"{self.name} asked its model {len(opened)} times for one question: take fewer "
                "passages with --k, or a model that reads more"
            )
        answer = self.llm.streamed.answer
        check_recording(self.name, answer.token_ids, recorded)
        if recorded and text != answer.text:
            raise RuntimeError(f"{self.name} told another text than its model wrote")
        stats = answer.stats
        known = {
            **self._source.stages,
            "prompt": opened[0] - self._source.ended,
            "prefill": stats.prefill_seconds,
            "draft": stats.draft_seconds,
            "verify": stats.verify_seconds,
        }
        return clock.asked(text, answer.token_ids, stats.prompt_tokens, stats.verify_passes, known)

    @contextmanager
    def _opening(self, recorded: Sequence[int]) -> Iterator[list[float]]:
        """Note when requests are opened, and have the model follow the recording from there."""
        engine, target, opened = self.llm.engine, self._target, list[float]()
        open_request: Callable[[Request], Any] = engine.open
        with ExitStack() as stack:

            def noted(request: Request) -> Any:
                opened.append(perf_counter())
                if recorded and len(opened) == 1:
                    prompt, graphs = request.prompt_ids, target.ours.graphs
                    network = target.ours.network
                    stack.enter_context(following(network, prompt, recorded, graphs))
                return open_request(request)

            engine.open = noted  # type: ignore[method-assign]
            try:
                yield opened
            finally:
                engine.open = open_request  # type: ignore[method-assign]


class Generate:
    """The same passages and prompt, answered by transformers' ``model.generate``, streamed."""

    def __init__(
        self, name: str, target: Target, source: TimedSource, *, k: int, max_new_tokens: int
    ) -> None:
        self.name, self._target, self._source = name, target, source
        self._k, self._max_new_tokens = k, max_new_tokens
        self._reads_apart = is_documents_only(target.tokenizer)

    def forget(self) -> None:
        """Do nothing: it learns nothing."""

    def ask(self, question: str, recorded: Sequence[int] = ()) -> Asked:
        """Answer a question, with exactly the ``recorded`` token ids if there are some."""
        target, model = self._target, cast("Any", self._target.model)
        ends = frozenset(target.tokenizer.eos_ids)
        synchronize(model.device)
        clock = Clock()
        prompt = self._prompt_ids(question, self._source.search(question, self._k))
        job = Job("", prompt, (), (), tuple(recorded), self._max_new_tokens, ends)
        ids = torch.tensor([prompt], device=model.device)
        opened = perf_counter()
        with ExitStack() as stack:
            if recorded:
                stack.enter_context(following(model, prompt, recorded))
            output = greedy(model, ids, job, streamer=clock)
            new = tuple(output[0, len(prompt) :].tolist())
        decoded = perf_counter()
        text = target.tokenizer.decode(new)
        clock.stop()
        check_recording(self.name, new, recorded)
        known = {
            **self._source.stages,
            "prompt": opened - self._source.ended,
            "prefill": clock.first - opened,
            "verify": decoded - clock.first,
        }
        return clock.asked(text, new, len(prompt), len(new), known)

    def _prompt_ids(self, question: str, passages: Sequence[Passage]) -> tuple[int, ...]:
        """The prompt of ``RAG``, made without what we look for in it, unless it is too long."""
        words, limit = self._target.tokenizer, self._target.ours.max_positions
        room = None if limit is None else limit - self._max_new_tokens
        if not self._reads_apart:
            ids = _encoded(words, written(question, passages))
            if room is None or len(ids) <= room:
                return ids
        template = template_of(words)
        return build_prompt(words, question, passages, template=template, max_tokens=room).token_ids


def _encoded(words: Tokenizer, text: str) -> tuple[int, ...]:
    if words.has_chat_template:
        return tuple(words.chat([{"role": "user", "content": text}]))
    return tuple(words.encode(text, add_special_tokens=True))


def check_recording(name: str, token_ids: Sequence[int], recorded: Sequence[int]) -> None:
    """Raise RuntimeError where an answer is not the recording it was to follow."""
    if recorded and tuple(token_ids) != tuple(recorded):
        raise RuntimeError(
            f"{name} left the recording: {len(token_ids)} tokens instead of {len(recorded)}"
        )


@contextmanager
def _unregistered(*, only_if: bool) -> Iterator[None]:
    """Switch off for a while that what is retrieved is registered and looked up."""
    name = "RAGACCEL_AUTO_REFERENCES"
    before = os.environ.get(name)
    if only_if:
        os.environ[name] = "0"
    try:
        yield
    finally:
        if only_if:
            del os.environ[name]
            os.environ.update({} if before is None else {name: before})
