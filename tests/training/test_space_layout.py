"""The layout of samples with mask tokens: the paper's figure, packing and cuts."""

import random

import pytest
import torch

from ragaccel.training import (
    IGNORED,
    Collator,
    Plan,
    Sample,
    make_recipe,
    pack,
    plan_epoch,
    plan_rows,
    plan_sample,
)

VOCAB = 100
SAMPLE = Sample((10, 11, 12), (20, 21, 22, 23, 24, 25, 26))  # real tokens 0 to 9


def collate(plans, num_masks):
    return Collator(num_masks, VOCAB)([plans])


def sees(batch):
    return batch["attention_mask"][0, 0]


def column(batch, name):
    return batch[name][0].tolist()


def drawn(batch):
    """Return the attention mask as lines, with # for True."""
    return ["".join("#" if seen else "." for seen in row) for row in sees(batch).tolist()]


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
    """Lay out 3 prompt tokens, 2 answer tokens, and mask tokens in place of the rest."""
    found = collate([Plan(SAMPLE, (4,), shortened=True)], num_masks)
    masks = [VOCAB + i for i in range(num_masks)]
    assert column(found, "input_ids") == [10, 11, 12, 20, 21, *masks]
    assert column(found, "position_ids") == list(range(5 + num_masks))
    assert column(found, "labels") == [IGNORED, IGNORED, 20, 21, 22, *labels]
    if lines:
        assert drawn(found) == lines
    assert torch.equal(sees(found), torch.ones(5 + num_masks, 5 + num_masks).tril().bool())


@pytest.mark.parametrize("num_masks", [1, 2, 5])
@pytest.mark.parametrize("cut", [2, 4, 7])
def test_the_efficient_variant_is_the_papers_figure(num_masks, cut):
    """Lay out a whole sample and mask tokens that do not attend past the cut."""
    found = collate([Plan(SAMPLE, (cut,))], num_masks)
    ids = SAMPLE.token_ids
    masks = [VOCAB + i for i in range(num_masks)]
    assert column(found, "input_ids") == [*ids, *masks]
    assert column(found, "position_ids") == [*range(10), *range(cut + 1, cut + 1 + num_masks)]
    ahead = [ids[i] if (i := cut + 1 + n) < 10 else IGNORED for n in range(1, num_masks + 1)]
    assert column(found, "labels") == [IGNORED, IGNORED, *ids[3:], IGNORED, *ahead]
    expected = torch.zeros(10 + num_masks, 10 + num_masks).bool()
    expected[:10, :10] = torch.ones(10, 10).tril().bool()
    expected[10:, : cut + 1] = True
    expected[10:, 10:] = torch.ones(num_masks, num_masks).tril().bool()
    assert torch.equal(sees(found), expected)
    # the real token before the label that a mask token has
    places = [i if (i := cut + n) < 9 else -1 for n in range(1, num_masks + 1)]
    assert column(found, "teachers") == [-1] * 10 + places


def test_a_decoder_sees_the_same():
    """Draw two groups of two mask tokens after their cuts."""
    sample = Sample((10,), (20, 21, 22))
    found = collate([Plan(sample, (0, 1))], 2)
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
    assert column(found, "position_ids") == [0, 1, 2, 3, 1, 2, 2, 3]
    assert column(found, "labels") == [20, 21, 22, IGNORED, 21, 22, 22, IGNORED]


def test_packed_samples_see_themselves_only():
    """Real tokens of all samples come first, then the mask tokens of all."""
    plans = [Plan(Sample((1, 2), (3, 4, 5)), (1, 2)), Plan(SAMPLE, (4, 6)), Plan(SAMPLE)]
    packed, reals = collate(plans, 2), sum(plan.num_real for plan in plans)
    real, mask, taught = 0, reals, 0
    for plan in plans:
        single, size = collate([plan], 2), plan.num_real
        here = [*range(real, real + size), *range(mask, mask + 2 * len(plan.cuts))]
        assert torch.equal(sees(packed)[here][:, here], sees(single))
        assert sees(packed)[here].sum() == sees(single).sum()
        for name in ("input_ids", "position_ids", "labels"):
            assert torch.equal(packed[name][0, here], single[name][0])
        teachers = packed["teachers"][0, here]
        assert torch.equal(torch.where(teachers < 0, -1, teachers - real), single["teachers"][0])
        taught += int((teachers >= 0).sum())
        real, mask = real + size, mask + 2 * len(plan.cuts)
    assert mask == packed["input_ids"].shape[1]
    assert taught == 4 + 3  # one label beyond the end of the first sample is none


@pytest.mark.parametrize(
    ("mode", "places"), [("paper", {2, 3, 4, 5}), ("gated", {1, 2, 3, 4, 5, 6, 7})]
)
def test_where_samples_are_cut(mode, places):
    recipe = make_recipe(mode, num_masks=3)
    rng = random.Random(0)
    plans = [plan_sample(SAMPLE, recipe, rng) for _ in range(300)]
    assert {cut for plan in plans for cut in plan.cuts} == places
    for sample, cuts in ((Sample((1, 2, 3), (4, 5)), (1, 2)), (Sample((1,), (4, 5)), (0,))):
        wanted = {"gated": {cuts}, "paper": {(), (len(sample.prompt_ids) - 1,)}}[mode]
        assert {plan_sample(sample, recipe, rng).cuts for _ in range(30)} == wanted


def test_cuts_are_as_many_as_there_is_room():
    recipe = make_recipe("gated", num_masks=2)
    rng = random.Random(0)
    assert plan_sample(SAMPLE, recipe, rng).cuts == (1, 2, 3, 4, 5, 6, 7)
    tight = make_recipe("gated", num_masks=2, row_tokens=17)
    assert len(plan_sample(SAMPLE, tight, rng).cuts) == 3


def test_the_paper_gives_half_of_the_samples_mask_tokens():
    rng = random.Random(0)
    plans = [plan_sample(SAMPLE, make_recipe("paper"), rng) for _ in range(2000)]
    assert 0.45 < sum(bool(plan.cuts) for plan in plans) / 2000 < 0.55
    assert all(plan.shortened == bool(plan.cuts) for plan in plans)


def test_rows_are_filled_in_order():
    plans = [Plan(SAMPLE, (4,)) for _ in range(7)]  # 12 tokens each
    assert [len(row) for row in pack(plans, 2, 40)] == [3, 3, 1]
    assert [len(row) for row in pack(plans, 2, 5)] == [1] * 7


def test_rows_are_those_of_the_epochs_one_after_another():
    samples = [Sample((i,), tuple(range(5 + i % 7))) for i in range(40)]
    recipe = make_recipe("gated", row_tokens=64, num_masks=2)
    epochs = [plan_epoch(samples, recipe, epoch) for epoch in range(4)]
    in_order = [row for epoch in epochs for row in epoch]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        seen = sorted(plan.sample.prompt_ids for row in epoch for plan in row)
        assert seen == sorted(sample.prompt_ids for sample in samples)
    assert plan_rows(samples, recipe) == epochs[0] + epochs[1]
    for steps, processes in ((1, 2), (len(epochs[0]), 3)):
        longer = make_recipe("gated", row_tokens=64, num_masks=2, steps=steps)
        assert plan_rows(samples, longer, processes) == in_order[: steps * processes]
    count = len(epochs[0]) + len(epochs[1])
    assert plan_rows(samples, recipe, 7) == in_order[: -(-count // 7) * 7]
