"""The sentence ranker: a model that reads question and passage together and scores each sentence.

It is the default embedding model with a low-rank change (LoRA, Hu et al., arXiv 2106.09685) that
ships with ragaccel, so it needs no further download and 4 MB. It sees a sentence in its passage,
like a reader of extractive question answering, and gives one number for the whole sentence
("answer sentence selection", e.g. Garg et al., arXiv 1911.04118).

This module imports torch and transformers, which takes seconds: import it only to rank. Shapes: B
rows, L tokens, S sentences of a row, E hidden size.
"""

from __future__ import annotations

import logging
import threading
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from ragaccel.errors import ModelNotFoundError, UnsupportedModelError
from ragaccel.passage import sentence_spans
from ragaccel.paths import PerProcess, claim_torch
from ragaccel.prompt import shorten_title
from ragaccel.retrieval.embedder import (
    batches_of_texts,
    default_device,
    local_default_folder,
    read_tokenizer,
    translate_model_errors,
)
from ragaccel.retrieval.encoder import load_encoder, num_threads, run_single_threaded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ragaccel.passage import Passage

    Encode = Callable[[str], Sequence[int]]

logger = logging.getLogger("ragaccel")

Row = tuple[list[int], list[int]]
"""Token ids and segments."""
ADAPTER = Path(__file__).parents[1] / "models" / "sentence_ranker" / "adapter.safetensors"
LORA_SCALE = 2.0

MAX_ROW_TOKENS = 320  # of a row; a longer passage is cut between sentences into several
_MAX_QUESTION_TOKENS, _MAX_SENTENCE_TOKENS = 96, 160
_PADDING, _SPECIAL, _QUESTION, _FIRST = -1, 0, 1, 2  # segments; sentences from the last on
NO_SENTENCE = -1e4  # the score where a row has no further sentence
_LENGTH_STEP = 8
_NUM_RECENT = 4096  # sentences whose scores are kept


class RankerNetwork(nn.Module):
    """The encoder, and the head that gives a sentence's score.

    That is the cosine of the means of the question's and the sentence's hidden states, as the
    embedding model compares them, times a scale, plus a direction's product with the latter.

    Args:
        encoder: A BERT encoder of transformers without pooling.
    """

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder
        self.direction = nn.Parameter(torch.zeros(encoder.config.hidden_size))
        self.scale = nn.Parameter(torch.tensor(15.0))
        self.none = nn.Parameter(torch.tensor(9.0))

    def forward(self, token_ids: Tensor, segments: Tensor) -> Tensor:
        """Return scores [B, S], of sentences that a row has not ``-1e4``.

        A score is the logarithm of the odds of the sentence against no answer.

        Args:
            token_ids: [B, L], right-padded.
            segments: [B, L]: -1 of padding, 0 of special tokens and title, 1 of the question, and
                from 2 on those of the sentences.
        """
        mask = (segments != _PADDING).long()
        states = self.encoder(input_ids=token_ids, attention_mask=mask).last_hidden_state.float()
        rows, tokens, width = states.shape
        count = max(int(segments.max()), _FIRST) + 1
        of_row = count * torch.arange(rows, device=segments.device)[:, None]
        places = (of_row + segments.clamp(min=_SPECIAL)).flatten()
        sums = states.new_zeros(rows * count, width).index_add(0, places, states.flatten(0, 1))
        sizes = states.new_zeros(rows * count).index_add(0, places, states.new_ones(rows * tokens))
        means = (sums / sizes.clamp(min=1)[:, None]).view(rows, count, width)
        sentences = means[:, _FIRST:]
        cosines = F.cosine_similarity(means[:, _QUESTION, None], sentences, dim=-1)
        scores = self.scale * cosines + (sentences * self.direction).sum(-1) - self.none
        known: Tensor = scores.masked_fill(sizes.view(rows, count)[:, _FIRST:] == 0, NO_SENTENCE)
        return known


def rows_of(encode: Encode, question: str, title: str, sentences: Sequence[str]) -> list[Row]:
    """Return the rows of a passage, as (token ids, segments): its question, title and sentences.

    Each row has the next of the sentences, as many as have room.

    Args:
        encode: Returns the token ids of a text, without special tokens.
        question: The question.
        title: The passage's.
        sentences: The passage's, in order.
    """
    start, end = encode("[CLS]")[0], encode("[SEP]")[0]
    asked = encode(question)[-_MAX_QUESTION_TOKENS:]  # a long one asks at its end
    named = encode(f"{shorten_title(title)}:") if title else ()
    opening = [start, *asked, end, *named]
    known = [_SPECIAL, *[_QUESTION] * len(asked), *[_SPECIAL] * (1 + len(named))]
    rows: list[Row] = []
    ids, segments, place = [*opening], [*known], _FIRST
    for sentence in sentences:
        added = encode(sentence)[:_MAX_SENTENCE_TOKENS] or [end]
        if place > _FIRST and len(ids) + len(added) >= MAX_ROW_TOKENS:
            rows.append(([*ids, end], [*segments, _SPECIAL]))
            ids, segments, place = [*opening], [*known], _FIRST
        ids += added
        segments += [place] * len(added)
        place += 1
    return [*rows, ([*ids, end], [*segments, _SPECIAL])]


