"""The compiled code for processors with fewer instructions than this one, in processes of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ragaccel.engine import bfloat16

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[1]
AVX2 = "+avx +avx2 +bmi +bmi2 +cx16 +f16c +fma +lzcnt +movbe +popcnt +sse4.2 +xsave".split()
AVX512 = [*AVX2, *"+avx512bw +avx512cd +avx512dq +avx512f +avx512vl".split()]
TESTED = (
    "engine/test_bfloat16_attention.py",
    "engine/test_bfloat16_products.py",
    "models/test_fused_decoder.py",
    "models/test_int8.py",
)


@pytest.mark.parametrize(("name", "features"), [("haswell", AVX2), ("skylake-avx512", AVX512)])
def test_what_holds_here_holds_there(name, features, tmp_path):
    if not bfloat16.is_supported():
        pytest.skip("nothing is compiled for bfloat16 here")
    if features is AVX512 and not has_avx512():
        pytest.skip("this processor has fewer instructions")
    held = {
        "NUMBA_CPU_NAME": name,
        "NUMBA_CPU_FEATURES": ",".join(features),
        "NUMBA_CACHE_DIR": str(tmp_path),
        "ATEN_CPU_CAPABILITY": "avx2" if features is AVX2 else "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX2" if features is AVX2 else "AVX512_CORE",
    }
    environment = {name: value for name, value in os.environ.items() if name != "RAGACCEL_SLOW"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs"]
    done = subprocess.run(
        [*command, *(str(TESTS / file) for file in TESTED)],
        env=environment | held, cwd=TESTS.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert "nothing is compiled" not in done.stdout


def has_avx512():
    from ragaccel.engine import bfloat16_code

    return bfloat16_code.HAS_WIDE_REGISTERS
