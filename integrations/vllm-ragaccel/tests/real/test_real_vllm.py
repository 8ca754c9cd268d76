"""Drafts in a real vLLM: the answers are those of vLLM alone, and drafts are accepted.

Every check compares with an engine without drafts, and asks vLLM how many draft tokens it accepted.
"""

import random
from collections import Counter
from contextlib import contextmanager

import pytest

pytest.importorskip("vllm")
from conftest import Engine
from hash_embedder import HashEmbedder
from ragaccel.retrieval import Store, index_folder
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.vllm
MAX_LENGTH = 512


@contextmanager
def counted(engine, figures):
    """Add what ``engine`` counts inside the context to the figures; drafts must be accepted."""
    before = dict(vars(engine.counters))
    yield
    figures |= {name: count - before[name] for name, count in vars(engine.counters).items()}
    assert figures["accepted"] > 0


def compare(figures, expected, got):
    """Record requests, tokens and differences; there must be no difference."""
    pairs = list(zip(expected, got, strict=True))
    figures["requests"] = len(pairs)
    figures["tokens"] = sum(len(one) for one in got)
    figures["differences"] = sum(one != other for one, other in pairs)
    assert not figures["differences"]


def random_prompt(rng, length):
    return [rng.randrange(256) for _ in range(length)]


