"""Training of the reader: what is trained, its batches and its losses."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from recipes.reader.batches import COPIED_SHARE, Batch, batches_of
from recipes.reader.examples import ExampleMaker
from recipes.reader.muon import Muon
from recipes.reader.network import TrainingForward
from recipes.reader.vocabulary import NONE
from recipes.training_run import BLOCK, TrainingRun, mixed_precision

# The prompts are in random order at first, and none after this share of the tokens: the order of
# the sentences is right for most questions, and would be learned instead of the rest.
SHUFFLED_UNTIL = 0.6
# Copying is learned from short prompts with their answers, of which more tokens are copies. All
# prompts are such at first, and none after this share of the tokens.
SHORT_UNTIL = 0.3
CHOICE_WEIGHT, RELEVANCE_WEIGHT, MATCH_WEIGHT = 1.0, 1.0, 1.0  # of the losses
# Each loss is a mean over its own tokens: in a single mean the questions' tokens, which are more,
# outweigh the answers'.
ANSWER_COPY_WEIGHT, QUESTION_COPY_WEIGHT = 1.0, 0.3
# Added to the refusal's logit in the loss alone ("logit adjustment", Menon et al., arXiv
# 2007.07314): what is trained refuses where that is e**2 times as likely as the best sentence.
REFUSAL_MARGIN = 2.0
WARM_UP_STEPS = 100


class Fit(TrainingRun[Batch]):
    """A training run of the reader; see ``TrainingRun``."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        maker: ExampleMaker,
        folder: Path,
        *,
        tokens: int,
        learning_rate: float,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.model, self.maker = model, maker
        self.network = TrainingForward(model).to(device).train()
        self.padding = int(model.config.pad_token_id or 0)
        self._refusal = torch.tensor(maker.id_of[NONE], device=device)
        matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
        chosen = {id(p) for p in matrices}
        others = [p for p in self.network.parameters() if id(p) not in chosen]
        optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=learning_rate),
            torch.optim.AdamW(
                others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
            ),
        ]
        super().__init__(
            dict(self.network.named_parameters()), optimizers, folder, tokens=tokens,
            learning_rate=learning_rate, seed=seed, device=device,
            data=maker.folder.corpus.digest(), warm_up=WARM_UP_STEPS,
        )  # fmt: skip

    def draw(self, block: int) -> list[Batch]:
        """Return the batches of a block; fewer and fewer prompts are shuffled."""
        rng = random.Random(f"{self.seed} {block}")
        shuffled = max(0.0, 1.0 - self.progress.tokens / self.tokens / SHUFFLED_UNTIL)
        numbers = islice(self.maker.folder.order(self.seed), block * BLOCK, (block + 1) * BLOCK)
        short = max(0.0, 1.0 - self.progress.tokens / self.tokens / SHORT_UNTIL)
        drawn = [self.maker.draw(number, rng, shuffled, short) for number in numbers]
        made = [one for one in drawn if one is not None]
        max_tokens = self.model.config.max_position_embeddings
        copied = COPIED_SHARE + short * (1.0 - COPIED_SHARE)
        return batches_of(made, self.padding, max_tokens, rng, copied)

    def losses(self, batch: Batch) -> tuple[dict[str, Tensor], int]:
        """Return the losses and the shares of what is right.

        Those of copied answers are left out if the batch has no answer to copy.
        """
        return self._losses(batch.to(self.device)), batch.token_ids.numel()

    def _losses(self, batch: Batch) -> dict[str, Tensor]:
        with mixed_precision(self.device):
            hidden, matches, scores = self.network(batch.token_ids)
        hidden = hidden.float()
        rows = torch.arange(len(batch.start), device=self.device)
        first = self.model.lm_head(hidden[rows, batch.start])
        markers = batch.token_ids.gather(1, batch.ends)
        margin = REFUSAL_MARGIN * F.one_hot(self._refusal, first.shape[1])
        choice = F.cross_entropy(first + margin, markers[rows, batch.gold])
        at_ends = scores.gather(1, batch.ends).masked_fill(~batch.end_mask, -1e9)
        relevance = F.cross_entropy(at_ends, batch.gold)
        match = F.binary_cross_entropy_with_logits(
            matches.flatten()[batch.sentence_tokens],
            batch.matches,
            pos_weight=torch.tensor(3.0, device=self.device),
        )
        question_copy, question_copied = self._copy_loss(hidden, batch, batch.question_tokens)
        loss = CHOICE_WEIGHT * choice + RELEVANCE_WEIGHT * relevance + MATCH_WEIGHT * match
        loss = loss + QUESTION_COPY_WEIGHT * question_copy
        of_answers: dict[str, Tensor] = {}
        if len(batch.answer_tokens):
            answer_copy, answer_copied = self._copy_loss(hidden, batch, batch.answer_tokens)
            loss = loss + ANSWER_COPY_WEIGHT * answer_copy
            of_answers = {"answer_copy": answer_copy, "answer_copied": answer_copied}
        with torch.no_grad():
            chances = first.gather(1, markers).masked_fill(~batch.end_mask, -1e9)
            return {
                "loss": loss,
                "choice": choice,
                "match": match,
                "right": (chances.argmax(1) == batch.gold).float().mean(),
                "relevant": (at_ends.argmax(1) == batch.gold).float().mean(),
                "first": (batch.gold == 0).float().mean(),
                "question_copy": question_copy,
                "question_copied": question_copied,
                **of_answers,
            }

    def _copy_loss(self, hidden: Tensor, batch: Batch, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean loss of the tokens after some, and the share that is right."""
        logits = self.model.lm_head(hidden.flatten(0, 1)[places])
        copies = batch.token_ids.flatten()[places + 1]
        return F.cross_entropy(logits, copies), (logits.argmax(-1) == copies).float().mean()
