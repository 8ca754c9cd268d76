"""The layout of samples with mask tokens: the paper's figure, packing, windows, where it cuts."""

import random

import pytest
import torch

from ragaccel.train.space.layout import IGNORED, Plan, lay_out
from ragaccel.train.space.plan import Rows, cut_places, pack, plan_epoch, plan_sample
from ragaccel.train.space.recipe import make_recipe
from ragaccel.train.space.samples import Sample

VOCAB = 100
SAMPLE = Sample((10, 11, 12), (20, 21, 22, 23, 24, 25, 26))  # real tokens 0 to 9


def drawn(layout):
    """The mask as lines: # where a token is seen."""
    return ["".join("#" if seen else "." for seen in row) for row in layout.sees().tolist()]


@pytest.mark.parametrize(
    ("num_masks", "lines", "labels"),
    [
        (1, ["#.....", "##....", "###...", "####..", "#####.", "######"], [23]),
        (
            2,
            ["#......", "##.....", "###....", "####...", "#####..", "######.", "#######"],
            [23, 24],
        ),
        (5, [], [23, 24, 25, 26, IGNORED]),
    ],
)
def test_the_plain_variant_is_the_papers_figure(num_masks, lines, labels):
    """A prompt of 3, two tokens of the answer, mask tokens in the place of the rest."""
    found = lay_out(
        [Plan(SAMPLE, (4,), shortened=True)],
        num_masks=num_masks,
        vocab_size=VOCAB,
        learns_real=True,
    )
    masks = [VOCAB + i for i in range(num_masks)]
    assert found.token_ids.tolist() == [10, 11, 12, 20, 21, *masks]
    assert found.positions.tolist() == list(range(5 + num_masks))
    assert found.labels.tolist() == [IGNORED, IGNORED, 20, 21, 22, *labels]
    if lines:
        assert drawn(found) == lines
    assert torch.equal(found.sees(), torch.ones(5 + num_masks, 5 + num_masks).tril().bool())


@pytest.mark.parametrize("num_masks", [1, 2, 5])
@pytest.mark.parametrize("cut", [2, 4, 7])
def test_the_efficient_variant_is_the_papers_figure(num_masks, cut):
    """The whole sample, mask tokens behind it; what stands behind the cut they do not see."""
    found = lay_out([Plan(SAMPLE, (cut,))], num_masks=num_masks, vocab_size=VOCAB, learns_real=True)
    ids = SAMPLE.token_ids
    masks = [VOCAB + i for i in range(num_masks)]
    assert found.token_ids.tolist() == [*ids, *masks]
    assert found.positions.tolist() == [*range(10), *range(cut + 1, cut + 1 + num_masks)]
    ahead = [ids[i] if (i := cut + 1 + n) < 10 else IGNORED for n in range(1, num_masks + 1)]
    assert found.labels.tolist() == [IGNORED, IGNORED, *ids[3:], IGNORED, *ahead]
    expected = torch.zeros(10 + num_masks, 10 + num_masks).bool()
    expected[:10, :10] = torch.ones(10, 10).tril().bool()
    expected[10:, : cut + 1] = True
    expected[10:, 10:] = torch.ones(num_masks, num_masks).tril().bool()
    assert torch.equal(found.sees(), expected)
    # the real token before the label that a mask token has
    places = [i if (i := cut + n) < 9 else -1 for n in range(1, num_masks + 1)]
    assert found.teachers.tolist() == [-1] * 10 + places


def test_a_decoder_sees_the_same():
    """Two groups of two behind their cuts, as lines."""
    sample = Sample((10,), (20, 21, 22))
    found = lay_out([Plan(sample, (0, 1))], num_masks=2, vocab_size=VOCAB)
    assert drawn(found) == [
        "#.......",
        "##......",
        "###.....",
        "####....",
        "#...#...",
        "#...##..",
        "##....#.",
        "##....##",
    ]
    assert found.positions.tolist() == [0, 1, 2, 3, 1, 2, 2, 3]
    assert found.labels.tolist() == [IGNORED] * 4 + [21, 22, 22, IGNORED]
    assert found.is_mask.tolist() == [False] * 4 + [True] * 4


