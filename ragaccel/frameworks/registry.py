"""The registry of retrieved passages, which finds them again in prompts.

Between a retriever and a model, frameworks have chains, templates and agents that pass on plain
text. The registry keeps retrieved passages by content and searches each prompt for them: a passage
that occurs in the prompt becomes a reference, however it got there.

A scope holds the passages that one caller retrieved, in a ``with`` block or in a framework's run.
The scope and its passages are garbage collected together with the caller's objects.
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
from typing import TYPE_CHECKING
from uuid import uuid4

from ragaccel.errors import ConfigurationError
from ragaccel.frameworks.text_matching import (
    FINGERPRINT_BYTES,
    KGRAM_LENGTH,
    Alignment,
    FingerprintIndex,
    SearchedText,
    find_alignments,
    kgram_keys,
    remove_whitespace,
)
from ragaccel.passage import Passage
from ragaccel.paths import PerProcess

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ragaccel.frameworks.text_matching import Keys


_MAX_ADJACENT = 32  # number of passages considered on each side of an offset


class DocumentOrder:
    """The numbers of passages by document (namespace and name), sorted by start offset."""

    def __init__(self) -> None:
        self._starts: dict[tuple[str, str], list[tuple[int, int]]] = {}

    def add(self, number: int, document: tuple[str, str], start: int) -> None:
        """Add the number of a passage that begins at ``start`` in a document."""
        insort(self._starts.setdefault(document, []), (start, number))

    def remove(self, number: int, document: tuple[str, str], start: int) -> None:
        """Remove a passage that was added with the same arguments."""
        order = self._starts[document]
        del order[bisect_left(order, (start, number))]
        if not order:
            del self._starts[document]

    def nearest(self, document: tuple[str, str], starts: Iterable[int]) -> dict[int, int]:
        """Return the numbers of passages near some offsets, and the distance to the closest one.

        If many passages start at one offset, return only the newest of these: passages without
        offsets all start at 0.
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
_MAX_CHARACTERS = 1_000_000  # longer texts occur in no prompt; indexing one would block others
_MIN_BYTES = 64 << 10
_ENTRY_BYTES = 750  # measured memory of a passage's entry and table rows


