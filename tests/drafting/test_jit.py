"""Compiled functions: when their cached code is used, and what happens without a cache."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ragaccel.jit as jit

INNER = "from own.jit import compiled\n@compiled\ndef inner(x):\n    return x + {}\n"
OUTER = (
    "from own.inner import inner\nfrom own.jit import compiled\n"
    "@compiled\ndef outer(x):\n    return inner(x) * 10\n"
)


def run(folder, code, **variables):
    """Run code in a process of its own that imports from a folder; return its words."""
    environment = {**os.environ, "PYTHONPATH": str(folder), **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture
def package(tmp_path):
    package = tmp_path / "own"
    package.mkdir()
    shutil.copy(Path(jit.__file__), package / "jit.py")
    (package / "__init__.py").write_text("")
    return package


@pytest.mark.slow
def test_a_changed_function_is_called_by_those_compiled_before(package, tmp_path):
    code = "from own.outer import outer; print(outer(1), outer.py_func.__name__)"
    (package / "outer.py").write_text(OUTER)
    for added, variables, result in (
        (1, {}, "20"),
        (1, {}, "20"),
        (4, {}, "50"),
        (4, {"NUMBA_DISABLE_JIT": "1"}, "50"),
    ):
        (package / "inner.py").write_text(INNER.format(added))
        assert run(tmp_path, code, **variables) == [result, "outer"]
        assert list((package / "__pycache__").glob("outer.*.nbi")), "it is kept"


@pytest.mark.slow
def test_on_a_full_disk_functions_are_compiled_all_the_same(package, tmp_path):
    pytest.importorskip("resource")
    (package / "inner.py").write_text(INNER.format(1))
    (package / "outer.py").write_text(OUTER)
    code = (
        "import resource, own.outer\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no file can be written\n"
        "print(own.outer.outer(1))"
    )
    assert run(tmp_path, code) == ["20"]
    assert not list((package / "__pycache__").glob("outer.*.nbc"))


@pytest.mark.slow
def test_cached_code_of_a_type_that_is_gone_is_compiled_anew(package, tmp_path):
    code = "from own.pairs import first, {0}; print(first({0}(3, 4)))"
    for name in ("Pair", "Couple"):
        (package / "pairs.py").write_text(
            "from typing import NamedTuple\nfrom own.jit import compiled\n"
            f"class {name}(NamedTuple):\n    a: int\n    b: int\n"
            "@compiled\ndef first(pair):\n    return pair.a\n"
        )
        assert run(tmp_path, code.format(name)) == ["3"]


THREADS = '''
import sys, threading, time
from collections import namedtuple
from numba.extending import typeof_impl

class Slow(type):
    """Reads numba's table of types as slowly as a busy machine would."""
    def __subclasscheck__(cls, other):
        if other.__name__ != "Kind0":  # which is the first one compiled
            time.sleep(0.4)
        return False

class Any(metaclass=Slow):
    pass

@typeof_impl.register(Any)
def never(value, context):
    return None

sys.setswitchinterval(1e-6)
from own.many import functions  # after that nothing has been compiled or loaded
errors, start = [], threading.Barrier(len(functions))

def first_use(number, function):
    kind = namedtuple(f"Kind{number}", "a b")  # a type that numba must look up
    start.wait()
    try:
        assert function(kind(1, 2.0)) == 3.0, number
    except BaseException as error:
        errors.append(repr(error))

threads = [threading.Thread(target=first_use, args=one) for one in enumerate(functions)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not errors, errors[0]
print("ready")
'''


@pytest.mark.slow
def test_threads_that_use_functions_for_the_first_time_together_never_fail(package, tmp_path):
    """Compiled by the first process, loaded by the second."""
    one = "@compiled\ndef f{0}(x):\n    return x.a + x.b\n"
    several = "".join(one.format(number) for number in range(4))
    names = ", ".join(f"f{number}" for number in range(4))
    code = f"from own.jit import compiled\n{several}functions = [{names}]\n"
    (package / "many.py").write_text(code)
    for _ in range(2):
        assert run(tmp_path, THREADS) == ["ready"]


@pytest.mark.slow
def test_a_strangers_folder_does_not_say_where_compiled_code_is_kept(tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / ".numba_config.yaml").write_text("cache_dir: ./theirs\ndisable_jit: 1\n")
    script = (
        "import sys; sys.path[:] = sys.argv[1:]\n"
        "from ragaccel.drafting.calibration import update_corrections\n"
        "import numba, os\n"
        "assert numba.njit(lambda n: n + 1)(1) == 2  # reads its settings again\n"
        "kept = os.path.abspath(update_corrections._cache._cache_file._index_path)\n"
        "assert not kept.startswith(os.getcwd()), kept\n"
        "assert not (numba.config.CACHE_DIR or numba.config.DISABLE_JIT)\n"
    )
    environment = {key: os.environ[key] for key in os.environ if not key.startswith("NUMBA_")}
    arguments = [sys.executable, "-c", script, *filter(None, sys.path)]
    subprocess.run(arguments, cwd=tmp_path, env=environment, check=True)
