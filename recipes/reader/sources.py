"""The training articles, tokenized, with the occurrences of each word."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerFast

from recipes.reader.corpus import Article, HumanQuestion
from recipes.reader.questions import stem

MAX_OCCURRENCES = 400  # kept for a word: enough to draw distractors
MAX_TITLE_TOKENS = 16


@dataclass(slots=True)
class Text:
    """A sentence with its token ids after a space."""

    text: str
    ids: list[int]
    stems: list[str]  # stem of each token's word; empty for function words


@dataclass(slots=True)
class Source:
    """A tokenized article; ``questions`` are people's questions about it."""

    title: str
    sentences: list[Text]
    kind: str
    questions: list[HumanQuestion] = field(default_factory=list)


@dataclass(slots=True)
class Piece:
    """A passage of an example: sentences ``start`` to ``end`` of a source."""

    source: Source
    start: int
    end: int

    @property
    def span(self) -> range:
        """Return the indices of the sentences in the source."""
        return range(self.start, self.end)


class Sources:
    """All articles, and passages of people's questions, by kind, title and word."""

    def __init__(
        self,
        articles: Sequence[Article],
        questions: Sequence[HumanQuestion],
        tokenizer: PreTrainedTokenizerFast,
    ) -> None:
        self._tokenizer = tokenizer
        self._pieces = {index: token for token, index in tokenizer.get_vocab().items()}
        self._titles: dict[str, list[int]] = {}
        self.by_kind: dict[str, list[Source]] = defaultdict(list)
        self._load(articles, questions)
        self.everything = [source for kind in self.by_kind.values() for source in kind]
        self.occurrences: dict[str, list[tuple[Source, int]]] = defaultdict(list)
        self.of_title: dict[str, list[Source]] = defaultdict(list)
        self._index()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text after a space."""
        return self._encode([text])[0]

    def title_ids(self, title: str) -> list[int]:
        """Return the token ids of a title, at most 16."""
        if title not in self._titles:
            self._titles[title] = self.encode(title)[:MAX_TITLE_TOKENS] if title else []
        return self._titles[title]

    def length(self, piece: Piece) -> int:
        """Return a passage's number of tokens in a prompt, with title, markers and citations."""
        sentences = piece.source.sentences[piece.start : piece.end]
        return len(self.title_ids(piece.source.title)) + 1 + sum(len(s.ids) + 3 for s in sentences)

    def stems(self, ids: list[int]) -> list[str]:
        """Return for each token the stem of its word."""
        stems: list[str] = []
        pieces = [self._pieces[i] for i in ids]
        starts = [i for i, piece in enumerate(pieces) if i == 0 or piece.startswith("Ġ")]
        for start, end in zip(starts, [*starts[1:], len(pieces)], strict=True):
            stems += [stem("".join(pieces[start:end]))] * (end - start)
        return stems

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        encoded: list[list[int]] = []
        for i in range(0, len(texts), 20_000):
            spaced = [" " + text for text in texts[i : i + 20_000]]
            encoded += self._tokenizer(spaced, add_special_tokens=False)["input_ids"]
        return encoded

    def _load(self, articles: Sequence[Article], questions: Sequence[HumanQuestion]) -> None:
        sources: list[Source] = []
        texts: list[tuple[str, Source]] = []
        for article in articles:
            sources.append(Source(article.title, [], article.source.split("/")[0]))
            texts += [(text, sources[-1]) for text in article.sentences]
        asked: dict[tuple[str, ...], Source] = {}
        for question in questions:
            if question.sentences not in asked:
                source = asked[question.sentences] = Source(question.title, [], "human")
                texts += [(text, source) for text in question.sentences]
            asked[question.sentences].questions.append(question)
        encoded = self._encode([text for text, _ in texts])
        for (text, source), ids in zip(texts, encoded, strict=True):
            source.sentences.append(Text(text, ids, self.stems(ids)))
        for source in [*sources, *asked.values()]:
            self.by_kind[source.kind].append(source)

    def _index(self) -> None:
        for source in self.everything:
            self.of_title[source.title].append(source)
            for i, sentence in enumerate(source.sentences):
                for word in set(re.findall(r"\w{4,}", sentence.text.lower())):
                    if len(occurrences := self.occurrences[word]) < MAX_OCCURRENCES:
                        occurrences.append((source, i))
