"""TensorRT-LLM's drafter interface, as recorded: nothing of TensorRT-LLM is installed here."""

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import pytest
from ragaccel.errors import ConfigurationError

from vllm_ragaccel.tensorrt_llm import make_drafter

MODULE = "tensorrt_llm._torch.speculative.drafter"
TEXT = list(range(10, 150))


class Drafter:
    """The base class, with the constructor of earlier versions."""

    def __init__(self, max_concurrency=None):
        self.max_concurrency = max_concurrency


class LaterDrafter:
    """The base class, with the constructor of later versions."""

    def __init__(
        self, max_draft_len, max_total_draft_tokens, max_concurrency=None, draft_len_schedule=None
    ):
        assert max_draft_len == max_total_draft_tokens == 8


@dataclass
class Request:
    """A request as the drafter sees it, and the answer that the model gives."""

    request_id: int
    prompt: list
    target: list
    said: list = field(default_factory=list)
    py_draft_tokens: list = field(default_factory=list)

    @property
    def py_orig_prompt_len(self):
        return len(self.prompt)

    @property
    def py_max_new_tokens(self):
        return len(self.target)

    def get_tokens(self, beam):
        assert beam == 0
        return self.prompt + self.said

    def verify(self):
        """Take the right draft tokens and the one after them; return how many were drafted."""
        assert all(type(token) is int for token in self.py_draft_tokens)
        assert len(self.said) + len(self.py_draft_tokens) < max(2, len(self.target))
        left, drafts = self.target[len(self.said) :], self.py_draft_tokens
        right = next((i for i, token in enumerate(drafts) if token != left[i]), len(drafts))
        self.said += left[: right + 1]
        return right


def install(monkeypatch, base):
    """Put a TensorRT-LLM of this interface where imports find it."""
    for name in ("tensorrt_llm", "tensorrt_llm._torch", "tensorrt_llm._torch.speculative", MODULE):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[MODULE].Drafter = base


@pytest.mark.usefixtures("equal_steps")
@pytest.mark.parametrize("base", [Drafter, LaterDrafter])
def test_requests_that_come_and_go_get_right_drafts(monkeypatch, base):
    install(monkeypatch, base)
    drafter = make_drafter(8)
    assert isinstance(drafter, base)
    waiting = [Request(i, TEXT, TEXT[start : start + 90]) for i, start in enumerate((0, 20, 40))]
    running, ended, num_accepted, num_steps = [], [], 0, 0
    while waiting or running:
        joining = waiting[:1]
        del waiting[:1]
        drafter.prepare_draft_tokens(
            SimpleNamespace(generation_requests=running, context_requests=joining), None
        )
        num_accepted += sum(request.verify() for request in running)
        for request in joining:
            request.said.append(request.target[0])  # the step that reads the prompt
        running = [one for one in [*running, *joining] if len(one.said) < len(one.target)]
        ended += [one for one in joining if one not in ended]
        num_steps += 1
    assert [one.said for one in ended] == [one.target for one in ended]
    assert num_accepted > 100
    assert num_steps < 80


def test_a_missing_tensorrt_llm_and_wrong_lengths_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, MODULE, None)
    with pytest.raises(ConfigurationError, match="install tensorrt_llm"):
        make_drafter(8)
    with pytest.raises(ConfigurationError, match="1 or more, not 0"):
        make_drafter(0)
