"""Engine(exact=True) checks that the model is deterministic."""

import pytest
import torch
from tiny_models import make_tiny_model, tiny_model

from ragaccel.engine import DETERMINISTIC_ROWS, Engine, attention
from ragaccel.errors import ConfigurationError
from ragaccel.models import HuggingFaceModel, hf_model as huggingface, self_check


def test_a_refusal_names_the_cause(monkeypatch):
    model = tiny_model("llama", torch.float32)
    monkeypatch.setattr(self_check, "_KNOWN_FINDINGS", {})  # of patched code: for this test only
    with monkeypatch.context() as patch:
        patch.setattr(huggingface, "make_shared_copy", lambda model: None)
        with pytest.raises(ConfigurationError, match="s attention: its modules cannot be copied"):
            Engine(HuggingFaceModel(model), exact=True)
    monkeypatch.setattr(huggingface, "passes_check", lambda *_: False)
    message = "s attention: this model fails the self-check with it"
    with pytest.raises(ConfigurationError, match=message):
        Engine(HuggingFaceModel(model), exact=True)


@pytest.mark.parametrize("edge", [48, 256])
def test_an_error_at_the_edge_of_a_chunk_is_found(edge, monkeypatch):
    """Simulate a model whose result depends on the row's place in a chunk."""
    monkeypatch.setattr(attention, "CHUNK", edge)
    model = make_tiny_model("llama", torch.float32, max_position_embeddings=edge + 32)
    target = HuggingFaceModel(model, self_check=False)
    Engine(target, exact=True)
    forward = target.forward

    def wrong_at_the_edge(rows, keep):
        logits = forward(rows, keep)
        logits[rows.positions[0, -keep:] == edge] += rows.spans[0].start
        return logits

    monkeypatch.setattr(target, "forward", wrong_at_the_edge)
    with pytest.raises(ConfigurationError, match="depends on the other tokens of the pass"):
        Engine(target, exact=True)


def test_a_model_shorter_than_a_chunk_is_checked_up_to_its_length(monkeypatch):
    target = HuggingFaceModel(tiny_model("gpt2", torch.float32), self_check=False)
    forward, longest = target.forward, []

    def watched(rows, keep):
        longest.append(int(rows.positions.max()))
        return forward(rows, keep)

    monkeypatch.setattr(target, "forward", watched)
    Engine(target, exact=True)
    assert max(longest) == 3 * 5 + DETERMINISTIC_ROWS - 1
