"""Memory of this process: the machine's, or a container's limit."""

import pytest
import torch

from ragaccel.engine import free_bytes, memory as host_memory, memory as memory_limits, total_bytes

MACHINE, FREE = 64 << 30, 40 << 30


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    pages = {"SC_PHYS_PAGES": MACHINE, "SC_AVPHYS_PAGES": FREE}
    monkeypatch.setattr(host_memory, "_read_pages", pages.__getitem__)


def write_files(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def group_files(limit, used, stat="anon 5", group=""):
    folder = f"sys/fs/cgroup{group}"
    return {
        f"{folder}/memory.max": limit,
        f"{folder}/memory.current": used,
        f"{folder}/memory.stat": stat,
    }


def test_without_control_groups_the_machine_counts(tmp_path):
    assert (total_bytes(tmp_path), free_bytes(tmp_path)) == (MACHINE, FREE)


@pytest.mark.parametrize(
    "groups",
    [
        "0::/",
        "0::/docker/abc",  # mounted in place of the topmost one
        "0::/../../other",
        "3:cpu:/\n2:memory:/docker/abc\n0::/",
    ],
)
def test_a_containers_limit_is_its_total_memory(tmp_path, groups):
    write_files(tmp_path, {"proc/self/cgroup": groups, **group_files(2 << 30, 1 << 30)})
    assert (total_bytes(tmp_path), free_bytes(tmp_path)) == (2 << 30, 1 << 30)


def test_a_group_without_a_limit_changes_nothing(tmp_path):
    write_files(tmp_path, {"proc/self/cgroup": "0::/", **group_files("max", 1 << 30)})
    assert (total_bytes(tmp_path), free_bytes(tmp_path)) == (MACHINE, FREE)


def test_the_smallest_limit_of_all_groups_above_counts(tmp_path):
    files = {"proc/self/cgroup": "0::/slice/unit"}
    files |= group_files("max", 0, group="/slice/unit") | group_files(
        3 << 30, 1 << 30, group="/slice"
    )
    write_files(tmp_path, files | group_files(5 << 30, 9 << 29))
    assert (total_bytes(tmp_path), free_bytes(tmp_path)) == (3 << 30, 1 << 29)


def test_inactive_file_cache_counts_as_free(tmp_path):
    files = group_files(2000, 1500, "anon 9\ninactive_file 700")
    write_files(tmp_path, {"proc/self/cgroup": "0::/", **files})
    assert free_bytes(tmp_path) == 1200


def test_invalid_numbers_are_skipped(tmp_path):
    write_files(
        tmp_path, {"proc/self/cgroup": "0::/\nnonsense", **group_files("?", "?", "inactive_file")}
    )
    assert (total_bytes(tmp_path), free_bytes(tmp_path)) == (MACHINE, FREE)


def test_unknown_memory_is_none_or_zero(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "_read_pages", lambda _name: None)
    assert (total_bytes(tmp_path), free_bytes(tmp_path)) == (None, 0)


def test_a_share_of_the_memory_is_one_of_the_containers(monkeypatch):
    monkeypatch.setattr(memory_limits, "total_bytes", lambda: 1000)
    assert memory_limits.memory_share(torch.device("cpu"), 0.05) == 50
