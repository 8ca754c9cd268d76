"""Measure RAG from a question to the last word of its answer.

Every way searches the same index and streams. Each of our ways has an ``LLM`` of its own over the
same weights, accelerated or with plain decoding. ``Generate`` works without ragaccel's decoding:
``model.generate`` with a streamer answers the same prompt. A model that must follow a recorded
answer does so whatever was retrieved: a chain makes its own prompt, so the recording begins after
the prompt of the request that reaches the engine.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, cast

import torch
from typing_extensions import override

from eval import cli
from eval.data import Example, Job, MissingDataError
from eval.decoders import greedy
from eval.experiments.frameworks import (
    PACKAGES,
    STREAMING,
    forget_requests,
    is_installed,
    template_of,
    written,
)
from eval.measure import paired_ratio, synchronize, teacher_forced
from eval.models import Target, chosen_target, describe_target
from eval.report.tables import RAG_STAGES, show
from eval.runner import (
    ResultsLog,
    in_turns,
    note,
    open_results_log,
    result,
    settings_of,
)
from eval.tasks import load_task
from ragaccel import (
    LLM,
    Embedder,
    NoDrafter,
    Passage,
    Retriever,
    Store,
    Stream,
    build_prompt,
    index_folder,
    index_passages,
    load_embedder,
)
from ragaccel.decoding import Request
from ragaccel.frameworks import is_documents_only
from ragaccel.models import Tokenizer
from ragaccel.models.load import is_bundled
from ragaccel.quotes import QuoteConstraint, refuse, values_of

Row = dict[str, Any]
Speeds = dict[tuple[str, int], float]


class TimedEmbedder:
    """An embedder that records the seconds of its last question in ``seconds``."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder, self.seconds = embedder, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._embedder, name)

    def embed_query(self, text: str) -> Any:
        """Embed a question and record the time."""
        started = perf_counter()
        vector = self._embedder.embed_query(text)
        self.seconds = perf_counter() - started
        return vector


class TimedSource:
    """A retriever for chains that records the stages and the end of its last search.

    Args:
        retriever: The retriever over the index.
        embedder: The retriever's embedder.
    """

    def __init__(self, retriever: Retriever, embedder: TimedEmbedder) -> None:
        self._retriever, self._embedder = retriever, embedder
        self.ended = 0.0
        self.stages: dict[str, float] = {}

    def search(self, query: str, k: int = 10) -> list[Passage]:
        """Return the k best passages and record the times."""
        started = perf_counter()
        found = self._retriever.search(query, k)
        self.ended = perf_counter()
        embed = self._embedder.seconds
        self.stages = {"embed": embed, "search": self.ended - started - embed}
        return found


@dataclass(slots=True)
class Clock:
    """The times of a question, its first and its last word; also a streamer for ``generate``."""

    began: float = field(default_factory=perf_counter)
    first: float = 0.0
    ended: float = 0.0
    _has_prompt: bool = False

    def read(self, pieces: Iterator[str]) -> str:
        """Read a stream to its end and return its text; time the first piece that is not empty."""
        text = ""
        for piece in pieces:
            if piece and not text:
                self.first = perf_counter()
            text += piece
        return text

    def put(self, _ids: Any) -> None:
        """Receive the prompt, then each token, as a streamer of ``generate``; time the first token.

        The first token counts even if it is only a part of a word.
        """
        if self._has_prompt and not self.first:
            self.first = perf_counter()
        self._has_prompt = True

    def end(self) -> None:
        """Do nothing: ``generate`` calls this before its work is finished."""

    def stop(self) -> None:
        """Record the end of the answer, and of its first word if there was none."""
        self.ended = perf_counter()
        self.first = self.first or self.ended

    def row(
        self,
        text: str,
        token_ids: Sequence[int],
        prompt_tokens: int,
        passes: int,
        known: dict[str, float],
    ) -> Row:
        """Return the figures of one answer for the results log, in seconds since the question.

        ``stages`` sum to ``total_seconds``: ``embed`` is the question's vector; ``search`` the rest
        of retrieval; ``prompt`` everything between the passages and the request (text, tokens and
        references); ``prefill`` the prompt's passes; ``draft`` drafting; ``verify`` the passes
        after the prompt; and ``rest`` what is outside these ``known`` ones (the framework before
        the search, detokenizing, streaming, remembering).
        """
        total = self.ended - self.began
        return {
            "prompt_tokens": prompt_tokens,
            "tokens": len(token_ids),
            "passes": passes,
            "text_hash": hashlib.sha256(text.strip().encode()).hexdigest()[:12],
            "first_token_seconds": self.first - self.began,
            "total_seconds": total,
            "stages": {**known, "rest": total - sum(known.values())},
        }


