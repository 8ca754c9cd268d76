"""Models of several processes: on the processors, what one process alone decodes."""

import gc
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from small_tokenizers import byte_level
from tiny_llm import tiny_llm, tiny_tokenizer
from tiny_models import make_tiny_model, tiny_config

from ragaccel.errors import ConfigurationError
from ragaccel.llm import LLM
from ragaccel.models import parallel
from ragaccel.models.load import load_model
from ragaccel.models.messages import ALIVE, END
from ragaccel.models.processes import check_heads

TESTS = Path(__file__).parents[1]
PROGRAMS = (
    "answers:llama",
    "answers:gemma3",
    "failing_follower",
    "hung_follower",
    "lost_follower",
    "lost_leader",
    "failing_leader",
    "idle",
)
LOST = "a pass failed, or a process is gone that holds a part of this model"

together = pytest.mark.skipif(
    not torch.distributed.is_available()
    or torch.cuda.is_available()
    or importlib.util.find_spec("accelerate") is None,
    reason="needs the extra multi-gpu, and processes that share a processor",
)


def run(*command):
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), *filter(None, sys.path)])
    own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Every program once, forked from one process."""
    folder = tmp_path_factory.mktemp("spread")
    for family in ("llama", "gemma3"):
        make_tiny_model(family, max_position_embeddings=1024).save_pretrained(folder / family)
        byte_level().save_pretrained(folder / family)
    done = run(TESTS / "spread.py", folder, *PROGRAMS)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(PROGRAMS), done.stderr
    return dict(zip(PROGRAMS, lines, strict=True)), done.stderr


@together
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_same_tokens_as_one_process(ran, family):
    program = ran[0][f"answers:{family}"]
    found = program["found"]
    assert found.pop("sequences in a pass") >= 4
    assert found.pop("closed") == ["this model was closed", True]
    assert [name for name, is_same in found.items() if not is_same] == []
    assert program["codes"] == [0, 0]


@together
def test_a_pass_that_fails_elsewhere_is_an_error_and_not_a_wait(ran):
    program = ran[0]["failing_follower"]
    assert program["codes"] == [0, 1]
    for said, is_soon in program["found"]:
        assert LOST in said
        assert is_soon
    assert "RuntimeError: no memory left" in ran[1]


@together
def test_a_pass_that_takes_for_ever_is_given_up(ran):
    program = ran[0]["hung_follower"]
    said, is_soon = program["found"]
    assert LOST in said
    assert is_soon
    assert program["codes"] == [0, 0]  # told to leave, amid the pass


@together
def test_a_process_that_is_lost_is_noticed_while_nothing_is_asked(ran):
    program = ran[0]["lost_follower"]
    is_noticed, (said, is_soon) = program["found"]
    assert is_noticed
    assert LOST in said
    assert is_soon
    assert program["codes"] == [0, -9]


@together
def test_the_others_leave_when_the_first_is_gone(ran):
    assert ran[0]["lost_leader"]["codes"] == [9, 1]
    assert ran[0]["lost_leader"]["seconds"] < 30


@together
def test_the_others_leave_when_a_pass_of_the_first_failed(ran):
    program = ran[0]["failing_leader"]
    assert program["codes"] == [0, 0]
    said, is_soon = program["found"]
    assert "KeyboardInterrupt" in said
    assert is_soon


@together
def test_signs_of_life_keep_the_others_waiting(ran):
    assert ran[0]["idle"]["found"] is True
    assert ran[0]["idle"]["codes"] == [0, 0]


@together
def test_a_script_under_torchrun(tmp_path):
    tiny_llm().model.model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    done = run(*torchrun, TESTS / "spread_llm.py", tmp_path / "model", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "rank-0.json").read_text())
    assert found["spread"] == found["alone"]
    assert len(set(found["spread"])) > 6
    assert found["guesses"] > 0
    assert not (tmp_path / "rank-1.json").exists()  # it never got that far


def test_without_torchrun_it_is_said_how_to_start(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match=r"torchrun --nproc-per-node 2 script\.py"):
        LLM.load(tmp_path, tensor_parallel=2)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "4")
    with pytest.raises(ConfigurationError, match=r"needs 2 processes, there are 4: .*torchrun"):
        load_model(tmp_path, tensor_parallel=2)


def test_arguments_that_exclude_each_other(tmp_path):
    for other in ({"device": "cpu"}, {"device_map": "auto"}):
        with pytest.raises(ConfigurationError, match="give no device or device_map"):
            load_model(tmp_path, tensor_parallel=2, **other)
    with pytest.raises(ConfigurationError, match="1 or more"):
        load_model(tmp_path, tensor_parallel=0)
    with pytest.raises(ConfigurationError, match="give tensor_parallel=N in place of tp_size"):
        LLM.load(tmp_path, tp_size=2)


def test_heads_that_cannot_be_shared_evenly():
    check_heads(tiny_config("llama"), 2)
    with pytest.raises(ConfigurationError, match="tensor_parallel=4 does not divide the 2 KV"):
        check_heads(tiny_config("llama"), 4)
    check_heads(tiny_config("phi3"), 4)  # every process computes all of its heads
    with pytest.raises(ConfigurationError, match=r"gpt2 model .* device_map"):
        check_heads(tiny_config("gpt2"), 2)


def test_a_model_that_nobody_leads():
    model = make_tiny_model("llama")
    model._tp_size = 2
    with pytest.raises(ConfigurationError, match="tensor_parallel=2"):
        LLM(model, tiny_tokenizer())


def test_one_process_alone_needs_no_torchrun_and_nothing_is_closed(tmp_path):
    tiny_llm().model.model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with LLM.load(tmp_path, tensor_parallel=1, keep_costs=False) as llm:
        assert llm.generate("The lamp", max_new_tokens=3)
    assert llm.generate("The lamp", max_new_tokens=3)


def test_a_model_collected_while_a_sign_of_life_is_sent_is_closed_all_the_same(monkeypatch):
    said, dropped = [], []

    class Channel:
        def send(self, words):
            said.append(int(words[0]))
            if not dropped:
                dropped.append(models.clear())
                gc.collect()  # in the thread that sends

        def call_off(self, *, in_order):
            said.append(in_order)

    monkeypatch.setattr(parallel, "_BEAT", 0.01)
    monkeypatch.setattr(parallel.dist, "get_world_size", lambda: 1)
    models = [parallel.ParallelModel(None, Channel())]
    models[0].target = models[0]  # a cycle: only a collection ends it
    deadline = time.monotonic() + 20
    while END not in said and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    assert said[0] == ALIVE
    assert said[-2:] == [END, True]
