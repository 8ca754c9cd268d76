"""Drafting changes how fast tokens come, never which tokens."""

import random

import pytest
from fakes import RandomDrafter, ScriptedVerifier, decode_plainly

from ragaccel.decoding import Drafter, DraftTree, NoDrafter, Reference, Request, Session
from ragaccel.drafting import (
    CopyDrafter,
    History,
    Mixture,
    PaperSpaceDrafter,
    SpaceDrafter,
    TrieDrafter,
)


class EndsWith:
    """Ends the answer at the first of some token sequences, as a stop string would."""

    def __init__(self, *endings):
        self.endings = endings

    def cut(self, token_ids, start):
        for keep in range(start + 1, len(token_ids) + 1):
            if any(tuple(token_ids[:keep][-len(e) :]) == e for e in self.endings):
                return keep
        return None


class SumDivides:
    """Ends the answer when the sum of its tokens is a multiple of ``n``."""

    def __init__(self, n):
        self.n = n

    def cut(self, token_ids, start):
        ends = (k for k in range(start + 1, len(token_ids) + 1) if sum(token_ids[:k]) % self.n == 0)
        return next(ends, None)


class Far(Drafter):
    """Drafts tokens that are outside every vocabulary."""

    mask_ids = (0, 1)

    def __init__(self, token):
        self.token = token

    def draft(self, context, budget):
        return DraftTree.chain([context.token_ids[-1], self.token, 3][: 1 + budget])


class LyingVerifier(ScriptedVerifier):
    """Under mask tokens, shows right tokens, wrong tokens or nothing."""

    random = random.Random(0)

    def predictions_at(self, tree):
        return [
            self.random.choice([row, [(self.random.randrange(89), self.random.random())], []])
            for row in super().predictions_at(tree)
        ]


class MaskDrafter(RandomDrafter):
    mask_ids = (0, 1)


class RankingDrafter(RandomDrafter):
    """Drafts the model's next likeliest tokens of the last pass, and requests more of them."""

    num_alternatives = 3

    def draft(self, context, budget):
        if context.last is None or not context.last.sampled.alternatives:
            return super().draft(context, budget)
        ranked = [token for row in context.last.sampled.alternatives for token in row]
        return DraftTree.chain([context.token_ids[-1], *ranked[: self.random.randint(0, budget)]])


def random_target(rng, vocab):
    """A function of the last few tokens that sometimes quotes, so that some drafts are good."""
    order, seed = rng.randrange(1, 4), rng.random()

    def next_token(context):
        return random.Random(str((seed, context[-order:]))).randrange(vocab)

    return next_token


def random_request(rng, vocab, next_token):
    def tokens(longest, shortest=0):
        return [rng.randrange(vocab) for _ in range(rng.randrange(shortest, longest))]

    prompt = tokens(40, 1)
    future = list(prompt)
    for _ in range(60):
        future.append(next_token(future))
    quotes = [future[start : start + 20] for start in rng.sample(range(len(future)), 1)]
    references = [Reference(tuple(t), rng.random()) for t in (*quotes, tokens(50), tokens(5))]
    rules = [EndsWith(tuple(tokens(4, 1)), tuple(tokens(3, 1))), SumDivides(rng.randrange(20, 90))]
    most = rng.randrange(1, 70)
    return Request(
        tuple(prompt),
        tuple(references),
        max_new_tokens=most,
        min_new_tokens=rng.choice([0, 0, rng.randrange(most + 1)]),
        eos_ids=frozenset(rng.sample(range(vocab), rng.choice([0, 0, 1, 2]))),
        stop_rules=tuple(rng.sample(rules, rng.choice([0, 0, 1, 2]))),
    )


def past(rng, vocab):
    history = History(rng.choice([1024, 1 << 20]))
    for _ in range(rng.randrange(5)):
        history.add(*([rng.randrange(vocab) for _ in range(rng.randrange(60))] for _ in "pa"))
    return history


DRAFTERS = {
    "none": lambda rng, vocab: NoDrafter(),
    "nonsense": lambda rng, vocab: RandomDrafter(rng.random(), vocab),
    "probing": lambda rng, vocab: MaskDrafter(rng.random(), vocab),
    "copy": lambda rng, vocab: CopyDrafter(
        min_n=rng.randrange(1, 4), max_length=rng.randrange(1, 40)
    ),
    "paper": lambda rng, vocab: CopyDrafter.paper(rng.randrange(1, 4), rng.randrange(2, 30)),
    "trie": lambda rng, vocab: TrieDrafter(
        decoding_length=rng.randrange(1, 70),
        branch_length=rng.randrange(1, 30),
        mode=rng.choice(["hierarchical", "parallel", "one"]),
        past=past(rng, vocab),
    ),
    "ranking": lambda rng, vocab: RankingDrafter(rng.random(), vocab),
    "mixture": lambda rng, vocab: Mixture(
        TrieDrafter(past=past(rng, vocab)),
        RankingDrafter(rng.random(), vocab),
        MaskDrafter(rng.random(), vocab),
    ),
    "far": lambda rng, vocab: Mixture(TrieDrafter(), Far(rng.choice([1 << 31, 1 << 70]))),
    "space": lambda rng, vocab: SpaceDrafter((90, 91, 92)),
    "paper's space": lambda rng, vocab: PaperSpaceDrafter((90, 91, 92)),
    "space and copies": lambda rng, vocab: Mixture(CopyDrafter(), SpaceDrafter((90, 91, 92))),
    "space and nonsense": lambda rng, vocab: Mixture(
        RandomDrafter(rng.random(), vocab), SpaceDrafter((90, 91, 92))
    ),
    "paper's space and nonsense": lambda rng, vocab: Mixture(
        RandomDrafter(rng.random(), vocab), PaperSpaceDrafter((90, 91, 92))
    ),
}


SEEDS = {"some": range(80), "many": range(80, 500)}


@pytest.mark.parametrize("seeds", ["some", pytest.param("many", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_tokens_are_those_of_plain_decoding(name, seeds):
    for seed in SEEDS[seeds]:
        check_one(name, seed)


def check_one(name, seed):
    rng = random.Random(f"{name} {seed}")
    vocab = rng.choice([2, 5, 11, 50])
    next_token = random_target(rng, vocab)
    request = random_request(rng, vocab, next_token)
    costs = sorted(rng.random() + 0.01 for _ in range(65))
    drafter = DRAFTERS[name](rng, vocab)
    fewest = max(3, 1 + len(drafter.mask_ids))
    verifier = LyingVerifier(next_token, rng.randrange(fewest, 65), costs.__getitem__)
    budget = rng.choice([None, None, 0, rng.randrange(64)])
    session = Session(verifier, drafter, request, token_budget=budget)

    steps = list(session)
    result = session.result()

    expected = decode_plainly(next_token, request)
    assert (result.token_ids, result.finish_reason) == expected
    assert result.token_ids == tuple(token for step in steps for token in step.token_ids)
    assert tuple(verifier.cached) == (*request.prompt_ids, *result.token_ids)[:-1]
    assert tuple(session.token_ids) == (*request.prompt_ids, *result.token_ids)
    assert verifier.largest_tree <= verifier.max_rows
    stats = result.stats
    assert stats.new_tokens == len(result.token_ids)
    assert stats.verify_passes == len(steps) > 0
    assert stats.accepted_tokens == sum(stats.accepted_by_source.values())
    assert stats.accepted_tokens == sum(step.num_accepted for step in steps)
    assert stats.new_tokens - stats.accepted_tokens in (len(steps), len(steps) - 1)
    assert all(len(step.origins) == len(step.token_ids) for step in steps)
