"""Draft tokens outside the vocabulary are removed before any logits processor sees them."""

import random

import pytest
import torch
from hypothesis import given, strategies as st
from tiny_llm import tiny_tokenizer
from tiny_models import make_tiny_model
from transformers import RepetitionPenaltyLogitsProcessor

from ragaccel import CopyDrafter, TrieDrafter
from ragaccel.decoding import Drafter, DraftTree, NoDrafter, Reference, check_tree, limit_vocabulary
from ragaccel.drafting import JIT_WARMUP
from ragaccel.llm import LLM

VOCAB, NEW = 380, 20
PROMPT = [random.Random(1).randrange(10, VOCAB) for _ in range(20)]


class Lowering:
    """A processor of a caller's that looks the score of the last token up, and checks all."""

    def __init__(self, vocab_size=VOCAB):
        self.vocab_size = vocab_size

    def __call__(self, ids, scores):
        assert int(ids.max()) < self.vocab_size
        scores = scores.clone()
        scores[:, ids[0, -1]] -= 1.0
        return scores


class Impossible(Drafter):
    """Drafts right tokens, then one outside the vocabulary, then more."""

    def __init__(self, known):
        self.known, self.token = known, VOCAB + 3

    def draft(self, context, budget):
        at = len(context.token_ids)
        self.token = 2**40 if self.token < 2**40 else VOCAB + 3
        known = [*self.known[at : at + 3], self.token, *self.known[at + 3 : at + 5]]
        return DraftTree.chain([context.token_ids[-1], *known[:budget]])


@pytest.fixture(scope="module")
def model():
    return make_tiny_model("llama", vocab_size=VOCAB)


DRAFTERS = {
    "default": lambda known: None,
    "copy": lambda known: CopyDrafter(),
    "trie": lambda known: TrieDrafter(),
    "own": Impossible,
}


@pytest.mark.parametrize("processor", [Lowering(), RepetitionPenaltyLogitsProcessor(1.2)])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_processor_sees_them(model, drafter, processor):
    JIT_WARMUP.wait()
    llm = LLM(model, tiny_tokenizer(), save_measurements=False)
    settings = {"max_new_tokens": NEW, "logits_processors": [processor]}
    plain = llm.generate(PROMPT, drafter=NoDrafter(), **settings).token_ids
    wild = (VOCAB, VOCAB + 7, 2**31 - 1, 2**40)
    references = [Reference((*PROMPT[-4:], *plain[:8], token, *plain[8:])) for token in wild]
    chosen = DRAFTERS[drafter]([*PROMPT, *plain])
    for _ in range(2):
        found = llm.generate(PROMPT, references=references, drafter=chosen, **settings)
        assert found.token_ids == plain
        assert found.stats.accepted_tokens


def test_nor_what_a_memory_of_another_model_holds(model):
    JIT_WARMUP.wait()
    llm = LLM(model, tiny_tokenizer(), save_measurements=False)
    settings = {"max_new_tokens": NEW, "logits_processors": [Lowering()]}
    plain = llm.generate(PROMPT, drafter=NoDrafter(), **settings).token_ids
    llm.memory.of("").remember([*PROMPT, *plain[:5]], [VOCAB, VOCAB + 1, *plain[5:]])
    assert llm.generate(PROMPT, **settings).token_ids == plain


def test_nor_tokens_that_are_read_and_never_chosen():
    """An embedding may be wider than the scores."""
    model = make_tiny_model("llama", vocab_size=VOCAB)
    model.lm_head = torch.nn.Linear(32, VOCAB - 30, bias=False, dtype=torch.float64)
    torch.nn.init.normal_(model.lm_head.weight)
    llm = LLM(model, tiny_tokenizer(), save_measurements=False)
    prompt = [token % (VOCAB - 30) for token in PROMPT]
    settings = {"max_new_tokens": NEW, "logits_processors": [Lowering(VOCAB - 30)]}
    plain = llm.generate(prompt, drafter=NoDrafter(), **settings).token_ids
    reference = Reference((*prompt[-4:], *plain[:3], VOCAB - 5, *plain[3:]))
    found = llm.generate(prompt, references=[reference], drafter=CopyDrafter(), **settings)
    assert found.token_ids == plain


@given(st.data())
def test_what_is_left_is_a_tree_of_the_others(data):
    n = data.draw(st.integers(1, 20))
    parents = (-1, *(data.draw(st.integers(0, node - 1)) for node in range(1, n)))
    tokens = (3, *(100 * (node % 3 == 0) + node for node in range(1, n)))
    tree = DraftTree(tokens, parents, (1.0,) * n, ((),) * n)
    limit = data.draw(st.sampled_from([30, 100, 200]))
    found = limit_vocabulary(tree, limit)
    check_tree(found, 3, n)
    whole = [node for node in range(n) if all(tokens[i] < limit for i in tree.path(node)[1:])]
    paths = {tuple(tokens[i] for i in tree.path(node)) for node in whole}
    assert {tuple(found.token_ids[i] for i in found.path(k)) for k in range(len(found))} == paths
    assert len(found) == len(whole)
