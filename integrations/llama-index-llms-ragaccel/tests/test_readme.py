"""Every Python block of the package's README runs in any folder."""

import re
from pathlib import Path

import llama_index.core
import pytest
from llama_index.core import Settings

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture
def _settings(monkeypatch):
    monkeypatch.setattr(Settings, "_llm", None)
    monkeypatch.setattr(llama_index.core, "global_tokenizer", None)


@pytest.mark.usefixtures("_settings")
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_runs_in_an_empty_folder(number, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[number], f"README block {number + 1}", "exec"), {"__name__": "readme"})
    said = capsys.readouterr().out
    assert said.strip()
    if number == 0:
        assert said.startswith("Isobel Tarrant designed the tower on Gannet Ledge")
        assert "stands in node" in said
    if "SentenceSplitter" in BLOCKS[number]:
        assert said.startswith("The lamp burns rapeseed oil")