@dataclass(frozen=True, slots=True)
class Match:
    """A registered passage, or a part of one, that occurs at characters [start, end) of a text.

    If ``whole`` is false, ``passage`` is the part that occurs, cut from the registered passage.
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
    registered: int  # higher for later registrations

    @property
    def document(self) -> tuple[str, str]:
        return self.namespace, _document_of(self.passage)

    @property
    def num_bytes(self) -> int:
        passage = self.passage
        texts = {id(text): text for text in (passage.text, self.compact)}  # often the same object
        names = (passage.passage_id, passage.title, passage.path)
        size = sum(map(getsizeof, (*texts.values(), *names)))
        return size + FINGERPRINT_BYTES * len(self.fingerprints) + _ENTRY_BYTES


class ReferenceRegistry:
    """A registry of retrieved passages by content, which evicts the least recently used.

    Texts are compared without whitespace; other differences (Unicode normalization, hyphens at line
    ends, escaping) count. Texts of fewer than 20 or more than a million characters without
    whitespace are not kept: shorter ones would match by accident. A text that two documents contain
    is attributed to the one registered last. A namespace never finds passages of another one, but
    all share ``max_bytes``. Calls from several threads are safe.

    Args:
        max_bytes: the maximum memory for all texts and their index.

    Raises:
        ConfigurationError: ``max_bytes`` is below 64 KiB.
    """

    def __init__(self, *, max_bytes: int = DEFAULT_BYTES) -> None:
        if max_bytes < _MIN_BYTES:
            raise ConfigurationError(f"max_bytes must be {_MIN_BYTES:,} or more, not {max_bytes}")
        self.max_bytes = max_bytes
        self._lock = Lock()
        self._new_number, self._now = count().__next__, count().__next__
        self._identity, self._version = uuid4().hex, 0
        self._reset()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Return the memory in use: texts, their index, and the tables of an empty registry."""
        return self._num_bytes

    @property
    def state(self) -> str:
        """Return a text that changes whenever ``match`` may return something else.

        It is different for every registry, and valid in this process only.
        """
        return f"{self._identity} {self._version}"

    @property
    def digest(self) -> str:
        """Return a hash of all passages; equal for registries that hold the same ones."""
        with self._lock:
            held = sorted(
                repr((entry.namespace, entry.passage)) for entry in self._entries.values()
            )
        return _key("\n".join(held)).hex()

    def register(self, passages: Passage | Iterable[Passage], namespace: str = "") -> None:
        """Keep passages as the most recently used; a new one replaces one with the same text.

        Texts that are too short, or larger than ``max_bytes`` allows, are ignored.

        Raises:
            ConfigurationError: something is not a passage, or the namespace is not a string.
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
        """Find the registered passages that occur in a text, in the text's order.

        A passage is found if all of it occurs, or at least 96 consecutive characters (a run of
        whitespace counts as one). A part is ignored if another match covers it, or if many
        registered texts share it, such as a licence. Of several versions of a text, the one with
        the most text in common is found. A passage that occurs as a whole is returned once; any
        other, once for each part that occurs.

        Raises:
            ConfigurationError: the namespace is not a string.
        """
        _check_namespace(namespace)
        if not self._num_by_namespace[namespace]:
            return []
        searched = SearchedText(text)
        keys = kgram_keys(searched.compact, _seed(namespace))
        with self._lock:
            alignments = self._index.find(keys)
            entries = {number: self._entries[number] for number in set(alignments.number.tolist())}
        entries = {  # keys of two namespaces may collide
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
        """Return other registered passages of the same documents, nearest start first.

        Passages with the same path are of one document. The only adjacent chunk of a passage
        without a path is the whole passage that it is a part of. Passages that do not fit in
        ``max_characters`` are skipped.

        Raises:
            ConfigurationError: the namespace is not a string.
        """
        _check_namespace(namespace)
        given = list(passages)
        texts = [remove_whitespace(passage.text) for passage in given]
        known = {_key(text) for text in texts}
        found: list[Passage] = []
        for entry in self._nearest_entries(given, namespace):
            size = len(entry.passage.text)
            if not entry.passage.path and not any(text in entry.compact for text in texts):
                continue  # another text with the same id
            if entry.key not in known and size <= max_characters:
                max_characters -= size
                found.append(entry.passage)
        return found

    def clear(self, namespace: str | None = None) -> None:
        """Remove all passages of a namespace, or of all namespaces."""
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
        entry = _Entry(passage, namespace, _key(compact), compact, (), 0)
        keys = kgram_keys(compact, _seed(namespace))
        with self._lock:
            self._add(entry, keys)

    def _nearest_entries(self, passages: Iterable[Passage], namespace: str) -> list[_Entry]:
        """Return entries of the passages' documents, the nearest first, then the newest first."""
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

    def _add(self, entry: _Entry, keys: Keys) -> None:
        """Index an entry and evict others as needed; the caller holds the lock.

        A known text is indexed again, since newer texts may have made it hard to find.
        """
        version = self._version
        known = self._numbers.get((entry.namespace, entry.key))
        is_same = known is not None and self._entries[known].passage == entry.passage
        if known is not None:
            self._remove(known)
        number = self._new_number()
        fingerprints = self._index.add(number, keys)
        entry = replace(entry, fingerprints=fingerprints, registered=self._now())
        if self._index.num_bytes + entry.num_bytes > self.max_bytes:
            self._index.remove(number, fingerprints)
            return
        self._numbers[entry.namespace, entry.key] = number
        self._entries[number] = entry
        self._num_by_namespace[entry.namespace] += 1
        self._documents.add(number, entry.document, entry.passage.start)
        self._num_bytes += entry.num_bytes
        self._version = version if is_same else version + 1
        while self._num_bytes > self.max_bytes:
            self._remove(next(iter(self._entries)))

    def _remove(self, number: int) -> None:
        entry = self._entries.pop(number)
        self._version += 1
        self._index.remove(number, entry.fingerprints)
        del self._numbers[entry.namespace, entry.key]
        self._num_by_namespace[entry.namespace] -= 1
        if not self._num_by_namespace[entry.namespace]:
            del self._num_by_namespace[entry.namespace]
        self._documents.remove(number, entry.document, entry.passage.start)
        self._num_bytes -= entry.num_bytes

    def _reset(self) -> None:
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # least recently used first
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
    """Return the name of a passage's document: its path, or its id if it has none."""
    return passage.path or f"\0{passage.passage_id}"


def _check_namespace(namespace: str) -> None:
    if not isinstance(namespace, str):
        raise ConfigurationError(f"a namespace must be a string, not {namespace!r}")


