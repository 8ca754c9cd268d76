import pytest

from ragaccel.decoding import Reference, Request, Sampling
from ragaccel.errors import ConfigurationError


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Request(()), "prompt is empty"),
        (lambda: Request((1, -2)), "prompt_ids must be 0 or more, not -2"),
        (lambda: Reference((-1,)), "token_ids must be 0 or more"),
        (lambda: Request((1,), max_new_tokens=0), "max_new_tokens must be 1 or more, not 0"),
        (lambda: Request((1,), max_new_tokens=3, min_new_tokens=4), "min_new_tokens must be"),
        (lambda: Request((1,), repetition_penalty=0.0), "repetition_penalty must be above 0"),
        (lambda: Request((1,), no_repeat_ngram_size=-1), "no_repeat_ngram_size"),
        (lambda: Sampling(temperature=-0.1), "temperature must be 0 or more"),
        (lambda: Sampling(top_k=-1), "top_k"),
        (lambda: Sampling(top_p=0.0), "top_p"),
        (lambda: Sampling(min_p=1.5), "min_p"),
        (lambda: Sampling(temperature=float("nan")), "temperature"),
        (lambda: Sampling(seed=1.5), "seed must be a whole number, not 1.5"),
        (lambda: Sampling(top_k=None), "top_k must be a whole number"),
        (lambda: Request((1,), max_new_tokens=2.5), "max_new_tokens must be a whole number"),
    ],
)
def test_settings_that_cannot_work_are_named(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_lists_are_taken_and_frozen():
    request = Request([1, 2], references=[Reference([3])], eos_ids={4})
    assert request == Request((1, 2), (Reference((3,)),), eos_ids=frozenset({4}))


def test_a_stateful_processor_makes_a_request_plain():
    class Stateful:
        stateful = True

    assert Request((1,), processors=[Stateful()]).is_plain
    assert not Request((1,), processors=[lambda ids, scores: scores]).is_plain


@pytest.mark.parametrize("name", [7, None, b"mine", ("a",)])
def test_a_namespace_that_is_no_string_is_refused(name):
    with pytest.raises(ConfigurationError, match="namespace"):
        Request((1,), namespace=name)
