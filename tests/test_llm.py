import dataclasses
import gc
import weakref

import pytest
import tiny_models
import torch
from tiny_llm import TEXT, say, tiny_llm, tiny_tokenizer
from transformers import StoppingCriteriaList

from ragaccel import llm as loading
from ragaccel.config import EngineConfig, EngineOptions
from ragaccel.decoding import Drafter, DraftTree, NoDrafter, Reference
from ragaccel.errors import ConfigurationError
from ragaccel.llm import LLM
from ragaccel.passage import Passage
from ragaccel.prompt import Prompt

PROMPT = "Who trims the wick?"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
LAMP = Passage("a", "The lamp burns rapeseed oil. Its keeper trims the wick at dusk.")
TIDE = Passage("b", "The tide rises four metres at the mole.")


@pytest.fixture
def llm():
    return tiny_llm()


def plainly(llm, ids, **settings):
    """What transformers answers, for the same ids."""
    settings = {"max_new_tokens": 24, "eos_token_id": 1, **settings}
    return tuple(tiny_models.generate(llm.model.model, ids, **settings))


class Nonsense(Drafter):
    """Drafts wrong tokens, or fails after some passes."""

    def __init__(self, fail_at=None):
        self.calls, self.fail_at = 0, fail_at

    def __len__(self):  # a drafter whose index is empty is false, and still a drafter
        return 0

    def draft(self, context, budget):
        self.calls += 1
        if self.calls == self.fail_at:
            raise ZeroDivisionError("a drafter that fails")
        return DraftTree.chain([context.token_ids[-1], *range(5, 5 + min(budget, 4))])


class Counting:
    """Counts forward passes of a model."""

    def __init__(self, monkeypatch, model):
        self.passes = 0
        forward = model.forward

        def counted(*args, **kwargs):
            self.passes += 1
            return forward(*args, **kwargs)

        monkeypatch.setattr(model, "forward", counted)


# What a prompt may be


def test_every_kind_of_prompt_gives_what_transformers_gives(llm):
    ids = llm.tokenizer.encode(PROMPT)
    unset = {"temperature": None, "stop": None, "drafter": None}  # None means the default
    assert llm.generate(PROMPT, max_new_tokens=24, **unset).token_ids == plainly(llm, ids)
    assert llm.generate(ids, max_new_tokens=24).token_ids == plainly(llm, ids)
    assert llm.generate(Prompt(tuple(ids)), max_new_tokens=24).token_ids == plainly(llm, ids)
    chat_ids = llm.tokenizer.chat(MESSAGES)
    assert chat_ids.count(0) == 1  # one begin token
    assert llm.generate(MESSAGES, max_new_tokens=24).token_ids == plainly(llm, chat_ids)


def test_a_list_of_prompts_is_a_batch_in_order(llm):
    ids = llm.tokenizer.encode(PROMPT)
    batch = [PROMPT, MESSAGES, ids, Prompt(tuple(ids))]
    answers = llm.generate(batch, max_new_tokens=8)
    assert [a.token_ids for a in answers] == [
        llm.generate(prompt, max_new_tokens=8).token_ids for prompt in batch
    ]


def test_the_references_of_a_batch_are_shared_or_one_list_each(llm):
    shared = llm.generate([PROMPT, "What rises?"], references=[LAMP], max_new_tokens=2)
    assert [answer.passages for answer in shared] == [(LAMP,), (LAMP,)]
    each = llm.generate([PROMPT, "What rises?"], references=[[LAMP], [TIDE]], max_new_tokens=2)
    assert [answer.passages for answer in each] == [(LAMP,), (TIDE,)]
    with pytest.raises(ConfigurationError, match="2 lists"):
        llm.generate([PROMPT, "What rises?"], references=[[LAMP]])
    with pytest.raises(ConfigurationError, match="list"):
        llm.generate([PROMPT, "What rises?"], references="text")


@pytest.mark.parametrize(
    "prompt",
    [
        "", [], (), [[]], [""], [1, "a"], [1, {"role": "user", "content": "a"}], [True, False],
        ["a", {"role": "user", "content": "a"}], [{"content": "a"}], [1.5], [None], None, 7, b"a",
        {"role": "user", "content": "a"}, [-1], [380], torch.tensor([5, 6]), ["a", []], {"a"},
        [["a"]], [[["a"]]], Prompt((5, 9999)), Prompt((5, -1)), Prompt(()),
        [5, torch.tensor(float("nan"))],
    ],
    ids=repr,
)  # fmt: skip
def test_an_empty_or_ambiguous_prompt_is_refused_before_anything_is_computed(
    llm, prompt, monkeypatch
):
    counting = Counting(monkeypatch, llm.model)
    for refuses in (llm.generate, llm.stream, lambda wrong: llm.generate([PROMPT, wrong])):
        with pytest.raises(ConfigurationError):
            refuses(prompt)
    with pytest.raises(ConfigurationError, match="one prompt"):
        llm.stream([PROMPT, PROMPT])
    with pytest.raises(ConfigurationError, match="no chat template"):
        tiny_llm(None).generate(MESSAGES)
    assert counting.passes == 0


