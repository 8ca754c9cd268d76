"""Memory of this process: the machine's, or a container's limit."""

import pytest
import torch

from ragaccel.engine import free_bytes, memory, total_bytes

MACHINE, FREE, GIB = 64 << 30, 40 << 30, 1 << 30


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    pages = {"SC_PHYS_PAGES": MACHINE, "SC_AVPHYS_PAGES": FREE}
    monkeypatch.setattr(memory, "_read_pages", pages.__getitem__)


LIMITED = {"": (2 * GIB, GIB, "anon 5")}
CONTAINERS = {
    "no control groups": (None, {}, (MACHINE, FREE)),
    "a root group": ("0::/", LIMITED, (2 * GIB, GIB)),
    "mounted in place of the root": ("0::/docker/abc", LIMITED, (2 * GIB, GIB)),
    "outside": ("0::/../../other", {**LIMITED, "/../../other": (GIB, 0, "")}, (2 * GIB, GIB)),
    "both versions": ("3:cpu:/\n2:memory:/docker/abc\n0::/", LIMITED, (2 * GIB, GIB)),
    "version 1": ("3:cpu:/\n2:memory:/docker/abc", LIMITED, (MACHINE, FREE)),
    "no limit": ("0::/", {"": ("max", GIB, "")}, (MACHINE, FREE)),
    "the smallest of all groups above": (
        "0::/slice/unit",
        {
            "": (5 * GIB, GIB * 9 // 2, ""),
            "/slice": (3 * GIB, GIB, ""),
            "/slice/unit": ("max", 0, ""),
        },
        (3 * GIB, GIB // 2),
    ),
    "an inactive file cache": (
        "0::/",
        {"": (2000, 1500, "a 9\ninactive_file 700")},
        (2000, 1200),
    ),
    "a large file cache": ("0::/", {"": (2000, 500, "inactive_file 700")}, (2000, 2000)),
    "over its limit": ("0::/", {"": (2000, 2500, "")}, (2000, 0)),
    "no numbers": ("0::/\nnonsense", {"": ("?", "?", "inactive_file")}, (MACHINE, FREE)),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_memory_is_the_machines_or_the_containers(tmp_path, name):
    own, groups, wanted = CONTAINERS[name]
    if own is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(own + "\n")
    for group, texts in groups.items():
        folder = tmp_path / f"sys/fs/cgroup{group}"
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in zip(("max", "current", "stat"), texts, strict=True):
            (folder / f"memory.{file}").write_text(f"{text}\n")
    assert (total_bytes(tmp_path), free_bytes(tmp_path)) == wanted


def test_unknown_memory_is_none_or_zero_and_a_share_is_one_of_the_containers(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_read_pages", lambda _name: None)
    assert (total_bytes(tmp_path), free_bytes(tmp_path)) == (None, 0)
    monkeypatch.setattr(memory, "total_bytes", lambda: 1000)
    assert memory.memory_share(torch.device("cpu"), 0.05) == 50
