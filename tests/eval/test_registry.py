"""What the registry takes and finds, measured."""

import json

from eval import registry, report


def test_a_run_measures_every_number_of_texts_and_is_reported(tmp_path, capsys):
    out = tmp_path / "r" / "x.json"
    registry.main(["--texts", "200", "300", "--prompts", "2", f"--out={out}"])
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    document = json.loads(out.read_text())
    assert document["figures"] == shown["figures"]
    assert [one["kept"] for one in shown["figures"]] == [200, 300]
    found = [one[how] for f in shown["figures"] for one in f["prompts"] for how in ("whole", "cut")]
    assert len(found) == 2 * 3 * 2
    assert all(one["match_ms_median"] > 0 for one in found)
    assert {(one["recall"], one["extra"]) for one in found} == {(1, 0)}
    assert str(tmp_path) not in out.read_text()
    table = report.all_results(tmp_path / "r")
    assert "the reference registry" in table
    assert "| 300 |" in table
    assert table.count("100.0 %") == 12
