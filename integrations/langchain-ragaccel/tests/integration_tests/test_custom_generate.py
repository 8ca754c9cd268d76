"""``custom_generate`` with HuggingFacePipeline; streams are refused."""

import pytest
import ragaccel
from framework_llms import tiny_model, tiny_tokenizer
from transformers import pipeline

huggingface = pytest.importorskip("langchain_huggingface")

TEXTS = ["Who trims the wick?", "The lamp burns", "What rises at the mole? The tide"]
SETTINGS = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def llm():
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side, tokenizer.pad_token = "left", "<eos>"
    pipe = pipeline("text-generation", model=tiny_model(), tokenizer=tokenizer)
    return huggingface.HuggingFacePipeline(pipeline=pipe, batch_size=2)


@pytest.fixture(scope="module")
def plain(llm):
    return llm.bind(pipeline_kwargs=SETTINGS)


@pytest.fixture(scope="module")
def fast(llm):
    settings = {**SETTINGS, "custom_generate": ragaccel.custom_generate}
    return llm.bind(pipeline_kwargs=settings)


def test_texts_and_batches_are_the_same(plain, fast):
    assert [fast.invoke(text) for text in TEXTS] == [plain.invoke(text) for text in TEXTS]
    assert fast.batch(TEXTS) == plain.batch(TEXTS)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_stream_is_refused_before_its_first_piece(fast):
    with pytest.raises(ragaccel.ConfigurationError, match="does not stream"):
        next(iter(fast.stream(TEXTS[0])))
