"""Settings: files, then variables, then flags."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ragaccel.cli.exits import UsageError
from ragaccel.cli.settings import BY_KEY, SETTINGS, read_file, resolve, write_value
from ragaccel.errors import RagaccelError


def test_each_layer_overrides_the_one_before(home, monkeypatch):
    assert resolve().values["k"] == 6
    home.mkdir()
    (home / "ragaccel.toml").write_text('k = 3\nmodel = "from-home"\nseed = 1\n')
    assert (resolve().values["k"], resolve().values["model"]) == (3, "from-home")
    Path("ragaccel.toml").write_text("k = 4\nseed = 2\n")
    assert (resolve().values["k"], resolve().origins["k"]) == (4, "ragaccel.toml")
    monkeypatch.setenv("RAGACCEL_K", "5")
    assert (resolve().values["k"], resolve().origins["k"]) == (5, "RAGACCEL_K")
    settings = resolve({"k": 9, "seed": None})
    assert (settings.values["k"], settings.origins["k"]) == (9, "flag")
    assert (settings.values["seed"], settings.text("model")) == (2, "from-home")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", "./model"),
        ("embedder", "./emb"),
        ("device", "cpu"),
        ("dtype", "float16"),
        ("memory", "/home/someone/answers"),
        ("drafter", "space"),
        ("space", "./adapter"),
        ("follow_links", "yes"),
        ("shared", "yes"),
    ],
)
def test_a_file_beside_documents_chooses_nothing_that_is_loaded_or_written(
    cli, monkeypatch, key, value
):
    Path("ragaccel.toml").write_text(f'{key} = "{value}"\nk = 4\n')
    assert resolve().values[key] == BY_KEY[key].default
    assert resolve().values["k"] == 4
    ended = cli("config", "get", key)
    assert f"ragaccel.toml: {key} is ignored" in ended.err
    assert f"ragaccel config set {key} {value}" in " ".join(ended.err.split())
    monkeypatch.setenv(f"RAGACCEL_{key.upper()}", value)
    assert resolve().values[key] == value


def test_every_setting_says_whether_it_may_come_with_documents():
    harmless = {setting.key for setting in SETTINGS if setting.may_come_with_documents}
    assert harmless == {"k", "max_tokens", "temperature", "seed", "color"}


def test_where_the_users_own_file_lies_it_sets_everything(cli, home, monkeypatch):
    home.mkdir()
    monkeypatch.chdir(home)
    (home / "ragaccel.toml").write_text('embedder = "mine"\n')
    assert resolve().values["embedder"] == "mine"
    assert cli("config", "get", "embedder").err == ""


def test_a_hub_name_set_for_all_folders_is_not_taken_from_the_current_one(home, monkeypatch):
    home.mkdir()
    (home / "ragaccel.toml").write_text('embedder = "owner/name"\n')
    assert resolve().values["embedder"] == "owner/name"
    Path("owner/name").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"--embedder \./owner/name"):
        resolve()
    assert resolve({"embedder": "owner/name"}).values["embedder"] == "owner/name"


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_settings_file_that_is_no_regular_file_is_refused_at_once(kind):
    if kind == "pipe":
        os.mkfifo("ragaccel.toml")
    else:
        Path("ragaccel.toml").symlink_to("/dev/zero")
    with pytest.raises(UsageError, match="not a settings file"):
        resolve()


def test_a_full_disk_is_told_as_what_it_is(cli, home, monkeypatch):
    assert cli("config", "set", "k", "3").code == 0

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RagaccelError, match="No space left on device"):
        write_value(home / "ragaccel.toml", "k", 4)
    assert read_file(home / "ragaccel.toml") == {"k": 3}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("modle = 'x'", "did you mean model"),
        ("k = 'many'", "not a whole number"),
        ("k = 0", "from 1 to 1000"),
        ("k = 99999999999999999999999", "from 1 to 1000"),
        ("temperature = nan", "at least 0"),
        ("max_tokens = 0", "at least 1"),
        ("k = 2.5", "not a whole number"),
        ("k = true", "not a whole number"),
        ("temperature = -1", "at least 0"),
        ("color = 'pink'", "auto, always, never"),
        ("k = ", "not a settings file"),
        (f"k = {'9' * 5000}", "not a settings file"),
        (f"k = {'[' * 5000}{']' * 5000}", "nested too deeply"),
        ("k.a = 1", "k is not a whole number"),
        (f"model{'.a' * 5000} = 1", "model is not a text"),
        (f"k{'.a' * 60_000} = 1", "larger than"),
    ],
)
def test_a_wrong_setting_is_named_with_its_file(content, said):
    Path("ragaccel.toml").write_text(content)
    with pytest.raises(UsageError, match=said) as error:
        resolve()
    assert "ragaccel.toml" in str(error.value)


def test_a_variable_of_another_program_part_is_none_of_our_business(monkeypatch):
    monkeypatch.setenv("RAGACCEL_DATA", "/somewhere")
    monkeypatch.setenv("RAGACCEL_K", "")
    assert resolve().values["k"] == 6


def test_a_wrong_flag_is_named_as_it_is_written():
    with pytest.raises(UsageError, match=r"^-k: "):
        resolve({"k": 0})
    with pytest.raises(UsageError, match=r"^--max-tokens: "):
        resolve({"max_tokens": 0})


def test_writing_a_value_leaves_the_other_lines_alone():
    path = Path("ragaccel.toml")
    path.write_text('# mine\n"k" = 3\n\n[other]\nx = 1\nk = 2\n')
    write_value(path, "model", 'a "quoted" name\\with é')
    write_value(path, "k", 7)
    assert read_file(path) == {
        "model": 'a "quoted" name\\with é',
        "k": 7,
        "other": {"x": 1, "k": 2},
    }
    assert path.read_text().startswith("# mine\n")
    write_value(path, "model", None)
    assert "model" not in path.read_text()


def test_a_file_that_is_none_is_not_written_to(tmp_path):
    path = tmp_path / "ragaccel.toml"
    path.write_bytes(b"k = caf\xe9")
    with pytest.raises(UsageError, match="not a settings file"):
        write_value(path, "k", 7)
    assert path.read_bytes() == b"k = caf\xe9"


def test_config_shows_sets_and_gets(cli, home):
    assert cli("config", "set", "model", "my-model").code == 0
    assert cli("config", "get", "model").out == "my-model\n"
    assert str(home / "ragaccel.toml") in cli("config", "show", "--json").out
    shown = cli("config", "show")
    assert "my-model" in shown.out
    assert shown.err == ""
    assert cli("config", "set", "--project", "k", "2").code == 0
    assert cli("config", "get", "k").out == "2\n"
    assert cli("config", "set", "--project", "model", "x").code == 2
    assert cli("config", "unset", "--project", "k").code == 0
    assert cli("config", "get", "k").out == "6\n"


@pytest.mark.parametrize(
    "arguments", [("set", "k", "zero"), ("set", "nothing", "1"), ("get", "nothing"), ("set", "k")]
)
def test_config_refuses_what_cannot_be_set(cli, arguments):
    ended = cli("config", *arguments)
    assert ended.code == 2
    assert ended.err
    assert not ended.out
