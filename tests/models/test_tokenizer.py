"""Text to ids and back, piece by piece, for every kind of tokenizer."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import CORPUS, KINDS, byte_fallback, byte_level
from transformers import PreTrainedTokenizerFast

from ragaccel.errors import ConfigurationError
from ragaccel.models.detokenizer import IncrementalDecoder, decode_tail
from ragaccel.models.tokenizer import Tokenizer

CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
WITH_DOCUMENTS = "{% for d in documents %}[{{ d.title }}] {{ d.text }}\n{% endfor %}" + CHAT
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT


def with_template(template):
    tokenizer = byte_fallback()
    copy = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>", eos_token="</s>"
    )
    copy.chat_template = template
    return Tokenizer(copy)


@pytest.fixture(params=KINDS)
def tokenizer(request):
    return Tokenizer(KINDS[request.param]())


def pieces_of(tokenizer, blocks):
    decoder = IncrementalDecoder(tokenizer)
    return [decoder.push(block) for block in blocks] + [decoder.finish()]


def test_offsets_point_into_the_text(tokenizer):
    for text in CORPUS[:4]:
        ids, spans = tokenizer.encode_with_offsets(text)
        assert ids == tokenizer.encode(text)
        assert len(ids) == len(spans)
        assert max(end for _, end in spans) <= len(text)
        assert all(start <= end for start, end in spans)
    words = [text[start:end] for (start, end) in spans]
    assert "light" in "".join(words)


@settings(max_examples=60, deadline=None)
@given(st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_together_the_text_of_all_tokens(kind, data):
    tokenizer = Tokenizer(KINDS[kind]())
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=150))
    blocks = []
    while ids[sum(map(len, blocks)) :]:
        blocks.append(ids[sum(map(len, blocks)) :][: data.draw(st.integers(1, 20))])
    assert "".join(pieces_of(tokenizer, blocks)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_no_half_characters_and_nothing_is_held_long(kind):
    tokenizer = Tokenizer(KINDS[kind]())
    text = "naïve 🙂 東京 café " * 30
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, [[token] for token in ids])
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert not any("�" in piece for piece in pieces)
    assert sum(map(bool, pieces)) >= len(text.split())


def test_long_answers_stay_cheap_and_exact():
    tokenizer = Tokenizer(byte_fallback())
    ids = tokenizer.encode(" ".join(CORPUS) * 5)
    decoder = IncrementalDecoder(tokenizer)
    text = "".join(decoder.push([token]) for token in ids)
    assert len(decoder._ids) < 200
    assert text + decoder.finish() == tokenizer.decode(ids)


def test_special_tokens_are_no_text():
    tokenizer = Tokenizer(byte_level())
    mark = byte_level().convert_tokens_to_ids("<s1>")
    ids = [mark, *tokenizer.encode("Keep"), mark]
    assert tokenizer.decode(ids) == "Keep"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s1>Keep<s1>"
    assert "".join(pieces_of(tokenizer, [[token] for token in ids])) == "Keep"


def test_the_tail_is_decoded_right(tokenizer):
    ids = tokenizer.encode(" ".join(CORPUS))
    for end in (1, 5, 60, len(ids)):
        whole = tokenizer.decode(ids[:end])
        for size in (1, 9, 40):
            assert decode_tail(tokenizer, ids[:end], size)[-size:] == whole[-size:]


def test_a_begin_token_is_never_doubled():
    tokenizer = with_template(CHAT)
    begin = tokenizer.tokenizer.bos_token_id
    messages = [{"role": "user", "content": "keep the light"}]
    ids = tokenizer.chat(messages)
    assert ids.count(begin) == 1
    assert tokenizer.encode(tokenizer.chat_text(messages), add_special_tokens=True) == ids
    again, spans = tokenizer.encode_with_offsets(tokenizer.chat_text(messages), True)
    assert again == ids
    assert len(spans) == len(ids)
    assert tokenizer.encode("light", add_special_tokens=True).count(begin) == 1
    assert tokenizer.encode("light").count(begin) == 0


def test_chat_equals_transformers_template():
    tokenizer = with_template(CHAT)
    messages = [{"role": "system", "content": "Quote."}, {"role": "user", "content": "Why?"}]
    expected = tokenizer.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.chat(messages) == expected
    assert tokenizer.chat_text(messages, add_generation_prompt=False).endswith("Why?\n")


def test_documents_reach_the_template():
    tokenizer = with_template(WITH_DOCUMENTS)
    assert tokenizer.takes_documents
    assert not with_template(CHAT).takes_documents
    documents = [{"title": "Log", "text": "Wind north.", "sentences": ["Wind north."]}]
    text = tokenizer.chat_text([{"role": "user", "content": "Wind?"}], documents)
    assert text.startswith("[Log] Wind north.\n<s>user: Wind?")


def test_templates_that_are_missing_or_refuse():
    assert not Tokenizer(byte_level()).has_chat_template
    with pytest.raises(ConfigurationError, match="no chat template"):
        Tokenizer(byte_level()).chat([{"role": "user", "content": "x"}])
    with pytest.raises(ConfigurationError, match="no system"):
        with_template(STRICT).chat([{"role": "system", "content": "x"}])


def test_end_tokens():
    tokenizer = byte_level()
    assert Tokenizer(tokenizer).eos_ids == {tokenizer.eos_token_id}
    assert Tokenizer(tokenizer, eos_ids=[5, 6]).eos_ids == {5, 6}


@pytest.mark.skipif("RAGACCEL_DATA" not in os.environ, reason="real tokenizers: RAGACCEL_DATA")
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox_pythia", "llama2", "qwen1"])
def test_real_tokenizers(name):
    folder = Path(os.environ["RAGACCEL_DATA"]) / "data" / "tokenizers" / name
    if not folder.is_dir():
        folder = Path(os.environ["RAGACCEL_DATA"]) / "tokenizers" / name
    tokenizer = Tokenizer(PreTrainedTokenizerFast.from_pretrained(folder))
    text = "\n".join(CORPUS) + " " + "ཨོཾ 🏳️‍🌈 é " * 50
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, [[token] for token in ids])
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert not any("�" in piece for piece in pieces)
    assert tokenizer.encode_with_offsets(text)[0] == ids
