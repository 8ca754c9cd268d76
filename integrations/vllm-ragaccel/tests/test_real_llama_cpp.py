"""``RagaccelDraft`` in llama-cpp-python itself, on the bundled reader: ``make llama-cpp``."""

from pathlib import Path

import pytest

from vllm_ragaccel import RagaccelDraft

llama_cpp = pytest.importorskip("llama_cpp")
gguf_writer = pytest.importorskip("eval.gguf_writer")

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
    gguf_writer.write_gguf(READER, path, "float32")
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
