"""What our loop in generate's place refuses, and how those who wait for it are told."""

import asyncio
import sys
import threading

import pytest
import torch
from stock_batches import PAD, assert_same, padded, some_prompts, text_model
from tiny_llm import tiny_tokenizer
from tiny_models import make_tiny_model, random_prompt, tiny_model
from transformers import (
    AsyncTextIteratorStreamer,
    DynamicCache,
    TextIteratorStreamer,
    TextStreamer,
)

from ragaccel import ConfigurationError, custom_generate


@pytest.fixture
def model():
    return tiny_model("llama")


REFUSED = {
    "beams": ({"num_beams": 2}, "beam search"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "drafts by itself"),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
    "states": (
        {"return_dict_in_generate": True, "output_hidden_states": True},
        "output_hidden_states",
    ),
    "cache": ({"past_key_values": DynamicCache()}, "past_key_values"),
    "positions": ({"position_ids": torch.arange(5, 15)[None]}, "position_ids"),
    "embeddings": ({"inputs_embeds": torch.zeros(1, 10, 32, dtype=torch.float64)}, "inputs_embeds"),
    "too long": ({"max_new_tokens": 500}, "exceed"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_done_is_refused(model, name):
    kwargs, words = REFUSED[name]
    kwargs = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": PAD, **kwargs}
    batch = padded([random_prompt(10)])
    if name == "embeddings":
        batch = {}
    with pytest.raises(ConfigurationError, match=words):
        model.generate(**batch, custom_generate=custom_generate, **kwargs)


def test_an_assistant_and_another_masks_holes_are_refused(model):
    batch = padded([random_prompt(10), random_prompt(8)])
    for broken in ([1] * 9 + [0], [1, 0] + [1] * 8, [0] * 10):
        batch["attention_mask"][1] = torch.tensor(broken)
        with pytest.raises(ConfigurationError, match="padded on the left alone"):
            model.generate(
                **batch, max_new_tokens=5, pad_token_id=PAD, custom_generate=custom_generate
            )
    with pytest.raises(ConfigurationError, match="leave out assistant_model"):
        model.generate(
            torch.tensor([random_prompt(10)]),
            assistant_model=model,
            max_new_tokens=5,
            custom_generate=custom_generate,
            pad_token_id=PAD,
        )


def test_a_model_in_training_and_autocast_are_refused():
    model = make_tiny_model("llama")
    model.train()
    with pytest.raises(ConfigurationError, match=r"model.eval\(\)"):
        assert_same(model, some_prompts(5))
    assert model.training
    model.eval()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigurationError, match="autocast"):
        assert_same(model, some_prompts(5))


def test_guidance_is_followed_for_one_prompt_and_refused_for_several(model):
    kwargs = {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[4, 5, 6]])}
    guided = assert_same(model, some_prompts(12), **kwargs)
    assert not guided.equal(assert_same(model, some_prompts(12)))
    with pytest.raises(ConfigurationError, match="remembers earlier calls"):
        model.generate(
            **padded(some_prompts(12, 9)),
            guidance_scale=1.5,
            max_new_tokens=5,
            pad_token_id=PAD,
            custom_generate=custom_generate,
        )


def read(streamer, found):
    try:
        found.append("".join(streamer))
    except Exception as error:
        found.append(error)


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_a_streamers_reader_gets_the_refusal_at_once(timeout):
    """As both frameworks stream: generate in one thread, the streamer read in another."""
    model, tokenizer = text_model(), tiny_tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=timeout)
    raised = []

    def run():
        try:
            model.generate(
                torch.tensor([tokenizer.encode("Who?")]),
                streamer=streamer,
                max_new_tokens=5,
                custom_generate=custom_generate,
            )
        except Exception as error:
            raised.append(error)

    thread, found = threading.Thread(target=run), []
    reader = threading.Thread(target=read, args=(streamer, found), daemon=True)
    thread.start()
    reader.start()
    thread.join(30)
    reader.join(30)
    assert not reader.is_alive()
    for error in (*raised, *found):
        assert isinstance(error, ConfigurationError)
        assert "does not stream" in str(error)
    assert len(raised) == len(found) == 1


def test_other_streamers_are_ended(model, capsys):
    class Noting:
        put_ids, ended = (), False

        def put(self, ids):
            self.put_ids = ids

        def end(self):
            self.ended = True

    noting = Noting()
    for streamer in (noting, TextStreamer(tiny_tokenizer(), skip_prompt=True)):
        with pytest.raises(ConfigurationError, match="does not stream"):
            model.generate(
                torch.tensor([random_prompt(5)]),
                streamer=streamer,
                max_new_tokens=5,
                custom_generate=custom_generate,
            )
    assert noting.ended
    assert capsys.readouterr().out.strip() == ""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="transformers' streamer needs 3.11")
def test_an_asynchronous_reader_gets_the_refusal_too():
    async def main():
        streamer = AsyncTextIteratorStreamer(tiny_tokenizer(), skip_prompt=True)
        refused = asyncio.to_thread(
            text_model().generate,
            torch.tensor([[5, 6]]),
            streamer=streamer,
            max_new_tokens=5,
            custom_generate=custom_generate,
        )
        task = asyncio.ensure_future(refused)
        with pytest.raises(ConfigurationError, match="does not stream"):
            async for _ in streamer:
                pass
        with pytest.raises(ConfigurationError, match="does not stream"):
            await task

    asyncio.run(main())
