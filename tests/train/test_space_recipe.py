"""The recipe: the paper's numbers, what suits a mode, and what is refused."""

import json

import pytest

from ragaccel.errors import ConfigurationError
from ragaccel.train.space.recipe import Recipe, make_recipe, parse_changes


def test_the_defaults_are_the_papers():
    recipe = make_recipe("full", shared_mask=True, variant="plain")
    assert (recipe.num_masks, recipe.mask_probability, recipe.num_cuts) == (5, 0.5, 1)
    assert (recipe.learning_rate, recipe.schedule, recipe.epochs) == (5e-5, "cosine", 2)
    assert (recipe.loss_weight, recipe.row_tokens, recipe.rank) == (1.0, 2048, 0)


def test_a_gated_base_is_its_own_teacher():
    recipe = make_recipe("gated", learning_rate=None)
    assert recipe.distill
    assert recipe.mask_probability == 1.0
    assert recipe.learning_rate == 2e-3
    plain = make_recipe("gated", variant="plain")
    assert (plain.distill, plain.num_cuts) == (False, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "other"}, "mode must be gated, lora, full"),
        ({"variant": "other"}, "variant must be"),
        ({"precision": "float16"}, "precision must be float32, bfloat16"),
        ({"schedule": "linear"}, "schedule must be"),
        ({"num_masks": 0}, "num_masks must be 1 or more, not 0"),
        ({"num_cuts": 0}, "num_cuts must be"),
        ({"steps": 0}, "steps must be 1"),
        ({"epochs": 0}, "epochs must be"),
        ({"accumulate": 0}, "accumulate must be"),
        ({"learning_rate": 0}, "learning_rate must be above 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be above 0"),
        ({"warmup": 1.5}, "warmup must be 0 to 1"),
        ({"mode": "full", "mask_probability": 1.5}, "mask_probability must be 0 to 1"),
        ({"mode": "full", "mask_probability": 0}, "mask_probability must be above 0"),
        ({"mask_probability": 0.5}, "learns nothing of samples without"),
        ({"rank": 0}, "need a rank"),
        ({"mode": "full", "rank": 4}, "rank must be 0"),
        ({"mode": "full", "targets": ("a",)}, "leave targets away"),
        ({"variant": "plain", "num_cuts": 2}, "num_cuts must be 1"),
        ({"variant": "plain", "distill": True}, "take the efficient variant"),
        ({"row_tokens": 12}, "row_tokens must be 13"),
        ({"speed": 3}, "a recipe has no speed"),
    ],
)
def test_what_cannot_work_is_refused(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        make_recipe(**changes)


def test_changes_are_read_as_they_are_typed():
    typed = ["variant=plain", "shared_mask=true", "targets=q_proj, v_proj", "warmup = 0.1"]
    assert parse_changes([*typed, "late_cuts=False", "steps=7"]) == {
        "variant": "plain",
        "shared_mask": True,
        "targets": ("q_proj", "v_proj"),
        "warmup": 0.1,
        "late_cuts": False,
        "steps": 7,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("warmup", "write name=value, names are accumulate"),
        ("speed=3", "sets nothing"),
        ("mode=full", "sets nothing"),
        ("warmup=fast", "warmup is of type float, not 'fast'"),
        ("shared_mask=1", "of type bool"),
        ("steps=1.5", "of type int"),
    ],
)
def test_changes_that_are_none(text, message):
    with pytest.raises(ConfigurationError, match=message):
        parse_changes([text])


def test_a_recipe_can_be_written_down():
    recipe = make_recipe("lora", targets=("q_proj", "v_proj"))
    read = json.loads(json.dumps(recipe.as_dict()))
    assert read == recipe.as_dict()
    assert Recipe(**{**read, "targets": tuple(read["targets"])}) == recipe
