"""``eval cpu_peers`` with a stand-in for a peer's environment: a script that takes its time."""

import json
import sys

import pytest

from eval.__main__ import find_run
from eval.experiments import cpu_peers

PEER = """#!{python}
import json, sys
print(json.dumps({{"version": "1.2"}} if json.loads(sys.stdin.readline()) else {{}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["do"] == "{fails}":
        sys.exit("it cannot")
    said = list(range(asked["most"])) if asked["do"] == "generate" else asked["answer"]
    print(json.dumps({{"first_seconds": 2.0, "seconds": 4.0, "tokens": len(said) - 1,
                       "token_ids": said}}), flush=True)
"""


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    monkeypatch.setattr(cpu_peers, "READER_ANSWER", 16)


@pytest.fixture
def peer(tmp_path):
    def peer(fails=""):
        path = tmp_path / "python"
        path.write_text(PEER.format(python=sys.executable, fails=fails))
        path.chmod(0o755)
        return path

    return peer


def run(tmp_path, *arguments):
    out = tmp_path / "found.json"
    absent = [f"--{name}={tmp_path / 'absent'}" for name in ("llama-cpp", "openvino", "vllm")]
    few = ["--rows=2", "--threads=1", "--parts=reader"]
    find_run("cpu_peers")([*absent, *few, f"--out={out}", *arguments])
    return json.loads(out.read_text())


def test_a_peer_takes_turns_with_the_decoders_of_this_process(tmp_path, peer, capsys):
    found = run(tmp_path, f"--openvino={peer()}")
    assert "llama_cpp is left out" in capsys.readouterr().err
    assert found["settings"]["versions"] == {"openvino": "1.2"}
    part = found["parts"]["reader"]
    by_name = part["contenders"]
    names = "ours_full ours_plain generate generate_lookup openvino/plain openvino/lookup"
    assert list(by_name) == names.split()
    assert by_name["openvino/plain"]["first_seconds"] == 2.0
    assert by_name["openvino/plain"]["same_as_generate"] == 0
    assert by_name["openvino/plain"]["ms_per_token"] == round(4000 / 15, 3)
    own = [by_name[name] for name in by_name if "openvino" not in name]
    assert all(one["same_as_generate"] == part["answers"] == 2 for one in own)
    assert 0 < by_name["ours_full"]["steps"] < by_name["ours_plain"]["steps"]
    assert part["over"]["ours_full"]["openvino/plain"]["whole_median"] > 1


def test_a_run_goes_on_where_it_was_interrupted(tmp_path, peer, capsys):
    with pytest.raises(RuntimeError, match="ended"):
        run(tmp_path, f"--openvino={peer('generate')}")
    first = run(tmp_path, f"--openvino={peer()}")
    capsys.readouterr()
    assert run(tmp_path, f"--openvino={peer()}")["parts"] == first["parts"]
    assert "example" not in capsys.readouterr().err


def test_an_unknown_part_is_refused_with_those_there_are(tmp_path):
    with pytest.raises(SystemExit, match="no part moon: take some of plain:llama-135m"):
        run(tmp_path, "--parts=moon")
