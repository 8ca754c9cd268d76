"""What files tell of a model is what transformers would say, or nothing."""

import json
import subprocess
import sys

import pytest
import torch
from small_tokenizers import byte_level
from tiny_models import make_tiny_model
from transformers import (
    Gemma3Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen3Config,
    T5Config,
)

from ragaccel.models.load import outline_model
from ragaccel.models.outline import FileOutline, read_outline

_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 300,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0,
         "original_max_position_embeddings": 200}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(max_position_embeddings=777),
    "mistral, sliding": MistralConfig(max_position_embeddings=900, sliding_window=64),
    "qwen3": Qwen3Config(max_position_embeddings=1234),
    "dynamic": LlamaConfig(max_position_embeddings=500, rope_parameters=_DYNAMIC),
    "yarn": LlamaConfig(max_position_embeddings=800, rope_parameters=_YARN),
    "longrope": Phi3Config(
        max_position_embeddings=1200, hidden_size=64, num_attention_heads=2, rope_parameters=_LONG,
        original_max_position_embeddings=300, pad_token_id=0,
    ),
    "nested": Gemma3Config(text_config={"max_position_embeddings": 640}),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    byte_level().save_pretrained(tmp_path)
    LlamaConfig(max_position_embeddings=777).save_pretrained(tmp_path)
    return tmp_path


def edit(file, **changes):
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    file.write_text(json.dumps({**known, **changes}), encoding="utf-8")


@pytest.mark.parametrize("kind", CONFIGS)
def test_context_lengths_are_those_of_transformers(kind, folder):
    CONFIGS[kind].save_pretrained(folder)
    outline = read_outline(str(folder))
    assert outline is not None
    assert outline.context_length == outline_model(folder).context_length


@pytest.mark.parametrize("kind", ["dynamic", "linear"])
def test_scaling_as_it_was_written_in_earlier_years(kind, folder):
    edit(folder / "config.json", rope_parameters=None,
         rope_scaling={"type": kind, "factor": 3.0})  # fmt: skip
    assert read_outline(folder).context_length == outline_model(folder).context_length == 777


@pytest.mark.parametrize(
    "changes",
    [
        {"chat_template.jinja": "{{ messages }}"},
        {"chat_template.jinja": ""},
        {"additional_chat_templates/rag.jinja": "{{ messages }}"},
        {"chat_template.jinja": "one", "additional_chat_templates/rag.jinja": "two"},
        {"config": "{{ messages }}"},
        {"config": ""},
        {"config": None},
        {"config": [{"name": "default", "template": "one"}, {"name": "rag", "template": "two"}]},
        {"config": [{"name": "rag", "template": "two"}]},
        {"config": "one", "additional_chat_templates/rag.jinja": "two"},
        {},
    ],
    ids=str,
)
def test_a_chat_template_is_where_transformers_finds_one(changes, folder):
    (folder / "additional_chat_templates").mkdir()
    for name, text in changes.items():
        if name == "config":
            edit(folder / "tokenizer_config.json", chat_template=text)
        else:
            (folder / name).write_text(text, encoding="utf-8")
    expected = outline_model(folder).tokenizer.has_chat_template
    assert read_outline(folder).has_chat_template is expected


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, False),
        ({"chat_template.jinja": "{{ messages }}"}, False),
        ({"chat_template.jinja": "{{ messages }}{{ tools }}"}, True),
        ({"additional_chat_templates/tool_use.jinja": "{{ tools }}"}, True),
        ({"tokenizer_config.json": '{"chat_template": [{"template": "{{ tools }}"}]}'}, True),
        ({"tokenizer_config.json": '{"chat_template": "{{ messages }}"}'}, False),
    ],
)  # fmt: skip
def test_a_template_that_takes_tools_has_to_name_them(folder, files, named):
    (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    assert read_outline(folder).names_tools is named


def test_the_bundled_reader():
    assert read_outline() == FileOutline(outline_model().context_length, True, names_tools=False)


def test_a_cached_name_and_a_folder_below(folder, tmp_path):
    cache = tmp_path / "cache"
    snapshot = cache / "models--someone--tiny" / "snapshots" / ("a" * 40)
    make_tiny_model("llama", torch.float32).save_pretrained(snapshot)
    byte_level().save_pretrained(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40, encoding="utf-8")
    expected = FileOutline(outline_model(snapshot).context_length, False, names_tools=False)
    assert read_outline("someone/tiny", {"cache_dir": cache}) == expected
    assert read_outline("someone/other", {"cache_dir": cache}) is None
    assert read_outline(cache, {"subfolder": str(snapshot.relative_to(cache))}) == expected
    (snapshot / "model.safetensors").unlink()  # the config alone: the hub is asked for the rest
    assert read_outline("someone/tiny", {"cache_dir": cache}) is None


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", {"auto_map": {"AutoConfig": "mine.Config"}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["mine.Words", None]}}),
        ("config.json", {"max_position_embeddings": None}),
        ("config.json", {"rope_scaling": "dynamic"}),
        ("config.json", {"decoder": {}, "text_config": {"max_position_embeddings": 5}}),
        ("tekken.json", {"config": {}}),
    ],
    ids=str,
)
def test_what_only_transformers_can_tell_is_left_to_it(file, changes, folder):
    assert read_outline(folder) is not None
    edit(folder / file, **changes)
    assert read_outline(folder) is None


@pytest.mark.parametrize("config", [GPT2Config(), T5Config()], ids=["gpt2", "t5"])
def test_other_ways_to_say_it_are_left_to_transformers(config, folder):
    config.save_pretrained(folder)
    assert read_outline(folder) is None


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", [None, "{", "[]", "\udcff"], ids=["none", "cut", "list", "bytes"])
def test_files_that_cannot_be_read_are_left_to_transformers(file, text, folder):
    (folder / file).unlink()
    if text is not None:
        (folder / file).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert read_outline(folder) is None
    assert read_outline(folder / "nothing") is None
    assert read_outline("not a name /") is None


def test_it_loads_neither_torch_nor_transformers(folder):
    code = (
        "import sys\nfrom ragaccel import shared_model\n"
        f"for model in (shared_model(), shared_model({str(folder)!r})):\n"
        "    print(model.context_length, model.is_chat_model)\n"
        "print([name for name in ('torch', 'transformers', 'huggingface_hub') if name in"
        " sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:3] == ["2048 True", "777 False", "[]"]
