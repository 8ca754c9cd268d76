"""A tokenizer of words, each with the space before it: light, with offsets, chat and documents."""

from __future__ import annotations

import re

from fakes import FakeTokenizer

_TOKEN = re.compile(r"<\w+>| ?\w+|\s|[^\w\s]")


class WordTokenizer(FakeTokenizer):
    """Does what the face asks of a tokenizer; ids are given out as words come."""

    begin, turn, end = "<bos>", "<{role}> {content}", "<assistant>"

    def __init__(self, *, takes_documents=False, has_chat_template=True):
        self.takes_documents = takes_documents
        self.has_chat_template = has_chat_template
        self.words = ["<bos>"]

    def _id(self, word):
        if word not in self.words:
            self.words.append(word)
        return self.words.index(word)

    def encode_with_offsets(self, text, add_special_tokens=True):
        found = list(_TOKEN.finditer(text))
        ids = [0] * add_special_tokens + [self._id(token.group()) for token in found]
        return ids, [(0, 0)] * add_special_tokens + [token.span() for token in found]

    def encode(self, text, add_special_tokens=True):
        return self.encode_with_offsets(text, add_special_tokens)[0]

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(self.words[i] for i in token_ids if i or not skip_special_tokens)
