import pytest
from fakes import ScriptedVerifier

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


@pytest.mark.parametrize(
    ("settings", "prompt", "budget", "drafted"),
    [
        ({}, [157], 9, (158, 159)),  # the text ends
        ({}, [157], 1, (158,)),
        ({}, [157], 0, ()),
        ({}, [1, 2], 9, ()),  # no match
        ({"min_n": 2}, [1, 110], 9, ()),
        ({}, [1, 2, 3, 1, 2], 2, (3, 1)),  # from the prompt
    ],
)
def test_copies_no_more_than_the_match_the_budget_and_the_text_hold(
    settings, prompt, budget, drafted
):
    tree = CopyDrafter(**settings).draft(Context(prompt, [PASSAGE]), budget)
    assert tree.token_ids == (prompt[-1], *drafted)


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
    context = Context([1], [Reference(tuple(range(1000)))])
    for token, drafted in ((766, (767,)), (767, ()), (768, ())):
        context.token_ids += [token]
        assert CopyDrafter.paper().draft(context, 60).token_ids == (token, *drafted)


def test_a_quoted_passage_takes_few_passes():
    answer = [110, *range(111, 150), 1, 2]
    verifier = ScriptedVerifier(lambda context: answer[len(context) - 3])
    request = Request((1, 2, 109), (PASSAGE,), max_new_tokens=len(answer))
    session = Session(verifier, CopyDrafter(), request)
    list(session)
    assert session.result().token_ids == tuple(answer)
    assert session.stats.verify_passes <= 5
    assert session.stats.accepted_by_source["reference"] >= 36