# Settings


def test_a_seed_gives_the_same_text_whatever_drafts(llm):
    settings = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "max_new_tokens": 32}
    drafters = (None, NoDrafter(), Nonsense())
    asked = {"references": [TEXT], **settings}
    texts = {llm.generate(PROMPT, drafter=drafter, **asked).text for drafter in drafters}
    assert len(texts) == 1
    assert llm.generate(PROMPT, **{**settings, "seed": 8}).text not in texts


def test_stopping_criteria_and_processors_of_transformers_are_heard(llm):
    ids = llm.tokenizer.encode(PROMPT)
    third = plainly(llm, ids)[2]

    def saw_third(token_ids, scores):
        return torch.tensor([bool(token_ids[0, -1] == third)])

    answer = llm.generate(PROMPT, stopping_criteria=StoppingCriteriaList([saw_third]))
    assert answer.token_ids == plainly(llm, ids)[:3]
    assert answer.finish_reason == "stop"


def test_the_end_token_ends_the_answer_and_is_no_text(llm):
    answer = llm.generate(PROMPT, logits_processors=[say(llm, PROMPT, "At dusk.")])
    assert (answer.text, answer.finish_reason) == ("At dusk.", "stop")
    assert answer.token_ids == (*llm.tokenizer.encode("At dusk."), 1)
    assert answer.usage.completion_tokens == answer.stats.new_tokens == len(answer.token_ids)
    wordy = LLM(llm.model, tiny_tokenizer())
    dot = llm.tokenizer.encode(".")[0]
    wordy.tokenizer.eos_ids = frozenset([dot])  # an end token that is not special has a text
    answer = wordy.generate(PROMPT, logits_processors=[say(llm, PROMPT, "At dusk. No")])
    assert answer.text == "At dusk"
    assert answer.token_ids[-1] == dot


@pytest.mark.parametrize("stop", ["k at", ["dusk", "wick at"], "and again", [" wi", "zzz"]])
@pytest.mark.parametrize("references", [[], [LAMP]])
def test_a_stop_string_ends_the_text_and_is_never_returned(llm, stop, references):
    said = "Its keeper trims the wick at dusk. And again."
    processors = [say(llm, PROMPT, said)]
    strings = [stop] if isinstance(stop, str) else stop
    expected = (
        said[: min(at for s in strings if (at := said.find(s)) >= 0)]
        if stop != "and again"
        else said
    )
    stream = llm.stream(PROMPT, references=references, stop=stop, logits_processors=processors)
    pieces = list(stream)
    assert "".join(pieces) == stream.answer.text == expected
    assert stream.answer.finish_reason == "stop"
    answer = llm.generate(PROMPT, stop=stop, logits_processors=processors, drafter=NoDrafter())
    assert (answer.text, answer.token_ids) == (expected, stream.answer.token_ids)


# Capacity


# References


def test_references_never_change_the_answer_and_make_it_cheaper():
    llm = tiny_llm(token_budget=16)
    processors = [say(llm, PROMPT, LAMP.text)]
    plain = llm.generate(PROMPT, logits_processors=processors, drafter=NoDrafter())
    quoted = llm.generate(PROMPT, references=[TIDE, LAMP], logits_processors=processors)
    assert quoted.token_ids == plain.token_ids
    assert plain.stats.acceptance_length == 1.0
    assert quoted.stats.verify_passes < plain.stats.verify_passes / 2
    assert sum(quoted.stats.accepted_by_source.values()) == quoted.stats.accepted_tokens > 0


def test_copied_spans_do_not_depend_on_what_drafted(llm):
    processors = [say(llm, PROMPT, "Well: Its keeper trims the wick at dusk. [2]")]
    for drafter in (None, NoDrafter(), Nonsense()):
        answer = llm.generate(
            PROMPT, references=[TIDE, LAMP], logits_processors=processors, drafter=drafter
        )
        (span,) = answer.copied_spans
        assert answer.text[span.start : span.end] == "Its keeper trims the wick at dusk."
        assert (
            LAMP.text[span.passage_start : span.passage_end] == "Its keeper trims the wick at dusk."
        )
        assert (span.passage_id, span.passage_number) == ("a", 2)
        assert answer.sources == (LAMP,)


class Seen(Drafter):
    """Keeps the context of the last request."""

    def draft(self, context, budget):
        self.context = context
        return DraftTree.chain(context.token_ids[-1:])


def context_of(llm, prompt, references=()):
    drafter = Seen()
    llm.generate(prompt, references=references, drafter=drafter, max_new_tokens=2)
    return drafter.context


