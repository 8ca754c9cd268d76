"""Conversation: what was said so far, and its entry in the history."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ragaccel.cli.history import History, HistoryError

if TYPE_CHECKING:
    from ragaccel.cli.terminal import Terminal


class Conversation:
    """Questions and answers about one source, written down as they come.

    The history is a convenience: when it cannot be written (a damaged file, a full disk), that
    is said once and the conversation goes on without it.
    """

    def __init__(self, terminal: Terminal, source: str, *, resume: bool = False) -> None:
        self._terminal = terminal
        self._source = source
        self._exchanges: list[tuple[str, str]] = []
        self._question = ""
        self._turn: int | None = None
        self.number: int | None = None
        self._history: History | None = None
        try:
            self._history = History()
            if resume:
                self._resume(self._history)
        except HistoryError as error:
            self._give_up(error)

    def messages(self) -> list[dict[str, str]]:
        """The conversation so far as chat messages, first to last."""
        return [
            {"role": role, "content": content}
            for exchange in self._exchanges
            for role, content in zip(("user", "assistant"), exchange, strict=True)
        ]

    def start_over(self) -> None:
        """Forget what was said; the history keeps it."""
        self._exchanges, self.number = [], None

    def begin(self, question: str, model: str) -> None:
        """Write down a question before it is answered."""
        self._question, self._turn = question, None
        if self._history is None:
            return
        try:
            if self.number is None:
                self.number = self._history.open_conversation(self._source)
            self._turn = self._history.begin(self.number, question, model)
        except HistoryError as error:
            self._give_up(error)

    def end(self, answer: str, state: str, details: dict[str, Any] | None = None) -> None:
        """Write down how the question ended."""
        if state == "answered":
            self._exchanges.append((self._question, answer))
        if self._history is None or self._turn is None:
            return
        try:
            self._history.finish(self._turn, answer, state, details)
        except HistoryError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the history."""
        if self._history is not None:
            self._history.close()

    def _resume(self, history: History) -> None:
        self.number = history.last_conversation(self._source)
        if self.number is None:
            self._terminal.note("no earlier conversation about this; a new one begins")
        else:
            self._exchanges = history.exchanges(self.number)

    def _give_up(self, error: Exception) -> None:
        self._terminal.warn(f"this is not written to the history: {error}")
        if self._history is not None:
            self._history.close()
        self._history = None
