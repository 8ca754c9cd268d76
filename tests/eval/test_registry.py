"""What the registry takes and finds, measured."""

import json

from eval.experiments import frameworks
from eval.report import build


def test_a_run_measures_every_number_of_texts_and_is_reported(tmp_path, capsys):
    out, folder = tmp_path / "r" / "x.json", tmp_path / "documents"
    folder.mkdir()
    for number in range(60):
        own = (f"In {n} the keeper of light {number} saw {n * number} ships." for n in range(100))
        (folder / f"{number}.md").write_text("\n".join(own), encoding="utf-8")
    frameworks.run_registry(
        ["--texts", "200", "300", "--prompts", "2", f"--data={folder}", f"--out={out}"]
    )
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    document = json.loads(out.read_text())
    assert document["figures"] == shown["figures"]
    assert [(one["kind"], one["kept"]) for one in shown["figures"]] == [
        *(("made", 200), ("real", 200), ("made", 300), ("real", 300)),
    ]
    found = [one[how] for f in shown["figures"] for one in f["prompts"] for how in ("whole", "cut")]
    assert len(found) == 4 * 3 * 2
    assert all(one["match_ms_median"] > 0 for one in found)
    assert {(one["recall"], one["extra"]) for one in found} == {(1, 0)}
    assert str(tmp_path) not in out.read_text()
    table = build.all_results(tmp_path / "r")
    assert "the reference registry" in table
    assert "| 300 made |" in table
    assert "| 300 real |" in table
    assert table.count("100.0 %") == 24


def test_a_folder_with_too_few_real_texts_is_said_to_have_few(tmp_path, capsys):
    (tmp_path / "one.md").write_text("The ferry leaves at seven. " * 20, encoding="utf-8")
    assert len(frameworks.real_texts(5, tmp_path)) == 1
    assert "only 1 real texts are here" in capsys.readouterr().err


def test_real_texts_are_those_of_the_installed_packages():
    made = frameworks.real_texts(50, None)
    assert len(made) == 50
    assert all(300 < len(passage.text) <= 1_000 for passage in made)
