import random

import pytest
from fakes import ScriptedVerifier
from seeds import each_seed

from ragaccel.decoding import Context, Origin, Reference, Request, Session, check_tree
from ragaccel.drafting import CopyDrafter, path_probs
from ragaccel.errors import ConfigurationError

PASSAGE = Reference(tuple(range(100, 160)), 1.0, "p1")


def test_copies_what_follows_the_match_and_says_from_where():
    tree = CopyDrafter(max_length=3).draft(Context([1, 2, 110, 111], [PASSAGE]), 9)
    check_tree(tree, 111, 3)
    assert tree.token_ids == (111, 112, 113, 114)
    assert tree.is_chain
    assert tree.origins[1:] == tuple((Origin("reference", 2 + i, "p1", 12 + i),) for i in range(3))


def test_copies_no_more_than_the_budget_and_the_text_hold():
    drafter, context = CopyDrafter(), Context([157], [PASSAGE])
    assert drafter.draft(context, 9).token_ids == (157, 158, 159)
    assert drafter.draft(context, 1).token_ids == (157, 158)
    assert drafter.draft(context, 0).token_ids == (157,)


def test_drafts_nothing_without_a_match():
    assert CopyDrafter().draft(Context([1, 2], [PASSAGE]), 9).token_ids == (2,)
    assert CopyDrafter(min_n=2).draft(Context([1, 110], [PASSAGE]), 9).token_ids == (110,)


def test_the_first_token_can_be_a_copied_one():
    context = Context([1, 2, 3, 1, 2])
    tree = CopyDrafter().draft(context, 2)
    assert tree.token_ids == (2, 3, 1)
    assert tree.origins[1][0].source == "prompt"


def test_chances_fall_along_the_copy_and_rise_with_the_match():
    for count in range(40):
        chances = [path_probs(length, count) for length in range(1, 33)]
        assert all(len(c) == count + 1 and c[0] == 1.0 for c in chances)
        assert all(list(c) == sorted(c, reverse=True) for c in chances)
        assert chances == sorted(chances)


@pytest.mark.parametrize(
    "settings", [{"min_n": 0}, {"min_n": 3, "max_n": 2}, {"max_n": 99}, {"max_length": 0}]
)
def test_settings_that_cannot_match_are_refused(settings):
    with pytest.raises(ConfigurationError):
        CopyDrafter(**settings)


def test_the_paper_copies_nineteen_tokens_of_the_first_occurrence():
    first = Reference((7, *range(200, 240)))
    best = Reference((5, 6, 7, *range(300, 340)), weight=2.0)
    context = Context([5, 6, 7], [first, best])
    drafter = CopyDrafter.paper()
    assert drafter.draft(context, 60).token_ids == (7,), "the prompt is not matched"
    context.token_ids += [7]
    assert drafter.draft(context, 60).token_ids == (7, *range(200, 219))
    context.token_ids += [5, 6, 7]
    assert drafter.draft(context, 60).token_ids == (7, *range(300, 319))


def test_the_paper_cuts_references_at_768_tokens():
    reference = Reference(tuple(range(1000)))
    context = Context([1], [reference])
    context.token_ids += [766]
    assert CopyDrafter.paper().draft(context, 60).token_ids == (766, 767)
    context.token_ids += [767]
    assert CopyDrafter.paper().draft(context, 60).token_ids == (767,)
    context.token_ids += [768]
    assert CopyDrafter.paper().draft(context, 60).token_ids == (768,)


def passes_of_the_paper(passages, answer, n, k):
    """Count the passes of LLMA's rules by themselves: look up 5 to n tokens, copy k - 1."""

    def copied(output):
        for length in range(min(5, len(output)), n - 1, -1):
            for passage in passages:
                for start in range(min(len(passage), 768) - length + 1):
                    if passage[start : start + length] == output[-length:]:
                        return passage[:768][start + length : start + length + k - 1]
        return []

    said, passes, drafted = 0, 0, 0
    while said < len(answer):
        draft, right = copied(answer[:said]), 0
        while draft[right : right + 1] and draft[right : right + 1] == answer[said + right :][:1]:
            right += 1
        said, passes, drafted = said + right + 1, passes + 1, drafted + len(draft)
    return passes, drafted


@each_seed(12)
def test_the_paper_takes_the_passes_of_its_published_rules(seed):
    rng = random.Random(seed)
    passages = [rng.choices(range(10, 40), k=rng.choice((3, 40, 900))) for _ in range(4)]
    answer = []
    for _ in range(12):
        passage = rng.choice(passages)
        start = rng.randrange(len(passage))
        answer += passage[start : start + rng.randint(1, 30)] + rng.choices(range(10, 50), k=2)
    answer.append(1)
    text = [*answer, *[0] * 20]  # where draft tokens are wrong
    for n, k in ((1, 20), (1, 15), (2, 20), (3, 5), (5, 2)):
        verifier = ScriptedVerifier(lambda context: text[len(context) - 2])
        request = Request(
            (0, 5),
            tuple(Reference(tuple(one)) for one in passages),
            max_new_tokens=len(answer) + k,
            eos_ids=frozenset((1,)),
        )
        session = Session(verifier, CopyDrafter.paper(n, k), request, token_budget=k - 1)
        list(session)
        assert session.result().token_ids == tuple(answer)
        counted = (session.stats.verify_passes, session.stats.draft_tokens)
        assert counted == passes_of_the_paper(passages, answer, n, k)


def test_a_quoted_passage_takes_few_passes():
    answer = [110, *range(111, 150), 1, 2]
    verifier = ScriptedVerifier(lambda context: answer[len(context) - 3])
    request = Request((1, 2, 109), (PASSAGE,), max_new_tokens=len(answer))
    session = Session(verifier, CopyDrafter(), request)
    list(session)
    assert session.result().token_ids == tuple(answer)
    assert session.stats.verify_passes <= 5
    assert session.stats.accepted_by_source["reference"] >= 36
