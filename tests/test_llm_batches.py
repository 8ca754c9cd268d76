"""Lists, threads and asyncio callers: one engine, shared passes, and the tokens of single calls."""

import asyncio
import itertools
import threading

import pytest
from tiny_llm import tiny_llm

from ragaccel.decoding import Drafter, DraftTree, NoDrafter
from ragaccel.engine import DETERMINISTIC_ROWS
from ragaccel.errors import CapacityError

PROMPTS = [f"Question {i}: who trims the wick {'at dusk ' * i}?" for i in range(7)]
SETTINGS = {"max_new_tokens": 24}


class Nonsense(Drafter):
    def draft(self, context, budget):
        return DraftTree.chain([context.token_ids[-1], *range(5, 5 + min(budget, 4))])


@pytest.fixture
def llm():
    return tiny_llm(drafter=Nonsense())


@pytest.fixture
def alone():
    plain = tiny_llm(drafter=NoDrafter())
    return [plain.generate(prompt, **SETTINGS).token_ids for prompt in PROMPTS]


def watch(llm):
    """Note how many sequences every pass has from now on."""
    seen, forward = [], llm.model.forward

    def watched(rows, keep):
        seen.append(len(rows.spans))
        return forward(rows, keep)

    llm.model.forward = watched
    return seen


def tokens(answers):
    return [answer.token_ids for answer in answers]


def test_a_long_list_runs_as_many_at_a_time_as_may_be():
    llm = tiny_llm(drafter=Nonsense(), max_batch=3)
    seen = watch(llm)
    texts = PROMPTS * 4
    answers = llm.generate(texts, **SETTINGS)
    assert max(seen) == 3
    assert len(llm.engine.prefix_cache._open) == 0
    expected = tiny_llm(drafter=NoDrafter())
    assert tokens(answers) == [expected.generate(text, **SETTINGS).token_ids for text in texts]


def test_texts_stops_and_counts_of_a_list_are_those_of_single_calls(llm):
    stop = llm.generate(PROMPTS[1], max_new_tokens=40).text[4:6]
    for settings in ({"stop": stop}, {"temperature": 1.0, "seed": 5}, {"repetition_penalty": 1.4}):
        together = llm.generate(PROMPTS, max_new_tokens=40, **settings)
        single = [llm.generate(prompt, max_new_tokens=40, **settings) for prompt in PROMPTS]
        assert [answer.text for answer in together] == [answer.text for answer in single]
        assert [a.finish_reason for a in together] == [a.finish_reason for a in single]
        assert tokens(together) == tokens(single)


def test_an_error_in_a_list_closes_all_of_it(llm):
    def fails(ids, scores):
        if ids.shape[1] > 60:
            raise KeyError("a processor's own")
        return scores

    with pytest.raises(KeyError, match="a processor's own"):
        llm.generate(PROMPTS, max_new_tokens=40, logits_processors=[fails])
    assert not llm.engine.prefix_cache._open
    assert llm.generate(PROMPTS[0], **SETTINGS).token_ids
    assert llm.scheduler.is_idle


def test_threads_share_passes_and_get_streams_of_their_own(llm, alone):
    seen, found = watch(llm), {}
    start = threading.Barrier(len(PROMPTS))

    def work(i):
        start.wait()
        stream = llm.stream(PROMPTS[i], **SETTINGS)
        text = "".join(stream)
        assert text == stream.answer.text
        found[i] = stream.answer.token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[i] for i in range(len(PROMPTS))] == alone
    assert max(seen) >= 3


def test_asyncio_streams_and_lists(llm, alone):
    async def read(prompt):
        return [piece async for piece in llm.astream(prompt, **SETTINGS)]

    async def both():
        pieces = await asyncio.gather(*map(read, PROMPTS[:3]))
        return pieces, await llm.agenerate(PROMPTS, **SETTINGS)

    seen = watch(llm)
    pieces, answers = asyncio.run(both())
    assert max(seen) >= 3
    assert tokens(answers) == alone
    assert ["".join(each) for each in pieces] == [answer.text for answer in answers[:3]]
    assert max(map(len, pieces)) > 3


def test_an_asyncio_stream_has_its_answer_at_the_end(llm, alone):
    async def read():
        stream = llm.astream(PROMPTS[0], **SETTINGS)
        with pytest.raises(RuntimeError, match="read to its end"):
            _ = stream.answer
        pieces = [piece async for piece in stream]
        assert stream.token_ids == stream.answer.token_ids
        whole = await llm.astream(PROMPTS[0], **SETTINGS).finish()
        left = llm.astream(PROMPTS[0], max_new_tokens=1500)
        await anext(aiter(left))
        await left.aclose()
        assert not llm.engine.prefix_cache._open
        return pieces, stream.answer, whole

    pieces, answer, whole = asyncio.run(read())
    assert "".join(pieces) == answer.text == whole.text
    assert tokens([answer, whole]) == [*alone[:1], *alone[:1]]


def test_what_cannot_work_is_refused_before_anything_is_computed(llm):
    seen = watch(llm)
    with pytest.raises(CapacityError):
        asyncio.run(llm.agenerate(PROMPTS[0], max_new_tokens=10**6))
    with pytest.raises(TypeError, match="max_new_tokens"):
        llm.astream(PROMPTS[0], max_tokens=3)
    assert not seen


def test_exact_mode_is_a_setting_of_the_model():
    exact = tiny_llm(drafter=Nonsense(), exact=True)
    plain = tiny_llm(drafter=NoDrafter())
    assert exact.engine.deterministic
    rows, forward = [], exact.model.forward

    def watched(step, keep):
        rows.extend([step.num_rows] * (keep > 1))
        return forward(step, keep)

    exact.model.forward = watched
    for prompt in PROMPTS:
        expected = plain.generate(prompt, **SETTINGS).token_ids
        assert exact.generate(prompt, **SETTINGS).token_ids == expected
    assert set(rows) == {DETERMINISTIC_ROWS}
    assert tokens(exact.generate(PROMPTS, **SETTINGS)) == tokens(
        plain.generate(PROMPTS, **SETTINGS)
    )


def test_a_warm_up_computes_what_the_first_answer_would_wait_for():
    llm = tiny_llm(drafter=NoDrafter())
    seen = watch(llm)
    llm.warm_up(compile=True)
    assert len(seen) > 10


def test_a_stream_tells_of_all_tokens_so_far(llm):
    stream = llm.stream(PROMPTS[0], **SETTINGS)
    seen = []
    for _ in stream:
        seen.append(stream.token_ids)
        assert llm.tokenizer.decode(stream.token_ids)
    assert seen[-1] == stream.token_ids == stream.answer.token_ids
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(seen))
    assert len(set(seen)) > 1
