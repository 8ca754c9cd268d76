import small_tokenizers

from ragaccel.decode.request import Reference
from ragaccel.memory.registry import ReferenceRegistry
from ragaccel.models.tokenizer import Tokenizer
from ragaccel.passage import Passage
from ragaccel.retrieved import gather_references

FERRY = Passage("ferry", "The ferry to the island leaves at seven in the morning.", path="a.md")
FARES = Passage("fares", "A ticket is four crowns, there and back six.", path="a.md", start=99)


def test_what_the_prompt_holds_is_gathered_and_its_neighbours_as_tokens():
    registry = ReferenceRegistry()
    registry.register([FERRY, FARES])
    tokenizer = Tokenizer(small_tokenizers.byte_level())
    passage, *near = gather_references(
        f"[1] {FERRY.text}\n\nWhen?", registry=registry, tokenizer=tokenizer
    )
    assert passage is FERRY
    assert {type(one) for one in near} == {Reference}
    assert {one.passage_id for one in near} == {"fares"}
