"""Training of the ranker: batches, loss, learning rates and checkpoints."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import peft
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ragaccel.errors import ConfigurationError
from ragaccel.retrieval.sentence_ranker import (
    LORA_RANK,
    LORA_SCALE,
    RankerNetwork,
    num_sentences,
    padded,
)
from recipes.ranker.examples import Example, Mixture

BLOCK = 512  # questions drawn together; checkpoints lie between blocks
BATCH_TOKENS = 6144
WARM_UP_STEPS, LAST_RATE = 50, 0.02  # share of the learning rate
SCALAR_RATE = 10.0  # of the learning rate, for the scale and the bias
SECONDS_BETWEEN_CHECKPOINTS = 60
ROWS_AT_ONCE = 2  # in attention: their weights stay in the processor's cache
_NO_SENTENCE = -1e9


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


def publish(network: RankerNetwork, path: Path) -> None:
    """Write what was trained as the adapter file of ``SentenceRanker``, in float16."""
    weights = {
        name.replace(".default", ""): parameter.detach().cpu().to(torch.float16).contiguous()
        for name, parameter in network.named_parameters()
        if parameter.requires_grad
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, path)
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
    scores = of_rows.new_full((len(batch) * width,), _NO_SENTENCE)
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


class Fit:
    """A training run of the ranker, which resumes from the checkpoint in its folder.

    A run resumed with the same arguments sees the examples that an uninterrupted one would.

    Raises:
        ConfigurationError: The checkpoint is of a run with other arguments.
    """

    def __init__(
        self,
        network: RankerNetwork,
        mixture: Mixture,
        folder: Path,
        *,
        tokens: int,
        learning_rate: float,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.network, self.mixture, self.folder, self.device = network, mixture, folder, device
        self.tokens, self.learning_rate, self.seed = tokens, learning_rate, seed
        torch.manual_seed(seed)
        make_trainable(network)
        network.to(device).eval()  # no dropout
        self.trained = [p for p in network.parameters() if p.requires_grad]
        scalars = [p for p in self.trained if not p.ndim]
        others = [p for p in self.trained if p.ndim]
        self.optimizer = torch.optim.AdamW(
            [{"params": others, "factor": 1.0}, {"params": scalars, "factor": SCALAR_RATE}],
            lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0,
        )  # fmt: skip
        self.blocks = self.steps = self.done = 0
        self.seconds = 0.0
        self.log: list[dict[str, float]] = []
        self._arguments = {
            "tokens": tokens, "learning_rate": learning_rate, "seed": seed,
            "data": mixture.digest,
        }  # fmt: skip
        self._precision = _precision(network, device)
        self._resume()

    def run(self) -> None:
        """Train on all tokens; save a checkpoint every minute and at the end."""
        last_saved = time.perf_counter()
        while self.done < self.tokens:
            batches = batches_of(self.mixture.draw(self.blocks, BLOCK, self.seed))
            random.Random(f"{self.seed} {self.blocks}").shuffle(batches)
            for batch in batches:
                self._step(batch)
            self.blocks += 1
            if time.perf_counter() - last_saved > SECONDS_BETWEEN_CHECKPOINTS:
                self.save()
                last_saved = time.perf_counter()
        self.save()

    def _step(self, batch: Sequence[Example]) -> None:
        started = time.perf_counter()
        warm = min(1.0, (self.steps + 1) / WARM_UP_STEPS)
        rate = self.learning_rate * warm * max(LAST_RATE, 1.0 - self.done / self.tokens)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        with self._precision():
            scores, tokens = scores_of(self.network, batch, self.device)
        gold = torch.tensor([example.gold for example in batch], device=self.device)
        loss = F.cross_entropy(scores, gold)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps, self.done = self.steps + 1, self.done + tokens
        self.seconds += time.perf_counter() - started
        right = (scores.argmax(1) == gold).float().mean().item()
        values = {"loss": loss.item(), "right": right, "questions": len(batch)}
        self.log.append({"tokens": self.done, **{n: round(v, 4) for n, v in values.items()}})
        if self.steps % 50 == 0:
            self._report()

    def _report(self) -> None:
        last = self.log[-50:]
        means = {name: sum(row[name] for row in last) / len(last) for name in ("loss", "right")}
        asked = sum(row["questions"] for row in self.log)
        print(
            f"{self.seconds / 60:6.1f} min  {self.done / 1e6:6.2f}M tokens  "
            f"{self.done / max(self.seconds, 1e-9):,.0f}/s  {asked:.0f} questions  "
            f"loss {means['loss']:.3f}  right {means['right']:.3f}",
            file=sys.stderr,
            flush=True,
        )

    def save(self) -> None:
        """Write what is trained, optimizer and progress; replace the old checkpoint atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "arguments": self._arguments,
            "trained": self.trained,
            "optimizer": self.optimizer.state_dict(),
            "progress": [self.blocks, self.steps, self.done, self.seconds],
            "log": self.log,
        }
        half_written = self.folder / "checkpoint.tmp"
        torch.save(state, half_written)
        half_written.replace(self.folder / "checkpoint.pt")
        (self.folder / "log.json").write_text(json.dumps(self.log))

    def _resume(self) -> None:
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["arguments"] != self._arguments:
            raise ConfigurationError(
                f"{path} is of a run with {state['arguments']}, not {self._arguments}: give those "
                "to go on, or another --out to begin anew"
            )
        with torch.no_grad():
            for parameter, saved in zip(self.trained, state["trained"], strict=True):
                parameter.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self.blocks, self.steps, self.done, self.seconds = state["progress"]
        self.log = state["log"]
        print(f"resumed after {self.done / 1e6:.1f}M tokens", file=sys.stderr)


def _precision(network: RankerNetwork, device: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return the precision to train in: bfloat16 where the hardware multiplies it."""
    is_cpu = device == "cpu"
    if is_cpu and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return nullcontext
    if is_cpu:
        network.encoder.set_attn_implementation("few_rows")
    return lambda: torch.autocast(device, torch.bfloat16)
