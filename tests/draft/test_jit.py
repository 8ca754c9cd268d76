"""What is kept of compiled functions must not outlive the functions they call."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import ragaccel.draft.jit as jit

INNER = "from own.jit import compiled\n@compiled\ndef inner(x):\n    return x + {}\n"
OUTER = (
    "from own.inner import inner\nfrom own.jit import compiled\n"
    "@compiled\ndef outer(x):\n    return inner(x) * 10\n"
)


def run(folder, **variables):
    code = "from own.outer import outer; print(outer(1), outer.py_func.__name__)"
    environment = {**os.environ, "PYTHONPATH": str(folder), **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout.split()


def write(folder, added):
    (folder / "own" / "inner.py").write_text(INNER.format(added))


def test_a_changed_function_is_called_by_those_compiled_before(tmp_path):
    package = tmp_path / "own"
    package.mkdir()
    shutil.copy(Path(jit.__file__), package / "jit.py")
    (package / "__init__.py").write_text("")
    (package / "outer.py").write_text(OUTER)
    write(tmp_path, 1)
    assert run(tmp_path) == ["20", "outer"]
    assert run(tmp_path) == ["20", "outer"]
    assert list((package / "__pycache__").glob("outer.*.nbi")), "it is kept"
    write(tmp_path, 4)
    assert run(tmp_path) == ["50", "outer"]
    assert run(tmp_path, NUMBA_DISABLE_JIT="1") == ["50", "outer"]
