import random

import pytest

from ragaccel.frameworks import KGRAM_LENGTH, FingerprintIndex, kgram_keys


def index_of(*texts):
    index = FingerprintIndex(1 << 16)
    for number, text in enumerate(texts):
        index.add(number, kgram_keys(text, 0))
    return index


def found(index, text):
    alignments = index.find(kgram_keys(text, 0))
    return set(zip(alignments.number.tolist(), alignments.shift.tolist(), strict=True))


def letters(seed, size):
    return "".join(random.Random(seed).choices("abcdefghij", k=size))


def test_equal_kgrams_have_equal_keys_and_other_seeds_others():
    text = letters(1, 200)
    keys = kgram_keys(text, 7)
    assert len(keys) == 200 - KGRAM_LENGTH + 1 == len(set(keys.tolist()))
    assert keys[50] == kgram_keys(text[50 : 50 + KGRAM_LENGTH], 7)[0]
    assert not set(keys.tolist()) & set(kgram_keys(text, 8).tolist())
    assert len(kgram_keys(text[: KGRAM_LENGTH - 1], 7)) == 0


@pytest.mark.parametrize("characters", ["ab", "日本語", "é🙂", "\ud800x"])
def test_any_characters_have_keys(characters):
    keys = kgram_keys(characters * 30, 0)
    assert len(set(keys.tolist())) == len(characters)


def test_every_piece_of_67_characters_is_found_where_it_stands():
    text = letters(2, 2_000)
    index = index_of(letters(3, 500), text, letters(4, 500))
    for start in range(len(text) - 67):
        assert found(index, "??" + text[start : start + 67]) == {(1, 2 - start)}


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_the_very_first_text_is_found_at_any_shift(shift):
    text = letters(2, 67)
    assert found(index_of(text + "??"), "?" * shift + text[max(0, -shift) :]) == {(0, shift)}


def test_texts_that_share_everything_split_their_positions():
    index = index_of(*[letters(5, 300)] * 200)
    assert len(found(index, letters(5, 300))) == 200


def test_the_distinctive_part_of_a_text_becomes_its_fingerprint():
    common = letters(6, 400)
    texts = [common[:200] + f"<{number:03}>" + common[200:] for number in range(900)]
    index = index_of(*texts)
    for number in range(100, 900, 37):
        assert (number, -181) in found(index, texts[number][181:224])


def test_a_distinctive_end_of_a_text_becomes_its_fingerprint():
    common = letters(6, 150)
    index = index_of(*[f"{common}<{number:03}>" for number in range(900)])
    for number in range(0, 900, 37):
        assert (number, -120) in found(index, f"{common}<{number:03}>"[120:])


def test_a_removed_text_is_not_found_and_leaves_nothing():
    texts = [letters(7, 300), letters(7, 300), letters(8, 300)]
    index = FingerprintIndex(1 << 16)
    fingerprints = [index.add(number, kgram_keys(text, 0)) for number, text in enumerate(texts)]
    index.remove(0, fingerprints[0])
    assert found(index, texts[0]) == {(1, 0)}
    index.remove(1, fingerprints[1])
    index.remove(2, fingerprints[2])
    assert found(index, texts[0] + texts[2]) == set()
    assert not any(index._counters)
    assert not index._positions


def test_the_newest_of_too_many_equal_texts_win():
    text = letters(9, KGRAM_LENGTH)
    index = index_of(*[text] * 40)
    assert {number for number, _ in found(index, text)} == set(range(24, 40))
    index.remove(3, tuple(kgram_keys(text, 0).tolist()))
    assert {number for number, _ in found(index, text)} == set(range(24, 40))


def test_many_positions_are_bounded_and_rare_ones_come_first():
    line, rare = letters(10, 60), letters(11, 60)
    index = index_of(*[line] * 300, rare)
    alignments = index.find(kgram_keys(line * 2_000 + rare, 0))
    assert (alignments.number[0], alignments.shift[0]) == (300, 120_000)
    assert len(set(alignments.number.tolist())) > 10
    assert len(alignments) <= 1_001
