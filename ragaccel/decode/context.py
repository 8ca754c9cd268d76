"""The context: everything a drafter may look at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ragaccel.decode.accept import Acceptance
    from ragaccel.decode.request import Reference

T = TypeVar("T")


class Context:
    """The tokens so far, the references, and what became of the last draft.

    Grows by what each verify pass emits; its last token is the root of the next draft tree.
    Drafters read it and change nothing. The first ``num_prompt`` of ``token_ids`` are the prompt;
    ``foreseen`` is what mask tokens behind it showed, if any were read with it.
    """

    def __init__(self, token_ids: Sequence[int], references: Sequence[Reference] = ()) -> None:
        self.token_ids = list(token_ids)
        self.references = tuple(references)
        self.num_prompt = len(self.token_ids)
        self.last: Acceptance | None = None
        self.foreseen: Sequence[Sequence[tuple[int, float]]] = ()
        self._shared: dict[Any, Any] = {}

    def advance(self, acceptance: Acceptance) -> None:
        """Append what a verify pass emitted."""
        self.token_ids += acceptance.emitted
        self.last = acceptance

    def shared(self, make: Callable[[Context], T]) -> T:
        """Return what ``make`` builds for this request, built once for all drafters that ask."""
        if make not in self._shared:
            self._shared[make] = make(self)
        built: T = self._shared[make]
        return built

    def forget(self) -> None:
        """Build anew what drafters share: one of them was interrupted while it built."""
        self._shared.clear()
