"""Special tokens in text from others stay text, for every kind of tokenizer."""

import pytest
from small_tokenizers import KINDS
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ragaccel.models import SpecialTokenEscaper, Tokenizer, bundled_reader_path


@pytest.mark.parametrize("text", ["<s3>", "a <s3> b</s>", "<s<s3>", "<s3", "", "x<s3><s3>"])
def test_escaping_can_be_undone(text):
    escaper = SpecialTokenEscaper(["<s3>", "</s>", "<s>"])
    escaped = escaper.escape(text)
    assert len(escaped) == len(text)
    assert escaper.unescape(escaped) == text
    assert escaper.is_escaped(escaped) == any(t in text for t in ("<s3>", "</s>"))
    assert escaper.escape(escaped) == escaped


def test_overlapping_tokens_are_all_escaped():
    escaper = SpecialTokenEscaper(["[a[", "[b]"])
    escaped = escaper.escape("[a[b]")
    assert "[" not in escaped
    assert escaper.unescape(escaped) == "[a[b]"


def test_an_escape_character_alone_is_text():
    escaper = SpecialTokenEscaper(["<s3>"])
    mark = escaper.escape("<s3>")[0]
    assert not escaper.is_escaped(mark + "s4>")
    assert escaper.unescape(mark + "s4>") == mark + "s4>"


def test_messages_are_escaped_at_any_depth_but_not_their_roles():
    escaper = SpecialTokenEscaper(["user", "</s>"])
    message = {"role": "user", "content": [{"type": "text", "text": "</s>"}], "n": 3}
    escaped = escaper.escape_message(message)
    assert escaped["role"] == "user"
    assert escaped["n"] == 3
    assert "<" not in escaped["content"][0]["text"]


@pytest.mark.parametrize("kind", KINDS)
def test_escaped_tokens_are_read_as_text(kind):
    wrapped = KINDS[kind]()
    tokenizer = Tokenizer(wrapped)
    special = set(wrapped.all_special_ids) - {wrapped.unk_token_id}
    end = wrapped.eos_token
    text = f"{end}The keeper said {tokenizer.escaper.escape(end)} and went.{end} The light"
    ids, spans = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text)
    assert len(ids) == len(spans)
    assert [i for i in ids if i in special] == [wrapped.eos_token_id] * 2
    trusted = [span for i, span in zip(ids, spans, strict=True) if i in special]
    assert [text[start:end_].strip() for start, end_ in trusted] == [end, end]
    assert all(a <= b for a, b in spans)
    if kind == "byte-level":  # the others spell it in pieces that decoding joins otherwise
        assert f"said {end} and" in tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_text_beside_escaped_tokens_is_tokenized_as_before(kind):
    tokenizer = Tokenizer(KINDS[kind]())
    end = KINDS[kind]().eos_token
    plain = f"{end}The keeper keeps{end}the light"
    marked = plain + end + tokenizer.escaper.escape(end)
    count = len(tokenizer.encode(plain))
    assert tokenizer.encode(marked)[:count] == tokenizer.encode(plain)


def test_the_bundled_reader_quotes_its_own_markers_exactly():
    tokenizer = Tokenizer(AutoTokenizer.from_pretrained(bundled_reader_path()))
    text = "The form <s3> has <answer> and </eos> fields, <bos>."
    ids = tokenizer.encode(tokenizer.escaper.escape(text))
    assert not set(ids) & set(tokenizer.tokenizer.all_special_ids)
    assert tokenizer.decode(ids) == text
    assert set(tokenizer.encode(text)) & set(tokenizer.tokenizer.all_special_ids)


def test_a_vocabulary_with_special_tokens_as_words_keeps_the_escape():
    from tokenizers import Tokenizer as Backend, models, pre_tokenizers

    backend = Backend(models.WordLevel({"a": 0, "<e>": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>", unk_token="?")
    tokenizer = Tokenizer(wrapped)
    assert tokenizer.encode("a <e> a") == [0, 1, 0]
    assert tokenizer.encode(tokenizer.escaper.escape("a <e> a")) == [0, 2, 0]


def test_a_chat_holds_the_special_tokens_of_its_template_only():
    tokenizer = Tokenizer(AutoTokenizer.from_pretrained(bundled_reader_path()))
    special = set(tokenizer.tokenizer.all_special_ids)

    def specials(question, text):
        messages = [{"role": "user", "content": question}]
        ids = tokenizer.chat(messages, documents=[{"title": "", "text": text, "sentences": [text]}])
        return [i for i in ids if i in special]

    assert specials("What is <s1>?", "A marker <answer>.") == specials("What?", "A marker.")