def padded(rows: Sequence[Row], padding: int = 0) -> tuple[Tensor, Tensor]:
    """Return the token ids and the segments [B, L] of rows.

    L is rounded up, since torch caches memory for every length.
    """
    longest = max(len(ids) for ids, _ in rows)
    length = -(-longest // _LENGTH_STEP) * _LENGTH_STEP
    return (
        torch.tensor([ids + [padding] * (length - len(ids)) for ids, _ in rows]),
        torch.tensor([known + [_PADDING] * (length - len(known)) for _, known in rows]),
    )


def num_sentences(row: Row) -> int:
    """Return how many sentences a row has."""
    return max(max(row[1]) - _FIRST + 1, 0)


class SentenceRanker:
    """Scores the sentences of passages for a question; safe to call from several threads.

    It remembers the sentences that it scored last, by their place, so that one that was cut out of
    its passage meanwhile (``Passage.cut``) keeps the score that it had there.

    Args:
        folder: That of the default embedding model.
        adapter: The file of the low-rank change.
        device: The torch device; None: a GPU if there is one.

    Raises:
        UnsupportedModelError: The folder or the file cannot be loaded.
    """

    def __init__(self, folder: Path, adapter: Path = ADAPTER, device: str | None = None) -> None:
        self.device = device or default_device()
        self._recent: dict[tuple[str, str, str, int, str], float] = {}  # latest last
        self._lock = PerProcess(threading.Lock)
        self._tokenizer = read_tokenizer(folder)
        with translate_model_errors(folder):
            self._network = RankerNetwork(load_encoder(folder, self.device))
            self._network.to(self.device).requires_grad_(False).eval()
            add_adapter(self._network, load_file(adapter))

    def relevance(self, question: str, passages: Sequence[Passage]) -> list[list[float]]:
        """Return of each sentence of each passage the logarithm of its odds of answering.

        They are those against no answer, in the order of ``sentence_spans``.
        """
        claim_torch()
        spans = [list(sentence_spans(passage.text)) for passage in passages]
        sentences = [
            [passage.text[start:end] for start, end in of]
            for passage, of in zip(passages, spans, strict=True)
        ]
        keys = [
            [
                (question, one.passage_id, one.path, one.start + start, text)
                for (start, _), text in zip(of, texts, strict=True)
            ]
            for one, of, texts in zip(passages, spans, sentences, strict=True)
        ]
        with self._lock.get():
            known = {key: self._recent[key] for of in keys for key in of if key in self._recent}
        new = [at for at, of in enumerate(keys) if not all(key in known for key in of)]
        asked = [(passages[at].title, sentences[at]) for at in new]
        for at, scores in zip(new, self.scores(question, asked), strict=True):
            known |= dict(zip(keys[at], scores, strict=True))
        with self._lock.get():
            for key, score in known.items():
                self._recent.pop(key, None)
                self._recent[key] = score
            while len(self._recent) > _NUM_RECENT:
                del self._recent[next(iter(self._recent))]
        return [[known[key] for key in of] for of in keys]

    def scores(
        self, question: str, passages: Sequence[tuple[str, Sequence[str]]]
    ) -> list[list[float]]:
        """Return the same of passages given as title and sentences; none is remembered."""
        encode = cache(self._encode)
        rows = [
            (place, row)
            for place, (title, sentences) in enumerate(passages)
            for row in rows_of(encode, question, title, sentences)
        ]
        batches = batches_of_texts([len(row[0]) for _, row in rows], num_threads())
        jobs = [partial(self._rank, [rows[at][1] for at in batch]) for batch in batches]
        found: dict[int, list[float]] = {}
        for batch, ranked in zip(batches, run_single_threaded(jobs), strict=True):
            found |= dict(zip(batch, ranked.tolist(), strict=True))
        scores: list[list[float]] = [[] for _ in passages]
        for at, (place, row) in enumerate(rows):
            scores[place] += found[at][: num_sentences(row)]
        return scores

    @torch.inference_mode()
    def _rank(self, rows: Sequence[Row]) -> Tensor:
        token_ids, segments = (tensor.to(self.device) for tensor in padded(rows))
        scores: Tensor = self._network(token_ids, segments)
        return scores.cpu()

    def _encode(self, text: str) -> Sequence[int]:
        replaced = text.encode(errors="replace").decode()  # lone surrogates
        ids: list[int] = self._tokenizer.encode(replaced, add_special_tokens=False).ids
        return ids


@torch.no_grad()
def add_adapter(network: RankerNetwork, weights: dict[str, Tensor]) -> None:
    """Add the low-rank changes to a network's matrices, and set its head.

    Raises:
        ValueError: The weights are those of another network.
    """
    own = dict(network.named_parameters())
    matrices = {name.replace(".lora_A", "") for name in weights if ".lora_A." in name}
    if not matrices or not {*matrices, "direction", "scale", "none"} <= {*own, *weights}:
        raise ValueError("it is no adapter of this model")
    for name, given in weights.items():
        if ".lora_A." in name:
            up = weights[name.replace("lora_A", "lora_B")].float()
            changed = own[name.replace(".lora_A", "")]
            changed.add_((LORA_SCALE * up @ given.float()).to(changed.device))
        elif name in own:
            own[name].copy_(given)


_default: dict[Path, SentenceRanker | None] = {}
_loading = PerProcess(threading.Lock)


def default_ranker() -> SentenceRanker | None:
    """Return the ranker, which is loaded once; None if its model is not on this machine.

    It is the default embedding model, which is never downloaded for this. A model that cannot be
    loaded is logged and not tried again.
    """
    folder = local_default_folder()
    if folder is None:
        return None
    claim_torch()
    with _loading.get():
        if folder not in _default:
            try:
                _default[folder] = SentenceRanker(folder)
            except (ModelNotFoundError, UnsupportedModelError) as error:
                logger.warning("ragaccel: sentences are not ranked: %s", error)
                _default[folder] = None
        return _default[folder]
