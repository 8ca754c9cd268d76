"""Settings: options, then variables, then files, then defaults."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ragaccel.cli.settings import KEYS, Settings, read_file
from ragaccel.cli.terminal import UsageError


@pytest.fixture
def shown(cli):
    """Return the settings of a command with these options: (value, origin) by name."""

    def show(*options):
        document = cli("config", "show", "--json", *options).json
        return {key: (one["value"], one["from"]) for key, one in document.items()}

    return show


def test_each_layer_overrides_the_one_before(shown, home, monkeypatch):
    assert shown()["k"] == (6, "default")
    home.mkdir()
    (home / "ragaccel.toml").write_text('k = 3\nmodel = "from-home"\nseed = 1\nshared = true\n')
    users = str(home / "ragaccel.toml")
    assert shown()["k"] == (3, users)
    assert shown()["model"] == ("from-home", users)
    assert shown()["shared"] == (True, users)
    Path("ragaccel.toml").write_text("k = 4\nseed = 2\n")
    assert shown()["k"] == (4, "ragaccel.toml")
    monkeypatch.setenv("RAGACCEL_K", "5")
    assert shown()["k"] == (5, "RAGACCEL_K")
    settings = shown("-k", "9", "--color", "never")
    assert settings["k"] == (9, "flag")
    assert settings["color"] == ("never", "flag")
    assert settings["seed"] == (2, "ragaccel.toml")
    assert settings["model"] == ("from-home", users)


UNTRUSTED = {
    "model": "./model",
    "embedder": "./emb",
    "device": "cpu",
    "dtype": "float16",
    "memory": "/home/someone/answers",
    "drafter": "space",
    "space": "./adapter",
    "follow_links": True,
    "shared": True,
}


def test_a_file_beside_documents_chooses_nothing_that_is_loaded_or_written(
    cli, shown, home, monkeypatch
):
    assert {*UNTRUSTED, "k", "max_new_tokens", "temperature", "seed", "color"} == set(KEYS)
    lines = [f"{key} = {json.dumps(written)}" for key, written in UNTRUSTED.items()]
    Path("ragaccel.toml").write_text("\n".join([*lines, "k = 4", "max_new_tokens = 9"]))
    told = " ".join(cli("config", "show").err.split())
    settings = shown()
    assert (settings["k"], settings["max_new_tokens"]) == (
        (4, "ragaccel.toml"),
        (9, "ragaccel.toml"),
    )
    for key, written in UNTRUSTED.items():
        assert settings[key] == (getattr(Settings(), key), "default")
        assert f"ragaccel.toml: {key} is ignored" in told
        assert f"set {key} in {home / 'ragaccel.toml'}" in told
        assert f"RAGACCEL_{key.upper()}={written}" in told
        monkeypatch.setenv(f"RAGACCEL_{key.upper()}", str(written))
    settings = shown()
    for key, written in UNTRUSTED.items():
        assert settings[key] == (written, f"RAGACCEL_{key.upper()}")


def test_a_hub_name_set_for_all_folders_is_not_taken_from_the_current_one(
    cli, shown, home, monkeypatch
):
    home.mkdir()
    (home / "ragaccel.toml").write_text('embedder = "owner/name"\n')
    assert shown()["embedder"][0] == "owner/name"
    Path("owner/name").mkdir(parents=True)
    ended = cli("config", "show")
    assert ended.code == 2
    assert "--embedder ./owner/name" in ended.err
    assert shown("--embedder", "owner/name")["embedder"] == ("owner/name", "flag")
    monkeypatch.chdir(home)  # where the user's own file lies it sets everything
    assert shown()["embedder"] == ("owner/name", "ragaccel.toml")
    assert "ignored" not in cli("config", "show").err


def test_a_settings_file_that_is_no_regular_file_is_refused_at_once():
    os.mkfifo("pipe.toml")
    Path("device.toml").symlink_to("/dev/zero")
    for name in ("pipe.toml", "device.toml"):
        with pytest.raises(UsageError, match="not a settings file"):
            read_file(Path(name))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('shared = "yes"', 'shared = "yes": give true or false'),
        ("modle = 'x'", "did you mean model"),
        ("nothing = 1", "the settings are: model, "),
        ("k = 'many'", 'k = "many": '),
        ("k = 0", "k = 0: "),
        ("k = 99999999999999999999999", "k = 99999999999999999999999: "),
        ("temperature = nan", "temperature = NaN: "),
        ("temperature = inf", "temperature = Infinity: inf is not a finite number"),
        ("max_new_tokens = 0", "max_new_tokens = 0: "),
        ("k = 2.5", "k = 2.5: "),
        ("k = true", "k = true: give a value"),
        ("temperature = -1", "temperature = -1: "),
        ("color = 'pink'", "'auto', 'always', 'never'"),
        ("k = ", "not a settings file"),
        (f"k = {'9' * 5000}", "not a settings file"),
        (f"k = {'[' * 5000}{']' * 5000}", "nested too deeply"),
        ("k.a = 1", "k must be a text in quotes, a number, true or false"),
        (f"model{'.a' * 5000} = 1", "model must be a text"),
        (f"k{'.a' * 60_000} = 1", "larger than"),
    ],
)
def test_a_wrong_setting_is_named_with_its_file(cli, home, content, said):
    home.mkdir()
    (home / "ragaccel.toml").write_text(content)
    ended = cli("config", "show")
    assert ended.code == 2
    assert ended.error.startswith(f"error: {home}/ragaccel.toml")
    assert said in ended.error
    assert ended.err.count("\n") == 1
    assert cli("logs", "--path").code == cli("ask", "--help").code == 0  # they have no settings


def test_a_wrong_flag_or_variable_is_named_as_it_is_written(cli, shown, monkeypatch):
    for variable, flags in (
        (None, ("-k", "0")),
        (None, ("--max-new-tokens", "0")),
        ("RAGACCEL_K", ()),
    ):
        with monkeypatch.context() as patch:
            if variable:
                patch.setenv(variable, "many")
            ended = cli("config", "show", *flags)
        assert (ended.code, ended.out) == (2, "")
        assert f"'{variable or flags[0]}'" in ended.err
    monkeypatch.setenv("RAGACCEL_DATA", "/somewhere")
    monkeypatch.setenv("RAGACCEL_K", "")
    assert shown()["k"] == (6, "default"), "what is empty or no setting decides nothing"


def test_config_shows_where_the_file_lies(cli, home):
    ended = cli("config", "show")
    assert "Unset:" in ended.out
    assert f"{home / 'ragaccel.toml'} (there is none yet)" in ended.err
    home.mkdir()
    (home / "ragaccel.toml").write_text('model = "my-model"\n')
    ended = cli("config", "show")
    assert "my-model" in ended.out
    assert "none yet" not in ended.err


def test_an_unreadable_settings_file_is_not_called_damaged(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr("ragaccel.cli.settings.read_regular_file", refuse)
    with pytest.raises(UsageError, match=r"cannot be read .* set RAGACCEL_HOME"):
        read_file(Path("ragaccel.toml"))
