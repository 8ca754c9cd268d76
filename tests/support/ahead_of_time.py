"""Triton kernels compiled for GPUs that are not here, by their own launchers."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ARCHITECTURES = {80: "sm_80", 89: "sm_89", 90: "sm_90a", 100: "sm_100a"}
SHARED_BYTES = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448}
"""The most shared memory of a program, by compute capability."""
_MATRIX_UNITS = r"wgmma\.mma_async|mma\.sync|tcgen05\.mma"


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel: its resources, and the matrix instructions that it has."""

    name: str
    shared: int
    warps: int
    registers: int
    spilled: int  # bytes stored to and loaded from local memory
    matrix_units: frozenset[str]


class _Driver:
    """A GPU of one compute capability, as far as compiling needs one."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability  # a cache of kernels each

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


def load_kernels(name):
    """Import a copy of a module with kernels: other tests may have imported it, interpreted."""
    spec = importlib.util.find_spec(f"ragaccel.engine.{name}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def compiling(capability):
    """Compile what is launched inside the context for a GPU, without running it.

    Yields a list of what was compiled.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launch, compiled = JITFunction.run, []

    def compile_only(function, *args, grid, warmup, **options):
        options.pop("launch_pdl", None)
        kernel = launch(function, *args, grid=grid, warmup=True, **options)
        compiled.append(_describe(function.fn.__name__, kernel, capability))
        return kernel

    active = driver.active if driver._active is not None else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", compile_only)
        driver.set_active(_Driver(capability))
        try:
            yield compiled
        finally:
            driver.set_active(active)


def _describe(name, kernel, capability):
    import triton

    ptx, tools = kernel.asm["ptx"], Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        told = subprocess.run(
            [tools / "ptxas-blackwell", "-v", "--fmad=false",
             f"--gpu-name={ARCHITECTURES[capability]}", file.name, "-o", os.devnull],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
    stores, loads = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", told).groups()
    return Compiled(
        name,
        kernel.metadata.shared,
        kernel.metadata.num_warps,
        int(re.search(r"Used (\d+) registers", told)[1]),
        int(stores) + int(loads),
        frozenset(re.findall(_MATRIX_UNITS, ptx)),
    )
