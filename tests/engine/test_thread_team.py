"""Threads that wait for cores which other programs have are left out of passes, for a while."""

import os
import sys
import time

import pytest
import torch
from decoding import decode
from tiny_models import make_tiny_model

from ragaccel.decoding import Request
from ragaccel.engine import Engine, thread_team
from ragaccel.engine.thread_team import ThreadTeam, seconds_waited
from ragaccel.models import HuggingFaceModel

pytestmark = pytest.mark.skipif(thread_team.openmp() is None, reason="torch has another pool here")


class Machine:
    """``busy`` programs take half of a core each, for which as many threads of a team wait."""

    def __init__(self, monkeypatch):
        self.now = self.waited = 0.0
        self.busy, self.num_cores = 0, torch.get_num_threads()
        self.team, self.sizes = ThreadTeam(), []
        monkeypatch.setattr(thread_team, "perf_counter", lambda: self.now)
        monkeypatch.setattr(thread_team, "seconds_waited", lambda: self.waited)

    def run(self, passes, seconds=0.01):
        self.sizes = []
        for _ in range(passes):
            self.team.run(lambda: self._compute(seconds))

    def _compute(self, seconds):
        size = torch.get_num_threads()
        in_need = max(0, size + self.busy - self.num_cores)
        seconds *= 2 if in_need else 1
        self.now += seconds
        self.waited += min(in_need, self.busy) * seconds / 2
        self.sizes.append(size)


@pytest.fixture(params=[2, 8])
def machine(request, monkeypatch):
    known = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield Machine(monkeypatch)
    torch.set_num_threads(known)


def test_all_threads_work_where_none_waits(machine):
    machine.run(1000)
    assert set(machine.sizes) == {machine.num_cores}


def test_threads_are_left_out_while_others_are_busy(machine):
    machine.busy = machine.num_cores // 2
    machine.run(100)
    machine.run(1000)
    assert machine.sizes.count(machine.num_cores - machine.busy) > 0.85 * len(machine.sizes)
    machine.busy = 0
    machine.run(300)
    assert machine.sizes[-1] == machine.num_cores
    assert torch.get_num_threads() == machine.num_cores


def test_passes_may_have_fewer_threads_than_what_comes_between(machine):
    """As where a number was measured for an engine's passes, and sampling has torch's."""
    machine.busy, whole, sizes = machine.num_cores - 1, machine.num_cores, []
    for _ in range(1000):
        torch.set_num_threads(max(1, whole // 2))
        machine.run(1, seconds=0.02)
        sizes += machine.sizes
        torch.set_num_threads(whole)
        machine.run(1, seconds=0.002)
    assert sizes.count(1) > 0.85 * len(sizes)


def test_a_long_pass_is_judged_alone(machine):
    machine.busy = 1
    machine.run(2, seconds=3.0)
    assert machine.sizes == [machine.num_cores, machine.num_cores - 1]


def test_waiting_between_passes_changes_nothing(machine):
    for _ in range(100):
        machine.run(1)
        machine.now, machine.waited = machine.now + 1.0, machine.waited + 5.0
        machine.run(5)
    assert set(machine.sizes) == {machine.num_cores}


def test_after_a_long_pause_all_threads_work(machine):
    machine.busy = machine.num_cores - 1
    machine.run(500)
    machine.busy, machine.now = 0, machine.now + 60.0
    machine.run(1)
    assert machine.sizes == [machine.num_cores]


def test_an_error_leaves_torch_its_threads(machine):
    machine.busy = machine.num_cores - 1
    machine.run(500)
    with pytest.raises(ZeroDivisionError):
        machine.team.run(lambda: 1 / 0)
    assert torch.get_num_threads() == machine.num_cores


@pytest.mark.parametrize("exact", [False, True])
def test_an_engine_asks_the_team_unless_no_bit_may_depend_on_it(exact, monkeypatch):
    asked = []
    monkeypatch.setattr(ThreadTeam, "run", lambda _team, compute: asked.append(1) or compute())
    model = HuggingFaceModel(make_tiny_model("llama"))
    decode(Engine(model, exact=exact), Request([1, 2, 3], max_new_tokens=3))
    assert bool(asked) != exact


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_waiting_for_a_core_is_told():
    """Two processes share one core for long enough that each waits."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", "while True: pass"], os.environ)
    try:
        before, deadline = seconds_waited(), time.monotonic() + 20
        while seconds_waited() - before < 0.05:
            assert time.monotonic() < deadline
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.sched_setaffinity(0, cores)