def test_a_window_goes_by_positions():
    found = lay_out([Plan(SAMPLE, (4, 8))], num_masks=3, vocab_size=VOCAB)
    near, far = found.sees(4), found.sees()
    distance = found.positions[:, None] - found.positions[None]
    assert torch.equal(near, far & (distance < 4))
    assert near.sum() < far.sum()


def test_packed_samples_see_themselves_only():
    others = [Plan(Sample((1, 2), (3, 4, 5)), (1, 2)), Plan(SAMPLE, (4, 6)), Plan(SAMPLE)]
    settings = {"num_masks": 2, "vocab_size": VOCAB, "learns_real": True}
    packed, start = lay_out(others, **settings), 0
    whole = packed.sees()
    for plan in others:
        alone = lay_out([plan], **settings)
        here = slice(start, start + len(alone))
        assert torch.equal(whole[here, here], alone.sees())
        assert whole[here].sum() == alone.sees().sum()
        for name in ("token_ids", "positions", "visible", "labels", "is_mask"):
            assert torch.equal(getattr(packed, name)[here], getattr(alone, name))
        teachers = packed.teachers[here]
        assert torch.equal(torch.where(teachers < 0, teachers, teachers - start), alone.teachers)
        start += len(alone)
    assert start == len(packed)


@pytest.mark.parametrize(
    ("early", "late", "places"),
    [
        (False, False, [2, 3, 4, 5]),
        (False, True, [2, 3, 4, 5, 6, 7]),
        (True, True, [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_where_samples_are_cut(early, late, places):
    recipe = make_recipe("gated", num_masks=3, early_cuts=early, late_cuts=late, num_cuts=1)
    assert list(cut_places(SAMPLE, recipe)) == places
    rng = random.Random(0)
    found = {plan_sample(SAMPLE, recipe, rng).cuts for _ in range(300)}
    assert found == {(place,) for place in places}
    short = Sample((1, 2, 3), (4, 5))
    assert list(cut_places(short, recipe)) == [2 - early, 2][not early :]
    shortest = Sample((1,), (4, 5))
    assert list(cut_places(shortest, recipe)) == [0]


def test_cuts_are_as_many_as_there_is_room():
    recipe = make_recipe("gated", num_masks=2, num_cuts=50)
    rng = random.Random(0)
    assert plan_sample(SAMPLE, recipe, rng).cuts == (1, 2, 3, 4, 5, 6, 7)
    tight = make_recipe("gated", num_masks=2, num_cuts=50, row_tokens=17)
    assert len(plan_sample(SAMPLE, tight, rng).cuts) == 3


def test_some_samples_get_no_mask_tokens():
    recipe = make_recipe("full", mask_probability=0.25)
    rng = random.Random(0)
    masked = sum(bool(plan_sample(SAMPLE, recipe, rng).cuts) for _ in range(2000))
    assert 0.2 < masked / 2000 < 0.3


def test_rows_are_filled_in_order():
    plans = [Plan(SAMPLE, (4,)) for _ in range(7)]  # 12 tokens each
    assert [len(row) for row in pack(plans, 2, 40)] == [3, 3, 1]
    assert [len(row) for row in pack(plans, 2, 5)] == [1] * 7


def test_any_row_can_be_asked_for():
    samples = [Sample((i,), tuple(range(5 + i % 7))) for i in range(40)]
    recipe = make_recipe("gated", row_tokens=64, num_masks=2)
    epochs = [plan_epoch(samples, recipe, epoch) for epoch in range(3)]
    in_order = [row for epoch in epochs for row in epoch]
    rows = Rows(samples, recipe)
    numbers = list(range(len(in_order)))
    random.Random(0).shuffle(numbers)
    for number in numbers:
        assert rows.row(number) == in_order[number]
    assert Rows(samples, recipe).row(numbers[0]) == in_order[numbers[0]]
    assert rows.first_of(2) == len(epochs[0]) + len(epochs[1])
    assert epochs[0] != epochs[1]
    seen = sorted(plan.sample.prompt_ids for row in epochs[1] for plan in row)
    assert seen == sorted(sample.prompt_ids for sample in samples)
