"""Default values of both modes, and values that are refused."""

import json

import pytest

from ragaccel.errors import ConfigurationError
from ragaccel.training import make_recipe


def test_the_papers_numbers():
    recipe = make_recipe("paper", learning_rate=None)
    assert (recipe.num_masks, recipe.num_cuts, recipe.rank) == (5, 1, 0)
    assert (recipe.learning_rate, recipe.epochs) == (5e-5, 2)


def test_an_adapters_numbers():
    recipe = make_recipe("gated", rank=4, learning_rate=None)
    assert (recipe.num_masks, recipe.num_cuts, recipe.rank) == (5, 24, 4)
    assert recipe.learning_rate == 2e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "lora"}, "mode must be gated or paper"),
        ({"precision": "float16"}, "precision must be float32 or bfloat16"),
        ({"num_masks": 0}, "num_masks must be 1 or more, not 0"),
        ({"steps": 0}, "steps must be 1"),
        ({"epochs": 0}, "epochs must be"),
        ({"accumulate": 0}, "accumulate must be"),
        ({"evaluate_every": -1}, "evaluate_every must be 0"),
        ({"learning_rate": 0}, "learning_rate must be above 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be above 0"),
        ({"rank": 0}, "rank must be 1"),
        ({"mode": "paper", "rank": 4}, "do not give a rank"),
        ({"row_tokens": 12}, "row_tokens must be 13"),
        ({"speed": 3}, "a recipe has no field speed"),
    ],
)
def test_what_cannot_work_is_refused(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        make_recipe(**changes)


def test_a_recipe_can_be_written_down():
    told = make_recipe("paper").as_dict()
    assert json.loads(json.dumps(told)) == told
    assert (told["mode"], told["shared_mask"], told["distill"]) == ("paper", True, False)
