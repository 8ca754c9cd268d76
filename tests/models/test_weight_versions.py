"""Weights that change after loading: followed if possible, else refused."""

import weakref

import numpy as np
import pytest
import torch
from decoding import decode
from tiny_llm import tiny_tokenizer
from tiny_models import generate, make_tiny_model, random_prompt
from torch import nn

from eval.robustness.stand_ins import save_tiny_model
from ragaccel.decoding import Request
from ragaccel.engine import Engine
from ragaccel.errors import ConfigurationError, UnsupportedModelError
from ragaccel.llm import LLM
from ragaccel.models import HuggingFaceModel, WeightVersions

PROMPT = random_prompt(20)
REQUEST = Request(PROMPT, max_new_tokens=20)


def make_model(**changes):
    sizes = {"hidden_size": 256, "intermediate_size": 512, **changes}
    return make_tiny_model("llama", torch.float32, **sizes)


def replaced(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2.0)


def assigned(model):
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.load_state_dict(state, assign=True, strict=False)  # packed layers take none


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.half(), "was float32 on cpu when .* is float16 on cpu now"),
        (lambda model: model.to(torch.bfloat16), "is bfloat16 on cpu now: make a new LLM"),
        (lambda model: model.double(), "is float64 on cpu now"),
        (lambda model: model.to("meta"), "were replaced after the LLM was made"),
        (replaced, "parameters of this model, such as 'weight', were replaced"),
        (assigned, "were replaced after the LLM was made: make a new LLM"),
    ],
)
@pytest.mark.parametrize("way", [{"pack": False}, {"pack": True}, {"owned": True}], ids=str)
def test_replaced_parameters_are_refused_at_the_next_request(change, message, way):
    model = make_model()
    engine = Engine(HuggingFaceModel(model, **way))
    decode(engine, REQUEST)
    change(model)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=message):
            decode(engine, REQUEST)


def test_a_new_llm_or_undoing_the_change_helps():
    model = make_model(vocab_size=400)
    llm = LLM(model, tiny_tokenizer())
    before = llm.generate(PROMPT, max_new_tokens=9).token_ids
    model.double()
    with pytest.raises(ConfigurationError, match="float64 on cpu now"):
        llm.generate(PROMPT, max_new_tokens=9)
    anew = LLM(model, tiny_tokenizer()).generate(PROMPT, max_new_tokens=9)
    assert list(anew.token_ids) == generate(model, PROMPT, 9)
    model.float()
    assert llm.generate(PROMPT, max_new_tokens=9).token_ids == before


@pytest.mark.parametrize("pack", [False, True])
def test_an_uncounted_write_can_be_marked(pack):
    model = make_model()
    target = HuggingFaceModel(model, pack=pack)
    engine = Engine(target)
    decode(engine, REQUEST)
    for weight, new in zip(model.parameters(), make_model(seed=1).parameters(), strict=True):
        weight.data.copy_(new.data)
    assert target.refresh() == 0
    target.mark_weights_changed()
    assert decode(engine, REQUEST) == decode(Engine(HuggingFaceModel(model, pack=pack)), REQUEST)
    assert target.refresh() == target.refresh() == 1


def watched():
    """Weights of many kinds."""
    torch.manual_seed(0)
    model = nn.ParameterList(
        [
            torch.randn(40, 7), torch.randn(9).bfloat16(), torch.randn(6, 5).double(),
            torch.tensor(1.5), torch.randn(5, 6).t(), torch.empty(3, 3, device="meta"),
            torch.full((4,), float("nan")),
        ]
    )  # fmt: skip
    return model, WeightVersions(model, list(model.parameters()))


def test_unchanged_weights_are_not_repacked():
    model, versions = watched()
    assert versions.changed_weights() == []
    with torch.no_grad():
        model[4].mul_(2.0)
    (changed,) = versions.changed_weights()
    assert changed is model[4]
    assert versions.changed_weights() == []
    assert versions.version == 1


def test_a_model_whose_weights_count_no_writes_is_refused():
    with torch.inference_mode():
        model = make_model()
    with pytest.raises(UnsupportedModelError, match="load it outside of inference mode"):
        HuggingFaceModel(model)


def test_a_model_that_is_loaded_in_inference_mode_is_followed(tmp_path):
    save_tiny_model(tmp_path)
    with torch.inference_mode():
        llm = LLM.load(tmp_path, save_measurements=False)
    before = llm.generate("The lamp", max_new_tokens=9).token_ids
    with torch.no_grad():
        llm.model.model.model.norm.weight.mul_(
            torch.linspace(-3, 3, llm.model.model.config.hidden_size)
        )
    assert llm.generate("The lamp", max_new_tokens=9).token_ids != before


def test_storage_that_weights_have_left_is_not_kept():
    layer, numbers = nn.Linear(64, 64, bias=False), np.ones((64, 64), np.float32)
    left = weakref.ref(numbers)
    layer.weight.data = torch.from_numpy(numbers)
    versions = WeightVersions(layer, [layer.weight])
    del numbers
    assert left() is not None
    layer.weight.data = torch.zeros(64, 64)
    assert left() is None
    assert versions.changed_weights() == [layer.weight]


def test_other_storage_at_the_same_address_is_seen():
    numbers = np.zeros((4, 4), dtype=np.float32)
    layer = nn.Linear(4, 4, bias=False)
    layer.weight.data = torch.from_numpy(numbers)
    versions = WeightVersions(layer, [layer.weight])
    assert versions.changed_weights() == []
    layer.weight.data = torch.empty(4, 4)  # as half().float() does: freed, then allocated there
    layer.weight.data = torch.from_numpy(numbers)
    assert [weight is layer.weight for weight in versions.changed_weights()] == [True]
    assert versions.changed_weights() == []
