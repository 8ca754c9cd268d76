"""Convert nodes to passages, collect retrieved nodes, and find citations."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from threading import get_ident
from types import AsyncGeneratorType, GeneratorType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary

from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.chat_engine.types import StreamingAgentChatResponse
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.instrumentation.span import BaseSpan, active_span_id
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.core.llms import ChatResponse, CompletionResponse
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

from ragaccel import ConfigurationError, Passage, Reference, citations
from ragaccel.frameworks import AsyncIterateWithin, ReferenceScope, iterate_within, use_context

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llama_index.core.instrumentation.events import BaseEvent

_MAX_PAGE_DIGITS = 9  # longer numbers are not pages, and int() refuses very long ones


def as_passage(node: BaseNode | NodeWithScore) -> Passage:
    """Convert a node to a passage, with its position in the document if the node has one."""
    if isinstance(node, NodeWithScore):
        return replace(as_passage(node.node), score=max(0.0, node.score or 0.0))
    text = node.get_content(metadata_mode=MetadataMode.NONE)
    start = getattr(node, "start_char_idx", None) or 0
    metadata = node.metadata
    return Passage(
        passage_id=node.node_id,
        text=text,
        title=_first(metadata, "title", "file_name"),
        path=node.ref_doc_id or _first(metadata, "file_path"),
        start=start,
        end=start + len(text),
        page=_page(metadata),
    )


def _first(metadata: Mapping[str, Any], *names: str) -> str:
    """Return the first non-empty field as text."""
    return next((str(metadata[name]) for name in names if metadata.get(name)), "")


def _page(metadata: Mapping[str, Any]) -> int | None:
    label = str(metadata.get("page_label", ""))
    return int(label) if label.isdecimal() and len(label) <= _MAX_PAGE_DIGITS else None


def citations_of(response: Any, text: str | None = None) -> list[dict[str, Any]]:
    """Return the spans of a response that are copied word for word from its source nodes.

    Each citation is a dict of the copied ``text``, its position in the response (``out_start``,
    ``out_end``) and in the node (``start``, ``end``), the node's id as ``passage_id``, and
    ``citation``, a label for readers such as ``guide.pdf:3``.

    Args:
        response: The response of an engine; a stream is read to its end. Or a response of
            ``Ragaccel`` itself or the last piece of its stream, which already have citations.
        text: The answer's text; needed for a stream that has been read already.

    Raises:
        ConfigurationError: The stream was already read and ``text`` is missing, an async or chat
            stream is not read yet, or the response has no sources.
    """
    if isinstance(response, ChatResponse | CompletionResponse):
        return _model_citations(response)
    if not hasattr(response, "source_nodes"):
        raise ConfigurationError(
            f"citations need a response with source nodes: a {type(response).__name__} has none"
        )
    passages = [as_passage(node) for node in _source_nodes(response)]
    text = _text(response) if text is None else text
    return citations(text, passages, format_citation=citation_label)


def citation_label(passage: Passage) -> str:
    """Return a label for readers: title and page; a document's id says little to them."""
    if not passage.title:
        return passage.citation
    return passage.title if passage.page is None else f"{passage.title}:{passage.page}"


def _model_citations(response: ChatResponse | CompletionResponse) -> list[dict[str, Any]]:
    raw = response.raw
    if not isinstance(raw, dict) or "ragaccel" not in raw:
        raise ConfigurationError(
            "this response has no citations: pass a response of Ragaccel or the last piece of its "
            "stream"
        )
    found: list[dict[str, Any]] = raw["ragaccel"]["citations"]
    return found


def _source_nodes(response: Any) -> list[NodeWithScore]:
    """Return the source nodes of a response, else those of the engines that its chat called."""
    answers = [source.raw_output for source in getattr(response, "sources", ())]
    return response.source_nodes or [
        node for answer in answers for node in getattr(answer, "source_nodes", ())
    ]