def references_of(llm, prompt, references):
    return context_of(llm, prompt, references).references


@pytest.mark.parametrize("kind", ["str", "messages", "ids", "prompt"])
def test_a_text_in_the_prompt_is_cut_from_the_prompts_own_ids(llm, kind):
    text = f"Read:{LAMP.text}And answer."  # no space before it: tokenized alone it would differ
    ids = tuple(llm.tokenizer.encode(text))
    prompt = {
        "str": text,
        "messages": [{"role": "user", "content": text}],
        "ids": list(ids),
        "prompt": Prompt(ids, text=text),
    }[kind]
    (reference,) = references_of(llm, prompt, [LAMP])
    context = context_of(llm, prompt)
    prompt_ids = tuple(context.token_ids[: context.num_prompt])
    size = len(reference.token_ids)
    places = [i for i in range(len(prompt_ids)) if prompt_ids[i : i + size] == reference.token_ids]
    assert places
    assert LAMP.text in llm.tokenizer.decode(reference.token_ids)
    assert reference.passage_id == "a"
    ids = Reference((5, 6, 7), 0.5, "own")
    made = references_of(llm, prompt, ["The tide rises.", ids])
    assert ids in made
    decoded = [llm.tokenizer.decode(reference.token_ids) for reference in made]
    assert {"The tide rises.", " The tide rises."} <= set(decoded)


# Streaming


def test_pieces_joined_are_the_text_whatever_bytes_come(llm):
    settings = {"max_new_tokens": 40, "stop": ["\n", "e the", "ss"]}
    for number in range(12):
        prompt = [5 + number, 40, 41]
        stream = llm.stream(prompt, **settings)
        text = "".join(stream)
        assert text == stream.answer.text
        assert text == llm.generate(prompt, drafter=NoDrafter(), **settings).text


def test_nothing_is_computed_before_the_first_piece_nor_after_leaving(monkeypatch):
    llm = LLM(tiny_llm().model.model, tiny_tokenizer())
    counting = Counting(monkeypatch, llm.model)
    stream = llm.stream(PROMPT, max_new_tokens=64)
    assert counting.passes == 0
    next(stream)
    after_first = counting.passes
    assert 0 < after_first < 10
    stream.close()
    assert counting.passes == after_first
    assert llm.engine.prefix_cache.num_idle == 1  # its cache is free again
    for _ in llm.stream(PROMPT, max_new_tokens=64):
        break
    gc.collect()
    assert llm.engine.prefix_cache.num_idle == 1
    assert counting.passes <= 2 * after_first


def test_a_model_that_is_dropped_takes_its_caches_along_at_once():
    llm = LLM(tiny_llm().model.model, tiny_tokenizer())
    llm.generate([PROMPT, "What rises?"], max_new_tokens=4)
    with llm.stream(PROMPT, max_new_tokens=64) as stream:
        next(stream)
    del stream
    caches = [weakref.ref(entry.cache) for entry in llm.engine.prefix_cache._idle]
    kept = [weakref.ref(each) for each in (llm.model, llm.engine, llm.engine.prefix_cache)] + caches
    assert caches
    gc.collect()
    gc.disable()
    try:
        del llm
        assert [one() for one in kept] == [None] * len(kept)
    finally:
        gc.enable()


def test_errors_reach_the_consumer_and_free_the_cache():
    llm = LLM(tiny_llm().model.model, tiny_tokenizer())
    stream = llm.stream(PROMPT, drafter=Nonsense(fail_at=3), max_new_tokens=64)
    with pytest.raises(ZeroDivisionError, match="a drafter that fails"):
        list(stream)
    assert llm.engine.prefix_cache.num_idle == 1
    with pytest.raises(ZeroDivisionError):
        LLM(llm.model, tiny_tokenizer(), drafter=Nonsense(fail_at=1)).generate(PROMPT)


def test_inference_mode_is_not_held_between_pieces(llm):
    for _ in llm.stream(PROMPT, max_new_tokens=6):
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()


# Loading


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_llm().model.model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_without_a_name_the_bundled_reader_answers_and_stderr_says_so(saved, capsys, monkeypatch):
    LLM.load(saved)
    assert "bundled reader" not in capsys.readouterr().err
    monkeypatch.setattr(loading, "bundled_reader_path", lambda: saved)
    loaded = LLM.load(capacity=64, token_budget=4)
    captured = capsys.readouterr()
    assert "bundled reader" in captured.err
    assert captured.out == ""
    assert loaded.context_length == 64


def test_loading_takes_what_making_takes():
    options = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    assert EngineOptions.__annotations__.keys() == options.keys()
    assert tiny_llm(**options).config == EngineConfig()
    with pytest.raises(TypeError, match="budget"):
        tiny_llm(budget=4)
    with pytest.raises(TypeError, match=r"unknown option capcity: .* of LLM are capacity, "):
        LLM.load(capcity=4)
