"""A language model whose answers a test chooses, for use with the real RAG."""

from __future__ import annotations

from fakes import ByteTokenizer

from ragaccel.answer import Answer, Stream
from ragaccel.decoding import GenerationResult, Stats


class ScriptedLLM:
    """Answers with ``say(prompt)``, a word a piece, and records its prompts and settings."""

    is_bundled_reader = False

    def __init__(self, say, *, context_length=100_000, before_piece=lambda number: None):
        self.say, self.before_piece = say, before_piece
        self.context_length, self.tokenizer = context_length, ByteTokenizer()
        self.prompts, self.settings = [], []

    def stream(self, prompt, **settings):
        self.prompts.append(prompt)
        self.settings.append(settings)
        return Stream(self._pieces(prompt, settings), prompt.passages)

    def _pieces(self, prompt, settings):
        words = self.say(prompt).split(" ")[: settings["max_new_tokens"]]
        pieces = [word if i == 0 else " " + word for i, word in enumerate(words)]
        for number, piece in enumerate(pieces):
            self.before_piece(number)
            yield piece
        plain = type(settings.get("drafter")).__name__ == "NoDrafter"
        stats = Stats(
            prompt_tokens=len(prompt.token_ids),
            new_tokens=len(words),
            verify_passes=len(words) if plain else max(1, len(words) // 4),
            draft_tokens=0 if plain else len(words),
            accepted_tokens=0 if plain else len(words) // 2,
            accepted_by_source={} if plain else {"copy": len(words) // 2},
            prefill_seconds=0.25,
            verify_seconds=1.75 if plain else 0.75,
            total_seconds=2.0 if plain else 1.0,
        )
        result = GenerationResult(tuple(map(len, words)), self._reason(prompt, settings), stats)
        return Answer.of("".join(pieces), result, prompt.passages, prompt.dropped)

    def _reason(self, prompt, settings):
        long = len(self.say(prompt).split(" ")) > settings["max_new_tokens"]
        return "length" if long else "stop"


def first_passage(prompt):
    """Quote the whole first passage and cite it; say nothing without passages."""
    if not prompt.passages:
        return ""
    return f"{prompt.passages[0].text} [1]"


def quotes(number, lead=""):
    """Return a function that quotes a whole passage without citing it."""
    return lambda prompt: f"{lead}{prompt.passages[number - 1].text}"