def _text(response: Any) -> str:
    if isinstance(response, StreamingResponse):
        if response.response_txt is None and _has_started(response.response_gen):
            raise ConfigurationError(
                "this stream has been read and keeps no text: call citations_of(response, text)"
            )
        return response.get_response().response or ""
    if isinstance(response, AsyncStreamingResponse):
        if response.response_txt is None:
            raise ConfigurationError(
                "read an async stream first: citations_of(await response.get_response())"
            )
        return response.response_txt
    is_chat_stream = isinstance(response, StreamingAgentChatResponse)
    if is_chat_stream and not (response.is_done or response.response):
        raise ConfigurationError(
            "read a chat's stream to its end first, then call citations_of(response)"
        )
    return str(response)


def _has_started(stream: Any) -> bool:
    return inspect.isgenerator(stream) and inspect.getgeneratorstate(stream) != inspect.GEN_CREATED


class RootSpan:
    """A root span and the nodes retrieved in it.

    It lives as long as the context in which it was entered or a copy of that context, such as
    those of its threads, its tasks and its unread stream.
    """

    def __init__(self, span_id: str, *, leaves_span: bool) -> None:
        self.span_id = span_id
        self.scope = ReferenceScope()
        self.has_ended = False
        self._origin = _thread_and_task()
        self._leaves_span = leaves_span

    def contains(self, parent_id: str) -> bool:
        """Return whether a span entered here below ``parent_id`` belongs to this root.

        A workflow runs in tasks. Its ``run`` returns at once and leaves its span active, although
        later calls in the same task do not belong to the workflow.
        """
        if self.has_ended:
            return False
        return not (
            self._leaves_span and parent_id == self.span_id and _thread_and_task() == self._origin
        )

    def exit(self) -> None:
        """Record the end of a span that stays active after its end."""
        self.has_ended = self._leaves_span


_ROOT: ContextVar[RootSpan | None] = ContextVar("ragaccel_root", default=None)
_STREAM_ROOT: ContextVar[RootSpan | None] = ContextVar("ragaccel_stream_root", default=None)
_ROOTS: WeakValueDictionary[str, RootSpan] = WeakValueDictionary()
_WRAPPED_STREAMS: WeakSet[Any] = WeakSet()  # streams that already keep their root span


def current_root() -> RootSpan | None:
    """Return the current root span, or None."""
    return None if active_span_id.get() is None else _ROOT.get()


