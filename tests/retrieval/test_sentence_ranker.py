"""The sentence ranker: which sentence of a passage answers a question, if any."""

import math
from concurrent.futures import ThreadPoolExecutor

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

from ragaccel import Passage
from ragaccel.errors import UnsupportedModelError
from ragaccel.passage import split_sentences
from ragaccel.retrieval.compression import likeliest_sentences, rank_sentences
from ragaccel.retrieval.embedder import find_model_folder
from ragaccel.retrieval.sentence_ranker import ADAPTER, SentenceRanker, default_ranker

TITLE = "Skerry Lighthouse"
TEXT = (
    "The lamp was first lit in 1864. It burned rapeseed oil until the war. The wick was trimmed "
    "every four hours. Visitors may climb the tower on Sundays."
)
PASSAGE = Passage("a", TEXT, title=TITLE)
OTHER = Passage("b", "The ferry costs four crowns. Dogs travel free.", title="Ferry")


@pytest.fixture(scope="module")
def ranker():
    return default_ranker()


def _best(ranker, question, *passages):
    sentences = [text for passage in passages for text in split_sentences(passage.text)]
    scores = [score for of in ranker.relevance(question, passages) for score in of]
    assert len(scores) == len(sentences)
    return sentences[scores.index(max(scores))], max(scores)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("When did the light shine for the first time?", "The lamp was first lit in 1864."),
        ("What fuel did it use?", "It burned rapeseed oil until the war."),
        ("How often did they cut the wick?", "The wick was trimmed every four hours."),
        ("What is the price of the ferry?", "The ferry costs four crowns."),
        ("Can I go up the tower?", "Visitors may climb the tower on Sundays."),
    ],
)
def test_the_sentence_that_answers_is_first_and_without_it_the_odds_are_lower(
    ranker, question, answer
):
    found, score = _best(ranker, question, PASSAGE, OTHER)
    assert found == answer
    left = [Passage("c", one.text.replace(answer, "").strip()) for one in (PASSAGE, OTHER)]
    assert _best(ranker, question, *left)[1] < score - 1


def test_of_a_long_question_the_end_counts(ranker):
    story = "We came by sea and saw much of the coast and its birds. " * 12
    of_fuel, of_tower = (
        ranker.relevance(story + end, [PASSAGE])[0]
        for end in ("What fuel did the lamp use?", "Can I go up the tower?")
    )
    assert of_fuel[1] - of_fuel[3] > of_tower[1] - of_tower[3] + 0.5


def test_a_question_on_something_else_has_low_odds(ranker):
    assert _best(ranker, "Who won the chess world cup?", PASSAGE, OTHER)[1] < -2


def test_the_scores_are_those_of_peft_and_transformers(ranker):
    """Against the outside: the adapter loaded by PEFT, the pooling written out by hand."""
    folder, weights = find_model_folder(), load_file(ADAPTER)
    (rank,) = {len(value) for name, value in weights.items() if "lora_A" in name}
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=r"encoder\.layer\.\d+\..*(query|key|value|dense)",
    )
    model = peft.inject_adapter_in_model(config, AutoModel.from_pretrained(folder)).eval()
    given = {
        name.removeprefix("encoder.")
        .replace("lora_A", "lora_A.default")
        .replace("lora_B", "lora_B.default"): value.float()
        for name, value in weights.items()
        if "lora" in name
    }
    missing, unknown = model.load_state_dict(given, strict=False)
    assert not unknown
    assert not any("lora" in name for name in missing)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    question, sentences = "What fuel did it use?", split_sentences(TEXT)

    def encode(text):
        return tokenizer(text, add_special_tokens=False).input_ids

    ids = [101, *encode(question), 102, *encode(f"{TITLE}:")]
    spans = []
    for sentence in sentences:
        spans.append((len(ids), len(ids) + len(encode(sentence))))
        ids += encode(sentence)
    with torch.inference_mode():
        states = model(torch.tensor([[*ids, 102]])).last_hidden_state[0]
    asked = states[1 : 1 + len(encode(question))].mean(0)
    direction, scale, none = (weights[n].float() for n in ("direction", "scale", "none"))
    expected = [
        (scale * torch.cosine_similarity(asked, mean, dim=0) + mean @ direction - none).item()
        for mean in (states[start:end].mean(0) for start, end in spans)
    ]
    assert ranker.scores(question, [(TITLE, sentences)])[0] == pytest.approx(expected, abs=1e-3)


