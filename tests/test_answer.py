import gc
import threading

import pytest

from ragaccel.answer import Answer, Segment, Stream
from ragaccel.decoding import Cancelled, GenerationResult, Stats
from ragaccel.passage import Passage

LAMP = Passage("a", "The lamp burns rapeseed oil. Its keeper trims the wick.")
TIDE = Passage("b", "The tide rises four metres at the mole.")


def make_answer(text="Own words.", passages=()):
    result = GenerationResult((5, 6, 7), "stop", Stats(prompt_tokens=10, new_tokens=3))
    return Answer.of(text, result, passages)


def produce(pieces, log, error=None):
    try:
        for piece in pieces:
            log.append(piece)
            yield piece
        if error is not None:
            raise error
        return make_answer("".join(pieces))
    finally:
        log.append("freed")


def test_an_answer_knows_its_spans_citations_and_usage():
    answer = make_answer("The lamp burns rapeseed oil. [1] So. [9] [2]", [LAMP, TIDE])
    assert str(answer) == answer.text
    (span,) = answer.copied_spans
    assert answer.text[span.start : span.end] == LAMP.text[span.passage_start : span.passage_end]
    assert answer.cited_numbers == (1, 2)
    assert answer.sources == (LAMP, TIDE)
    assert answer.segments() == [
        Segment("The lamp burns rapeseed oil.", 1),
        Segment(" [1] So. [9] [2]"),
    ]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (10, 3)
    assert answer.usage.total_tokens == 13


def test_a_stream_gives_its_pieces_and_then_the_answer():
    log = []
    stream = Stream(produce(["a", "b"], log), [LAMP])
    assert log == []  # nothing is computed ahead of the consumer
    assert next(stream) == "a"
    assert log == ["a"]
    with pytest.raises(RuntimeError, match="read to its end"):
        _ = stream.answer
    assert list(stream) == ["b"]
    assert stream.answer.text == "ab"
    assert stream.closed
    assert list(stream) == []
    assert stream.passages == (LAMP,)


def test_an_error_reaches_the_consumer_and_ends_the_stream():
    log = []
    stream = Stream(produce(["a"], log, ValueError("broken")))
    assert next(stream) == "a"
    with pytest.raises(ValueError, match="broken"):
        next(stream)
    assert log == ["a", "freed"]
    assert list(stream) == []
    with pytest.raises(RuntimeError, match="no answer"):
        _ = stream.answer


def test_leaving_a_with_block_or_a_loop_stops_the_work_and_frees_what_it_held():
    log = []
    with Stream(produce(["a", "b"], log)) as stream:
        next(stream)
    stream.close()
    assert log == ["a", "freed"]
    assert list(stream) == []
    with pytest.raises(RuntimeError, match="closed before its end"):
        _ = stream.answer
    log.clear()
    for _ in Stream(produce(["a", "b"], log)):
        break
    gc.collect()
    assert log == ["a", "freed"]


def test_a_stream_can_be_closed_while_another_thread_computes():
    computing, closed, log, seen = threading.Event(), threading.Event(), [], []

    class Pieces(list):
        def __iter__(self):
            yield "a"
            computing.set()
            closed.wait(10)
            yield "b"

    stream = Stream(produce(Pieces(), log))
    reader = threading.Thread(target=lambda: seen.extend(stream))
    reader.start()
    assert computing.wait(10)
    stream.close()
    assert "freed" not in log  # the computing thread is still in its step
    closed.set()
    reader.join(10)
    assert seen == ["a"]
    assert log[-1] == "freed"


def test_a_stream_closed_while_a_piece_is_handed_over_is_freed():
    log = []
    stream = Stream(produce(["a", "b"], log))
    lock = stream._busy

    class Closing:
        """Has somebody close the stream when the reader has its piece, and still the lock."""

        acquire, release = lock.acquire, lock.release

        def __enter__(self):
            lock.acquire()

        def __exit__(self, *_):
            stream.close()
            assert log == ["a"]
            lock.release()

    stream._busy = Closing()
    assert next(stream, None) is None
    assert log == ["a", "freed"]


def test_what_was_cancelled_ends_without_an_error():
    stream = Stream(produce(["a"], [], Cancelled("in a round of passes")))
    assert list(stream) == ["a"]
    assert stream.closed
    with pytest.raises(RuntimeError, match="closed before its end"):
        _ = stream.answer


def test_one_stream_may_be_read_from_thread_after_thread():
    stream = Stream(produce(list("abcdef"), []))
    seen = []
    for _ in range(6):
        reader = threading.Thread(target=lambda: seen.append(next(stream)))
        reader.start()
        reader.join(10)
    assert seen == list("abcdef")
    assert stream.finish().text == "abcdef"
