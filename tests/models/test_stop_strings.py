"""Stop strings: found at the token that completes them, whatever the blocks, never in the text."""

import pytest
import torch
from decoding import OracleDrafter, decode
from hypothesis import given, settings, strategies as st
from small_tokenizers import KINDS, byte_level
from tiny_models import generate, make_tiny_model, random_prompt
from transformers import StopStringCriteria

from ragaccel.decoding import Request
from ragaccel.engine import Engine
from ragaccel.errors import ConfigurationError
from ragaccel.models import (
    HuggingFaceModel,
    IncrementalDecoder,
    StopStringFilter,
    TextStopRule,
    Tokenizer,
)

STOPS = [("ee",), (" the", "l"), ("keeps the ships",), ("\n\n",), ("é",), ("rough.'",)]


def first_end(tokenizer, ids, strings):
    for end in range(1, len(ids) + 1):
        if any(string in tokenizer.decode(ids[:end]) for string in strings):
            return end
    return None


def cut_in_blocks(rule, ids, sizes):
    start = 0
    for size in sizes:
        block_end = min(len(ids), start + size)
        if block_end > start and (end := rule.cut(ids[:block_end], start)) is not None:
            return end
        start = block_end
    return None


@settings(max_examples=80, deadline=None)
@given(st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_end_whatever_the_blocks(kind, data):
    tokenizer = Tokenizer(KINDS[kind]())
    strings = data.draw(st.sampled_from(STOPS))
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    if data.draw(st.booleans()):
        ids += tokenizer.encode("A keeper keeps the ships; too rough.' café\n\n end")
    sizes = [*data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=8)), 1000]
    rule = TextStopRule(strings, tokenizer)
    expected = first_end(tokenizer, ids, strings)
    assert cut_in_blocks(rule, ids, sizes) == expected
    if expected is not None:
        text = rule.trim(tokenizer.decode(ids[:expected]))
        assert not any(string in text for string in strings)
        decoder, text_filter = IncrementalDecoder(tokenizer), rule.make_filter()
        pieces = [text_filter.push(decoder.push([token])) for token in ids[:expected]]
        assert "".join(pieces) + text_filter.push(decoder.finish()) + text_filter.finish() == text


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_streaming_keeps_back_exactly_a_possible_stop_string(text, strings):
    text_filter = StopStringFilter(strings)
    out = ""
    for character in text:
        out += text_filter.push(character)
        assert not any(string in out for string in strings)
    out += text_filter.finish()
    found = [text.find(string) for string in strings if string in text]
    ends = [text.find(string) + len(string) for string in strings if string in text]
    if not found:
        assert out == text
    else:
        seen = text[: min(ends)]
        assert text_filter.stopped
        assert out == seen[: min(at for s in strings if (at := seen.find(s)) >= 0)]


def test_no_text_waits_without_reason():
    text_filter = StopStringFilter(["STOP"])
    pieces = {"a": "a", "S": "", "T": "", "x": "STx", "ST": ""}
    assert {piece: text_filter.push(piece) for piece in pieces} == pieces
    assert text_filter.finish() == "ST"


def test_empty_strings_are_refused():
    with pytest.raises(ConfigurationError, match="empty stop string"):
        TextStopRule(["", "x"], Tokenizer(byte_level()))
    assert TextStopRule((), Tokenizer(byte_level())).cut([1, 2, 3], 0) is None


def spell_letters_only(model, tokenizer):
    """Let a model choose among tokens of ordinary letters."""
    with torch.no_grad():
        for token in range(len(tokenizer)):
            if not tokenizer.decode([token]).strip().isascii() or not tokenizer.decode([token]):
                model.lm_head.weight[token] = 0.0


def test_inside_an_accepted_block_and_across_tokens():
    """The case that transformers' own prompt lookup misses."""
    tokenizer = Tokenizer(byte_level())
    model = make_tiny_model("llama", vocab_size=len(tokenizer))
    spell_letters_only(model, tokenizer)
    prompt = random_prompt(20, vocab=len(tokenizer))
    answer = generate(model, prompt, 40)
    stop = tokenizer.decode(answer)[9:14]
    rule = TextStopRule(stop, tokenizer)
    request = Request(prompt, max_new_tokens=40, stop_rules=(rule,))
    found = decode(Engine(HuggingFaceModel(model)), request, OracleDrafter(prompt, answer), 30)
    assert found == generate(model, prompt, 40, stop_strings=[stop], tokenizer=tokenizer.tokenizer)
    assert len(found) < 40
    assert stop in tokenizer.decode(found)
    assert stop not in rule.trim(tokenizer.decode(found))


def test_strings_that_name_special_tokens_end_an_answer_as_in_transformers():
    tokenizer = Tokenizer(byte_level())
    stock = tokenizer.tokenizer
    light = tokenizer.encode("light")
    special = stock.convert_tokens_to_ids("<s1>")
    for string in ("<s1>", "t<s1>", "ht<s1>s"):
        ids = [*light, special, *tokenizer.encode("ships"), *light]
        criterion = StopStringCriteria(stock, [string])
        ends = [e for e in range(1, len(ids) + 1) if criterion(torch.tensor([ids[:e]]), None)]
        for after in ((), (5,)):
            rule = TextStopRule(string, tokenizer, after=after)
            assert rule.cut(ids, 0) == ends[0]
            assert cut_in_blocks(rule, ids, [1] * len(ids)) == ends[0]
    assert TextStopRule("<s", tokenizer).cut([special], 0) is None  # nobody is shown that
    assert TextStopRule("<s", tokenizer, after=[5]).cut([special], 0) == 1


def test_tokens_without_text_do_not_part_a_string():
    """The shown text would contain the string. Only in this case does transformers continue."""
    tokenizer = Tokenizer(byte_level())
    special = tokenizer.tokenizer.convert_tokens_to_ids("<s1>")
    keep, ships = tokenizer.encode("keep"), tokenizer.encode("ships")
    for between in (special, len(tokenizer) + 3):
        ids = [*keep, between, *ships]
        rule = TextStopRule("keepships", tokenizer)
        assert rule.cut(ids, 0) == len(ids)
        assert rule.trim(tokenizer.decode(ids)) == ""


@settings(max_examples=150, deadline=None)
@given(st.data())
@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_after_a_prompt_they_end_where_transformers_ends_them(kind, data):
    tokenizer = Tokenizer(KINDS[kind]())
    words = tokenizer.encode("A keeper keeps the light; the light keeps the ships.")
    token = st.sampled_from(words)
    prompt = data.draw(st.lists(token, min_size=1, max_size=6))
    ids = data.draw(st.lists(token, min_size=1, max_size=12))
    text = tokenizer.decode([*prompt, *ids])
    start = data.draw(st.integers(0, len(text) - 1))
    string = text[start : start + data.draw(st.integers(1, 8))]
    criterion = StopStringCriteria(tokenizer.tokenizer, [string])
    ends = (
        end
        for end in range(1, len(ids) + 1)
        if criterion(torch.tensor([[*prompt, *ids[:end]]]), None)
    )
    rule = TextStopRule(string, tokenizer, after=prompt)
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    assert cut_in_blocks(rule, ids, [*sizes, 100]) == next(ends, None)