DOCUMENTS = Path(__file__).parents[2] / "demos" / "documents"
ABOUT_DOCUMENTS = frozenset({"demo", "handbook"})
"""Tasks on the shipped documents, which are indexed for them."""
TASK, SHIPPED = "llma", "handbook"


@dataclass(frozen=True, slots=True)
class Collection:
    """An open index: its timed retriever and its number of passages."""

    source: TimedSource
    num_passages: int


def load_questions(name: str | None, data: Path | None) -> tuple[str, list[Example]]:
    """Load a task by name; for None the search questions, or without data a task that ships.

    Returns:
        The task's name and its examples.
    """
    try:
        return name or TASK, load_task(name or TASK, None, data)
    except MissingDataError as error:
        if name is not None:
            raise
        note(f"{error}: taking the questions on demos/documents, which ship")
        return SHIPPED, load_task(SHIPPED)


@contextmanager
def open_collection(
    task: str, examples: Sequence[Example], embedder: Embedder
) -> Iterator[Collection]:
    """Index the examples' passages, or the shipped documents, in a folder deleted at the end."""
    timed = TimedEmbedder(embedder)
    with TemporaryDirectory() as folder, Store(Path(folder) / "index.db") as store:
        if task in ABOUT_DOCUMENTS:
            index_folder(store, embedder, DOCUMENTS)
        else:
            index_passages(store, embedder, write_passages(examples, Path(folder) / "all.jsonl"))
        note(f"{store.count_passages():,} passages indexed")
        yield Collection(TimedSource(Retriever(store, timed), timed), store.count_passages())


