"""The eight methods give the tokens of the LLM itself, complete and streamed."""

import asyncio
from dataclasses import asdict

import pytest
from framework_llms import TEMPLATE, Say, tiny_llm
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from methods import text_of

from llama_index.llms.ragaccel import Ragaccel

PROMPT = "The lamp burns rapeseed oil. Who trims the wick?"
MESSAGES = [
    ChatMessage(role="system", content="Quote the passages."),
    ChatMessage(role="user", content=PROMPT),
    ChatMessage(role="assistant", content="Its keeper."),
    ChatMessage(role="user", content="When?"),
]
TURNS = [{"role": message.role.value, "content": message.content} for message in MESSAGES]
SETTINGS = {"max_new_tokens": 40, "references": ["trims the wick at dusk"], "remember": False}


async def collect(pieces):
    return [piece async for piece in await pieces]


def every_way(llm, kind, *given, **settings):
    """Return the responses of the four methods of a kind: two complete, then two streamed."""
    call = {
        name: getattr(llm, name.format(kind)) for name in ("{}", "a{}", "stream_{}", "astream_{}")
    }
    return (
        call["{}"](*given, **settings),
        asyncio.run(call["a{}"](*given, **settings)),
        list(call["stream_{}"](*given, **settings)),
        asyncio.run(collect(call["astream_{}"](*given, **settings))),
    )


def check(ways, answer):
    once, once_async, pieces, pieces_async = ways
    assert text_of(once) == text_of(once_async) == answer.text
    usage = asdict(answer.usage)
    for stream in (pieces, pieces_async):
        assert len(stream) > 3
        assert "".join(piece.delta for piece in stream) == answer.text
        so_far = ""
        for piece in stream:
            so_far += piece.delta
            assert text_of(piece) == so_far
        assert all(piece.raw is None for piece in stream[:-1])
    for last in (once, once_async, pieces[-1], pieces_async[-1]):
        assert last.raw["usage"] == usage
        assert last.raw["finish_reason"] == answer.finish_reason
        assert {**last.additional_kwargs, **usage} == last.additional_kwargs


LINES = "".join(f"{turn['role']}: {turn['content']}\n" for turn in TURNS) + "assistant: "


@pytest.mark.parametrize(
    ("template", "kind", "given", "options", "expected"),
    [
        (TEMPLATE, "complete", PROMPT, {}, [{"role": "user", "content": PROMPT}]),
        (TEMPLATE, "complete", PROMPT, {"formatted": True}, PROMPT),
        (None, "complete", PROMPT, {}, PROMPT),
        (TEMPLATE, "chat", MESSAGES, {}, TURNS),
        (None, "chat", MESSAGES, {}, LINES),
    ],
    ids=["user's message", "as it is", "as it is, plain", "by the template", "lines"],
)
def test_all_ways_of_asking_answer_alike(template, kind, given, options, expected):
    llm = tiny_llm(template)
    ways = every_way(Ragaccel(llm=llm), kind, given, **options, **SETTINGS)
    check(ways, llm.generate(expected, **SETTINGS))


def test_a_templates_text_begins_once():
    llm = Ragaccel(llm=tiny_llm())
    text = llm.messages_to_prompt(MESSAGES)
    assert text == tiny_llm().tokenizer.chat_text(TURNS)
    assert Ragaccel(llm=tiny_llm(None)).messages_to_prompt(MESSAGES) == LINES
    read = llm.complete(text, formatted=True, max_new_tokens=30)
    asked = llm.chat(MESSAGES, max_new_tokens=30)
    assert read.text == asked.message.content
    assert read.raw["usage"] == asked.raw["usage"]


def test_an_empty_answer_is_one_piece():
    llm = Ragaccel(llm=tiny_llm())
    pieces = list(llm.stream_chat(MESSAGES, logits_processors=[Say("")]))
    assert [(piece.delta, piece.message.content) for piece in pieces] == [("", "")]
    assert pieces[0].raw["usage"]["completion_tokens"] == 1


def test_the_system_prompt_precedes_completions_and_predictions():
    llm = Ragaccel(llm=tiny_llm(), system_prompt="Be brief.", max_new_tokens=20)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    expected = tiny_llm().generate(turns, max_new_tokens=20).text
    template = PromptTemplate("{sentence} Who trims the wick?")
    assert llm.complete(PROMPT).text == expected
    assert llm.predict(template, sentence="The lamp burns rapeseed oil.") == expected
    assert llm.complete(PROMPT, formatted=True).text != expected
    alone = tiny_llm().generate(turns[1:], max_new_tokens=20).text
    assert llm.chat([ChatMessage(content=PROMPT)]).message.content == alone


def test_the_system_prompt_of_a_plain_model_is_text():
    llm = Ragaccel(llm=tiny_llm(None), system_prompt="Be brief.", max_new_tokens=20)
    expected = tiny_llm(None).generate(f"Be brief.\n\n{PROMPT}", max_new_tokens=20).text
    assert llm.complete(PROMPT).text == expected
    assert llm.predict(PromptTemplate(PROMPT)) == expected


@pytest.mark.parametrize(
    ("options", "ask", "expected"),
    [
        ({"completion_to_prompt": "Q: {}\nA:".format}, "complete", f"Q: {PROMPT}\nA:"),
        (
            {"messages_to_prompt": lambda told: " | ".join(one.content for one in told)},
            "chat",
            " | ".join(turn["content"] for turn in TURNS),
        ),
        (
            {"query_wrapper_prompt": PromptTemplate("Q: {query_str}")},
            "complete",
            [{"role": "user", "content": f"Q: {PROMPT}"}],
        ),
    ],
)
def test_custom_prompts_are_used(options, ask, expected):
    llm = Ragaccel(llm=tiny_llm(), max_new_tokens=20, **options)
    found = getattr(llm, ask)(MESSAGES if ask == "chat" else PROMPT)
    assert text_of(found) == tiny_llm().generate(expected, max_new_tokens=20).text


def test_answer_metadata_is_not_written_into_later_prompts():
    llm = Ragaccel(llm=tiny_llm())
    response = llm.chat(MESSAGES, max_new_tokens=5)
    assert response.message.additional_kwargs == {}
    *_, last = llm.stream_chat(MESSAGES, max_new_tokens=5)
    assert last.message.additional_kwargs == {}
