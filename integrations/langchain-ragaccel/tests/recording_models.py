"""Models that answer at once and record the references of each prompt."""

from __future__ import annotations

from chat_model import TOOLS_TEMPLATE
from ragaccel import LLM, Answer, AsyncStream, Passage, Reference, Stats, Stream
from ragaccel.answer import Usage
from scripted_llm import call_a_tool
from tiny_llm import make_tiny_model, tiny_tokenizer

from langchain_ragaccel import ChatRagaccel, RagaccelLLM


class RecordingLLM(LLM):
    """Answers from a script without decoding, and otherwise behaves like a real LLM."""

    given = None

    def stream(self, prompt, *, references=(), **settings):
        text = self._text_of(prompt)
        named = [one.passage_id for one in references if isinstance(one, Passage)]
        beside = [one.passage_id for one in references if isinstance(one, Reference)]
        self.given.note(text, named, beside)
        said = call_a_tool(text) if "<tools>" in text else "The keeper trims it."
        return Stream(self._pieces(said))

    def generate(self, prompt, *, references=(), **settings):
        if not isinstance(prompt, list) or not isinstance(prompt[0], str):
            return self.stream(prompt, references=references).finish()
        pairs = zip(prompt, references, strict=True)
        return [self.stream(one, references=own).finish() for one, own in pairs]

    async def agenerate(self, prompt, *, references=(), **settings):
        return self.generate(prompt, references=references)

    def astream(self, prompt, *, references=(), **settings):
        return AsyncStream(self.stream(prompt, references=references))

    def _text_of(self, prompt):
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt[0], int):
            return self.tokenizer.decode(prompt, skip_special_tokens=False)
        return self.tokenizer.chat_text(prompt)

    def _pieces(self, said):
        half = len(said) // 2
        yield said[:half]
        yield said[half:]
        ids = tuple(self.tokenizer.encode(said))
        stats = Stats(prompt_tokens=1, new_tokens=len(ids), verify_passes=1)
        return Answer(said, ids, "stop", Usage(1, len(ids), 1 + len(ids)), stats)


def recording(given):
    """Return an LLM that records the references of each prompt."""
    llm = RecordingLLM(make_tiny_model(), tiny_tokenizer(TOOLS_TEMPLATE), save_measurements=False)
    llm.given = given
    return llm


def recording_llm(given, **options):
    """Return a LangChain LLM over a recording LLM."""
    return RagaccelLLM(llm=recording(given), **options)


def recording_chat_model(given, **options):
    """Return a LangChain chat model over a recording LLM."""
    return ChatRagaccel(llm=recording(given), **options)
