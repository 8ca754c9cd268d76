"""Room: an open index, a loaded model and a conversation, ready for questions."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ragaccel.cli.answering import Answering
from ragaccel.cli.conversation import Conversation
from ragaccel.cli.drafting import drafter_of, space_of
from ragaccel.cli.knowledge import open_knowledge
from ragaccel.cli.searching import Search, passages_of
from ragaccel.cli.waiting import wait_for_rehearsal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ragaccel.answer import Answer
    from ragaccel.cli.answering import Manner
    from ragaccel.cli.knowledge import Knowledge
    from ragaccel.cli.settings import Settings
    from ragaccel.cli.source import Source
    from ragaccel.cli.terminal import Terminal
    from ragaccel.llm import LLM
    from ragaccel.rag import PassageSource


class Room:
    """Where questions about one source are asked."""

    def __init__(
        self, knowledge: Knowledge, search: Search, answering: Answering, talk: Conversation
    ) -> None:
        self._knowledge = knowledge
        self._search = search
        self._answering = answering
        self.conversation = talk
        self.last: Answer | None = None

    def ask(self, question: str, context: str = "") -> Answer:
        """Answer a question; ``context`` is a text to take into account beside the documents."""
        embedder = self._knowledge.embedder
        limit = max(1, self._knowledge.k // 2)
        self._search.first = passages_of(context, question, embedder, limit) if context else ()
        self.last = self._answering.ask(question)
        return self.last


@contextmanager
def open_room(
    terminal: Terminal, source: Source, settings: Settings, *, manner: Manner, resume: bool = False
) -> Iterator[Room]:
    """Index what is new, load the model and open the history.

    Raises:
        NothingIndexedError: there is nothing to answer from.
        ModelNotFoundError, ModelRefusedError: the model cannot be used.
    """
    from ragaccel.rag import RAG

    began = time.perf_counter()
    with open_knowledge(terminal, source, settings) as knowledge:
        indexed = time.perf_counter()
        llm = load_llm(terminal, settings)
        if settings.memory not in (None, "off"):  # what is asked now is to be remembered
            wait_for_rehearsal(terminal)
        search = Search(_passage_source(knowledge, settings), source.name, knowledge.retriever)
        rag = RAG(llm, search, k=knowledge.k, max_new_tokens=settings.max_tokens)
        talk = Conversation(terminal, source.name, resume=resume)
        generation: dict[str, Any] = {
            "temperature": settings.temperature,
            "seed": settings.seed,
        }
        drafter = drafter_of(settings, llm)
        if drafter is not None:
            generation["drafter"] = drafter
        answering = Answering(terminal, rag, search, talk, manner=manner, generation=generation)
        answering.model = settings.model or "bundled reader"
        answering.seconds = {"index": indexed - began, "load": time.perf_counter() - indexed}
        try:
            yield Room(knowledge, search, answering, talk)
        finally:
            talk.close()


def _passage_source(knowledge: Knowledge, settings: Settings) -> PassageSource:
    """Whole passages for a model of the user's; for the bundled reader what bears on them most."""
    if settings.model is not None:
        return knowledge.retriever
    from ragaccel.retrieval.focusing import FocusedRetriever

    # chosen with the reader on held-out questions: python -m eval.questions --held-out
    return FocusedRetriever(knowledge.retriever, sentences=1, margin=0.05)


def load_llm(terminal: Terminal, settings: Settings, **options: Any) -> LLM:
    """Load the language model that the settings name, or the bundled reader.

    Raises:
        ModelNotFoundError, ModelRefusedError: the model cannot be used.
    """
    terminal.pass_on_warnings()
    name, memory = settings.model, settings.memory
    if name is None:
        from ragaccel.loading import BUNDLED_READER, SUGGESTED_MODEL

        terminal.note(f"{BUNDLED_READER} (another: --model {SUGGESTED_MODEL}, 3 GB, once)")
    with terminal.working("loading the model"):
        from ragaccel.llm import LLM
        from ragaccel.models.load import bundled_reader_path

        name = name or str(bundled_reader_path())
        return LLM.load(
            name,
            space=space_of(settings),
            dtype=settings.dtype,
            device=settings.device,
            memory=None if memory == "off" else memory,
            remember=memory != "off",
            **options,
        )