def prompt_that_repeats(rng, length):
    """A passage and, behind it, words of it again, as questions on documents have."""
    passage = random_prompt(rng, max(4, length // 2))
    start = rng.randrange(len(passage) // 2)
    return (passage * 3)[: length - 3] + passage[start : start + 3]


def greedy(max_tokens, **options):
    options = {"ignore_eos": True, **options}
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def test_300_mixed_requests_give_the_same_greedy_tokens(plain, chunked, figures):
    rng = random.Random(1)
    lengths = [rng.choice([rng.randrange(4, 40), rng.randrange(40, 380)]) for _ in range(288)]
    lengths += [rng.randrange(470, MAX_LENGTH - 1) for _ in range(12)]  # these end at the limit
    rng.shuffle(lengths)
    prompts = [rng.choice([random_prompt, prompt_that_repeats])(rng, n) for n in lengths]
    params = [greedy(min(rng.randrange(1, 130), MAX_LENGTH - n)) for n in lengths]
    expected = plain.tokens(prompts, params)
    with counted(chunked, figures):
        got = chunked.tokens(prompts, params)
    compare(figures, expected, got)


def test_requests_come_and_go_in_a_batch_of_16(plain, chunked, figures):
    rng = random.Random(2)
    prompts = [prompt_that_repeats(rng, rng.randrange(8, 200)) for _ in range(64)]
    prompts[5] = prompts[4]  # side by side, one cancelled
    params = [greedy(rng.randrange(4, 90)) for _ in prompts]
    cancelled = {5, *rng.sample(range(64), 8)}
    expected = plain.tokens(prompts, params)
    engine, waiting, said, most = chunked.llm.llm_engine, list(range(64)), {}, 0
    with counted(chunked, figures):
        while waiting or engine.has_unfinished_requests():
            for number in [waiting.pop(0) for _ in range(rng.choice([0, 0, 1, 4])) if waiting]:
                engine.add_request(
                    f"come-{number}", {"prompt_token_ids": prompts[number]}, params[number]
                )
            most = max(most, engine.get_num_unfinished_requests())
            for output in engine.step():
                number = int(output.request_id.partition("-")[2].partition("-")[0])
                said[number] = list(output.outputs[0].token_ids)
                if number in cancelled and len(said[number]) > len(expected[number]) // 2:
                    engine.abort_request([output.request_id])
    figures["cancelled"], figures["most at once"] = len(cancelled), most
    assert most >= 16
    compare(figures, [expected[n][: len(said[n])] for n in range(64)], [said[n] for n in range(64)])
    assert all(len(said[n]) == len(expected[n]) for n in range(64) if n not in cancelled)


def test_a_cache_too_small_for_all_preempts_requests(plain, crowded, figures):
    rng = random.Random(3)
    prompts = [prompt_that_repeats(rng, rng.randrange(20, 90)) for _ in range(48)]
    params = [greedy(rng.randrange(60, 160)) for _ in prompts]
    expected = plain.tokens(prompts, params)
    with counted(crowded, figures):
        got = crowded.tokens(prompts, params)
    assert figures["preemptions"] > 0
    compare(figures, expected, got)


def test_prompts_share_a_prefix_in_the_cache(plain, drafting, figures):
    rng = random.Random(4)
    shared = random_prompt(rng, 300)
    prompts = [shared + prompt_that_repeats(rng, rng.randrange(8, 60)) for _ in range(32)]
    prompts += prompts[:8]
    params = [greedy(rng.randrange(10, 80)) for _ in prompts]
    expected = plain.tokens(prompts, params)
    with counted(drafting, figures):
        got = drafting.tokens(prompts, params)
    assert figures["prefix_cache_hits"] > 0
    compare(figures, expected, got)


LETTERS = [*map(ord, "abcdefghijklmnopqrstuvwxyz")]
PASSAGE_WORDS = 12


def test_text_that_only_an_index_holds_is_drafted(plain, model, tmp_path, figures):
    rng = random.Random(8)
    tokenizer = plain.llm.get_tokenizer()

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    passages = [
        " ".join("".join(map(chr, rng.choices(LETTERS, k=9))) for _ in range(PASSAGE_WORDS))
        for _ in range(16)
    ]
    prompts = [encode(passage + " ") for passage in passages]
    params = greedy(24, allowed_token_ids=encode("abcdefghijklmnopqrstuvwxyz"))
    answers = plain.generate(prompts, params)
    folder, index = tmp_path / "documents", tmp_path / "documents.db"
    folder.mkdir()
    for number, (passage, answer) in enumerate(zip(passages, answers, strict=True)):
        (folder / f"{number}.txt").write_text(f"{passage} {answer.text}", encoding="utf-8")
    with Store(index) as store:
        index_folder(store, HashEmbedder(), folder, passage_tokens=PASSAGE_WORDS)
    expected = [list(answer.token_ids) for answer in answers]

    def accepted(**options):
        options["reproducible"] = True  # else the time of steps decides what is drafted
        engine = Engine(model, drafts=True, additional_config={"ragaccel": options})
        with counted(engine, figures):
            got = engine.tokens(prompts, params)
        compare(figures, expected, got)
        return figures["accepted"]

    figures["accepted without the index"] = accepted()
    assert accepted(index=str(index)) > 1.5 * figures["accepted without the index"]


SCHEMA = {
    "type": "object",
    "properties": {
        "landing": {"type": "string", "enum": ["the northern jetty at low water", "none"]},
        "swell": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["landing", "swell"],
}
CONSTRAINTS = (
    {"json": SCHEMA},
    {"regex": r"(the swell is [a-z]{3} ){3}\."},
    {"choice": ["landing at the northern jetty", "landing at the southern jetty", "no landing"]},
)
DOCUMENT = (
    '{"landing": "the northern jetty at low water", "swell": 1} the swell is low the swell is low '
    "landing at the northern jetty, landing at the southern jetty. "
)


def test_structured_output_stays_as_constrained(plain, drafting, figures):
    rng = random.Random(5)
    tokenizer = plain.llm.get_tokenizer()
    document = tokenizer.encode(DOCUMENT, add_special_tokens=False)
    prompts = [random_prompt(rng, rng.randrange(3, 30)) + document for _ in range(24)]
    params = [
        greedy(
            100,
            ignore_eos=False,
            structured_outputs=StructuredOutputsParams(**CONSTRAINTS[number % 3]),
        )
        for number in range(24)
    ]
    expected = plain.tokens(prompts, params)
    with counted(drafting, figures):
        got = drafting.generate(prompts, params)
    assert all(one.text in CONSTRAINTS[2]["choice"] for one in got[2::3])
    compare(figures, expected, [list(one.token_ids) for one in got])


def test_stop_strings_end_an_answer_at_the_same_character(plain, drafting, figures):
    rng = random.Random(6)
    prompts = [prompt_that_repeats(rng, rng.randrange(8, 120)) for _ in range(48)]
    whole = plain.generate(prompts, greedy(80))
    params = []
    for number, one in enumerate(whole):
        start = rng.randrange(10, 60)
        options = {"stop": [one.text[start : start + 2]]}
        if number % 3 == 1:
            options["include_stop_str_in_output"] = True
        elif number % 3 == 2:
            options = {"stop_token_ids": [one.token_ids[start]], "min_tokens": 6}
        params.append(greedy(80, **options))
    expected = plain.generate(prompts, params)
    with counted(drafting, figures):
        got = drafting.generate(prompts, params)
    figures["stopped"] = sum(one.finish_reason == "stop" for one in got)
    assert figures["stopped"] > 40
    compare(figures, *([ended(one) for one in answers] for answers in (expected, got)))


def ended(one):
    return (*one.token_ids, one.text, one.finish_reason, one.stop_reason)


def test_a_seed_gives_the_same_text_as_far_as_vllm_alone_does(
    plain, reproducible, drafting, figures
):
    rng = random.Random(7)
    prompts = [prompt_that_repeats(rng, rng.randrange(8, 200)) for _ in range(48)]
    params = [
        SamplingParams(temperature=0.7, max_tokens=60, seed=number, ignore_eos=True)
        for number in range(48)
    ]

    def differences(engine):
        once, again = engine.tokens(prompts, params), engine.tokens(prompts, params)
        return sum(one != other for one, other in zip(once, again, strict=True))

    figures["requests"], figures["tokens"] = 48, 48 * 60 * 2
    figures["differences without drafts"] = differences(plain)
    with counted(reproducible, figures):
        figures["differences"] = differences(reproducible)
    figures["differences where measured time decides the lengths"] = differences(drafting)
    assert figures["differences"] <= figures["differences without drafts"]


SAMPLES = 4000
SAMPLING = {
    "as by default": ("drafting", {"temperature": 1.0}),
    "reproducible": ("reproducible", {"temperature": 1.0}),
    "top p": ("reproducible", {"temperature": 0.8, "top_p": 0.9}),
    # top_k alone fails in vLLM 0.32 on CPUs at a step without drafts, whoever drafts
    "top k": ("reproducible", {"temperature": 1.3, "top_k": 20, "top_p": 0.97}),
}


@pytest.mark.parametrize("kind", SAMPLING)
def test_sampled_tokens_have_the_same_distribution(plain, figures, kind, request):
    name, options = SAMPLING[kind]
    engine, prompt = request.getfixturevalue(name), likely_prompt(plain)

    def sample(engine, first_seed):
        params = [
            SamplingParams(max_tokens=4, seed=first_seed + number, ignore_eos=True, **options)
            for number in range(SAMPLES)
        ]
        return engine.tokens([prompt] * SAMPLES, params)

    expected, other = sample(plain, 0), sample(plain, 10**6)
    with counted(engine, figures):
        got = sample(engine, 2 * 10**6)
    figures["requests"], figures["tokens"] = SAMPLES, sum(map(len, got))
    places = [slice(at, at + 1) for at in (1, 2, 3)] + [slice(1, 3)]  # the last: pairs of tokens
    figures["total variation"] = [total_variation(expected, got, at) for at in places]
    figures["total variation without drafts"] = [
        total_variation(expected, other, at) for at in places
    ]
    figures["p of chi-square"] = [chi_square(expected, got, at) for at in places]
    assert min(figures["p of chi-square"]) > 0.001


def likely_prompt(plain):
    """Return a prompt with greedy text of the model twice, so that samples often follow it."""
    text = plain.tokens([[5, 9, 77]], greedy(24))[0]
    return [5, 9, 77, *text, 11, *text[:20]]


def counts_of(samples, place):
    return Counter(tuple(one[place]) for one in samples)


def total_variation(expected, got, place):
    one, other = counts_of(expected, place), counts_of(got, place)
    return round(sum(abs(one[key] - other[key]) for key in one | other) / (2 * len(got)), 4)


def chi_square(expected, got, place):
    """Return the p-value of two samples from one distribution; rare tokens count as one."""
    from scipy.stats import chi2_contingency

    one, other = counts_of(expected, place), counts_of(got, place)
    often = [key for key in one | other if one[key] + other[key] >= 20]
    table = [[sample[key] for key in often] for sample in (one, other)]
    rare = [len(got) - sum(row) for row in table]
    if sum(rare) >= 20:
        table = [[*row, rest] for row, rest in zip(table, rare, strict=True)]
    return round(float(chi2_contingency(table).pvalue), 4)
