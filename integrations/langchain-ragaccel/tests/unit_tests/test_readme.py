"""Every Python block of the package's README runs in any folder."""

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2]
README = (PACKAGE / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs_in_an_empty_folder(number, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[number], f"README block {number + 1}", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert printed.strip()
    if number == 0:
        assert "one metre" in printed
        assert "landing.txt" in printed
