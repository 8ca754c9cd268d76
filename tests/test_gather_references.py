import pytest
import small_tokenizers
from tiny_llm import say, tiny_llm

from ragaccel.decoding import Reference
from ragaccel.errors import ConfigurationError
from ragaccel.frameworks import ReferenceRegistry, gather_references
from ragaccel.models import Tokenizer
from ragaccel.passage import Passage
from ragaccel.prompt import as_passages, make_references

FERRY = Passage(
    "ferry", "The ferry to the island leaves at seven in the morning.", path="a.md", score=0.7
)
FARES = Passage("fares", "A ticket is four crowns, there and back six.", path="a.md", start=99)
KEEPER = Passage("keeper", "The keeper of the light writes down every ship.", path="b.md")
PROMPT = f"[1] {FERRY.text}\n\n[2] {KEEPER.text}\n\nWhen does it leave?"
TOKENIZER = Tokenizer(small_tokenizers.byte_level())


class Untouched:
    """A tokenizer that must not be used."""


def gathered(text=PROMPT, given=(), registered=(FERRY, FARES, KEEPER), **options):
    registry = ReferenceRegistry()
    registry.register(registered)
    options = {"registry": registry, "tokenizer": TOKENIZER, **options}
    return gather_references(text, given, **options)


def test_passages_come_in_the_prompts_order_and_adjacent_chunks_as_tokens():
    ferry, keeper, *near = gathered()
    assert (ferry, keeper) == (FERRY, KEEPER)
    assert {type(one) for one in near} == {Reference}
    assert {one.passage_id for one in near} == {"fares"}
    tokens = TOKENIZER.encode(FARES.text, add_special_tokens=False)
    assert near[0].token_ids == tuple(tokens)
    assert as_passages([ferry, keeper, *near]) == [FERRY, KEEPER]  # adjacent chunks are not cited


def test_retrieved_passages_outside_the_prompt_share_the_token_budget():
    other = Passage("other", "The chandler sells rope by the fathom, and tar.")
    assert gathered(KEEPER.text, retrieved=[other, KEEPER]) == [KEEPER, other]
    assert gathered(KEEPER.text, retrieved=[other], registry=None) == []
    room = len(KEEPER.text) // 4 + 1
    assert gathered(KEEPER.text, retrieved=[other], max_tokens=room) == [KEEPER]
    assert gathered("Nothing.", [FERRY], retrieved=[other], max_tokens=2) == [FERRY]
    with pytest.raises(ConfigurationError, match="int"):
        gathered(retrieved=[7])


def test_adjacent_chunks_weigh_less_than_passages_in_the_prompt():
    weights = {"keeper": [], "fares": [], "ferry": []}
    for reference in make_references(gathered(), TOKENIZER, None):
        weights[reference.passage_id].append(reference.weight)
    assert max(weights["fares"]) < min(weights["keeper"])


def test_what_is_not_in_the_prompt_is_not_used():
    assert gathered("When does the ferry leave?") == gathered(namespace="other") == []
    assert {one.passage_id for one in gathered(FERRY.text)} == {"ferry", "fares"}
    assert gathered(adjacent_chunks=False, tokenizer=Untouched()) == [FERRY, KEEPER]
    assert gathered(KEEPER.text, tokenizer=Untouched()) == [KEEPER]


def test_what_is_given_comes_first_and_the_same_content_once():
    own = Passage("mine", FERRY.text.replace(" ", "\n"))
    tokens = Reference((1, 2, 3), 1.0, "own")
    given = [tokens, "Some text.", own, "Some  text. ", Reference((1, 2, 3))]
    found = gathered(given=given, adjacent_chunks=False)
    assert found == [tokens, "Some text.", own, KEEPER]
    for one in (FARES, FARES.text):
        assert gathered(given=[one], registered=[FERRY, FARES]) == [one, FERRY]
        assert gathered(given=[one], registry=None, tokenizer=Untouched()) == [one]


def test_given_references_stay_and_the_others_share_the_tokens_left():
    small = Passage("small", "A light. A ship. A light again.")
    text = f"{PROMPT} {small.text}"
    sizes = [len(passage.text) / 4 for passage in (FERRY, KEEPER, small, FARES)]
    for max_tokens, given, expected in (
        (0, [], set()),
        (0, ["Stays."], {"Stays."}),
        (sizes[0], [], {"ferry"}),
        (sizes[0] + sizes[2], [], {"ferry", "small"}),  # a smaller one takes what is left
        (sum(sizes[:3]), [], {"ferry", "keeper", "small"}),
        (sum(sizes), [], {"ferry", "keeper", "small", "fares"}),
        (sum(sizes), ["Takes room."], {"Takes room.", "ferry", "keeper", "small"}),
    ):
        registered = [FERRY, FARES, KEEPER, small]
        found = gathered(text, given, registered=registered, max_tokens=max_tokens)
        names = {one if isinstance(one, str) else one.passage_id for one in found}
        assert names == expected, max_tokens


def test_what_is_no_list_of_references_is_refused():
    for given in ("text", KEEPER, [3], [b"text"], [[KEEPER]]):
        with pytest.raises(ConfigurationError, match="reference"):
            gathered(given=given)


def test_a_model_answers_the_same_and_cites_only_what_stands_in_the_prompt():
    llm = tiny_llm()
    text = f"{FERRY.text} {FARES.text}"
    options = {"max_new_tokens": 80, "logits_processors": [say(llm, PROMPT, text)]}
    answers = [
        llm.generate(PROMPT, references=references, **options)
        for references in ([], gathered(tokenizer=llm.tokenizer))
    ]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[1].text.startswith(FERRY.text)
    assert {span.passage_id for span in answers[1].copied_spans} == {"ferry"}
