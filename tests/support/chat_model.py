"""A tiny random chat model, and an LLM that says what a script says, token by token.

A logits processor leaves the model no choice, so everything else is what happens with a model that
was trained to call tools: its chat template, the engine, stopping, streaming, and reading calls.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ragaccel import LLM

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<turn>{{ message['role'] }}: "
    "{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<turn>assistant:{% endif %}"
)
TOOLS_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ '<turn>system: <tools>' }}{% for tool in tools %}"
    "{{ '\n' + tool | tojson }}{% endfor %}{{ '\n</tools>' }}{% endif %}"
    "{% for message in messages %}{{ '<turn>' + message.role }}"
    "{% if message.role == 'tool' and message.name %}{{ '(' + message.name + ')' }}{% endif %}"
    "{{ ': ' + message.content }}"
    "{% for call in message.tool_calls or [] %}{% set call = call.function %}"
    "{{ '\n<tool_call>\n' }}"
    '{{ \'{"name": "\' + call.name + \'", "arguments": \' + call.arguments | tojson + "}" }}'
    "{{ '\n</tool_call>' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>assistant: ' }}{% endif %}"
)


def make_tokenizer(text: str, template: str | None, vocab_size: int = 400, special=()):
    """Make a byte-level BPE that can spell anything, trained on a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<bos>", "<eos>", "<turn>", *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text] * 3, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<turn>"],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = template
    return wrapped


def make_model(**changes) -> LlamaForCausalLM:
    """Build a llama with random weights, wide enough that choices have clear gaps."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
        **changes,
    )
    return LlamaForCausalLM(config).eval().to(torch.float64)


class Say:
    """A logits processor, pure in (ids, scores), that makes a model say given tokens."""

    def __init__(self, num_prompt_tokens: int, token_ids: list[int]) -> None:
        self.num_prompt_tokens, self.token_ids = num_prompt_tokens, token_ids

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        said = ids.shape[1] - self.num_prompt_tokens
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.token_ids[min(said, len(self.token_ids) - 1)]] = 0.0
        return forced


class ScriptedLLM(LLM):
    """Answers every prompt with what ``script`` makes of its text; keeps the prompts."""

    def __init__(self, script, model, tokenizer):
        super().__init__(model, tokenizer, save_measurements=False)
        self.script, self.prompts, self.references = script, [], []

    def _request(self, prompt, references, given):
        ids = super()._request(prompt, references, dict(given)).request.prompt_ids
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        self.prompts.append(text)
        self.references.append(list(references))
        said = [*self.tokenizer.encode(self.script(text)), *self.tokenizer.eos_ids]
        forced = {**given, "logits_processors": [Say(len(ids), said)]}
        return super()._request(prompt, references, forced)