def test_scores_do_not_depend_on_what_else_is_scored(ranker):
    question = "What fuel did it use?"
    asked = [(one.title, split_sentences(one.text)) for one in (PASSAGE, OTHER)]
    apart = [ranker.scores(question, [one])[0] for one in asked]
    for together, alone in zip(ranker.scores(question, asked), apart, strict=True):
        assert together == pytest.approx(alone, abs=1e-3)
    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(lambda _: ranker.scores(question, asked), range(8)):
            assert found[0] == pytest.approx(apart[0], abs=1e-3)


def test_every_sentence_of_any_passage_has_a_score(ranker):
    lines = [f"Keeper {n} moved {n} boxes of rope." for n in range(200)]
    lines[142] = "The ferry costs four crowns."
    long = Passage("long", " ".join(lines))
    odd = Passage("odd", "A lone \ud83d mark. " + "x" * 5000 + ". " + "word " * 3000)
    for passage in (long, odd, Passage("no", ""), Passage("-", "...")):
        (scores,) = ranker.relevance("Who moved 42 boxes?", [passage])
        assert len(scores) == len(split_sentences(passage.text))
        assert all(map(math.isfinite, scores))
    assert ranker.relevance("Who?", []) == []
    assert len(ranker.relevance("who " * 2000, [PASSAGE])[0]) == 4
    assert _best(ranker, "What is the price of the ferry?", long)[0] == lines[142]


def test_a_sentence_cut_out_of_its_passage_keeps_its_score(ranker):
    question = "What did the lamp burn?"
    (scores,) = ranker.relevance(question, [PASSAGE])
    start = TEXT.index("It burned")
    cut = PASSAGE.cut(start, start + len("It burned rapeseed oil until the war."))
    assert ranker.relevance(question, [cut]) == [[scores[1]]]
    alone = ranker.scores(question, [(TITLE, [cut.text])])[0][0]
    assert alone != pytest.approx(scores[1], abs=1e-3)


def test_a_broken_adapter_is_told(tmp_path):
    broken, other = tmp_path / "adapter.safetensors", tmp_path / "other.safetensors"
    broken.write_bytes(b"no")
    save_file({"direction": torch.zeros(384)}, other)
    for file in (broken, other):
        with pytest.raises(UnsupportedModelError, match="cannot be loaded"):
            SentenceRanker(find_model_folder(), file)


def test_without_its_model_nothing_is_ranked_and_nothing_downloaded(monkeypatch):
    monkeypatch.setattr("ragaccel.retrieval.embedder.local_default_folder", lambda: None)
    monkeypatch.setattr("ragaccel.models.hub.download", lambda *_: pytest.fail("downloaded"))
    assert rank_sentences("What fuel did it use?", [PASSAGE]) == []
    assert likeliest_sentences("What fuel did it use?", [PASSAGE]) == []


class _Embedder:
    is_multilingual = False


class _Multilingual:
    is_multilingual = True


@pytest.mark.parametrize(
    ("question", "embedder", "is_ranked"),
    [
        ("What fuel did it use?", None, True),
        ("What fuel did it use?", _Multilingual(), True),
        ("Was kostet die Fähre?", _Embedder(), True),
        ("Was kostet die Fähre?", _Multilingual(), False),
        ("Was kostet die Fähre?", object(), False),  # of the caller's, which may know German
        ("Сколько стоит паром?", _Embedder(), False),
        ("Сколько стоит паром?", None, True),
    ],
)
def test_a_question_is_ranked_unless_its_embedder_compares_better(question, embedder, is_ranked):
    assert bool(rank_sentences(question, [PASSAGE, OTHER], embedder)) == is_ranked


def test_a_model_that_cannot_be_loaded_is_told_once_and_nothing_ranked(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("ragaccel.retrieval.sentence_ranker.local_default_folder", lambda: tmp_path)
    for _ in range(2):
        assert rank_sentences("What fuel did it use?", [PASSAGE]) == []
    assert caplog.text.count("sentences are not ranked") == 1
