"""The reader's tokenizer: byte-level BPE, marker tokens, and the prompt as a chat template."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

NUM_MARKERS = 64
NUM_CITATIONS = 9
MAX_POSITIONS = 2048
REFUSAL = "The passages do not tell."
BOS, EOS, PAD, QUESTION, PASSAGE, ANSWER, NONE = (
    "<bos>", "<eos>", "<pad>", "<question>", "<passage>", "<answer>", "<none>",
)  # fmt: skip
MARKERS = tuple(f"<s{i}>" for i in range(1, NUM_MARKERS + 1))
CITATIONS = tuple(f" [{i}]" for i in range(1, NUM_CITATIONS + 1))

# Sentences are numbered across all passages; each stands between two copies of its marker and
# ends with its passage's citation. The answer is one of them, copied: one choice (the marker)
# decides it.
CHAT_TEMPLATE = (
    "{%- set question = '<question> ' + (messages[-1]['content'] | trim) -%}"
    "{%- set count = namespace(value=0) -%}"
    "{{- bos_token + question -}}"
    "{%- for document in documents or [] -%}"
    "{%- set citation = ' [' ~ loop.index ~ ']' -%}"
    "{{- '<passage>' + ((' ' + document['title'] | trim) if document['title'] else '') -}}"
    "{%- for sentence in document['sentences'] or [document['text']] -%}"
    f"{{%- set marker = '<s' ~ (count.value % {NUM_MARKERS} + 1) ~ '>' -%}}"
    "{%- set count.value = count.value + 1 -%}"
    "{{- marker + ' ' + sentence | trim + citation + marker -}}"
    "{%- endfor -%}"
    "{%- endfor -%}"
    f"{{{{- '{NONE} {REFUSAL}{NONE}' + question -}}}}"
    "{%- if add_generation_prompt -%}{{- '<answer>' -}}{%- endif -%}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = 7936) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE from texts and wrap it with markers and chat template.

    Citations such as `` [2]`` are one token each, and visible text; markers are special tokens,
    which decoding leaves out. Sentences begin with a space, so that a word is the same token
    wherever it stands; decoding strips the first one.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    special = [BOS, EOS, PAD, QUESTION, PASSAGE, ANSWER, NONE, *MARKERS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - NUM_CITATIONS,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in CITATIONS])
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[QUESTION, PASSAGE, ANSWER, NONE, *MARKERS],
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
