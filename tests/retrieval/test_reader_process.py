"""The reading process: bounded, isolated, and independent of the working directory."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ragaccel.errors import DocumentError, MissingExtraError
from ragaccel.retrieval.loaders import DocumentReader, document_from_bytes
from ragaccel.retrieval.loaders.process import _COMMAND, ReaderProcess

SLOW = b"a,b\n" + b"1,2\n" * 1_500_000
LARGE = b"[" + b"[]," * 3_000_000 + b"1]"
COMMAND = "ragaccel.retrieval.loaders.process._COMMAND"
POSIX = pytest.mark.skipif(os.name != "posix", reason="signals and forks")


@pytest.fixture
def process():
    with ReaderProcess() as process:
        yield process


def reads(process, number=1):
    return process.read(b"[%d]" % number, "a.json").text == f"{number}."


def soon(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_it_reads_what_is_read_here(process):
    data = b'{"cells": [{"cell_type": "markdown", "source": "J\\u00fcrgen \\ud83d."}], "b": [1, 2]}'
    for name in ("a.json", "a.ipynb", "a.csv", "a.html"):
        assert process.read(data, name) == document_from_bytes(data, name)


# Limits


@pytest.mark.parametrize("watchdog", [False, True])
@pytest.mark.parametrize(
    ("data", "name", "seconds", "memory", "reason"),
    [
        (SLOW, "a.csv", 1, 1_000_000_000, "takes more than 1 s to read"),
        (LARGE, "a.json", 30, 150_000_000, "takes more than 0.15 GB of memory to read"),
    ],
)
def test_a_file_that_takes_too_much_is_refused_alone(watchdog, data, name, seconds, memory, reason):
    with ReaderProcess(seconds, memory, watchdog=watchdog) as process:
        assert reads(process)
        with pytest.raises(DocumentError, match=f"^{reason}$"):
            process.read(data, name)
        assert reads(process, 2)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_it_uses_one_thread_and_writes_no_core_dump(process):
    openpyxl, book = pytest.importorskip("openpyxl"), io.BytesIO()
    openpyxl.Workbook().save(book)
    process.read(book.getvalue(), "a.xlsx")
    with open(f"/proc/{process._process.pid}/status") as file:
        assert "\nThreads:\t1\n" in file.read()
    with open(f"/proc/{process._process.pid}/limits") as file:
        assert next(line for line in file if "core" in line).split()[4] == "0"


@pytest.mark.slow
def test_what_it_may_take_is_counted_for_each_file_and_without_the_process_that_started_it():
    script = (
        "import sys; from ragaccel.retrieval.loaders.process import ReaderProcess\n"
        "large = bytearray(400_000_000); large[::4096] = b'x' * len(large[::4096]); del large\n"
        "with ReaderProcess(1, max_memory=200_000_000, watchdog=True) as process:\n"
        "    for _ in range(5): process.read(b'a,b\\n' + b'1,2\\n' * 125_000, 'a.csv')"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


# Starting and ending


def test_it_starts_once_early_or_late_and_only_for_formats_of_a_reader():
    with DocumentReader() as reader:
        for name in ("a.md", "a.txt", "a.rst", "a.py"):
            reader.read(b"text", name)
        reader.prepare_for(["a.md", "b.txt"])
        assert reader._process is None
        reader.prepare_for(["a.md", "b.pdf", "c.csv"])
        early = reader._process
        assert early is not None
        for name in ("a.json", "a.csv", "a.html"):
            reader.read(b"[1]", name)
        assert reader._process is early


@pytest.mark.parametrize("trouble", ["", "import os; os._exit(1)", "x = bytearray(1 << 40)"])
def test_it_imports_early_what_files_need_and_a_failure_fails_none(
    process, tmp_path, monkeypatch, trouble
):
    ran = tmp_path / "ran"
    (tmp_path / "library.py").write_text(f"open({str(ran)!r}, 'w')\n{trouble}")
    monkeypatch.syspath_prepend(str(tmp_path))
    process.prepare(["no_such_module", "library"])
    assert all(reads(process, number) for number in range(3))
    assert soon(ran.exists)


def test_a_process_that_does_not_start_is_reported_with_the_first_file(process, tmp_path):
    for early in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(COMMAND, "raise SystemExit")
            if early:
                process.prepare()
            with pytest.raises(DocumentError, match=r"does not start: it ended$"):
                reads(process)
        assert reads(process)
        process.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", "")
        patch.setattr(sys, "exec_prefix", str(tmp_path))
        with pytest.raises(DocumentError, match="does not start: no Python interpreter"):
            reads(process)


def test_a_missing_extra_is_named(process, monkeypatch):
    monkeypatch.setattr(COMMAND, f"import sys\nsys.modules['docx'] = None\n{_COMMAND}")
    with pytest.raises(MissingExtraError, match=r"python-docx.* is not installed: pip") as found:
        process.read(b"", "a.docx")
    assert found.value.extra == "office"


def test_it_imports_little_and_nothing_from_the_working_folder(process, tmp_path, monkeypatch):
    for name in ("json", "csv", "docx", "pypdf", "ragaccel", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    listed = tmp_path / "modules"
    told = f"\nopen({str(listed)!r}, 'w').write(' '.join(sys.modules))\n"
    monkeypatch.setattr(COMMAND, _COMMAND.replace("\nserve(", told + "serve("))
    assert process.read(b"a,b\n1,2\n", "a.csv").text == "a: 1; b: 2."
    with pytest.raises(DocumentError, match="broken docx"):
        process.read(b"", "a.docx")
    assert not (tmp_path / "ran").exists()
    heavy = {"torch", "numpy", "faiss", "transformers", "lxml", "docx", "pypdf", "sqlite3"}
    assert not heavy & set(listed.read_text().split())


@POSIX
def test_it_starts_where_the_working_folder_is_deleted(process, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert reads(process)


@POSIX
def test_it_ends_with_the_process_that_started_it():
    script = (
        "import sys, time; from ragaccel.retrieval.loaders.process import ReaderProcess\n"
        "process = ReaderProcess(); process.read(b'[1]', 'a.json')\n"
        "print(process._process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
    assert soon(lambda: not runs(child))


def runs(pid):
    """Return whether a process runs, a zombie aside."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return found.returncode == 0 and not found.stdout.startswith("Z")


# Interrupts, forks and threads


@POSIX
def test_an_interrupt_leaves_no_answer_for_the_next_file(process):
    def interrupt(*_):
        raise KeyboardInterrupt

    assert reads(process)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            process.read(SLOW, "a.csv")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert reads(process, 2)


@POSIX
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_starts_its_own(process):
    assert reads(process)
    child = os.fork()
    if child == 0:
        right = reads(process, 2)
        process.close()
        os._exit(0 if right else 1)
    assert reads(process, 3)
    assert os.waitpid(child, 0)[1] == 0


def test_threads_share_it(process):
    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(lambda number: reads(process, number), range(120)))


def test_closing_waits_for_the_file_that_another_thread_reads(process):
    found = []
    data = SLOW[: len(SLOW) // 6]
    thread = threading.Thread(target=lambda: found.append(process.read(data, "a.csv")))
    thread.start()
    while process._process is None:
        time.sleep(0.001)
    process.close()
    thread.join()
    assert found[0].text.startswith("a: 1; b: 2.")
    assert process._process is None