def write_passages(examples: Sequence[Example], path: Path) -> Path:
    """Write all distinct passages to a file that ``index_passages`` reads; return its path."""
    once = {passage.text: passage for example in examples for passage in example.passages}
    lines = (
        json.dumps({"id": passage.passage_id, "title": passage.title, "text": passage.text})
        for passage in once.values()
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def share_found(collection: Collection, examples: Sequence[Example], k: int) -> float:
    """Return the share of the examples' own passages that a search for k passages finds.

    At most k passages of each question count.
    """
    found = wanted = 0
    for example in examples:
        own = {passage.text for passage in example.passages}
        texts = {passage.text for passage in collection.source.search(example.question, k)}
        found, wanted = found + len(own & texts), wanted + min(k, len(own))
    return found / wanted


class Way(ABC):
    """A way to answer a question; several ways are compared."""

    name: str

    def forget(self) -> None:  # noqa: B027
        """Forget the earlier questions, but not the latency profile."""

    @abstractmethod
    def ask(self, question: str, recorded: Sequence[int] = ()) -> Row:
        """Answer a question and return its figures; see :meth:`Clock.row`.

        With ``recorded``, the model must give exactly these token ids.
        """


class StreamedLLM(LLM):
    """An LLM that keeps its last stream in ``streamed``, since a chain returns only the text."""

    streamed: Stream | None = None

    def stream(self, prompt: Any, **settings: Any) -> Stream:
        """Stream an answer, and keep the stream in ``streamed``."""
        self.streamed = super().stream(prompt, **settings)
        return self.streamed


class Ours(Way):
    """One chain over our LLM.

    Args:
        name: The name in results.
        target: The model.
        source: The retriever.
        way: A name of ``STREAMING``.
        k: Number of passages of a prompt.
        max_new_tokens: Maximum number of tokens of an answer.
        accelerated: Whether to use the LLM's defaults. False decodes plainly, and registers and
            searches no references, unless a documents-only prompt needs them.
        again: Ask each question once before, without timing. The memory then knows the question,
            but the prefix cache is cleared.
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

    @override
    def forget(self) -> None:
        forget_requests(self.llm)

    @override
    def ask(self, question: str, recorded: Sequence[int] = ()) -> Row:
        if self._again:
            self._ask(question, recorded)
            self.llm.engine.prefix_cache.clear()
        return self._ask(question, recorded)

    def _ask(self, question: str, recorded: Sequence[int]) -> Row:
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
            raise RuntimeError(f"{self.name} returned another text than its model wrote")
        stats = answer.stats
        known = {
            **self._source.stages,
            "prompt": opened[0] - self._source.ended,
            "prefill": stats.prefill_seconds,
            "draft": stats.draft_seconds,
            "verify": stats.verify_seconds,
        }
        return clock.row(text, answer.token_ids, stats.prompt_tokens, stats.verify_passes, known)

    @contextmanager
    def _opening(self, recorded: Sequence[int]) -> Iterator[list[float]]:
        """Yield the list of times at which requests open; the first one follows the recording."""
        engine, target, opened = self.llm.engine, self._target, list[float]()
        open_request: Callable[[Request], Any] = engine.open
        with ExitStack() as stack:

            def noted(request: Request) -> Any:
                opened.append(perf_counter())
                if recorded and len(opened) == 1:
                    prompt, ours = request.prompt_ids, target.ours
                    forced = teacher_forced(ours.network, prompt, recorded, ours.runner)
                    stack.enter_context(forced)
                return open_request(request)

            engine.open = noted  # type: ignore[method-assign]
            try:
                yield opened
            finally:
                engine.open = open_request  # type: ignore[method-assign]


class Generate(Way):
    """The same passages and prompt, answered and streamed by ``model.generate``."""

    def __init__(
        self, name: str, target: Target, source: TimedSource, *, k: int, max_new_tokens: int
    ) -> None:
        self.name, self._target, self._source = name, target, source
        self._k, self._max_new_tokens = k, max_new_tokens
        self._reads_apart = is_documents_only(target.tokenizer)
        self._is_reader = is_bundled(getattr(target.model, "name_or_path", ""))

    @override
    def ask(self, question: str, recorded: Sequence[int] = ()) -> Row:
        target, model = self._target, cast("Any", self._target.model)
        ends = frozenset(target.tokenizer.eos_ids)
        synchronize(model.device)
        clock = Clock()
        prompt, rules = self._prompt(question, self._source.search(question, self._k))
        job = Job("", prompt, (), (), tuple(recorded), self._max_new_tokens, ends)
        ids = torch.tensor([prompt], device=model.device)
        opened = perf_counter()
        with ExitStack() as stack:
            if recorded:
                stack.enter_context(teacher_forced(model, prompt, recorded))
            output = greedy(model, ids, job, streamer=clock, logits_processor=rules)
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
        return clock.row(text, new, len(prompt), len(new), known)

    def _prompt(
        self, question: str, passages: Sequence[Passage]
    ) -> tuple[tuple[int, ...], list[Any]]:
        """Return the prompt of ``RAG`` and its logits processors, without search for references."""
        words, limit = self._target.tokenizer, self._target.ours.max_positions
        room = None if limit is None else limit - self._max_new_tokens
        if not self._reads_apart:
            ids = _encoded(words, written(question, passages))
            if room is None or len(ids) <= room:
                return ids, []
        template = template_of(words)
        made = build_prompt(words, question, passages, template=template, max_tokens=room)
        if not self._is_reader:
            return made.token_ids, []
        _, sentences = refuse(question, [], made.passages)
        values = values_of(question, sentences)
        return made.token_ids, [QuoteConstraint(made.token_ids, words, values)]


def _encoded(words: Tokenizer, text: str) -> tuple[int, ...]:
    if words.has_chat_template:
        return tuple(words.chat([{"role": "user", "content": text}]))
    return tuple(words.encode(text, add_special_tokens=True))


def check_recording(name: str, token_ids: Sequence[int], recorded: Sequence[int]) -> None:
    """Raise RuntimeError if an answer differs from its recording; do nothing without one."""
    if recorded and tuple(token_ids) != tuple(recorded):
        raise RuntimeError(
            f"{name} left the recording: {len(token_ids)} tokens instead of {len(recorded)}"
        )


@contextmanager
def _unregistered(*, only_if: bool) -> Iterator[None]:
    """Switch off the registration and search of references inside the context if ``only_if``."""
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


GENERATE, PLAIN, AGAIN = "generate", "_plain", "_again"


@cli.experiment(
    *cli.TARGET, cli.DTYPE,
    cli.option("--task", help="a task's name, or a .jsonl file of your own (default: llma)"),
    cli.option("--ways", default=",".join(STREAMING), help="comma-separated"),
    cli.option("--embedder", help="a folder or name (default: all-MiniLM-L6-v2)"),
    cli.integer("--k", 10, "passages of a prompt"),
    cli.option("--limit", type=int, help="questions (default: all); the index has all passages"),
    cli.integer("--repeats", 1, "rounds over all questions"),
    cli.integer("--max-new-tokens", 256), table=show, shown=("decoders",),
)  # fmt: skip
def run_rag_speedup(options: Namespace) -> dict[str, Any]:
    """RAG: is a whole request faster, from the question to the last word of its answer?

        python -m eval rag_speedup --model reader --data DATA
        python -m eval rag_speedup --model random:llama-135m --data DATA --limit 20

    The passages of all questions of a task form one index: a file, an embedder, FAISS. Each
    question goes from there to its ten best passages, a prompt and an answer: through
    ``ragaccel.RAG``, a LangChain chain and a LlamaIndex query engine, if these are installed, each
    with its defaults and with plain decoding; and through ``model.generate`` on the same passages.
    All stream. They take turns on each question; memory and prefix cache of every LLM are empty at
    the start of a round. Only the way *asked again* has seen the question before. A real model
    gives its own answers; a random one follows the recorded ones whatever was retrieved. Without
    the data folder the questions are about the documents under ``demos/``.
    """
    ways, left_out = chosen_ways(options.ways)
    task, examples = load_questions(options.task, options.data)
    note(f"loading {options.model}")
    target = chosen_target(options, options.dtype)
    asked = questions_of(examples, options.limit, answered=target.is_random)
    if not asked:
        raise ValueError(f"task {task} has no questions with recorded answers to follow")
    settings = describe_target(options) | settings_of(
        options, "k", "repeats", "max_new_tokens",
        task=Path(task).name, forced=target.is_random, ways=",".join(ways), examples=len(asked),
        **({"left_out": left_out} if left_out else {}),
        **({"embedder": Path(options.embedder).name} if options.embedder else {}),
    )  # fmt: skip
    results_log = open_results_log(options.out, settings)
    with open_collection(task, examples, load_embedder(options.embedder)) as collection:
        index: dict[str, Any] = {"passages": collection.num_passages}
        if task not in ABOUT_DOCUMENTS:
            index["own_found"] = share_found(collection, asked, options.k)
        decoders = make_ways(ways, target, collection.source, options)
        recorded = recorded_answers(asked, target, options.max_new_tokens)
        run_rounds(decoders, asked, recorded, results_log, options.repeats)
    return result(
        "rag_speedup",
        settings,
        device=options.device,
        index=index,
        log=results_log,
        decoders=compare(results_log.measurements),
    )


def questions_of(
    examples: Sequence[Example], limit: int | None, *, answered: bool
) -> list[Example]:
    """Return the first questions without a history; with ``answered`` only those with an answer."""
    alone = (one for one in examples if one.question and not one.history)
    return list(islice((one for one in alone if one.answer or not answered), limit))


def chosen_ways(names: str) -> tuple[list[str], list[str]]:
    """Return the requested ways that are installed, and those that are not."""
    chosen = names.split(",")
    if unknown := set(chosen) - STREAMING.keys():
        raise ValueError(f"no way {sorted(unknown)[0]!r}: take some of {', '.join(STREAMING)}")
    left_out = [name for name in chosen if name in PACKAGES and not is_installed(name)]
    for name in left_out:
        note(f"{name} is left out: {PACKAGES[name]} is not installed")
    return [name for name in chosen if name not in left_out], left_out


def make_ways(
    ways: Sequence[str], target: Target, source: TimedSource, options: Namespace
) -> list[Way]:
    """Make each way accelerated and plain, the first also *asked again*, and ``generate``."""
    settings = {"k": options.k, "max_new_tokens": options.max_new_tokens}
    made: list[Way] = [Generate(GENERATE, target, source, **settings)]
    for way in ways:
        made.append(Ours(way + PLAIN, target, source, way=way, accelerated=False, **settings))
        made.append(Ours(way, target, source, way=way, **settings))
    again = f"{ways[0]}{AGAIN}"
    made.append(Ours(again, target, source, way=ways[0], again=True, **settings))
    return made


def recorded_answers(
    examples: Sequence[Example], target: Target, max_new_tokens: int
) -> dict[str, tuple[int, ...]]:
    """Return the token ids of the answers for a random model to follow; empty for a real one."""
    if not target.is_random:
        return {}
    return {
        example.example_id: recorded_ids(example.answer, target.tokenizer)[:max_new_tokens]
        for example in examples
    }


def recorded_ids(answer: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return an answer's token ids with an end token, tokenized apart from any prompt."""
    return (*tokenizer.encode(answer), *sorted(tokenizer.eos_ids)[:1])


def run_rounds(
    ways: Sequence[Way],
    examples: Sequence[Example],
    recorded: Mapping[str, tuple[int, ...]],
    results_log: ResultsLog,
    repeats: int,
) -> None:
    """Ask every way every question in turns; all forget everything before every round."""
    by_name = {way.name: way for way in ways}

    def ask(name: str, example: Example) -> Row:
        answer = recorded.get(example.example_id, ())
        return by_name[name].ask(example.question, answer)

    in_turns(
        results_log,
        list(by_name),
        {example.example_id: example for example in examples},
        ask,
        lambda row: f"{row['total_seconds']:.2f} s",
        repeats=repeats,
        warm_up=lambda name: ask(name, examples[-1]),
        forget=lambda name: by_name[name].forget(),
    )


def compare(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return the figures of each way, in order of first appearance.

    ``first_token_seconds`` and ``total_seconds`` are medians over answers; ``stages`` are means, so
    that they sum to ``total_seconds_mean``. ``ratio`` and ``ratio_first_token`` are medians of
    paired speeds over the same way with plain decoding, ``ratio_generate`` and
    ``ratio_first_token_generate`` over ``model.generate``. ``same_text`` is the number of answers
    with the same text as plain decoding, of ``answers`` in all.
    """
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row["decoder"], []).append(row)
    return {name: _figures(name, by_name) for name in by_name}


def _figures(name: str, by_name: Mapping[str, list[Row]]) -> dict[str, Any]:
    own, plain = by_name[name], by_name.get(plain_of(name), [])
    first_plain = next(rows for other, rows in by_name.items() if other.endswith(PLAIN))
    said = {_key(row): row["text_hash"] for row in plain or first_plain}
    return {
        "first_token_seconds": median(row["first_token_seconds"] for row in own),
        "total_seconds": median(row["total_seconds"] for row in own),
        "total_seconds_mean": fmean(row["total_seconds"] for row in own),
        **_ratios(own, plain, ""),
        **_ratios(own, by_name[GENERATE], "_generate"),
        "stages": {
            stage: fmean(row["stages"][stage] for row in own)
            for stage in RAG_STAGES
            if stage in own[0]["stages"]
        },
        "examples": len({row["example"] for row in own}),
        "answers": len(own),
        "prompt_tokens": fmean(row["prompt_tokens"] for row in own),
        "tokens": sum(row["tokens"] for row in own),
        "passes": sum(row["passes"] for row in own),
        "acceptance_length": sum(r["tokens"] for r in own) / sum(r["passes"] for r in own),
        "same_text": sum(row["text_hash"] == said.get(_key(row)) for row in own),
    }


def plain_of(name: str) -> str:
    """Return the name of the same way with plain decoding."""
    return name.removesuffix(AGAIN).removesuffix(PLAIN) + PLAIN


def _ratios(own: Sequence[Row], other: Sequence[Row], label: str) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for quantity, kind in (("total_seconds", ""), ("first_token_seconds", "_first_token")):
        if other:
            ratio = paired_ratio(_speeds(own, quantity), _speeds(other, quantity))
            key = f"ratio{kind}{label}"
            figures[key], figures[f"{key}_worst"] = ratio.value, ratio.worst
            figures[f"{key}_interval"] = [ratio.low, ratio.high]
    return figures


def _speeds(rows: Sequence[Row], quantity: str) -> Speeds:
    return {_key(row): 1 / row[quantity] for row in rows}


def _key(row: Row) -> tuple[str, int]:
    return row["example"], row["round"]