def _key(compact: str) -> bytes:
    return blake2b(compact.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _seed(namespace: str) -> int:
    """Return the hash seed of a namespace: equal texts differ in fingerprints across namespaces."""
    name = namespace.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")


_DEFAULT = PerProcess(ReferenceRegistry)


def default_registry() -> ReferenceRegistry:
    """Return the registry of this process, created on first use."""
    return _DEFAULT.get()


def auto_references_enabled() -> bool:
    """Return whether integrations search prompts for references by default.

    They do unless the environment variable ``RAGACCEL_AUTO_REFERENCES`` is 0, off, no or false.
    """
    said = os.environ.get("RAGACCEL_AUTO_REFERENCES", "")
    return said.strip().lower() not in {"0", "false", "off", "no"}


_MAX_BYTES = 8 << 20  # limit of one scope: enough for some hundred retrievals
_LOCK = Lock()


class ReferenceScope:
    """The passages that one caller retrieved, invisible to others and released with this object.

    ``registry`` holds them; None if there is none.
    """

    __slots__ = ("__weakref__", "registry")

    def __init__(self) -> None:
        self.registry: ReferenceRegistry | None = None  # created lazily: most scopes stay empty

    def register(self, passages: Passage | Iterable[Passage]) -> None:
        """Keep passages; see ``ReferenceRegistry.register``, also for the errors."""
        with _LOCK:
            if self.registry is None:
                self.registry = ReferenceRegistry(max_bytes=_MAX_BYTES)
        self.registry.register(passages)


class VisibleReferences:
    """The passages that one request may see: those of its scopes and of a registry's namespace.

    If several registries match the same part of a text, the first one wins. Adjacent chunks come
    from the registry that matched the passage.

    Args:
        scopes: the request's scopes, innermost first; visible in every namespace.
        registry: searched in the request's namespace; None for the scopes alone.
    """

    def __init__(
        self, scopes: Sequence[ReferenceScope] = (), registry: ReferenceRegistry | None = None
    ) -> None:
        known = [scope.registry for scope in dict.fromkeys(scopes)]
        self._scope_registries = [one for one in known if one is not None]
        self._registry = registry
        self._found: list[tuple[ReferenceRegistry, Passage]] = []

    @property
    def state(self) -> str:
        """Return a text that changes whenever ``match`` may return something else.

        It is equal for scopes that hold the same passages, and valid in this process only.
        """
        digests = [registry.digest for registry in self._scope_registries]
        own = [] if self._registry is None else [self._registry.state]
        return " ".join([*digests, *own])

    def match(self, text: str, namespace: str = "") -> list[Match]:
        """Find the passages that occur in a text, in the text's order."""
        each: list[list[Match]] = []
        for registry, name in self._lookups(namespace):
            each.append(registry.match(text, name))
            self._found += ((registry, match.passage) for match in each[-1])
        return first_matches(each)

    def adjacent_chunks(
        self,
        passages: Iterable[Passage],
        namespace: str = "",
        *,
        max_characters: int = ADJACENT_CHARACTERS,
    ) -> list[Passage]:
        """Return other passages of the same documents as passages that ``match`` found."""
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


def first_matches(each: Iterable[list[Match]]) -> list[Match]:
    """Return the matches of several registries in a text, in order; of overlapping ones the first.

    Those of each registry are given in order of precedence.
    """
    kept: list[Match] = []
    for found in each:
        kept += [m for m in found if all(m.end <= k.start or k.end <= m.start for k in kept)]
    return sorted(kept, key=lambda match: match.start)


Lookup = ReferenceRegistry | VisibleReferences
"""One registry, or several, in which a prompt's passages are looked up."""


def visible_references(
    registry: ReferenceRegistry | None = None,
    namespace: str = "",
    *,
    scopes: Sequence[ReferenceScope] = (),
) -> VisibleReferences:
    """Return the passages that a request made now may see.

    These are the passages of the current ``reference_scope``, of further scopes, and of the
    request's namespace in the given registry. The process's registry is searched only in a named
    namespace, or if it is passed: outside of namespaces it may hold passages of other callers.

    Args:
        registry: the registry that the request was given, if any.
        namespace: the request's namespace. If it is named and no registry is given, the process's
            registry is searched.
        scopes: the scopes of the framework's run.
    """
    here = current_scope()
    if registry is None and namespace:
        registry = default_registry()
    return VisibleReferences(scopes if here is None else (here, *scopes), registry)


_CURRENT: ContextVar[ReferenceScope | None] = ContextVar("ragaccel_scope", default=None)


@contextmanager
def reference_scope(scope: ReferenceScope | None = None) -> Iterator[ReferenceScope]:
    """Make passages retrieved inside a ``with`` block visible to models called inside it.

    >>> with reference_scope():
    ...     documents = retriever.invoke(question)
    ...     answer = model.invoke(prompt_of(documents, question))

    The passages are invisible outside the block and released at its end. The scope applies to calls
    and tasks started in the block, and to threads started with a copy of the context, as
    ``asyncio.to_thread`` and both frameworks do. In a thread of your own, enter it again:
    ``with reference_scope(scope)``. The innermost scope applies.

    Args:
        scope: a scope to enter again; a new one by default.
    """
    entered = ReferenceScope() if scope is None else scope
    before = _CURRENT.set(entered)
    try:
        yield entered
    finally:
        _CURRENT.reset(before)


def current_scope() -> ReferenceScope | None:
    """Return the scope of the innermost ``reference_scope`` block, or None outside of any."""
    return _CURRENT.get()
