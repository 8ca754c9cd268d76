"""``custom_generate`` with HuggingFaceLLM; streams are refused."""

import threading

import pytest
import ragaccel
from framework_llms import tiny_model, tiny_tokenizer

huggingface = pytest.importorskip("llama_index.llms.huggingface")

TEXTS = ["Who trims the wick?", "The lamp burns", "What rises at the mole? The tide"]


def make(**generate_kwargs):
    return huggingface.HuggingFaceLLM(
        model=tiny_model(),
        tokenizer=tiny_tokenizer(),
        context_window=512,
        max_new_tokens=12,
        generate_kwargs={"do_sample": False, **generate_kwargs},
    )


@pytest.fixture(scope="module")
def fast():
    return make(custom_generate=ragaccel.custom_generate)


def test_texts_are_the_same(fast):
    plain = make()
    assert [fast.complete(t).text for t in TEXTS] == [plain.complete(t).text for t in TEXTS]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_stream_is_refused_and_does_not_hang(fast):
    found = []

    def read():
        try:
            found.extend(fast.stream_complete(TEXTS[0]))
        except Exception as error:
            found.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(60)
    assert not reader.is_alive()
    (error,) = found
    assert isinstance(error, ragaccel.ConfigurationError)
    assert "does not stream" in str(error)
