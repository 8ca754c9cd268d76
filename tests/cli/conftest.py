"""Run the command line in this process, with a data folder of each test's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli_documents import HUT, KEY
from hash_embedder import HashEmbedder
from scripted_llm import ScriptedLLM, first_passage

from ragaccel.cli import ask, index

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class CommandResult:
    """The exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self):
        """The document on stdout; the command must have succeeded."""
        assert self.code == 0, self.err
        return json.loads(self.out)

    @property
    def error(self):
        """The error line of a failed command: its only one, and nothing else went wrong."""
        assert self.out == ""
        assert "Traceback" not in self.err
        (line,) = [line for line in self.err.splitlines() if line.startswith("error: ")]
        return line


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A data folder and a working folder for this test alone, and no settings from outside."""
    for name in list(os.environ):
        if name.startswith("RAGACCEL_") or name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setenv("RAGACCEL_HOME", str(home))
    monkeypatch.chdir(work)
    return home


@pytest.fixture(autouse=True)
def embedder(monkeypatch):
    """A stand-in for the embedding model of every command."""
    made = HashEmbedder()
    monkeypatch.setattr(index, "load_embedder", lambda settings: made)
    return made


@pytest.fixture
def llm(monkeypatch):
    """A model that quotes the first passage; tests may replace what it says."""
    model = ScriptedLLM(first_passage)
    monkeypatch.setattr(ask, "load_llm", lambda terminal, settings: model)
    monkeypatch.setattr(ask, "resolve_model", lambda terminal, name: None)
    return model


@pytest.fixture
def docs():
    """A folder of two documents, HUT and KEY, in the working folder."""
    folder = Path("docs")
    folder.mkdir()
    (folder / "hut.md").write_text(f"# Hut\n\n{HUT}\n")
    (folder / "key.txt").write_text(f"{KEY}\n")
    return folder


@pytest.fixture
def cli(capsys):
    """Run a command line and return its result."""
    from ragaccel.cli.main import run

    def call(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return CommandResult(ended.value.code or 0, captured.out, captured.err)

    return call


@pytest.fixture
def pipe(tmp_path, monkeypatch):
    """Put a text or bytes onto stdin, as from a pipe."""
    opened = []

    def put(content):
        path = tmp_path / f"stdin-{len(opened)}"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        opened.append(path.open())
        monkeypatch.setattr(sys, "stdin", opened[-1])

    yield put
    for file in opened:
        file.close()


def _restore_interrupts():
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def spawn():
    """Start Python with this package on its path, in the test's folder."""
    started = []

    def start(*arguments, **settings):
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        settings["env"] = {**os.environ, "PYTHONPATH": path, **settings.get("env", {})}
        streams = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        streams["stdin"] = subprocess.DEVNULL
        # a suite that runs in the background ignores Ctrl-C, and its children would inherit that
        settings.setdefault("preexec_fn", _restore_interrupts)
        command = [sys.executable, *map(str, arguments)]
        started.append(subprocess.Popen(command, text=True, **{**streams, **settings}))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
