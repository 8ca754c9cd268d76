import random

from seeds import each_seed

from ragaccel.decoding import Context, Reference
from ragaccel.drafting import (
    MAX_CANDIDATES,
    MAX_N,
    SEQUEL_RANGE,
    FirstMatchIndex,
    NgramIndex,
    NgramMatch,
    sort_positions,
)


class PlainIndex:
    """The index in plain loops over all texts: slow, but simple."""

    def __init__(self, context):
        self.context, self.last, self.copied_to, self.seen = context, None, None, None
        self.positions, self.tokens = [], [-1] * 32
        for reference in sorted(context.references, key=lambda r: -r.weight):
            self.tokens += [-1, *reference.token_ids]
        self.tokens.append(-1)
        self.text_start = len(self.tokens)
        self.prompt_end = self.text_start + context.num_prompt

    def find(self, min_n=1, max_n=MAX_N):
        tokens = self.tokens[: self.text_start] + self.context.token_ids
        self._follow(tokens)
        running = len(self.context.token_ids)
        lengths = {p: self._agree(tokens, p) for p in range(33, len(tokens)) if tokens[p] != -1}
        bound = min(max_n, MAX_N, running)
        length = min(bound, max(lengths.values(), default=0))
        if length < max(1, min_n):
            return None
        output = [p for p in lengths if p >= self.prompt_end and lengths[p] >= length][-1:]
        found = [p for p in lengths if p < self.prompt_end and lengths[p] >= length] + output
        if length == MAX_N and len(found) > 1:
            found = found[:MAX_CANDIDATES]
            for n in (16, 32):
                found = [p for p in found if lengths[p] >= n] or found
        position = self._choose(found)
        if length == MAX_N and max_n >= MAX_N:
            length = lengths[position]
        self.last = NgramMatch(length, position)
        return self.last

    def _agree(self, tokens, position):
        n = 0
        while n < 32 and tokens[position - 1 - n] == tokens[-1 - n] != -1:
            n += 1
        return n

    def _follow(self, tokens):
        if self.seen is not None and len(tokens) > self.seen:
            gained = len(tokens) - self.seen
            if self.last and tokens[self.last.position] == tokens[self.seen]:
                self.copied_to = self.last.position + gained
            elif self.copied_to is not None:
                self.copied_to += gained
        if self.seen is None or len(tokens) > self.seen:
            self.last = None
        self.seen = len(tokens)

    def _choose(self, found):
        if len(found) > 1 and self.copied_to is not None:
            near = [p for p in found if SEQUEL_RANGE[0] <= p - self.copied_to < SEQUEL_RANGE[1]]
            if near:
                return min(near)
        return found[0] if found[0] < self.text_start else found[-1]


def random_case(rng):
    vocab = rng.choice([2, 3, 20, 1000, 2**40])
    text = [rng.randrange(vocab) for _ in range(rng.randrange(1, 120))]

    def piece(longest):
        if rng.random() < 0.5:
            start = rng.randrange(len(text))
            return text[start : start + rng.randrange(longest)]
        return [rng.randrange(vocab) for _ in range(rng.randrange(longest))]

    references = [
        Reference(tuple(piece(90)), rng.choice([0.2, 0.5, 1.0]), f"p{i}")
        for i in range(rng.randrange(5))
    ]
    return references, (piece(60) or [0]), [piece(12) for _ in range(12)]


@each_seed(400)
def test_finds_what_plain_loops_find(seed):
    rng = random.Random(seed)
    references, prompt, blocks = random_case(rng)
    context = Context(prompt, references)
    fast, plain = NgramIndex(context), PlainIndex(context)
    for block in blocks:
        min_n = rng.choice([1, 1, 1, 2, 4])
        max_n = rng.choice([MAX_N, MAX_N, 5])
        found = fast.find(min_n, max_n)
        assert found == plain.find(min_n, max_n)
        if found:
            assert (
                fast.texts.token_ids[found.position - found.length : found.position]
                == (context.token_ids[-found.length :])
            )
        context.token_ids += block


@each_seed(60)
def test_positions_are_sorted_by_what_precedes_them(seed):
    rng = random.Random(seed)
    vocab = rng.choice([2, 50, 40_000, 2**45])
    tokens = [rng.choice([-1, *(rng.randrange(vocab) for _ in range(9))]) for _ in range(300)]
    positions = sort_positions(tokens).tolist()
    inside = [p for p in range(len(tokens)) if tokens[p] != -1 and (p == 0 or tokens[p - 1] != -1)]
    assert sorted(positions) == inside
    before = [tokens[max(0, p - MAX_N) : p][::-1] for p in positions]
    assert before == sorted(before)


def test_of_long_matches_the_one_that_agrees_furthest_is_copied():
    text = tuple(range(100, 140))
    shorter, longer = Reference((*text[30:], 7), 1.0), Reference((*text[10:], 8), 0.1)
    index = NgramIndex(Context(text, [shorter, longer]))
    assert index.texts.tokens_from(index.find().position, 1) == [8]


def test_the_output_is_copied_from_and_the_latest_first():
    context = Context([3], ())
    index = NgramIndex(context)
    assert index.find() is None
    context.token_ids += [1, 2, 4, 1, 5, 6, 1]
    match = index.find()
    assert index.texts.tokens_from(match.position, 2) == [5, 6]
    origin = index.texts.origins(match, 2)[1][0]
    assert (origin.source, origin.match_length, origin.offset) == ("output", 2, 6)


class PlainPaper:
    """LLMA's lookup, written from its description with strings and lists."""

    def __init__(self, context):
        self.context = context
        self.docs = [list(map(str, r.token_ids[:768])) for r in context.references]

    def find(self, n):
        output = list(map(str, self.context.token_ids[self.context.num_prompt :]))
        for length in range(5, n - 1, -1):
            if len(output) < length:
                continue
            for doc in self.docs:
                for j in range(len(doc) - length + 1):
                    if doc[j : j + length] == output[-length:]:
                        return length, [int(t) for t in doc[j + length : j + length + 19]]
        return None


@each_seed(100)
def test_the_papers_index_finds_what_the_paper_finds(seed):
    rng = random.Random(seed)
    references, prompt, blocks = random_case(rng)
    context = Context(prompt, references)
    ours, plain, n = FirstMatchIndex(context), PlainPaper(context), rng.choice([1, 1, 2])
    for block in blocks:
        match, expected = ours.find(n, 5), plain.find(n)
        assert (match is None) == (expected is None)
        if match:
            assert (match.length, ours.texts.tokens_from(match.position, 19)) == expected
        context.token_ids += block
