"""``RagaccelDraft`` in llama-cpp-python itself, on the bundled reader: ``make llama-cpp``."""

import json
from pathlib import Path

import numpy as np
import pytest

from vllm_ragaccel import RagaccelDraft

llama_cpp = pytest.importorskip("llama_cpp")
gguf = pytest.importorskip("gguf")
safetensors = pytest.importorskip("safetensors.numpy")

ROOT = Path(__file__).parents[3]
READER = ROOT / "ragaccel/models/reader"
QUESTIONS = {
    "stations/gannet-ledge.md": ["When was the light built?", "How high is the tower?"],
    "stations/wether-holm.md": ["Who keeps the station?", "What is the light's range?"],
    "stations/stonehand-point.md": ["What stands at the point?", "When was it lit first?"],
    "staff/training-of-keepers.md": ["How long is the training?", "Who trains the keepers?"],
    "incidents/2022-storm-hilda.md": ["What did the storm break?", "Was anybody hurt?"],
    "island/birds-and-seals.md": ["Which birds breed there?", "When are the seals counted?"],
}
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    name = name.removeprefix("model.").removesuffix(".weight")
    if name.startswith("layers."):
        _, layer, part = name.split(".", 2)
        return f"blk.{layer}.{NAMES[part]}.weight"
    return {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight"}[name]


def interleave(weight, num_heads):
    """Reorder a query or key projection's rows: GGUF keeps rotated pairs side by side."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def write_gguf(path):
    """Write the bundled reader as float32 GGUF."""
    config = json.loads((READER / "config.json").read_text())
    heads = config["num_attention_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    add_tokenizer(writer, config)
    for name, weight in safetensors.load_file(READER / "model.safetensors").items():
        weight = weight.astype(np.float32)
        if "q_proj" in name or "k_proj" in name:
            weight = interleave(weight, heads)
        writer.add_tensor(gguf_name(name), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer, config):
    tokenizer = json.loads((READER / "tokenizer.json").read_text())
    tokens = {token_id: text for text, token_id in tokenizer["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    tokens |= special
    types = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens[i] for i in range(config["vocab_size"])])
    writer.add_token_types(
        [types.CONTROL if i in special else types.NORMAL for i in range(config["vocab_size"])]
    )
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def prompt_of(name, question):
    """Return the prompt that the reader's chat template makes of a document."""
    text = (ROOT / "demos/documents" / name).read_text()[:1500]
    sentences = text.replace("\n", " ").split(". ")
    marked = (f"<s{i}> {one.strip()}. [1]<s{i}>" for i, one in enumerate(sentences, 1))
    asked = f"<question> {question}"
    told = "".join(marked) + "<none> The passages do not tell.<none>"
    return f"<bos>{asked}<passage>{told}{asked}<answer>"


PROMPTS = [prompt_of(name, one) for name, both in QUESTIONS.items() for one in both]


class Counted:
    """A draft model that counts its calls and the tokens drafted."""

    def __init__(self, draft_model):
        self.draft_model, self.num_calls, self.num_drafted = draft_model, 0, 0

    def __call__(self, input_ids, /, **options):
        drafted = self.draft_model(input_ids, **options)
        self.num_calls += 1
        self.num_drafted += len(drafted)
        return drafted


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "reader.gguf"
    write_gguf(path)
    return path


@pytest.fixture(scope="module")
def load(model):
    def load(draft_model=None, n_ctx=2048):
        options = {} if draft_model is None else {"draft_model": draft_model, "logits_all": True}
        return llama_cpp.Llama(str(model), n_ctx=n_ctx, n_threads=1, verbose=False, **options)

    return load


@pytest.fixture(scope="module")
def plain(load):
    return load()


@pytest.fixture
def drafts():
    return Counted(RagaccelDraft())


@pytest.fixture
def drafting(load, drafts):
    return load(drafts)


def text_of(llama, prompt, max_tokens=64, **options):
    (choice,) = llama(prompt, max_tokens=max_tokens, temperature=0, **options)["choices"]
    return choice["text"], choice["finish_reason"]


def test_greedy_answers_stay_the_same_in_fewer_steps(plain, drafting, drafts):
    num_tokens = 0
    for prompt in PROMPTS:
        answer = text_of(plain, prompt)
        num_tokens += plain.n_tokens - len(plain.tokenize(prompt.encode(), False, True))
        assert text_of(drafting, prompt) == answer
    assert num_tokens > 100
    assert drafts.num_drafted > 0
    assert drafts.num_calls < num_tokens / 1.3


def test_streamed_text_is_that_of_a_whole_answer(plain, drafting):
    for prompt in PROMPTS[:4]:
        pieces = drafting(prompt, max_tokens=48, temperature=0, stream=True)
        streamed = "".join(piece["choices"][0]["text"] for piece in pieces)
        assert streamed == text_of(plain, prompt, 48)[0]


def test_a_stop_string_ends_the_answer_where_it_would_without_drafts(plain, drafting):
    for prompt in PROMPTS[:4]:
        whole, _ = text_of(plain, prompt)
        stop = whole[len(whole) // 2 :][:4]
        expected = text_of(plain, prompt, stop=[stop])
        assert text_of(drafting, prompt, stop=[stop]) == expected == (whole.split(stop)[0], "stop")


def test_the_context_s_end_is_reached_as_without_drafts(load, drafts):
    tokens = load().tokenize(PROMPTS[0].encode(), False, True)[-500:]
    expected = text_of(load(n_ctx=512), tokens, None)
    assert expected[1] == "length"
    assert text_of(load(drafts, n_ctx=512), tokens, None) == expected
    assert drafts.num_drafted > 0


def test_a_chat_goes_on_and_another_begins(plain, drafting):
    follow_up = PROMPTS[0] + text_of(plain, PROMPTS[0])[0] + "<question> And why?<answer>"
    for prompt in (PROMPTS[0], follow_up, PROMPTS[5], PROMPTS[0]):
        assert text_of(drafting, prompt) == text_of(plain, prompt)
