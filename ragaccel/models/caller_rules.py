"""The caller's rules: transformers' stopping criteria and logits processors, as ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ragaccel.checks import shown
from ragaccel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

# Processors of transformers that remember earlier calls, and so must see each token once.
_STATEFUL = frozenset(
    {"UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor"}
)


class CriterionRule:
    """A StoppingCriteria as a stop rule: called after every token, on prompt and answer.

    Args:
        criterion: called with (ids [1, L], None); a bool or a [1] bool tensor comes back.
        prompt_ids: the prompt of the request.
        device: where the criterion expects the ids.
    """

    def __init__(
        self,
        criterion: Callable[..., Any],
        prompt_ids: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> None:
        self._criterion = criterion
        self._prompt = torch.tensor([list(prompt_ids)], dtype=torch.int64, device=device)

    def cut(self, token_ids: Sequence[int], start: int) -> int | None:
        """Return how many answer tokens stand when the criterion first holds."""
        answer = torch.tensor([list(token_ids)], dtype=torch.int64, device=self._prompt.device)
        ids = torch.cat((self._prompt, answer), dim=1)
        num_prompt = self._prompt.shape[1]
        for end in range(start + 1, len(token_ids) + 1):
            done = self._criterion(ids[:, : num_prompt + end], None)
            try:
                holds = bool(done.all() if isinstance(done, torch.Tensor) else done)
            except (TypeError, ValueError) as error:
                raise ConfigurationError(
                    f"the stopping criterion {shown(self._criterion)} returns {shown(done)}: a "
                    "bool, or a tensor of one, is wanted"
                ) from error
            if holds:
                return end
        return None


def criterion_rules(
    criteria: Iterable[Callable[..., Any]],
    prompt_ids: Sequence[int],
    device: torch.device | str = "cpu",
) -> tuple[CriterionRule, ...]:
    """Turn a StoppingCriteriaList, or any iterable of criteria, into stop rules."""
    return tuple(CriterionRule(criterion, prompt_ids, device) for criterion in criteria)


class StatefulProcessor:
    """A logits processor that must see each token once, in order: it forces plain decoding."""

    stateful = True

    def __init__(self, processor: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._processor = processor

    def __call__(self, token_ids: Tensor, scores: Tensor) -> Tensor:
        """Process the scores of one row."""
        return self._processor(token_ids, scores)


def is_stateful(processor: Any) -> bool:
    """Whether a logits processor must see each token once, as far as that is known."""
    return type(processor).__name__ in _STATEFUL or bool(getattr(processor, "stateful", False))


def logits_processors(processors: Iterable[Callable[..., Any]]) -> tuple[Any, ...]:
    """Take over the caller's processors; transformers' own stateful ones are marked as such."""
    return tuple(
        StatefulProcessor(processor) if is_stateful(processor) else processor
        for processor in processors
    )
