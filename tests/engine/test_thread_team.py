"""Threads that other programs keep from their cores are left out of passes, for a while."""

import pytest
import torch

from ragaccel.engine import thread_team
from ragaccel.engine.thread_team import ThreadTeam


class Machine:
    """Passes of a team: ``busy`` threads of other programs take half of a core each."""

    def __init__(self, monkeypatch, threads):
        self.now, self.busy, self.threads = 0.0, 0, threads
        self.team, self.sizes = ThreadTeam(), []
        monkeypatch.setattr(thread_team, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    def run(self, passes, seconds=0.01):
        self.sizes = []
        for _ in range(passes):
            size = self.team.size()
            contended = size + self.busy > self.threads
            took = seconds * (2 if contended else 1)
            self.now += took
            self.team.note(size, took, size * seconds * (0.9 if contended else 1))
            self.sizes.append(size)


@pytest.fixture(params=[2, 8])
def machine(request, monkeypatch):
    return Machine(monkeypatch, request.param)


def test_all_threads_work_where_none_loses_time(machine):
    machine.run(1000)
    assert set(machine.sizes) == {machine.threads}


def test_threads_are_left_out_while_others_are_busy(machine):
    machine.busy = machine.threads // 2
    machine.run(100)
    machine.run(1000)
    assert machine.sizes.count(machine.threads - machine.busy) > 0.9 * len(machine.sizes)
    machine.busy = 0
    machine.run(200)
    assert machine.sizes[-1] == machine.threads


def test_long_passes_are_judged_one_by_one(machine):
    machine.busy = 1
    machine.run(10, seconds=3.0)
    assert machine.sizes[-1] == machine.threads - 1


def test_one_short_loss_changes_nothing(machine):
    machine.run(100)
    machine.busy = 1
    machine.run(1)
    machine.busy = 0
    machine.run(100)
    assert set(machine.sizes) == {machine.threads}


def test_one_thread_works_where_torch_has_one_now(machine, monkeypatch):
    machine.busy = machine.threads - 1
    machine.run(500)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert machine.team.size() == 1