class RootSpanHandler(BaseSpanHandler[BaseSpan]):
    """A span handler that records the root span of each context and nothing else."""

    @classmethod
    def class_name(cls) -> str:
        """Return the class name for LlamaIndex's instrumentation."""
        return "RootSpanHandler"

    def span_enter(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,  # noqa: ARG002
        instance: Any = None,
        parent_id: str | None = None,
        tags: dict[str, Any] | None = None,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Record a root span."""
        root = _ROOT.get()
        if parent_id is None and (stream_root := _STREAM_ROOT.get()) is not None:
            _ROOT.set(stream_root)
        elif parent_id is None or root is None or not root.contains(parent_id):
            root = RootSpan(id_, leaves_span=_is_workflow(instance))
            _ROOTS[id_] = root
            _ROOT.set(root)

    def span_exit(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,  # noqa: ARG002
        instance: Any = None,  # noqa: ARG002
        result: Any = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Record a root span's end; an unread stream still belongs to it."""
        if isinstance(result, StreamingResponse | AsyncStreamingResponse):
            _keep_root_while_read(result)
        self._exit(id_)

    def span_drop(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,  # noqa: ARG002
        instance: Any = None,  # noqa: ARG002
        err: BaseException | None = None,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Record a root span's end."""
        self._exit(id_)

    def new_span(self, *_: Any, **__: Any) -> BaseSpan | None:
        """Return None: spans are not kept."""
        return None

    def prepare_to_exit_span(self, *_: Any, **__: Any) -> BaseSpan | None:
        """Return None: spans are not kept."""
        return None

    def prepare_to_drop_span(self, *_: Any, **__: Any) -> BaseSpan | None:
        """Return None: spans are not kept."""
        return None

    def _exit(self, span_id: str) -> None:
        root = _ROOTS.pop(span_id, None)
        if root is None:
            return
        root.exit()
        if _ROOT.get() is root and active_span_id.get() == span_id:
            _ROOT.set(None)


def _keep_root_while_read(response: StreamingResponse | AsyncStreamingResponse) -> None:
    """Keep the current root span for model calls made while the stream is read."""
    root, pieces = _ROOT.get(), response.response_gen
    if root is None or pieces in _WRAPPED_STREAMS:
        return
    context = partial(_use_root, root)
    if isinstance(pieces, AsyncGeneratorType):
        response.response_gen = AsyncIterateWithin(context, pieces)
    elif isinstance(pieces, GeneratorType):
        response.response_gen = iterate_within(context, pieces)
    _WRAPPED_STREAMS.add(response.response_gen)


@contextmanager
def _use_root(root: RootSpan) -> Iterator[None]:
    with use_context(_STREAM_ROOT, root), use_context(_ROOT, root):
        yield


def _thread_and_task() -> tuple[int, int | None]:
    """Return the ids of the current thread and task."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return get_ident(), None if task is None else id(task)


def _is_workflow(instance: Any) -> bool:
    return any(kind.__name__ == "Workflow" for kind in type(instance).__mro__)


logger = logging.getLogger(__name__)

NAMESPACE_TAG = "ragaccel_namespace"


class RetrievalCollector(BaseEventHandler):
    """An event handler that registers the nodes that retrievers return.

    Importing ``llama_index.llms.ragaccel`` attaches one to all events. It registers nodes in the
    namespace set by ``instrument_tags({"ragaccel_namespace": ...})``, else in the current
    ``ragaccel.reference_scope``, else for the current root span. Nodes retrieved outside of all
    these go to the process's registry, which is searched only by models that are given it.

    Attributes:
        registry: A ``ragaccel.frameworks.ReferenceRegistry`` to use instead of these.
    """

    registry: Any = None

    @classmethod
    def class_name(cls) -> str:
        """Return the class name for LlamaIndex's instrumentation."""
        return "RetrievalCollector"

    def handle(self, event: BaseEvent, **_: Any) -> None:
        """Register the nodes of a retrieval; ignore other events."""
        if not isinstance(event, RetrievalEndEvent):
            return
        try:  # a dispatcher drops errors of handlers
            self._register(event)
        except Exception:
            logger.warning(
                "retrieved nodes were not registered as references; answers stay the same, but "
                "copying from them is not faster",
                exc_info=True,
            )

    def _register(self, event: RetrievalEndEvent) -> None:
        from ragaccel.frameworks import auto_references_enabled, current_scope, default_registry

        if not auto_references_enabled():
            return
        passages = [as_passage(node) for node in event.nodes]
        namespace = event.tags.get(NAMESPACE_TAG, "")
        if self.registry is not None or namespace:
            registry = default_registry() if self.registry is None else self.registry
            registry.register(passages, namespace)
            return
        here, root = current_scope(), current_root()
        if here is not None:
            here.register(passages)
        elif root is None or root.span_id == event.span_id:  # the retriever was called directly
            default_registry().register(passages)
        else:
            root.scope.register(passages)


AnyReference = str | Passage | Reference
_SINGLE_TYPES = (str, bytes, Mapping, BaseNode, NodeWithScore)  # iterable, but one reference


def as_references(given: Any) -> list[AnyReference]:
    """Convert one or several objects of a caller to references.

    Raises:
        ConfigurationError: An object is not a str, node, Passage or Reference.
    """
    if given is None:
        return []
    is_one = isinstance(given, _SINGLE_TYPES) or not isinstance(given, Iterable)
    return [_as_reference(one) for one in ([given] if is_one else given)]


def _as_reference(given: Any) -> AnyReference:
    if isinstance(given, AnyReference):
        return given
    if isinstance(given, BaseNode | NodeWithScore):
        return as_passage(given)
    raise ConfigurationError(
        f"a reference must be a str, node, Passage or Reference, not {type(given).__name__}"
    )
