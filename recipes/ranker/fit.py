"""Training of the ranker: what is trained, its batches and its loss."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ragaccel.retrieval.sentence_ranker import (
    LORA_SCALE,
    NO_SENTENCE,
    RankerNetwork,
    num_sentences,
    padded,
)
from recipes.ranker.examples import Example, TrainingExamples
from recipes.training_run import BLOCK, TrainingRun, has_bfloat16, mixed_precision

LORA_RANK = 16
BATCH_TOKENS = 6144
WARM_UP_STEPS = 50
SCALAR_RATE = 10.0  # of the learning rate, for the scale and the bias
ROWS_AT_ONCE = 2  # in attention: their weights stay in the processor's cache


def make_trainable(network: RankerNetwork) -> None:
    """Give every matrix of the encoder's layers a low-rank change, and freeze the rest of it."""
    config = peft.LoraConfig(
        r=LORA_RANK,
        lora_alpha=round(LORA_RANK * LORA_SCALE),
        target_modules=r"encoder\.layer\.\d+\..*(query|key|value|dense)",
    )
    network.encoder = peft.inject_adapter_in_model(config, network.encoder)
    for name, parameter in network.named_parameters():
        is_own = "lora_" in name or "encoder." not in name
        parameter.requires_grad_(is_own)


def adapter_of(network: RankerNetwork) -> dict[str, Tensor]:
    """Return what was trained, as in the adapter file of ``SentenceRanker``, in float16."""
    return {
        name.replace(".default", ""): parameter.detach().cpu().to(torch.float16).contiguous()
        for name, parameter in network.named_parameters()
        if parameter.requires_grad
    }


def averaged(adapters: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the adapter whose changes are the means of those of several runs.

    It often ranks better than each of them ("model soups", Wortsman et al., arXiv 2203.05482). Its
    rank is the sum of theirs.
    """
    mean: dict[str, Tensor] = {}
    for name in adapters[0]:
        parts = [adapter[name] for adapter in adapters]
        if ".lora_A." in name:
            mean[name] = torch.cat(parts)
        elif ".lora_B." in name:
            mean[name] = torch.cat(parts, dim=1) / len(parts)
        else:
            mean[name] = torch.stack(parts).mean(0)
    return mean


def publish(adapter: dict[str, Tensor], path: Path) -> None:
    """Write the file of an adapter."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(adapter, path)
    path.chmod(0o644)  # safetensors makes it readable for the owner only


def batches_of(examples: Sequence[Example], tokens: int = BATCH_TOKENS) -> list[list[Example]]:
    """Return examples in batches of similar lengths; each is at most ``tokens`` if padded."""
    some = sorted(examples, key=_length)
    batches: list[list[Example]] = []
    while some:
        length, rows = _length(some[-1]), 0
        batches.append([])
        while some and (not rows or (rows + len(some[-1].rows)) * length <= tokens):
            rows += len(some[-1].rows)
            batches[-1].append(some.pop())
    return batches


def _length(example: Example) -> int:
    return max(len(ids) for ids, _ in example.rows)


def scores_of(network: RankerNetwork, batch: Sequence[Example], device: str) -> tuple[Tensor, int]:
    """Return the scores [B, S + 1] of the examples' sentences, and the number of tokens.

    That of no answer, 0, comes after an example's last sentence, then padding.
    """
    rows = [row for example in batch for row in example.rows]
    token_ids, segments = (tensor.to(device) for tensor in padded(rows))
    of_rows = network(token_ids, segments)
    width = max(example.size for example in batch) + 1
    sources: list[int] = []
    targets: list[int] = []
    ends: list[int] = []
    at_row = 0
    for at, example in enumerate(batch):
        place = at * width
        for row in example.rows:
            count = num_sentences(row)
            sources += range(at_row * of_rows.shape[1], at_row * of_rows.shape[1] + count)
            targets += range(place, place + count)
            place, at_row = place + count, at_row + 1
        ends.append(place)
    scores = of_rows.new_full((len(batch) * width,), NO_SENTENCE)
    kept = of_rows.flatten()[torch.tensor(sources, device=device)]
    scores = scores.index_put((torch.tensor(targets, device=device),), kept)
    scores = scores.index_fill(0, torch.tensor(ends, device=device), 0.0)
    return scores.view(len(batch), width), token_ids.numel()


def _few_rows_attention(
    _module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend few rows at a time: half the time of torch's in bfloat16 on a processor."""
    with torch.autocast("cpu", enabled=False):
        query = query * kwargs.get("scaling", query.shape[-1] ** -0.5)
        hidden = query.new_zeros((len(query), 1, 1, key.shape[2]))
        if mask is not None:  # the same for every query
            hidden = hidden.masked_fill(~mask[:, :1, :1], -1e4)
        parts = zip(*(x.split(ROWS_AT_ONCE) for x in (query, key, value, hidden)), strict=True)
        mixed = torch.cat([(q @ k.mT + h).softmax(-1) @ v for q, k, v, h in parts])
    return mixed.transpose(1, 2).contiguous(), None


AttentionInterface.register("few_rows", _few_rows_attention)
AttentionMaskInterface.register("few_rows", sdpa_mask)


class Fit(TrainingRun[Sequence[Example]]):
    """A training run of the ranker; see ``TrainingRun``."""

    def __init__(
        self,
        network: RankerNetwork,
        examples: TrainingExamples,
        folder: Path,
        *,
        tokens: int,
        learning_rate: float,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.network, self.examples = network, examples
        torch.manual_seed(seed)
        make_trainable(network)
        network.to(device).eval()  # no dropout
        trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
        scalars = [p for p in trained.values() if not p.ndim]
        others = [p for p in trained.values() if p.ndim]
        optimizer = torch.optim.AdamW(
            [{"params": others}, {"params": scalars, "factor": SCALAR_RATE}],
            lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0,
        )  # fmt: skip
        if has_bfloat16(device) and device == "cpu":
            network.encoder.set_attn_implementation("few_rows")
        super().__init__(
            trained, [optimizer], folder, tokens=tokens, learning_rate=learning_rate,
            seed=seed, device=device, data=examples.digest, warm_up=WARM_UP_STEPS,
        )  # fmt: skip

    def draw(self, block: int) -> list[Sequence[Example]]:
        """Return the batches of a block in random order."""
        batches: list[Sequence[Example]] = [
            *batches_of(self.examples.draw(block, BLOCK, self.seed))
        ]
        random.Random(f"{self.seed} {block}").shuffle(batches)
        return batches

    def losses(self, batch: Sequence[Example]) -> tuple[dict[str, Tensor], int]:
        """Return the loss, the share that is right, and the number of questions."""
        with mixed_precision(self.device):
            scores, tokens = scores_of(self.network, batch, self.device)
        gold = torch.tensor([example.gold for example in batch], device=self.device)
        return {
            "loss": F.cross_entropy(scores, gold),
            "right": (scores.argmax(1) == gold).float().mean(),
            "questions": torch.tensor(float(len(batch))),
        }, tokens
