"""Stand-ins for the slow parts: no torch, no model, no network."""

from __future__ import annotations

import random
from itertools import pairwise

from ragaccel.decoding import Drafter, DraftTree, Origin, SampledTokens, Verifier
from ragaccel.models import SpecialTokenEscaper


class ScriptedVerifier(Verifier):
    """A target model given as a function from all token ids so far to the next one."""

    def __init__(self, next_token, max_rows=64, cost_seconds=lambda rows: 1.0):
        self.next_token, self.max_rows, self.cost_seconds = next_token, max_rows, cost_seconds
        self.cached, self.tree, self.largest_tree, self.closed = [], None, 0, False

    def prefill(self, request):
        self.cached = list(request.prompt_ids[:-1])

    def verify(self, tree, num_alternatives=0):
        assert self.tree is None, "commit before the next verify"
        self.tree, self.largest_tree = tree, max(self.largest_tree, len(tree))
        paths = [[tree.token_ids[i] for i in tree.path(node)] for node in range(len(tree))]
        next_ids = [self.next_token(self.cached + path) for path in paths]
        near = range(1, num_alternatives + 1)
        others = [[token + i for i in near] for token in next_ids] if near else ()
        return SampledTokens(next_ids, others, mask_predictions=self.predictions_at(tree))

    def predictions_at(self, tree):
        """What the mask tokens under a node show: the text that comes, and something else."""
        first, found = len(tree) - tree.num_masks, []
        for mask in range(first, len(tree)):
            path = tree.path(mask)
            text = self.cached + [tree.token_ids[node] for node in path if node < first]
            for _ in range(sum(node >= first for node in path) + 1):
                text.append(self.next_token(text))
            found.append([(text[-1], 0.6), (text[-1] + 1, 0.2)])
        return found

    def commit(self, path):
        assert all(self.tree.parents[b] == a for a, b in pairwise(path))
        self.cached += [self.tree.token_ids[node] for node in path]
        self.tree = None

    def close(self):
        self.closed = True


class RecordingVerifier(ScriptedVerifier):
    """Keeps the trees it verified."""

    def __init__(self, next_token, **settings):
        super().__init__(next_token, **settings)
        self.trees = []

    def verify(self, tree, num_alternatives=0):
        self.trees.append(tree)
        return super().verify(tree, num_alternatives)


class RandomDrafter(Drafter):
    """Drafts random trees: decoding must stay lossless whatever the draft."""

    def __init__(self, seed, vocab_size):
        self.random, self.vocab_size = random.Random(seed), vocab_size

    def draft(self, context, budget):
        tokens, parents, probs = [context.token_ids[-1]], [-1], [1.0]
        used = set()
        for _ in range(self.random.randint(0, budget)):
            parent = self.random.choice([len(tokens) - 1, self.random.randrange(len(tokens))])
            token = self.random.randrange(self.vocab_size)
            if (parent, token) not in used:
                used.add((parent, token))
                tokens.append(token)
                parents.append(parent)
                probs.append(probs[parent] * self.random.random())
        origins = ((), *[(Origin("random", 0),)] * (len(tokens) - 1))
        return DraftTree(tuple(tokens), tuple(parents), tuple(probs), origins)


class FakeTokenizer:
    """What every fake tokenizer makes of a chat and its documents."""

    escaper = SpecialTokenEscaper([])
    has_chat_template, takes_documents, takes_tools = True, False, False
    begin, turn, end = "", "{role}: {content}\n", "assistant:"

    def chat_text(self, messages, documents=None, add_generation_prompt=True, **tools_and_options):
        text, number = self.begin, 0
        for index, document in enumerate(documents or [], start=1):
            text += "<passage> " + document["title"]
            for sentence in document["sentences"]:
                number += 1
                text += f"<s{number}> {sentence} [{index}]<s{number}>"
        text += "".join(self.turn.format(**message) for message in messages)
        return text + self.end * add_generation_prompt


class ByteTokenizer(FakeTokenizer):
    """UTF-8 bytes as token ids, the ends of text and turn above them."""

    eos_ids, vocab_size = frozenset({256}), 258
    special_tokens = ()

    def encode(self, text, add_special_tokens=False):
        return list(text.encode())

    def encode_with_offsets(self, text, add_special_tokens=False):
        spans = [(i, i + 1) for i, c in enumerate(text) for _ in c.encode()]
        return self.encode(text), spans

    def decode(self, token_ids, skip_special_tokens=True):
        return bytes(t for t in token_ids if t < 256).decode(errors="replace")

    def chat(self, messages, documents=None, add_generation_prompt=True, **tools_and_options):
        text = self.chat_text(messages, documents, add_generation_prompt, **tools_and_options)
        return self.encode(text)


def decode_plainly(next_token, request):
    """One token at a time, each stop rule asked after each: what every session must equal."""
    answer = []
    while len(answer) < request.max_new_tokens:
        answer.append(next_token([*request.prompt_ids, *answer]))
        if answer[-1] in request.eos_ids:
            return tuple(answer), "stop"
        if any(rule.cut(answer, len(answer) - 1) is not None for rule in request.stop_rules):
            return tuple(answer), "stop"
    return tuple(answer), "length"
