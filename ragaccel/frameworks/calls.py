"""One call of a framework's model: name its options, prepare its prompt, and answer it.

>>> call = prepare(get_shared_model(), "Who keeps the lamp?", {"max_new_tokens": 64})
>>> call.reply().text
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from threading import Event, Timer
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from ragaccel.answer import Stream
from ragaccel.config import Settings, check_settings
from ragaccel.decoding.request import Reference
from ragaccel.errors import CapacityError, ConfigurationError, check_arguments, has_no_effect
from ragaccel.frameworks.prompt_parsing import parse_prompt
from ragaccel.frameworks.references import MAX_TOKENS, gather_references
from ragaccel.models import resolve_tool_calling, resolve_tool_choice
from ragaccel.passage import Passage
from ragaccel.prompt import Prompt, adapt_messages, build_prompt
from ragaccel.quotes import judging_constraint

if TYPE_CHECKING:
    from collections.abc import (
        Awaitable,
        Callable,
        Coroutine,
        Generator,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )
    from contextlib import AbstractContextManager
    from contextvars import ContextVar

    from ragaccel.answer import Answer, AsyncStream
    from ragaccel.frameworks.registry import ReferenceRegistry, ReferenceScope, VisibleReferences
    from ragaccel.frameworks.shared_model import SharedModel
    from ragaccel.llm import LLM
    from ragaccel.models import ToolCall, ToolCalling

    Message = dict[str, Any]
    AnyReference = str | Passage | Reference
    ReadReply = Callable[[str, list[ToolCall], str], tuple[str, list[ToolCall]]]


ALIASES = {
    "format": "response_format",
    "max_completion_tokens": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "model_id": "model",
    "model_name": "model",
    "num_ctx": "capacity",
    "num_predict": "max_new_tokens",
    "num_return_sequences": "n",
    "repeat_penalty": "repetition_penalty",
    "request_timeout": "timeout",
    "stop_sequences": "stop",
    "torch_dtype": "dtype",
}
"""{an option's name in other classes and libraries: its name in ``LLM``}."""

DEFAULT_MAX_NEW_TOKENS = 256
_MIN_TOKENS_FOR_THREAD = 256  # shorter answers are parsed for tool calls on the event loop
_MAX_THREADS = 64

Result = TypeVar("Result")


def in_thread(method: Callable[..., Result]) -> Callable[..., Coroutine[Any, Any, Result]]:
    """Return an async version of a method, which runs it in a thread.

    >>> class Store:
    ...     def add(self, texts): ...
    ...     aadd = in_thread(add)
    """

    @wraps(method)
    async def run(self: Any, *args: Any, **kwargs: Any) -> Result:
        bound: Callable[..., Result] = getattr(self, method.__name__)
        return await asyncio.to_thread(bound, *args, **kwargs)

    return run


@contextmanager
def use_context(variable: ContextVar[Result], value: Result) -> Iterator[None]:
    """Set a context variable inside the block."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


def iterate_within(
    context: Callable[[], AbstractContextManager[Any]], pieces: Iterator[Result]
) -> Generator[Result, None, None]:
    """Yield pieces, and be in a context only while each piece is computed."""
    with closing(pieces):  # type: ignore[type-var]
        while True:
            with context():
                try:
                    piece = next(pieces)
                except StopIteration:
                    return
            yield piece


class AsyncIterateWithin(AsyncGenerator[Result, Any]):
    """The async counterpart of ``iterate_within``.

    This is a class because an event loop that shuts down closes all native async generators at
    once, and reports an error for one that an outer generator is already closing.
    """

    def __init__(
        self,
        context: Callable[[], AbstractContextManager[Any]],
        pieces: AsyncGenerator[Result, Any],
    ) -> None:
        self._context, self._pieces = context, pieces

    async def asend(self, value: Any) -> Result:
        """Compute and return the next piece."""
        with self._context():
            return await self._pieces.asend(value)

    async def athrow(self, *error: Any) -> Result:
        """Raise an error inside the inner generator."""
        with self._context():
            return await self._pieces.athrow(*error)

    async def aclose(self) -> None:
        """Close the inner generator."""
        await self._pieces.aclose()


def rename_options(
    given: Mapping[str, Any], owner: str, aliases: Mapping[str, str] = ALIASES
) -> dict[str, Any]:
    """Translate other libraries' names of options, and drop options without effect.

    An option without effect is, for example, a penalty of 0.

    Raises:
        TypeError: one option is given under two names.
    """
    named: dict[str, Any] = {}
    for name, value in given.items():
        if has_no_effect(name, value):
            continue
        own = aliases.get(name, name)
        if own in named or (own != name and own in given):
            raise TypeError(f"{owner} got {own} twice, once as {name}: pass it once")
        named[own] = value
    return named


def read_options(
    given: Mapping[str, Any],
    owner: str,
    known: Iterable[str],
    advice: Mapping[str, str],
    aliases: Mapping[str, str] = ALIASES,
) -> dict[str, Any]:
    """Return options by their own names, without those that have no effect.

    Raises:
        TypeError: a name is unknown, or one option is given under two names; the message says what
            to use instead, which ``advice`` names.
    """
    known = set(known)
    unknown = [
        name
        for name, value in given.items()
        if aliases.get(name, name) not in known and not has_no_effect(name, value)
    ]
    of_aliases = {other: advice[name] for other, name in aliases.items() if name in advice}
    check_arguments(owner, unknown, known, {**of_aliases, **advice})
    return rename_options(given, owner, aliases)


def refuse_settings(loading_options: Iterable[str], advice: str) -> None:
    """Raise TypeError for settings of requests among options of loading, which would be ignored."""
    settings = Settings.__annotations__.keys() - {"drafter", "remember"}  # ``LLM`` takes these too
    misplaced = [name for name in loading_options if ALIASES.get(name, name) in settings]
    check_arguments("model_kwargs", misplaced, (), dict.fromkeys(misplaced, advice))


def searched_references(
    registry: ReferenceRegistry | None,
    namespace: str,
    scopes: Sequence[ReferenceScope] = (),
    *,
    enabled: bool = True,
) -> VisibleReferences | None:
    """Return the references that a call made here may search, or None if it searches none.

    Raises:
        ConfigurationError: ``registry`` is not a ``ReferenceRegistry``.
    """
    from ragaccel.frameworks.registry import auto_references_enabled, visible_references

    check_registry(registry)
    if not enabled or not auto_references_enabled():
        return None
    return visible_references(registry, namespace, scopes=scopes)


def check_registry(registry: Any) -> None:
    """Raise ConfigurationError unless ``registry`` is None or a ``ReferenceRegistry``."""
    if registry is None:
        return
    from ragaccel.frameworks.registry import ReferenceRegistry  # imports numpy

    if not isinstance(registry, ReferenceRegistry):
        raise ConfigurationError(
            "registry must be a ragaccel.frameworks.ReferenceRegistry, not "
            f"{type(registry).__name__}"
        )


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the references of a call come from; see ``gather_references``."""

    given: Sequence[AnyReference] = ()
    retrieved: Sequence[AnyReference] = ()
    visible: VisibleReferences | None = None
    adjacent_chunks: bool = True
    max_tokens: int = MAX_TOKENS


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of a call in the chat templates' format, and the choice among them.

    ``choice`` is None (the model decides), a tool's name, or empty for any tool.
    """

    tools: list[dict[str, Any]]
    choice: str | None = None
    parallel: bool = True

    @classmethod
    def of(cls, tools: list[dict[str, Any]], choice: Any, parallel: Any) -> Toolbox | None:
        """Return the toolbox for a framework's arguments, or None if no tool may be called.

        Raises:
            ConfigurationError: the choice is not the name of a tool.
        """
        chosen = resolve_tool_choice(tools, choice)
        return cls(tools, chosen, parallel is not False) if tools and chosen != "none" else None


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer: its text without tool calls, and the calls."""

    answer: Answer
    text: str
    calls: list[ToolCall]

    @property
    def finish_reason(self) -> str:
        """Return ``tool_calls`` if a valid tool call was made, else the answer's reason."""
        return (
            "tool_calls" if any(call.is_valid for call in self.calls) else self.answer.finish_reason
        )


@dataclass(frozen=True, slots=True)
class Call:
    """One prompt with everything needed to answer it, synchronously or under asyncio.

    Attributes:
        timeout: seconds from ``started`` to the complete answer, then ``TimeoutError``.
        calling: the tools that the answer may call.
        read: turns text, tool calls and finish reason of an answer into its final text and calls.
        is_buffered: whether the text is only known at the end, so that a stream has one piece.
    """

    llm: LLM
    prompt: Any
    references: Sequence[AnyReference]
    settings: Mapping[str, Any]
    timeout: float | None = None
    started: float = field(default_factory=monotonic)
    calling: ToolCalling | None = None
    read: ReadReply | None = None
    is_buffered: bool = False

    def reply(self) -> Reply:
        """Compute the answer; raise TimeoutError at the timeout, as all methods do."""
        (reply,) = reply_all([self])
        return reply

    def pieces(self) -> Generator[str | Reply, None, None]:
        """Check the request now; return the pieces of its answer, then the ``Reply``.

        Closing the iterator ends the request.
        """
        return self._pieces(self._stream())

    async def areply(self) -> Reply:
        """Compute the answer; cancelling the caller cancels it."""
        stream = await asyncio.to_thread(self._astream)
        answer = await self._in_time(stream.finish)
        return await self._aparse(answer.token_ids, self._reply, answer)

    async def apieces(self) -> AsyncGenerator[str | Reply, None]:
        """Check the request now; return the pieces of its answer, then the ``Reply``.

        Closing the iterator ends the request.
        """
        return self._apieces(await asyncio.to_thread(self._astream))

    def _stream(self) -> Stream:
        return self.llm.stream(self.prompt, references=self.references, **self.settings)

    def _astream(self) -> AsyncStream:
        return self.llm.astream(self.prompt, references=self.references, **self.settings)

    def _pieces(self, stream: Stream) -> Generator[str | Reply, None, None]:
        emitted = ""
        with stream, self._closing_in_time(stream.close):
            for piece in stream:
                if text := self._visible(piece, emitted, stream.token_ids):
                    emitted += text
                    yield text
            yield from self._last(emitted, stream.answer)

    async def _apieces(self, stream: AsyncStream) -> AsyncGenerator[str | Reply, None]:
        emitted = ""
        try:
            while (piece := await self._in_time(_next, stream)) is not None:
                ids = stream.token_ids
                if text := await self._aparse(ids, self._visible, piece, emitted, ids):
                    emitted += text
                    yield text
            answer = stream.answer
            for part in await self._aparse(answer.token_ids, self._last, emitted, answer):
                yield part
        finally:
            await stream.aclose()

    def _visible(self, piece: str, emitted: str, token_ids: Sequence[int]) -> str:
        """Return the text to emit after one more piece, without what may become a tool call."""
        if self.is_buffered:
            return ""
        return piece if self.calling is None else self.calling.next_content(emitted, token_ids)

    def _last(self, emitted: str, answer: Answer) -> list[str | Reply]:
        reply = self._reply(answer)
        rest = reply.text[len(emitted) :] if reply.text.startswith(emitted) else ""
        return [rest, reply] if rest else [reply]

    def _reply(self, answer: Answer) -> Reply:
        text, calls = answer.text, list[Any]()
        if self.calling is not None:
            text, calls = self.calling.read(text, answer.token_ids)
        if self.read is not None:
            text, calls = self.read(text, calls, answer.finish_reason)
        return Reply(answer, text, calls)

    async def _aparse(
        self, token_ids: Sequence[int], work: Callable[..., Result], *arguments: Any
    ) -> Result:
        """Parse an answer, in a thread if it is long: each piece parses all of it again."""
        if self.calling is None or len(token_ids) < _MIN_TOKENS_FOR_THREAD:
            return work(*arguments)
        return await asyncio.to_thread(work, *arguments)

    @property
    def _seconds_left(self) -> float | None:
        if self.timeout is None:
            return None
        left = self.started + self.timeout - monotonic()
        if left <= 0:
            raise self._timeout_error()
        return left

    async def _in_time(self, work: Callable[..., Awaitable[Result]], *arguments: Any) -> Result:
        seconds = self._seconds_left
        try:
            return await asyncio.wait_for(work(*arguments), seconds)
        except asyncio.TimeoutError as error:
            raise self._timeout_error() from error

    @contextmanager
    def _closing_in_time(self, close: Callable[[], None]) -> Iterator[None]:
        """Close the streams at the timeout, from a timer thread, and raise TimeoutError here."""
        seconds = self._seconds_left
        if seconds is None:
            yield
            return
        timed_out = Event()

        def end() -> None:
            timed_out.set()
            close()

        timer = Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        except RuntimeError as error:  # raised by a closed stream when asked for its answer
            if timed_out.is_set():
                raise self._timeout_error() from error
            raise
        finally:
            timer.cancel()

    def _timeout_error(self) -> TimeoutError:
        return TimeoutError(
            f"no complete answer within timeout={self.timeout} seconds: increase timeout or lower "
            "max_tokens"
        )


async def _next(stream: AsyncStream) -> str | None:
    return await anext(stream, None)


def sampled_calls(call: Call, count: int) -> list[Call]:
    """Return ``count`` copies of a call with consecutive seeds, from its own upwards."""
    seed = call.settings.get("seed") or 0
    return [
        replace(call, settings={**call.settings, "seed": seed + number}) if number else call
        for number in range(count)
    ]


def reply_all(calls: Sequence[Call]) -> list[Reply]:
    """Answer several calls of one model in shared forward passes, within the first one's timeout.

    If one fails, the others end.
    """
    if not calls:
        return []
    streams = [call._stream() for call in calls]

    def close() -> None:
        for stream in streams:
            stream.close()

    with calls[0]._closing_in_time(close):
        if len(streams) == 1:
            return [calls[0]._reply(streams[0].finish())]
        with ThreadPoolExecutor(min(len(streams), _MAX_THREADS)) as pool:
            try:
                answers = list(pool.map(Stream.finish, streams))
            finally:
                close()
    return [call._reply(answer) for call, answer in zip(calls, answers, strict=True)]


async def areply_all(calls: Sequence[Call]) -> list[Reply]:
    """Answer several calls of one model in shared forward passes; if one fails, all end."""
    tasks = [asyncio.ensure_future(call.areply()) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def prepare(
    model: SharedModel,
    prompt: str | list[Message],
    settings: Mapping[str, Any],
    sources: Sources | None = None,
    *,
    documents: Sequence[Passage] = (),
    toolbox: Toolbox | None = None,
    template_options: Mapping[str, Any] | None = None,
    is_verbatim: bool = False,
    context_window: int | None = None,
    **call_fields: Any,
) -> Call:
    """Load the model, render the prompt, find its references, and return the call.

    Messages are rendered with the model's chat template. For a documents-only template, such as the
    bundled reader's, the prompt is parsed into its passages and its question. The bundled reader
    says one sentence of them then, or that they do not tell.

    Args:
        model: the model that answers.
        prompt: a text, or messages.
        settings: settings of ``LLM.generate``.
        sources: where references come from; by default there are none.
        documents: passages for the chat template's own field, or else for the last message; those
            that do not fit are dropped.
        toolbox: the tools that the answer may call.
        template_options: further variables of the chat template.
        is_verbatim: whether a text is never parsed.
        context_window: the maximum number of tokens of prompt and answer, if below the model's.
        **call_fields: further fields of the ``Call``.

    Raises:
        ConfigurationError: the chat template does not support tools, documents or a message.
        CapacityError: prompt and answer exceed ``context_window``, or not even one document fits.
    """
    check_settings(settings)  # before the model is loaded
    llm, sources = model.load(), sources or Sources()
    namespace = settings.get("namespace") or ""
    given = [*sources.given, *documents]
    found = gather_references(
        prompt if isinstance(prompt, str) else text_of(prompt),
        given,
        retrieved=sources.retrieved,
        registry=sources.visible,
        namespace=namespace,
        tokenizer=llm.tokenizer,
        adjacent_chunks=sources.adjacent_chunks,
        max_tokens=sources.max_tokens,
    )
    calling = None
    if toolbox is not None:
        stop = settings.get("stop")
        stops = [stop] if isinstance(stop, str) else stop
        calling = resolve_tool_calling(
            llm.tokenizer, toolbox.tools, toolbox.choice, stop=stops, parallel=toolbox.parallel
        )
    has_inputs = toolbox is not None or bool(template_options)
    is_parsed = not has_inputs and not documents and model.is_documents_only
    longest = _max_prompt_tokens(llm, settings, context_window)
    rendered: Any = prompt
    if is_parsed and not (is_verbatim and isinstance(prompt, str)):
        rendered = parse_prompt(
            prompt,
            llm.tokenizer,
            sources.visible,
            given=given,
            namespace=namespace,
            max_tokens=longest,
        )
    elif not isinstance(prompt, str) and documents and not has_inputs:
        rendered = _prompt_with_documents(llm, prompt, documents, longest)
    elif not isinstance(prompt, str):
        tools = None if toolbox is None else toolbox.tools
        rendered, inputs = _fit_template(model, prompt, tools, template_options, documents)
        if inputs:
            opening = calling.opening_ids if calling else []
            rendered = [*llm.tokenizer.chat(rendered, **inputs), *opening]
    _check_context_window(rendered, llm, settings, context_window)
    if isinstance(rendered, Prompt) and llm.is_bundled_reader:
        history = prompt[:-1] if documents and not isinstance(prompt, str) else ()
        settings = _quoting(rendered, llm, settings, history)
    shown = {_key(one) for one in rendered.passages} if isinstance(rendered, Prompt) else set()
    references = [one for one in found if not isinstance(one, Passage) or _key(one) not in shown]
    return Call(llm, rendered, references, settings, calling=calling, **call_fields)


def _quoting(
    prompt: Prompt, llm: LLM, settings: Mapping[str, Any], history: Sequence[Message]
) -> Mapping[str, Any]:
    constraint = judging_constraint(prompt, llm.tokenizer, history)
    given = settings.get("logits_processors") or ()
    return {**settings, "logits_processors": [*given, constraint]}


def text_of(messages: Sequence[Message]) -> str:
    """Return the text of all messages, in which retrieved passages are searched."""
    return "\n\n".join(filter(None, (message["content"] for message in messages)))


def count_message_tokens(
    model: SharedModel,
    messages: list[Message],
    tools: list[dict[str, Any]] | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> int:
    """Return the number of tokens of messages and tools, rendered with the chat template."""
    fitted, inputs = _fit_template(model, messages, tools, template_options, ())
    return len(model.tokenizer.chat(fitted, **inputs))


def _key(passage: Passage) -> tuple[str, str]:
    return passage.passage_id, passage.text  # two passages may have the same id


def _fit_template(
    model: SharedModel,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    template_options: Mapping[str, Any] | None,
    documents: Sequence[Passage],
) -> tuple[list[Message], dict[str, Any]]:
    """Return messages that the chat template accepts, and its further arguments."""
    inputs: dict[str, Any] = {}
    if documents:
        if not model.tokenizer.takes_documents:
            raise ConfigurationError(
                "this model's chat template cannot take documents together with tools or template "
                "options: write the documents into a message"
            )
        inputs["documents"] = [{"title": one.title, "text": one.text} for one in documents]
    if tools:
        inputs["tools"] = tools
    if template_options:
        inputs["template_options"] = dict(template_options)
    render = model.tokenizer.chat_text
    return adapt_messages(messages, lambda some: render(some, **inputs)), inputs


def _prompt_with_documents(
    llm: LLM, messages: list[Message], documents: Sequence[Passage], max_tokens: int | None
) -> Prompt:
    *history, last = messages
    if last["role"] != "user":
        raise ConfigurationError("documents= needs a question: end with a human message")
    return build_prompt(
        llm.tokenizer, last["content"], documents, history=history, max_tokens=max_tokens
    )


def _max_prompt_tokens(
    llm: LLM, settings: Mapping[str, Any], context_window: int | None
) -> int | None:
    limits = [limit for limit in (llm.context_length, context_window) if limit is not None]
    answer: int = settings.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
    return min(limits) - answer if limits else None


def _check_context_window(
    prompt: Any, llm: LLM, settings: Mapping[str, Any], window: int | None
) -> None:
    """Raise CapacityError if prompt and answer exceed the window; the LLM checks its own limit."""
    limit = llm.context_length
    if window is None or (limit is not None and window >= limit):
        return
    taken, answer = _num_tokens(prompt, llm), settings.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
    if taken + answer > window:
        raise CapacityError(
            f"prompt ({taken:,}) + max_new_tokens ({answer:,}) exceed context_window={window:,}: "
            "shorten the prompt, lower max_new_tokens or raise context_window"
        )


def _num_tokens(prompt: Any, llm: LLM) -> int:
    if isinstance(prompt, Prompt):
        return len(prompt.token_ids)
    if isinstance(prompt, str):
        return len(llm.tokenizer.encode(prompt, add_special_tokens=True))
    return len(prompt if prompt and isinstance(prompt[0], int) else llm.tokenizer.chat(prompt))
