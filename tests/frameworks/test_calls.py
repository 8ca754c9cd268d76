"""What the integrations share: options by name, prepared prompts, and answers in time."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from chat_model import TEMPLATE, TOOLS_TEMPLATE
from tiny_llm import DOCUMENTS_TEMPLATE, tiny_llm

from ragaccel.answer import Answer, AsyncStream, Stream, Usage
from ragaccel.decoding import Reference, Stats
from ragaccel.errors import CapacityError, ConfigurationError
from ragaccel.frameworks import (
    Call,
    ReferenceRegistry,
    ReferenceScope,
    Reply,
    SharedModel,
    Sources,
    Toolbox,
    areply_all,
    count_message_tokens,
    in_thread,
    prepare,
    read_options,
    refuse_settings,
    rename_options,
    reply_all,
    sampled_calls,
    searched_references,
)
from ragaccel.passage import Passage
from ragaccel.prompt import Prompt
from ragaccel.quotes import REFUSAL

WICK = Passage("wick", "The keeper of Gannet Ledge trims the wick at dusk, and at midnight.")
TIDE = Passage("tide", "The tide at the mole rises four metres in spring, and falls again.")
ASKED = [{"role": "user", "content": "Who trims the wick?"}]
TOOLS = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}]


def model(template=TEMPLATE):
    return SharedModel("m", ready=tiny_llm(template))


# Options


def test_options_of_other_libraries_get_their_names_here():
    given = {"max_tokens": 3, "torch_dtype": "float32", "logit_bias": {}, "top_p": None}
    assert rename_options(given, "x") == {"max_new_tokens": 3, "dtype": "float32", "top_p": None}
    for twice in ({"max_tokens": 1, "num_predict": 2}, {"max_new_tokens": 1, "max_tokens": 1}):
        with pytest.raises(TypeError, match="a call got max_new_tokens twice"):
            rename_options(twice, "a call")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("temprature", r"a call takes no temprature: did you mean temperature\?"),
        ("format", "a call takes no format: ask in the prompt"),
        ("response_format", "a call takes no response_format: ask in the prompt"),
        ("num_beams", "a call takes no num_beams: one answer"),
    ],
)
def test_an_unknown_option_is_refused_by_the_name_it_was_given(name, told):
    advice = {"response_format": "ask in the prompt"}
    with pytest.raises(TypeError, match=told):
        read_options({name: 2}, "a call", {"temperature", "n"}, advice)
    known = read_options({"num_return_sequences": 2, "num_beams": 1}, "a call", {"n"}, advice)
    assert known == {"n": 2}


def test_settings_among_the_options_of_loading_are_refused():
    refuse_settings({"revision": "r", "drafter": None, "remember": False}, "no")
    for name in ("temperature", "max_tokens", "stop_sequences", "namespace"):
        with pytest.raises(TypeError, match=f"model_kwargs takes no {name}: it is for calls"):
            refuse_settings([name], "it is for calls")


def test_an_async_version_of_a_method_runs_in_a_thread():
    class Store:
        def add(self, *texts, times=1):
            """Add texts."""
            return threading.current_thread(), [*texts] * times

        aadd = in_thread(add)

    class Louder(Store):
        def add(self, *texts, times=1):
            return super().add(*map(str.upper, texts), times=times)

    thread, texts = asyncio.run(Louder().aadd("a", times=2))
    assert texts == ["A", "A"]
    assert thread is not threading.main_thread()
    assert Store.aadd.__doc__ == "Add texts."


# Preparing


def test_a_text_is_completed_and_messages_are_rendered():
    assert prepare(model(), "The lamp", {}).prompt == "The lamp"
    assert prepare(model(), ASKED, {}).prompt == ASKED
    merged = prepare(model(), [*ASKED, *ASKED], {}).prompt
    assert merged == [*ASKED, *ASKED]  # this template takes any order of roles
    with pytest.raises(ConfigurationError, match="does not support tools"):
        prepare(model(), ASKED, {}, toolbox=Toolbox(TOOLS))


def test_tools_and_template_options_are_rendered_at_once():
    llm = tiny_llm(TOOLS_TEMPLATE)
    call = prepare(model(TOOLS_TEMPLATE), ASKED, {"stop": "."}, toolbox=Toolbox(TOOLS, "tide"))
    expected = llm.tokenizer.chat(ASKED, tools=TOOLS)
    assert call.prompt[: len(expected)] == expected
    assert call.prompt[len(expected) :] == call.calling.opening_ids
    assert call.calling.stop == (".",)
    plain = count_message_tokens(model(TOOLS_TEMPLATE), ASKED)
    assert plain == len(llm.tokenizer.chat(ASKED))
    assert count_message_tokens(model(TOOLS_TEMPLATE), ASKED, TOOLS) == len(expected)
    with pytest.raises(ConfigurationError, match="cannot take documents together with tools"):
        prepare(model(TOOLS_TEMPLATE), ASKED, {}, documents=[WICK], toolbox=Toolbox(TOOLS))


def test_a_toolbox_resolves_the_choice():
    choices = {None: None, "auto": None, "any": "tide", "tide": "tide"}
    assert {choice: Toolbox.of(TOOLS, choice, None).choice for choice in choices} == choices
    assert Toolbox.of(TOOLS, "none", None) is Toolbox.of([], "any", None) is None
    assert not Toolbox.of(TOOLS, None, parallel=False).parallel


def test_documents_are_shown_cited_and_fitted():
    call = prepare(model(), ASKED, {"max_new_tokens": 4}, documents=[WICK, TIDE])
    assert isinstance(call.prompt, Prompt)
    assert call.prompt.passages == (WICK, TIDE)
    assert call.references == []  # they are in the prompt, so they are not given again
    with pytest.raises(ConfigurationError, match="end with a human message"):
        prepare(model(), [*ASKED, {"role": "assistant", "content": "He."}], {}, documents=[WICK])


def test_a_prompt_for_the_reader_is_parsed_unless_it_is_verbatim():
    text = f"{WICK.text}\n\n{TIDE.text}\n\nQuestion: Who trims the wick?"
    sources = Sources([TIDE, WICK])
    for prompt in (text, [{"role": "user", "content": text}]):
        call = prepare(model(DOCUMENTS_TEMPLATE), prompt, {}, sources)
        assert call.prompt.passages == (WICK, TIDE)
        assert call.references == []
    call = prepare(model(DOCUMENTS_TEMPLATE), text, {}, sources, is_verbatim=True)
    assert (call.prompt, call.references) == (text, [TIDE, WICK])


def test_references_come_from_all_sources_in_order_and_namesakes_are_kept():
    registry, ids = ReferenceRegistry(), Reference((1, 2))
    registry.register(TIDE, "tenant")
    visible = searched_references(registry, "tenant")
    sources = Sources(["given", ids], [WICK], visible)
    call = prepare(model(), f"{TIDE.text} And?", {"namespace": "tenant"}, sources)
    assert call.references == ["given", ids, TIDE, WICK]
    other = Sources(["given"], [WICK], searched_references(registry, "other"))
    call = prepare(model(), f"{TIDE.text} And?", {"namespace": "other"}, other)
    assert call.references == ["given", WICK]
    namesake = Passage("wick", TIDE.text)
    call = prepare(model(), ASKED, {}, Sources([namesake]), documents=[WICK])
    assert call.references == [namesake]


def test_searching_is_off_on_demand_and_takes_only_a_registry(monkeypatch):
    scope = ReferenceScope()
    scope.register(WICK)
    assert len(searched_references(None, "", [scope]).match(WICK.text)) == 1
    assert searched_references(None, "", [scope], enabled=False) is None
    with pytest.raises(ConfigurationError, match=r"frameworks\.ReferenceRegistry"):
        searched_references({}, "")
    for said in ("0", "false", "Off", " no "):
        monkeypatch.setenv("RAGACCEL_AUTO_REFERENCES", said)
        assert searched_references(None, "", [scope]) is None


@pytest.mark.parametrize("prompt", ["x " * 90, [{"role": "user", "content": "x " * 90}]])
def test_a_prompt_that_exceeds_the_window_is_refused(prompt):
    with pytest.raises(CapacityError, match=r"max_new_tokens \(9\) exceed context_window=100"):
        prepare(model(), prompt, {"max_new_tokens": 9}, context_window=100)
    assert prepare(model(), prompt, {"max_new_tokens": 9}, context_window=100_000)


# Answering


class SlowLLM:
    """Yields a word of "one two three" every few milliseconds, and records its streams."""

    def __init__(self, seconds=0.0, before_piece=lambda number: None):
        self.seconds, self.before_piece, self.streams = seconds, before_piece, []

    def stream(self, prompt, *, references, **settings):
        if prompt == "refused":
            raise ConfigurationError("no")
        self.streams.append(Stream(self._pieces(prompt, settings)))
        return self.streams[-1]

    def astream(self, prompt, **given):
        return AsyncStream(self.stream(prompt, **given))

    def _pieces(self, prompt, settings):
        text = f"{prompt} {settings.get('seed', 0)} one two three"
        for number, word in enumerate(text.split()):
            self.before_piece(number)
            threading.Event().wait(self.seconds)
            if prompt == "fails":
                raise ValueError("broken")
            yield word if number == 0 else f" {word}"
        return Answer(text, (), "stop", Usage(1, 5, 6), Stats())


def call(llm=None, prompt="a", **fields):
    return Call(llm or SlowLLM(), prompt, (), fields.pop("settings", {}), **fields)


async def read(one):
    return [part async for part in await one.apieces()]


def test_all_ways_of_answering_agree():
    text = "a 0 one two three"
    assert call().reply().text == asyncio.run(call().areply()).text == text
    for *pieces, reply in (list(call().pieces()), asyncio.run(read(call()))):
        assert "".join(pieces) == reply.text == text
        assert len(pieces) == 5
        assert (reply.calls, reply.finish_reason) == ([], "stop")


def test_a_buffered_answer_comes_in_one_piece_as_it_is_read():
    fields = {"is_buffered": True, "read": lambda text, calls, why: (f"{why}: {text[:3]}", calls)}
    for pieces, reply in (list(call(**fields).pieces()), asyncio.run(read(call(**fields)))):
        assert pieces == reply.text == "stop: a 0"
    seen = list(call(read=lambda text, *_: (f"{text} END", [])).pieces())
    assert seen[-2] == " END"


def test_what_may_become_a_tool_call_is_held_back():
    found = SimpleNamespace(is_valid=True)

    class Calling:
        def next_content(self, emitted, token_ids):
            return "a" if not emitted else ""

        def read(self, text, token_ids):
            return "a 0", [found]

    *pieces, reply = call(calling=Calling()).pieces()
    assert pieces == ["a", " 0"]
    assert (reply.text, reply.calls, reply.finish_reason) == ("a 0", [found], "tool_calls")
    assert Reply(reply.answer, "", [SimpleNamespace(is_valid=False)]).finish_reason == "stop"


def test_samples_have_consecutive_seeds():
    calls = sampled_calls(call(settings={"seed": 7}), 3)
    assert [reply.text[:3] for reply in reply_all(calls)] == ["a 7", "a 8", "a 9"]
    assert sampled_calls(calls[0], 1) == [calls[0]]


def test_several_calls_run_at_the_same_time():
    for answer_all in (reply_all, lambda calls: asyncio.run(areply_all(calls))):
        barrier = threading.Barrier(5, timeout=30)
        llm = SlowLLM(before_piece=lambda number, all_are_there=barrier: all_are_there.wait())
        replies = answer_all([call(llm, prompt) for prompt in "abcde"])
        assert [reply.text[0] for reply in replies] == list("abcde")
        assert answer_all([]) == []


@pytest.mark.parametrize("prompt", ["fails", "refused"])
def test_if_one_call_fails_the_others_end(prompt):
    for answer_all in (reply_all, lambda calls: asyncio.run(areply_all(calls))):
        llm = SlowLLM(0.5)
        with pytest.raises(ValueError, match=r"broken|no"):
            answer_all([call(llm), call(llm, prompt), call(llm)])
        assert all(stream.closed for stream in llm.streams) or prompt == "refused"


@pytest.mark.parametrize(
    "ask",
    [
        lambda one: one.reply(),
        lambda one: list(one.pieces()),
        lambda one: reply_all([one, one]),
        lambda one: asyncio.run(one.areply()),
        lambda one: asyncio.run(read(one)),
        lambda one: asyncio.run(areply_all([one, one])),
    ],
)
def test_time_is_up(ask):
    llm = SlowLLM(0.3)
    with pytest.raises(TimeoutError, match=r"within timeout=0.1 seconds: increase timeout"):
        ask(call(llm, timeout=0.1))
    assert all(stream.closed for stream in llm.streams)
    with pytest.raises(TimeoutError, match=r"timeout=5 seconds"):
        ask(call(timeout=5, started=-100))
    assert ask(call(timeout=60))


def test_leaving_or_cancelling_ends_the_request():
    llm = SlowLLM(0.05)
    for _ in call(llm).pieces():
        break

    async def leave():
        parts = await call(llm).apieces()
        await anext(parts)
        await parts.aclose()
        task = asyncio.create_task(call(llm).areply())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert len(llm.streams) == 3
    assert all(stream.closed for stream in llm.streams)


def test_a_stream_is_refused_before_its_first_piece():
    with pytest.raises(ConfigurationError):
        call(prompt="refused").pieces()
    with pytest.raises(ConfigurationError):
        asyncio.run(call(prompt="refused").apieces())


# The bundled reader


DOCUMENTS = Path(__file__).parents[2] / "demos" / "documents"


@pytest.fixture(scope="module")
def chapters():
    files = sorted(DOCUMENTS.rglob("*.md"))[:9]
    return [Passage(one.stem, one.read_text(encoding="utf-8")[:800]) for one in files]


@pytest.mark.parametrize("is_parsed", [False, True])
def test_the_bundled_reader_says_a_sentence_of_long_passages_or_that_they_do_not_tell(
    chapters, is_parsed
):
    tower = "Isobel Tarrant designed the tower on Gannet Ledge at the age of twenty-nine."
    passages = [*chapters, Passage("tower", f"It has a tower. {tower} She won a prize.")]
    reader = SharedModel(None)
    told = {}
    for question in (
        "Who designed the tower on Gannet Ledge?",
        "What did Nora Pell invent?",
        "What is the capital of Mongolia?",
    ):
        text = "\n\n".join(one.text for one in passages) + f"\n\nQuestion: {question}"
        asked = [{"role": "user", "content": text if is_parsed else question}]
        given = {} if is_parsed else {"documents": passages}
        sources = Sources(given=passages if is_parsed else ())
        told[question] = prepare(reader, asked, {"max_new_tokens": 120}, sources, **given).reply()
    for reply in told.values():
        quote = " ".join(reply.text.rpartition(" [")[0].split())
        assert reply.text == REFUSAL or any(quote in " ".join(one.text.split()) for one in passages)
    first, *_, last = told.values()
    assert first.text.startswith(tower)
    assert last.text == REFUSAL


QUESTION = "What did Nora Pell invent?"
QUOTE = "Nora Pell invented the canvas bucket that every station uses."


@pytest.mark.parametrize(
    ("asked", "documents", "said"),
    [
        ([QUESTION], [QUOTE], f"{QUOTE} [1]"),
        ([QUESTION], ["", QUOTE], REFUSAL),  # not as many sentences as the prompt has
        (["Was hat Nora Pell erfunden, und wer hat es ihr bezahlt?"], [QUOTE], REFUSAL),
        ([QUESTION, "And by whom?"], [QUOTE], f"{QUOTE} [1]"),
        (["And by whom?"], [QUOTE], REFUSAL),
    ],
)
def test_the_bundled_reader_refuses_what_rag_does(asked, documents, said):
    chat = [{"role": "user", "content": asked[0]}]
    for later in asked[1:]:
        chat += [{"role": "assistant", "content": QUOTE}, {"role": "user", "content": later}]
    given = [Passage(str(n), one) for n, one in enumerate(documents)]
    call = prepare(SharedModel(None), chat, {"temperature": 1.0, "seed": 2}, documents=given)
    assert call.reply().text == said


def test_without_the_embedder_the_bundled_reader_alone_decides(monkeypatch):
    def no_download(*_):
        raise AssertionError("it must not be downloaded")

    monkeypatch.setattr("ragaccel.retrieval.embedder.local_default_folder", lambda: None)
    monkeypatch.setattr("ragaccel.retrieval.embedder.find_model_folder", no_download)
    asked = [{"role": "user", "content": QUESTION}]
    call = prepare(SharedModel(None), asked, {}, documents=[Passage("nora", QUOTE)])
    assert call.reply().text in (f"{QUOTE} [1]", REFUSAL)


def test_other_models_are_not_bound_to_a_sentence():
    call = prepare(model(DOCUMENTS_TEMPLATE), ASKED, {}, documents=[WICK])
    assert "logits_processors" not in call.settings
