"""The compiled code for processors with fewer instructions than this one, in processes of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[1]
AVX2 = "+avx +avx2 +bmi +bmi2 +cx16 +f16c +fma +lzcnt +movbe +popcnt +sse4.2 +xsave".split()
AVX512 = [*AVX2, *"+avx512bw +avx512cd +avx512dq +avx512f +avx512vl".split()]
TESTED = (
    "engine/test_bfloat16_attention.py",
    "engine/test_bfloat16_products.py",
    "models/test_fused_decoder.py",
    "models/test_int8.py",
    "models/test_packing.py",
)
TILES = [*AVX512, *"+avx512bf16 +avx512vbmi +amx-tile +amx-bf16".split()]
COMPILE = (
    "from numba import from_dtype, types\n"
    "from ragaccel.engine import bfloat16_code\n"
    "bfloat16_code.HAS_TILES = True  # as where Linux allows it\n"
    "from ragaccel.engine import bfloat16_attention, bfloat16_layers, bfloat16_products\n"
    "from ragaccel.jit import callback\n"
    "for module in (bfloat16_products, bfloat16_attention, bfloat16_layers):\n"
    "    tasks = module._TASKS\n"
    "    made = callback(tasks._run, types.void(types.CPointer(from_dtype(tasks.record))))\n"
    "    assert 'tdpbf16ps' in made.inspect_llvm()\n"
)
KIND = (
    "from ragaccel.engine import bfloat16, bfloat16_code as code\n"
    "print(bfloat16.is_supported(), code.HAS_DOT_PRODUCTS, code.HAS_WIDE_REGISTERS)"
)


@pytest.mark.parametrize(("name", "features"), [("haswell", AVX2), ("skylake-avx512", AVX512)])
def test_what_holds_here_holds_there(name, features, tmp_path):
    is_wide, here = features is AVX512, torch.backends.cpu.get_cpu_capability()
    if sys.platform != "linux" or not here.startswith("AVX512" if is_wide else "AVX"):
        pytest.skip("this processor has fewer instructions, or nothing is compiled for its system")
    held = {
        "NUMBA_CPU_NAME": name,
        "NUMBA_CPU_FEATURES": ",".join(features),
        "NUMBA_CACHE_DIR": str(tmp_path),
        "ATEN_CPU_CAPABILITY": "avx512" if is_wide else "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE" if is_wide else "AVX2",
    }
    environment = {name: value for name, value in os.environ.items() if name != "RAGACCEL_SLOW"}

    def run(*given):
        return subprocess.run(
            [sys.executable, *given],
            env=environment | held, cwd=TESTS.parent,
            capture_output=True, text=True, check=False, timeout=900,
        )  # fmt: skip

    kind = run("-c", KIND)
    assert kind.stdout.split() == ["True", "False", str(is_wide)], kind.stderr
    files = [str(TESTS / file) for file in TESTED]
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *files)
    assert done.returncode == 0, done.stdout[-3000:]


def test_products_of_tiles_can_be_compiled_anywhere(tmp_path):
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("LLVM compiles for other kinds of processors here")
    held = {
        "NUMBA_CPU_NAME": "sapphirerapids",
        "NUMBA_CPU_FEATURES": ",".join(TILES),
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=os.environ | held, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
