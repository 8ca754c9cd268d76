"""``eval cpu_step``: the parts of a pass, told by the names of torch's operations."""

import pytest
import torch
from tiny_models import make_tiny_model

from eval.experiments import cpu_step
from ragaccel.engine import Engine
from ragaccel.models import HuggingFaceModel


def test_every_millisecond_of_a_pass_has_its_part(monkeypatch):
    monkeypatch.setattr(cpu_step, "CONTEXT", 40)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 400}
    model = make_tiny_model("llama", torch.bfloat16, **sizes)
    for target in (HuggingFaceModel(model, pack=True), HuggingFaceModel(model, pack=False)):
        spent = cpu_step.parts_of_pass(Engine(target, max_rows=8, kept_prefixes=0), 4, repeats=3)
        whole = spent.pop("whole")
        assert sum(spent.values()) == pytest.approx(whole, abs=0.05)
        assert spent["products"] > 0
        assert spent.get("attention", 0) + spent.get("layers", 0) > 0
