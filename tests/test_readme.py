"""Every Python block of the README runs, and every file it names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
HAS_READER = (ROOT / "ragaccel" / "models" / "reader" / "model.safetensors").exists()


@pytest.mark.skipif(not HAS_READER, reason="the bundled reader is not in this checkout")
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_runs(number, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("RAGACCEL_HOME", str(tmp_path))
    exec(compile(BLOCKS[number], f"README block {number + 1}", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.strip()


def test_files_named_in_it_exist():
    named = re.findall(r"\]\(((?!http)[^)#]+)\)", README)
    assert named
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_it_has_both_commands():
    assert "make demo" in README
    assert "make test" in README
