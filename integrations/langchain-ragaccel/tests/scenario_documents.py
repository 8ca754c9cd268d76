"""Documents for each question, and a record of the references of each call, to find leaks."""

from __future__ import annotations

import random
import re
import threading
import time
from dataclasses import dataclass, field

from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever

WORDS = """
amber anchor basalt beacon cable cinder copper current drift ember ferry gannet granite harbour
heather island kelp kestrel lamp lantern ledge lichen mole moor oil otter pier plover quay rain
reef salt seal shale shoal signal slate sound spray swell tern thrift tide timber wick wind
""".split()
CLAUSE = (
    "This handbook is the property of the board of lights, and may not be copied or lent to "
    "anybody without the leave of its secretary in writing."
)
QUERY = re.compile(r"question-\d+")
DOCUMENT = re.compile(r"document (\d+) of (question-\d+)")


def documents_of(query, count=3, words=45):
    """Return the documents of one question only, each of about 400 characters.

    Ten consecutive questions share a file name, and all questions share a clause.
    """
    source = f"handbook-{int(query.rpartition('-')[2]) // 10}.md"
    made = []
    for number in range(1, count + 1):
        chosen = random.Random(f"{query}/{number}").choices(WORDS, k=words)
        text = f"This is document {number} of {query}: {' '.join(chosen)}.\n{CLAUSE}"
        made.append(Document(text, id=f"{query}/{number}", metadata={"source": source}))
    return made


class QuestionRetriever(BaseRetriever):
    """Returns the documents of the question named in a query, after a short delay."""

    count: int = 3

    def _get_relevant_documents(self, query, *, run_manager):
        time.sleep(random.random() * 0.002)
        named = QUERY.search(query)
        return documents_of(named.group(), self.count) if named else []


@dataclass
class ReferenceRecorder:
    """The documents in the prompt of each call, and the references that the call got.

    ``leaks`` are references that are not in the prompt, and adjacent chunks of documents that are
    not in the prompt, unless all calls have one caller.
    """

    calls: list[tuple[frozenset[str], frozenset[str]]] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    adjacent_chunks: int = 0
    is_one_caller: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, prompt, passage_ids, adjacent_ids):
        """Record a call: the documents in its prompt, and those it got as references."""
        standing = {f"{query}/{number}" for number, query in DOCUMENT.findall(prompt)}
        asked = {name.split("/")[0] for name in standing}
        strange = {name for name in adjacent_ids if name.split("/")[0] not in asked}
        with self.lock:
            self.calls.append((frozenset(standing), frozenset(passage_ids)))
            self.adjacent_chunks += len(adjacent_ids)
            strange = set() if self.is_one_caller else strange
            self.leaks += sorted(strange | (set(passage_ids) - standing))

    @property
    def completeness(self):
        """Return the share of passages in prompts that were also references."""
        wanted = sum(len(standing) for standing, _ in self.calls)
        return sum(len(standing & given) for standing, given in self.calls) / wanted
