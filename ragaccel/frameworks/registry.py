"""The registry: retrieved passages, found again in the prompts that they reach.

Between a retriever and a model stand chains, templates and agents that pass on text alone. What
was retrieved is kept here by content, and looked for in each prompt: what is found there is a
reference, whichever way it came, and what is not found is not used.

A scope holds what one caller retrieved: a ``with`` block, or a run of a framework. It lives as long
as something of that caller's does, and whatever was registered in it goes with it.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import count
from sys import getsizeof
from threading import Lock
from typing import TYPE_CHECKING, Protocol

from ragaccel.errors import ConfigurationError
from ragaccel.frameworks.text_matching import (
    FINGERPRINT_BYTES,
    KGRAM_LENGTH,
    Alignment,
    FingerprintIndex,
    KGrams,
    SearchedText,
    find_alignments,
    kgram_keys,
    remove_whitespace,
)
from ragaccel.passage import Passage
from ragaccel.paths import PerProcess

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


_MAX_ADJACENT = 32  # passages on either side of one that are looked at


class DocumentOrder:
    """Numbers of passages by document, a namespace and a name, sorted by where they start."""

    def __init__(self) -> None:
        self._starts: dict[tuple[str, str], list[tuple[int, int]]] = {}

    def add(self, number: int, document: tuple[str, str], start: int) -> None:
        """Add a passage."""
        insort(self._starts.setdefault(document, []), (start, number))

    def remove(self, number: int, document: tuple[str, str], start: int) -> None:
        """Take out a passage that was added like that."""
        order = self._starts[document]
        del order[bisect_left(order, (start, number))]
        if not order:
            del self._starts[document]

    def nearest(self, document: tuple[str, str], starts: Iterable[int]) -> dict[int, int]:
        """Find the passages round some places, and how far each starts from the nearest of them.

        Of too many that start at one place there are the newest: where nobody tells starts, all
        start at 0.
        """
        order = self._starts.get(document, [])
        near: dict[int, int] = {}
        for place in set(starts):
            middle = bisect_left(order, (place + 1, 0))
            for start, number in order[max(0, middle - _MAX_ADJACENT) : middle + _MAX_ADJACENT]:
                distance = abs(start - place)
                near[number] = min(distance, near.get(number, distance))
        return near


DEFAULT_BYTES = 128 << 20
ADJACENT_CHARACTERS = 8_000
_MAX_CHARACTERS = 1_000_000  # of a text: no prompt holds more, and others would wait for it
_MIN_BYTES = 64 << 10
_ENTRY_BYTES = 750  # of a passage, its entry and its places in the tables, measured


@dataclass(frozen=True, slots=True)
class Match:
    """As much of a registered passage as stands in a text: in its characters [start, end).

    ``whole`` says that all of it does; if not, ``passage`` is the piece of it that does, as the
    passage itself has it, and nothing besides.
    """

    passage: Passage
    start: int
    end: int
    whole: bool


@dataclass(frozen=True, slots=True)
class _Entry:
    passage: Passage
    namespace: str
    key: bytes
    compact: str
    fingerprints: tuple[int, ...]
    registered: int  # the higher, the later

    @property
    def document(self) -> tuple[str, str]:
        return self.namespace, _document_of(self.passage)

    @property
    def num_bytes(self) -> int:
        passage = self.passage
        texts = {id(text): text for text in (passage.text, self.compact)}  # often it is the same
        names = (passage.passage_id, passage.title, passage.path)
        size = sum(map(getsizeof, (*texts.values(), *names)))
        return size + FINGERPRINT_BYTES * len(self.fingerprints) + _ENTRY_BYTES


class ReferenceRegistry:
    """Retrieved passages by their content, the one used longest ago let go first; thread-safe.

    Two texts are the same if they differ in whitespace only, and are compared without it; other
    differences (Unicode normalization, hyphens at line ends, escaping) are not seen through.
    Texts of fewer than 20 characters besides whitespace are not kept, since they would be found
    where they were not meant, nor of more than a million. What two documents hold is found as the
    one's that was registered last. No namespace ever finds what another one registered; all share
    the room.

    Args:
        max_bytes: of all texts with what they are found by.

    Raises:
        ConfigurationError: ``max_bytes`` below 64 KiB.
    """

    def __init__(self, *, max_bytes: int = DEFAULT_BYTES) -> None:
        if max_bytes < _MIN_BYTES:
            raise ConfigurationError(f"max_bytes must be {_MIN_BYTES:,} or more, not {max_bytes}")
        self.max_bytes = max_bytes
        self._lock = Lock()
        self._new_number, self._now = count().__next__, count().__next__
        self._version = 0
        self._reset()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """How large it is: the texts, what they are found by, and the tables of an empty one."""
        return self._num_bytes

    @property
    def version(self) -> int:
        """Another number than before, if something else may be found now."""
        return self._version

    @property
    def digest(self) -> str:
        """The same for registries that hold the same passages; made from all of them."""
        with self._lock:
            held = sorted(
                repr((entry.namespace, entry.passage)) for entry in self._entries.values()
            )
        return _key("\n".join(held)).hex()

    def register(self, passages: Passage | Iterable[Passage], namespace: str = "") -> None:
        """Keep passages, each as the most recently used; of the same text the newest stays.

        A text that is too short to be found, or larger than all there is room for, is not kept.

        Raises:
            ConfigurationError: something that is no passage, or a namespace that is no string.
        """
        _check_namespace(namespace)
        for passage in [passages] if isinstance(passages, Passage) else passages:
            if not isinstance(passage, Passage):
                raise ConfigurationError(
                    f"a registry takes passages, not {type(passage).__name__}: make it a "
                    "Passage(passage_id, text)"
                )
            self._register(passage, namespace)

    def match(self, text: str, namespace: str = "") -> list[Match]:
        """Find the registered passages that stand in a text, in the order in which they do.

        A passage is found if all of it is there, or 96 of its characters in a row (a run of
        whitespace counts as one). A part does not count that another passage found covers, nor one
        that many registered texts have in common, such as a licence. Of versions the one that has
        most in common is found; each passage once, or each piece of it that stands there.

        Raises:
            ConfigurationError: a namespace that is no string.
        """
        _check_namespace(namespace)
        if not self._num_by_namespace[namespace]:
            return []
        searched = SearchedText(text)
        keys = kgram_keys(searched.compact, _seed(namespace))
        with self._lock:
            alignments = self._index.find(keys)
            entries = {number: self._entries[number] for number in set(alignments.number.tolist())}
        entries = {  # keys of two namespaces may agree by chance
            number: entry for number, entry in entries.items() if entry.namespace == namespace
        }
        found = find_alignments(searched, entries, alignments)
        self._touch([one.number for one in found])
        return [_match(entries[one.number].passage, one, searched) for one in found]

    def adjacent_chunks(
        self,
        passages: Iterable[Passage],
        namespace: str = "",
        *,
        max_characters: int = ADJACENT_CHARACTERS,
    ) -> list[Passage]:
        """Find the registered passages of the same documents, those that start nearest first.

        A document is its path. A passage without one has no neighbours, but for the whole of it
        where it is a piece. What does not fit in ``max_characters`` is passed over.

        Raises:
            ConfigurationError: a namespace that is no string.
        """
        _check_namespace(namespace)
        given = list(passages)
        texts = [remove_whitespace(passage.text) for passage in given]
        known = {_key(text) for text in texts}
        found: list[Passage] = []
        for entry in self._nearest_entries(given, namespace):
            size = len(entry.passage.text)
            if not entry.passage.path and not any(text in entry.compact for text in texts):
                continue  # another text of the same id
            if entry.key not in known and size <= max_characters:
                max_characters -= size
                found.append(entry.passage)
        return found

    def clear(self, namespace: str | None = None) -> None:
        """Forget a namespace, or everything."""
        with self._lock:
            if namespace is None:
                self._reset()
                return
            for number in [n for n, entry in self._entries.items() if entry.namespace == namespace]:
                self._remove(number)

    def _register(self, passage: Passage, namespace: str) -> None:
        if getsizeof(passage.text) > self.max_bytes:
            return
        compact = remove_whitespace(passage.text)
        if not KGRAM_LENGTH <= len(compact) <= _MAX_CHARACTERS:
            return
        key = _key(compact)
        if self._refresh(passage, namespace, key):
            return
        kgrams = _kgrams(compact, key, _seed(namespace))
        with self._lock:
            self._add(_Entry(passage, namespace, key, compact, (), 0), kgrams)

    def _refresh(self, passage: Passage, namespace: str, key: bytes) -> bool:
        """Return whether a text is known and can be found: it is this passage's now."""
        with self._lock:
            number = self._numbers.get((namespace, key))
            if number is None or self._index.is_displaced(
                number, self._entries[number].fingerprints
            ):
                return False
            known = self._pop(number)
            self._version += known.passage != passage
            self._insert(number, replace(known, passage=passage, registered=self._now()))
            self._shrink()
            return True

    def _nearest_entries(self, passages: Iterable[Passage], namespace: str) -> list[_Entry]:
        """Return passages of the same documents, the nearest first, of equally near ones the newest."""
        starts: dict[str, list[int]] = {}
        for passage in passages:
            starts.setdefault(_document_of(passage), []).append(passage.start)
        with self._lock:
            near = [
                (distance, self._entries[number])
                for path, positions in starts.items()
                for number, distance in self._documents.nearest(
                    (namespace, path), positions
                ).items()
            ]
        near.sort(key=lambda item: (item[0], -item[1].registered))
        return [entry for _, entry in near]

    def _touch(self, numbers: Iterable[int]) -> None:
        with self._lock:
            for number in numbers:
                if number in self._entries:
                    self._entries.move_to_end(number)

    def _add(self, entry: _Entry, kgrams: KGrams) -> None:
        """Take an entry in, the lock being held."""
        if (known := self._numbers.get((entry.namespace, entry.key))) is not None:
            self._remove(known)
        number = self._new_number()
        fingerprints = self._index.add(number, kgrams)
        entry = replace(entry, fingerprints=fingerprints, registered=self._now())
        if self._index.num_bytes + entry.num_bytes > self.max_bytes:
            self._index.remove(number, fingerprints)
            return
        self._numbers[entry.namespace, entry.key] = number
        self._insert(number, entry)
        self._version += 1
        self._shrink()

    def _insert(self, number: int, entry: _Entry) -> None:
        self._entries[number] = entry
        self._num_by_namespace[entry.namespace] += 1
        self._documents.add(number, entry.document, entry.passage.start)
        self._num_bytes += entry.num_bytes

    def _pop(self, number: int) -> _Entry:
        entry = self._entries.pop(number)
        self._num_by_namespace[entry.namespace] -= 1
        if not self._num_by_namespace[entry.namespace]:
            del self._num_by_namespace[entry.namespace]
        self._documents.remove(number, entry.document, entry.passage.start)
        self._num_bytes -= entry.num_bytes
        return entry

    def _remove(self, number: int) -> None:
        entry = self._pop(number)
        self._version += 1
        self._index.remove(number, entry.fingerprints)
        del self._numbers[entry.namespace, entry.key]

    def _shrink(self) -> None:
        while self._num_bytes > self.max_bytes:
            self._remove(next(iter(self._entries)))

    def _reset(self) -> None:
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # used longest ago first
        self._numbers: dict[tuple[str, bytes], int] = {}
        self._num_by_namespace: Counter[str] = Counter()  # passages of each namespace
        self._index = FingerprintIndex(self.max_bytes // 64)
        self._documents = DocumentOrder()
        self._num_bytes = self._index.num_bytes
        self._version += 1


def _match(passage: Passage, found: Alignment, searched: SearchedText) -> Match:
    start, end = searched.original(found.start, found.end)
    if not found.whole:
        own = SearchedText(passage.text)
        passage = passage.cut(*own.original(found.start - found.shift, found.end - found.shift))
    return Match(passage, start, end, found.whole)


def _document_of(passage: Passage) -> str:
    """What a passage's document is known by; one without a path is a document by itself."""
    return passage.path or f"\0{passage.passage_id}"


def _check_namespace(namespace: str) -> None:
    if not isinstance(namespace, str):
        raise ConfigurationError(f"a namespace's name is a string, not {namespace!r}")


def _key(compact: str) -> bytes:
    return blake2b(compact.encode("utf-8", "surrogatepass"), digest_size=16).digest()


_KGRAMS: dict[tuple[bytes, int], KGrams] = {}  # by text and seed: numbers alone, no text is kept
_MAX_CACHED_TEXTS, _MAX_CACHED_CHARACTERS = 512, 4_000  # at most 20 MB


def _kgrams(compact: str, key: bytes, seed: int) -> KGrams:
    """Return a text's pieces: each run has a registry of its own, and runs often retrieve the same."""
    kgrams = _KGRAMS.get((key, seed))
    if kgrams is None:
        kgrams = KGrams(kgram_keys(compact, seed))
        if len(compact) <= _MAX_CACHED_CHARACTERS:
            if len(_KGRAMS) >= _MAX_CACHED_TEXTS:
                _KGRAMS.clear()
            _KGRAMS[key, seed] = kgrams
    return kgrams


def _seed(namespace: str) -> int:
    """What makes the same text's fingerprints others in each namespace."""
    name = namespace.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")


_DEFAULT = PerProcess(ReferenceRegistry)


def default_registry() -> ReferenceRegistry:
    """Return the registry that all of a process shares, made when first used."""
    return _DEFAULT.get()


def auto_references_enabled() -> bool:
    """Return whether references are looked for unasked: ``RAGACCEL_AUTO_REFERENCES`` is not 0 or off."""
    said = os.environ.get("RAGACCEL_AUTO_REFERENCES", "")
    return said.strip().lower() not in {"0", "false", "off", "no"}


_MAX_BYTES = 8 << 20  # of one scope: what some hundred retrievals find
_LOCK = Lock()


class ReferenceScope:
    """What one caller retrieved; known to nobody else, and forgotten with this object."""

    __slots__ = ("__weakref__", "_registry")

    def __init__(self) -> None:
        self._registry: ReferenceRegistry | None = None  # most callers retrieve nothing

    def register(self, passages: Passage | Iterable[Passage]) -> None:
        """Keep passages, as ``ReferenceRegistry.register`` does; errors are those of that."""
        with _LOCK:
            if self._registry is None:
                self._registry = ReferenceRegistry(max_bytes=_MAX_BYTES)
        self._registry.register(passages)

    @property
    def registry(self) -> ReferenceRegistry | None:
        """Where they are kept; None if there are none."""
        return self._registry


class Lookup(Protocol):
    """Where a prompt's references are looked up: a registry, or several as one."""

    def match(self, text: str, namespace: str = "") -> list[Match]:
        """Find the passages that stand in a text; see ``ReferenceRegistry.match``."""
        ...

    def adjacent_chunks(
        self,
        passages: Iterable[Passage],
        namespace: str = "",
        *,
        max_characters: int = ADJACENT_CHARACTERS,
    ) -> list[Passage]:
        """Find passages of the same documents; see ``ReferenceRegistry.adjacent_chunks``."""
        ...


class VisibleReferences:
    """All that one request may be given: what its own scopes hold, and a registry's namespace.

    Of what several of them know, the one that comes first is believed. A document's neighbours
    come from where its own passage came from.

    Args:
        scopes: the request's own, the nearest first; known whatever its namespace is.
        registry: for its namespace; None for the scopes alone.
    """

    def __init__(
        self, scopes: Sequence[ReferenceScope] = (), registry: ReferenceRegistry | None = None
    ) -> None:
        known = [scope.registry for scope in dict.fromkeys(scopes)]
        self._scope_registries = [one for one in known if one is not None]
        self._registry = registry
        self._found: list[tuple[ReferenceRegistry, Passage]] = []

    @property
    def registry(self) -> ReferenceRegistry | None:
        """The one whose namespace it looks into besides its scopes."""
        return self._registry

    @property
    def scopes_digest(self) -> str:
        """The same where the scopes hold the same passages."""
        return " ".join(registry.digest for registry in self._scope_registries)

    def match(self, text: str, namespace: str = "") -> list[Match]:
        """Find the passages that stand in a text, in the order in which they do."""
        kept: list[Match] = []
        for registry, name in self._lookups(namespace):
            found = registry.match(text, name)
            self._found += ((registry, match.passage) for match in found)
            if kept:
                apart = [
                    m for m in found if all(m.end <= k.start or k.end <= m.start for k in kept)
                ]
                kept = sorted([*kept, *apart], key=lambda match: match.start)
            else:
                kept = found
        return kept

    def adjacent_chunks(
        self,
        passages: Iterable[Passage],
        namespace: str = "",
        *,
        max_characters: int = ADJACENT_CHARACTERS,
    ) -> list[Passage]:
        """Find the passages of the same documents as some that ``match`` found."""
        wanted, found = set(map(id, passages)), []
        for registry, name in self._lookups(namespace):
            own = [one for place, one in self._found if place is registry and id(one) in wanted]
            for one in registry.adjacent_chunks(own, name, max_characters=max_characters):
                max_characters -= len(one.text)
                found.append(one)
        return found

    def _lookups(self, namespace: str) -> Iterator[tuple[ReferenceRegistry, str]]:
        yield from ((registry, "") for registry in self._scope_registries)
        if self._registry is not None:
            yield self._registry, namespace


def visible_references(
    registry: ReferenceRegistry | None = None,
    namespace: str = "",
    *,
    scopes: Sequence[ReferenceScope] = (),
) -> VisibleReferences:
    """Return what a request may be given: what is known here, where it is made, and nothing else.

    That is what ``reference_scope`` round it holds, further scopes of its own, what was registered
    in its namespace, and in a registry that it was given. What others registered in the process's
    registry without a namespace is left out, unless that registry is given.

    Args:
        registry: one that the request was given.
        namespace: the request's; with a name, and without a registry, the process's one is used.
        scopes: those of the framework's run that asks.
    """
    here = current_scope()
    if registry is None and namespace:
        registry = default_registry()
    return VisibleReferences(scopes if here is None else (here, *scopes), registry)


_CURRENT: ContextVar[ReferenceScope | None] = ContextVar("ragaccel_scope", default=None)


@contextmanager
def reference_scope(scope: ReferenceScope | None = None) -> Iterator[ReferenceScope]:
    """Let what is retrieved inside of ``with`` be known to the models called inside of it.

    >>> with reference_scope():
    ...     documents = retriever.invoke(question)
    ...     answer = model.invoke(prompt_of(documents, question))

    Nobody outside finds it, and it is forgotten with the block. It holds for what is called from
    there, for tasks and for threads that are started with a copy of the context, as those of
    ``asyncio.to_thread`` and of both frameworks are. A thread of your own enters the same scope:
    ``with reference_scope(scope)``. The innermost one counts.

    Args:
        scope: one to enter again; a new one by default.
    """
    entered = ReferenceScope() if scope is None else scope
    before = _CURRENT.set(entered)
    try:
        yield entered
    finally:
        _CURRENT.reset(before)


def current_scope() -> ReferenceScope | None:
    """Return the scope of the ``with`` block that this is called in, if there is one."""
    return _CURRENT.get()
