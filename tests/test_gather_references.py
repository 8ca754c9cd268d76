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
    made = make_references(gathered(), TOKENIZER, None)
    weights = {
        name: [r.weight for r in made if r.passage_id == name] for name in ("keeper", "fares")
    }
    assert max(weights["fares"]) < min(weights["keeper"])


def test_adjacent_chunks_can_be_switched_off_and_then_nothing_is_tokenized():
    assert gathered(adjacent_chunks=False, tokenizer=Untouched()) == [FERRY, KEEPER]
    assert gathered(KEEPER.text, tokenizer=Untouched()) == [KEEPER]


def test_a_document_of_which_nothing_is_in_the_prompt_is_never_used():
    assert gathered("When does the ferry leave?") == []
    assert {one.passage_id for one in gathered(FERRY.text)} == {"ferry", "fares"}


def test_namespaces_are_separate():
    assert gathered(namespace="other") == []


def test_what_is_given_comes_first_and_the_same_content_once():
    own = Passage("mine", FERRY.text.replace(" ", "\n"))
    tokens = Reference((1, 2, 3), 1.0, "own")
    given = [tokens, "Some text.", own, "Some  text. ", Reference((1, 2, 3))]
    found = gathered(given=given, adjacent_chunks=False)
    assert found == [tokens, "Some text.", own, KEEPER]
    assert gathered(given=[FARES], registered=[FERRY, FARES]) == [FARES, FERRY]
    assert gathered(given=[FARES.text], registered=[FERRY, FARES]) == [FARES.text, FERRY]


def test_without_a_registry_there_is_what_is_given():
    assert gathered(given=[KEEPER, "Text."], registry=None, tokenizer=Untouched()) == [
        KEEPER,
        "Text.",
    ]


def test_given_references_stay_and_the_others_share_the_tokens_left():
    small = Passage("small", "A light. A ship. A light again.")
    registered = [FERRY, FARES, KEEPER, small]
    text = f"{PROMPT} {small.text}"
    sizes = [len(passage.text) / 4 for passage in (FERRY, KEEPER, small, FARES)]

    def names(max_tokens, **options):
        found = gathered(text, registered=registered, max_tokens=max_tokens, **options)
        return [one if isinstance(one, str) else one.passage_id for one in found]

    assert names(0) == []
    assert names(0, given=["Stays all the same."]) == ["Stays all the same."]
    assert names(sizes[0]) == ["ferry"]
    assert names(sizes[0] + sizes[2]) == ["ferry", "small"]  # a smaller one takes what is left
    assert names(sum(sizes[:3])) == ["ferry", "keeper", "small"]
    assert set(names(sum(sizes))) == {"ferry", "keeper", "small", "fares"}
    assert names(sum(sizes), given=["Takes room."]) == ["Takes room.", "ferry", "keeper", "small"]


@pytest.mark.parametrize("given", ["text", KEEPER, [3], [b"text"], [[KEEPER]]])
def test_what_is_no_list_of_references_is_refused(given):
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
