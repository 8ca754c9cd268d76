"""Chat templates of the shapes that models with tools have, and tokenizers that carry them."""

from functools import cache

from tiny_llm import tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from ragaccel.models import Tokenizer

_TOOLS = "{% if tools %}tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}\n{% endif %}"


def _chatml(call: str, before: str = "") -> str:
    return (
        _TOOLS + "{%- for m in messages %}"
        "{{ '<|im_start|>' + m.role + '\n' }}"
        "{%- if m.role == 'assistant' %}" + before + "{%- endif %}"
        "{{ m.content or '' }}"
        "{%- for c in m.tool_calls or [] %}{% set c = c.function %}"
        "{%- if m.content or not loop.first %}{{ '\n' }}{% endif %}" + call + "{%- endfor %}"
        "{{ '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


_HERMES = (
    '{{ \'<tool_call>\n{"name": "\' + c.name + \'", "arguments": \' }}'
    "{{ c.arguments | tojson }}{{ '}\n</tool_call>' }}"
)
_XML = (
    "{{ '<tool_call>\n<function=' + c.name + '>\n' }}"
    "{%- for k, v in c.arguments | items %}{{ '<parameter=' + k + '>\n' }}"
    "{{ v if v is string else v | tojson }}{{ '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}"
)
_GLM = (
    "{{ '<tool_call>' + c.name + '\n' }}{%- for k, v in c.arguments | items %}"
    "{{ '<arg_key>' + k + '</arg_key>\n<arg_value>' }}{{ v if v is string else v | tojson }}"
    "{{ '</arg_value>\n' }}{% endfor %}{{ '</tool_call>' }}"
)
_LLAMA = (
    "{{ bos_token }}" + _TOOLS + "{%- for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{%- if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{%- set c = m.tool_calls[0].function %}"
    "{{ '{\"name\": \"' + c.name + '\", \"parameters\": ' }}{{ c.arguments | tojson }}{{ '}' }}"
    "{%- else %}{{ m.content | trim }}{% endif %}{{ '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def _mistral(calls: str) -> str:
    return (
        "{{ bos_token }}{%- for m in messages %}{%- if m.role == 'user' %}"
        "{%- if tools and loop.last or tools and loop.index0 == 0 %}"
        "{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
        "{{ '[INST]' + m.content + '[/INST]' }}"
        "{%- elif m.tool_calls %}" + calls + "{{ eos_token }}"
        "{%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
        "{%- elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
        "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
        "{% endif %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}{% endif %}{%- endfor %}"
    )


_MISTRAL_OLD = (
    "{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}"
    '{{ \'{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments | tojson }}{{ ', \"id\": \"' + c.id + '\"}' }}"
    "{{ ', ' if not loop.last else ']' }}{% endfor %}"
)
_MISTRAL_NEW = (
    "{% for c in m.tool_calls %}{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' }}"
    "{{ c.function.arguments | tojson }}{% endfor %}"
)
_MISTRAL_IDS = _MISTRAL_NEW.replace("'[ARGS]'", "'[CALL_ID]' + c.id + '[ARGS]'")


def _listed(open_list: str, call: str, close_list: str) -> str:
    """All calls of an answer in one list."""
    return (
        _TOOLS + "{%- for m in messages %}{{ '<turn>' + m.role + ': ' }}{{ m.content or '' }}"
        "{%- for c in m.tool_calls or [] %}{% set c = c.function %}"
        "{%- if loop.first %}{{ '" + open_list + "' }}{% endif %}" + call + ""
        "{%- if loop.last %}{{ '" + close_list + "' }}{% else %}{{ ', ' }}{% endif %}"
        "{%- endfor %}{{ '<|end|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<turn>assistant: ' }}{% endif %}"
    )


_PYTHON = (
    "{{ c.name + '(' }}{%- for k, v in c.arguments | items %}{{ k + '=' }}"
    "{{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}{{ ')' }}"
)
_JSON = "{{ {'name': c.name, 'arguments': c.arguments} | tojson }}"
_DEEPSEEK = (
    _TOOLS + "{%- for m in messages %}{%- if m.role == 'assistant' %}{{ '<｜Assistant｜>' }}"
    "{{ m.content or '' }}{%- for c in m.tool_calls or [] %}"
    "{%- if loop.first %}{{ '<｜tool▁calls▁begin｜>' }}{% else %}{{ '\n' }}{% endif %}"
    "{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\n```json\n' }}"
    "{{ c.function.arguments + '\n```<｜tool▁call▁end｜>' }}"
    "{%- if loop.last %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}{%- endfor %}"
    "{{ '<｜end▁of▁sentence｜>' }}{%- else %}{{ '<｜User｜>' + m.content }}{% endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
_GEMMA = (
    _TOOLS + "{%- macro value(v) %}"
    "{%- if v is string %}{{ '<|\"|>' + v + '<|\"|>' }}"
    "{%- elif v is mapping %}{{ '{' }}{%- for k, w in v | items %}{{ k + ':' }}{{ value(w) }}"
    "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
    "{%- elif v is iterable %}{{ '[' }}{%- for w in v %}{{ value(w) }}{{ ',' if not loop.last }}"
    "{% endfor %}{{ ']' }}{%- else %}{{ v | tojson }}{% endif %}{%- endmacro %}"
    "{%- for m in messages %}{{ '<|turn>' }}"
    "{{ 'model' if m.role == 'assistant' else m.role }}{{ '\n' }}"
    "{{ m.content or '' }}{%- for c in m.tool_calls or [] %}"
    "{{ '<|tool_call>call:' + c.function.name }}{{ value(c.function.arguments) }}"
    "{{ '<tool_call|>' }}{% endfor %}{{ '<turn|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)
_THOUGHT = "{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"

CHATML = ("<|im_start|>", "<|im_end|>")
TEMPLATES = {
    "hermes": (_chatml(_HERMES), CHATML),
    "qwen3": (_chatml(_HERMES, _THOUGHT), CHATML),
    "qwen3 coder": (_chatml(_XML), CHATML),
    "glm": (_chatml(_GLM), CHATML),
    "llama": (
        _LLAMA,
        ("<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
    ),
    "mistral old": (
        _mistral(_MISTRAL_OLD),
        ("<eos>", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[INST]", "[/INST]"),
    ),
    "mistral new": (_mistral(_MISTRAL_NEW), ("<eos>", "[TOOL_CALLS]", "[ARGS]")),
    "mistral ids": (_mistral(_MISTRAL_IDS), ("<eos>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    "pythonic": (_listed("[", _PYTHON, "]"), ("<|end|>",)),
    "marked pythonic": (
        _listed("<|tool_call_start|>[", _PYTHON, "]<|tool_call_end|>"),
        ("<|end|>", "<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "marked list": (_listed("<|tool_call|>[", _JSON, "]<|/tool_call|>"), ("<|end|>",)),
    "deepseek": (_DEEPSEEK, ("<｜end▁of▁sentence｜>", "<｜Assistant｜>", "<｜User｜>")),
    "gemma": (_GEMMA, ("<turn|>", "<|turn>", "<|tool_call>", "<tool_call|>", '<|"|>')),
}


@cache
def tool_tokenizer(name: str) -> Tokenizer:
    """Make a tokenizer with the template of that shape, and its special tokens."""
    template, special = TEMPLATES[name]
    return tokenizer_with(template, special)


def tokenizer_with(template: str, special: tuple[str, ...]) -> Tokenizer:
    """Make a tokenizer with a template; the first of its special tokens end an answer."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer().backend_tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=[token for token in special if token != "<eos>"],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = template
    ends = [token for token in special if "im_end" in token or token in _ENDS]
    return Tokenizer(wrapped, eos_ids=wrapped.convert_tokens_to_ids(ends))


_ENDS = {"<eos>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<｜end▁of▁sentence｜>", "<turn|>"}
