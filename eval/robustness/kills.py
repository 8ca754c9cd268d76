"""An experiment that kills processes while they write and checks that nothing is lost."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import tempfile
import time
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from eval import cli
from eval.robustness.fuzz import in_child
from eval.robustness.stand_ins import HashEmbedder
from eval.runner import note, result
from ragaccel.cli.history import ANSWERED, History
from ragaccel.errors import RagaccelError
from ragaccel.passage import Passage
from ragaccel.retrieval import Collection, Store, index_folder, indexing as folder_run

_WORDS = [f"word{number}" for number in range(500)]
_MAX_IN_A_ROW = 4  # kills of one build before a run may finish
_SHOWN = 5


class Trial:
    """A kind of work that is killed again and again, with the checks after each kill.

    Args:
        folder: The folder for all files of the trial.
        seed: Seed of the work and of the moments of the kills.
    """

    shortest, longest = 0.0, 0.1  # seconds until a kill
    name, what = "file", "what is written"

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.place = folder, folder / self.name
        self.rng = random.Random(seed)
        self.log = folder / "acknowledged"
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    def prepare(self) -> None:
        """Prepare the trial, once, before the first kill."""

    def reset(self) -> None:
        """Prepare the next run of the work, in this process, which is not killed."""

    def work(self) -> None:
        """Do the work in the process to be killed; call :meth:`acknowledge` after every step."""
        raise NotImplementedError

    def check(self) -> None:
        """Check the files after a kill: they exist, can be read, and pass :meth:`compare`."""
        records = self.acknowledged()
        if not self.place.exists():
            if records or self.must_exist():
                self.lose(f"nothing is left of {self.what}")
            return
        with self.finding():
            self.compare(records)

    def must_exist(self) -> bool:
        """Return whether the file existed before the work and so must exist after a kill."""
        return False

    def compare(self, records: list[Any]) -> None:
        """Compare the files with the acknowledged records; call :meth:`lose` for differences."""
        raise NotImplementedError

    def end(self) -> None:
        """Do the last checks, after all kills."""

    def run(self, count: int) -> dict[str, Any]:
        """Kill ``count`` processes; return the counts and the first problems."""
        self.prepare()
        while self.counts["kills"] < count and not self.counts["failed"]:
            self.reset()
            self.kill()
        self.end()
        return {**self.counts, "problems": self.problems[:_SHOWN]}

    def kill(self) -> bool:
        """Kill one process at a random moment and check; return False if it ended before."""
        self.log.unlink(missing_ok=True)
        status = run_killed(self.work, self.rng.uniform(self.shortest, self.longest))
        if not os.WIFSIGNALED(status):
            self.counts["failed" if status else "ended before"] += 1
            if status:
                self.problems.append("the work failed by itself, without a kill")
            return False
        self.counts["kills"] += 1
        self.check()
        return True

    def acknowledge(self, what: object) -> None:
        """Record, in the process to be killed, that ``what`` is done; survives the kill."""
        handle = os.open(self.log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.write(handle, (json.dumps(what) + "\n").encode())
        os.close(handle)

    def acknowledged(self) -> list[Any]:
        """Return all records of the killed process."""
        lines = self.log.read_text().split("\n")[:-1] if self.log.exists() else []
        self.counts["acknowledged"] += len(lines)
        return [json.loads(line) for line in lines]

    def lose(self, what: str) -> None:
        """Count a loss and describe it in ``problems``."""
        self.counts["lost"] += 1
        self.problems.append(f"after kill {self.counts['kills']}: {what}")

    @contextmanager
    def finding(self) -> Iterator[None]:
        """Count a loss if the code inside the context cannot read the files."""
        try:
            yield
        except (RagaccelError, sqlite3.Error, OSError) as error:
            self.lose(f"{self.what} cannot be read: {error}")

    def require_sound(self) -> None:
        """Count a loss if SQLite's integrity checks fail."""
        with closing(sqlite3.connect(self.place)) as connection:
            whole = connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            if not whole or connection.execute("PRAGMA foreign_key_check").fetchall():
                self.lose(f"SQLite finds {self.what} damaged")

    def require_sound_store(self) -> None:
        """Count a loss if SQLite's integrity checks or those of the store fail."""
        self.require_sound()
        with Store(self.place) as store:
            for problem in store.check():
                self.lose(problem)


def run_killed(work: Callable[[], None], seconds: float | None = None) -> int:
    """Run ``work`` in a forked process, killed after ``seconds`` if given; return its status."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(3)
        os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)  # safe: an ended child keeps its id until waitpid
    return os.waitpid(child, 0)[1]


# Indexing


class Build(Trial):
    """A trial of building a new index."""

    name, what = "index.db", "the index"
    changes = rebuilds = False

    @override
    def prepare(self) -> None:
        folder_run._BATCH_PASSAGES = 16  # many small transactions: more moments to be killed in
        self.docs = self.folder / "docs"
        self.embedder = HashEmbedder(seconds_a_text=0.0008)
        self._write_documents()
        self.before: Any = ({}, {})
        if self.changes or self.rebuilds:
            run_killed(self.work)
            self.before = self._contents()
            self._keep()
        if self.changes:
            self._change_documents()
        if self.rebuilds:
            self.embedder = HashEmbedder("another embedder", 0.0008)
        self.wanted, self.longest = self._clean_build()

    @override
    def reset(self) -> None:
        if self.counts["in a row"] >= _MAX_IN_A_ROW:
            self._let_end()
        if not self.counts["in a row"]:
            self._put_back()

    @override
    def kill(self) -> bool:
        killed = super().kill()
        if killed:
            self.counts["in a row"] += 1
        else:
            self._let_end()
        return killed

    @override
    def end(self) -> None:
        if self.counts["in a row"]:
            self._let_end()
        del self.counts["in a row"]

    @override
    def work(self) -> None:
        with Store(self.place) as store:
            transaction = store.transaction

            @contextmanager
            def acknowledged() -> Iterator[None]:
                with transaction():
                    yield
                files = store.files().items()
                self.acknowledge({path: record.sha256 for path, record in files})

            store.transaction = acknowledged
            index_folder(store, self.embedder, self.docs, rebuild=self.rebuilds)

    @override
    def must_exist(self) -> bool:
        return bool(self.before[0])

    @override
    def compare(self, records: list[Any]) -> None:
        self.require_sound_store()
        files, passages = self._contents()
        if self.rebuilds:
            if (files, passages) not in (self.before, self.wanted):
                self.lose("neither the old index nor the new one is there")
            return
        for path, sha256 in (records[-1] if records else self.before[0]).items():
            self._check_file(path, sha256, files, passages)
        for path in files.keys() - self.before[0].keys() - self.wanted[0].keys():
            self.lose(f"{path} is there and should never have been")

    def _check_file(self, path: str, sha256: str, files: Any, passages: Any) -> None:
        """Count a loss unless a file's record and passages are all acknowledged or all final."""
        allowed = [self.wanted]
        if self.before[0].get(path) == sha256:
            allowed.append(self.before)
        if not any(
            (files.get(path), passages.get(path)) == (whole[0].get(path), whole[1].get(path))
            for whole in allowed
        ):
            self.lose(f"{path} is not whole, or older than was acknowledged")

    def _let_end(self) -> None:
        """Let a run finish; count a loss unless the index equals the expected one."""
        self.counts["in a row"] = 0
        self.counts["runs let end"] += 1
        if run_killed(self.work):
            self.lose("the next run fails")
            return
        with self.finding():
            self.require_sound_store()
            if self._contents() != self.wanted:
                self.lose("the next run ends in another index than one made from nothing")
        kept = {"index.db", "index.db-wal", "index.db-shm", "index.db.lock"}
        self.counts["left behind"] += len(
            [path for path in self.folder.glob("index.db*") if path.name not in kept]
        )

    def _contents(self) -> tuple[dict[str, str], dict[str, Any]]:
        """Return the sha256 and the passages of each file in the index, by path."""
        passages: dict[str, Any] = {}
        with closing(sqlite3.connect(f"{self.place.as_uri()}?mode=ro", uri=True)) as connection:
            files = dict(connection.execute("SELECT path, sha256 FROM file"))
            for path, *row in connection.execute(
                "SELECT f.path, p.passage_id, p.start, p.end, p.title, p.text, p.text_hash,"
                " p.vector FROM passage AS p JOIN file AS f ON f.id = p.file_id ORDER BY 1, 3, 2"
            ):
                passages.setdefault(path, []).append(row)
        return files, passages

    def _clean_build(self) -> tuple[Any, float]:
        """Build the expected index from nothing; return it and the seconds of a run."""
        self._remove()
        rebuilds, self.rebuilds = self.rebuilds, False
        run_killed(self.work)
        wanted = self._contents()
        self.rebuilds = rebuilds
        self._put_back()
        started = time.perf_counter()
        run_killed(self.work)
        return wanted, 1.02 * (time.perf_counter() - started)

    def _remove(self) -> None:
        for path in self.folder.glob("index.db*"):
            path.unlink()

    def _keep(self) -> None:
        with closing(sqlite3.connect(self.place)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        shutil.copy(self.place, self.folder / "kept")

    def _put_back(self) -> None:
        self._remove()
        if (self.folder / "kept").exists():
            shutil.copy(self.folder / "kept", self.place)

    def _write_documents(self) -> None:
        for number in range(120):
            path = self.docs / f"d{number % 7}" / f"f{number}.md"
            path.parent.mkdir(parents=True, exist_ok=True)
            texts = [self._text(40) for _ in range(self.rng.randint(1, 9))]
            path.write_text(f"# File {number}\n\n" + "\n\n".join(texts) + "\n")

    def _change_documents(self) -> None:
        """Delete about 15 % of the files, change about 35 % and add 20."""
        for path in sorted(self.docs.rglob("*.md")):
            chance = self.rng.random()
            if chance < 0.15:
                path.unlink()
            elif chance < 0.5:
                path.write_text(path.read_text() + f"\n\n{self._text(30)}\n")
        for number in range(20):
            (self.docs / f"new{number}.md").write_text(f"# New\n\n{self._text(90)}\n")

    def _text(self, words: int) -> str:
        return " ".join(self.rng.choices(_WORDS, k=words)) + "."


class Update(Build):
    """A trial of updating an index after files were deleted, changed and added."""

    changes = True


class Rebuild(Build):
    """A trial of rebuilding an index with another embedder."""

    rebuilds = True


# Other things that are written


class Collected(Trial):
    """A trial of a collection: passages are put and dropped, or all cleared, in turn."""

    longest = 0.5
    name, what = "collection.db", "the collection"

    @override
    def reset(self) -> None:
        for path in self.folder.glob("collection.db*"):
            path.unlink()
        self.seed = self.rng.random()

    def _operations(self) -> Iterator[tuple[str, Any, dict[str, str]]]:
        """Yield (operation, argument, expected contents afterwards), the same for each seed."""
        rng, state = random.Random(self.seed), dict[str, str]()
        while True:
            chance = rng.random()
            if chance < 0.65 or not state:
                names = [f"p{rng.randrange(400)}" for _ in range(rng.randint(1, 20))]
                put = {name: f"text {rng.random()}" for name in names}
                state = {**state, **put}
                yield "put", put, state
            elif chance < 0.97:
                gone = rng.sample(sorted(state), min(len(state), rng.randint(1, 15)))
                state = {name: text for name, text in state.items() if name not in gone}
                yield "drop", gone, state
            else:
                state = {}
                yield "clear", None, state

    @override
    def work(self) -> None:
        embedder = HashEmbedder()
        with Collection(self.place) as collection:
            self.acknowledge(0)
            for number, (operation, argument, _) in enumerate(self._operations(), 1):
                if operation == "put":
                    passages = [
                        Passage(name, text, path=f"doc{len(name)}")
                        for name, text in argument.items()
                    ]
                    vectors = embedder.embed_documents(list(argument.values()))
                    collection.put(passages, vectors, [{"n": number}] * len(passages))
                elif operation == "drop":
                    collection.drop(argument)
                else:
                    collection.clear()
                self.acknowledge(number)

    @override
    def compare(self, records: list[Any]) -> None:
        self.require_sound_store()
        found = self._found()
        done = records[-1] if records else 0
        states = [{}] if done == 0 else []
        for number, (_, _, state) in enumerate(self._operations(), 1):
            if number in (done, done + 1):
                states.append(state)
            if number > done:
                break
        if found not in states:
            self.lose(f"what it holds is neither operation {done}'s nor the next one's")

    def _found(self) -> dict[str, str]:
        """Return the collection's texts by id; count a loss if a search misses one of them."""
        with Collection(self.place) as collection:
            found = {item.passage.passage_id: item.passage.text for item in collection}
            if found:
                vector = HashEmbedder().embed_query(next(iter(found.values())))
                if collection.search(vector, 1)[0].passage.score < 0.98:
                    self.lose("a passage is not found by its own text")
        return found


class HistoryTurns(Trial):
    """A trial of the history: questions and answers are written to it."""

    longest = 0.08
    name, what = "history.db", "the history"

    @override
    def work(self) -> None:
        history = History(self.place)
        conversation = history.open_conversation("documents")
        while True:
            turn = history.begin(conversation, "a question")
            self.acknowledge([turn, "", "unfinished"])
            history.finish(turn, f"answer {turn}", ANSWERED, {"x": 1})
            self.acknowledge([turn, f"answer {turn}", ANSWERED])

    @override
    def compare(self, records: list[Any]) -> None:
        self.require_sound()
        with closing(sqlite3.connect(self.place)) as connection:
            has_turns = connection.execute(
                "SELECT 1 FROM sqlite_master WHERE name = 'turn'"
            ).fetchone()
            rows = "SELECT id, answer, state FROM turn" if has_turns else "SELECT 1 WHERE 0"
            found = {row[0]: list(row[1:]) for row in connection.execute(rows)}
        for turn, *written in records:
            is_last = written[-1] == "unfinished" and turn in found
            if found.get(turn) != written and not is_last:
                self.lose(f"turn {turn} was {written} and is {found.get(turn)}")


class Remembered(Trial):
    """A trial of a memory, saved after every request; it counts the requests that it holds."""

    longest = 0.25
    name, what = "memory.bin", "the memory"

    @override
    def prepare(self) -> None:
        self._remember(self._opened(None), 0)  # compiles functions before the first fork

    @override
    def reset(self) -> None:
        if self.counts["kills"] % 20 == 0:  # keeps the file small
            self.place.unlink(missing_ok=True)

    def _opened(self, place: Path | None) -> Any:
        from ragaccel.drafting import Memory

        return Memory(path=place, fingerprint="model", vocab_size=60)

    def _remember(self, memory: Any, number: int) -> int:
        """Remember a request; return the number of requests in the memory."""
        rng = random.Random(number)
        prompt, answer = ([rng.randrange(60) for _ in range(size)] for size in (50, 30))
        memory.of("mine").remember(prompt, answer)
        return int(memory.of("mine").history.num_requests)

    @override
    def work(self) -> None:
        memory = self._opened(self.place)
        while True:
            number = self._remember(memory, memory.of("mine").history.num_requests)
            memory.save()
            self.acknowledge(number)

    @override
    def compare(self, records: list[Any]) -> None:
        memory = self._opened(self.place)
        found = memory.of("mine").history.num_requests
        if memory.load_error:
            self.lose(f"the memory is refused: {memory.load_error}")
        elif records and found not in (records[-1], records[-1] + 1):
            self.lose(f"{found} requests are there, {records[-1]} were acknowledged")

    @override
    def end(self) -> None:
        """Count the unfinished files that remain after one more write."""
        memory = self._opened(self.place)
        self._remember(memory, 0)
        memory.save()
        self.counts["left behind"] = len(list(self.folder.rglob(".ragaccel-*.part")))


class Checkpoints(Trial):
    """A trial of training runs that save every step and resume from their last checkpoint."""

    name, what = "out-run", "the last checkpoint"

    @override
    def prepare(self) -> None:
        import torch

        from eval.robustness.stand_ins import save_tiny_model
        from ragaccel.training import make_recipe

        torch.set_num_threads(1)
        self.model, self.samples = self.folder / "model", self.folder / "samples.jsonl"
        save_tiny_model(self.model)
        rows = [{"prompt": f"light {n}", "answer": f"is {n} of {n * n}"} for n in range(12)]
        self.samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.recipe = make_recipe(num_masks=2, rank=2, row_tokens=80, steps=50, save_every=1)
        self.wanted: dict[int, Any] = {}
        started = time.perf_counter()
        self._train("whole", self._remember)
        self.shortest = 0.5 * (self.first_saved - started)
        self.longest = time.perf_counter() - started

    def _remember(self, step: int, network: Any) -> None:
        if not self.wanted:
            self.first_saved = time.perf_counter()
        self.wanted[step] = {
            name: one.detach().clone() for name, one in network.trained_parameters().items()
        }

    def _train(self, name: str, saved: Callable[[int, Any], None]) -> None:
        from ragaccel.training import Job, Listener, train_space

        class Saved(Listener):
            def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
                saved(state.global_step, kwargs["model"])

        job = Job(self.samples, self.folder / name, model=self.model, max_evaluated=0, device="cpu")
        train_space(job, self.recipe, Saved())

    @override
    def reset(self) -> None:
        if (self.folder / "out" / "space.safetensors").exists():
            self._check_end()
            for name in ("out", self.name):
                shutil.rmtree(self.folder / name, ignore_errors=True)

    @override
    def work(self) -> None:
        self._train("out", lambda step, _: self.acknowledge(step))

    @override
    def compare(self, records: list[Any]) -> None:
        folders = {int(one.name[11:]): one for one in self.place.glob("checkpoint-*")}
        last = max(folders, default=0)
        if records and last not in (records[-1], records[-1] + 1):
            self.lose(f"the checkpoint is of step {last}, not of {records[-1]} or the next one")
        for step, folder in folders.items():
            self._check_one(folder, step)

    def _check_one(self, folder: Path, step: int) -> None:
        """Count a loss unless the checkpoint's weights equal those of an uninterrupted run."""
        import torch
        from safetensors.torch import load_file

        try:
            found = load_file(folder / "model.safetensors")
            for name in ("optimizer.pt", "scheduler.pt"):
                torch.load(folder / name, weights_only=True)
            state = json.loads((folder / "trainer_state.json").read_text())
        except (RuntimeError, ValueError, EOFError) as error:
            raise OSError(str(error)) from error
        self.counts["checkpoints read"] += 1
        wanted = self.wanted[step]
        if state["global_step"] != step or found.keys() != wanted.keys():
            self.lose(f"checkpoint {step} is of two steps")
        elif not all(torch.equal(found[name], wanted[name]) for name in wanted):
            self.lose(f"checkpoint {step} is not what a run without a stop has")

    def _check_end(self) -> None:
        """Count a loss unless the finished adapter equals that of an uninterrupted run."""
        self.counts["runs let end"] += 1
        whole, out = (self.folder / name / "space.safetensors" for name in ("whole", "out"))
        if whole.read_bytes() != out.read_bytes():
            self.lose("the adapter is not that of a run without a stop")

    @override
    def end(self) -> None:
        """Let the last run finish and check it; count the leftovers beside the last checkpoint."""
        run_killed(self.work)
        self._check_end()
        self.counts["left behind"] = len(list(self.place.glob("checkpoint*"))) - 1


KINDS: dict[str, tuple[type[Trial], int]] = {
    "build": (Build, 150),
    "update": (Update, 150),
    "rebuild": (Rebuild, 155),
    "collection": (Collected, 270),
    "memory": (Remembered, 150),
    "history": (HistoryTurns, 150),
    "checkpoints": (Checkpoints, 125),
}
"""{kind: (its trial, its number of kills)}."""


@cli.experiment(
    cli.option("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS)),
    cli.option("--count", type=int, help="kills of each kind, instead of its own number"),
    cli.SEED,
    shown=("kinds", "kills", "lost", "failed"),
    broken=lambda document: bool(document["lost"] or document["failed"]),
)
def run_kills(options: Namespace) -> dict[str, Any]:
    """Kills: processes killed in the middle of writing, and whether anything acknowledged is lost.

        python -m eval kills --out eval/results

    An index is built, updated and rebuilt; a collection, a memory, the history and checkpoints of a
    training run are written: each in a process that is killed (SIGKILL) at a random moment, 1,150
    times in all. After each kill everything that the process had acknowledged must be in the file,
    and the file must be undamaged; an interrupted build must continue to the contents of a new
    index. Only processes die, not the machine, so data that the system has not yet written to disk
    is not at risk. The run exits with 1 if anything was lost.
    """
    found: dict[str, dict[str, Any]] = {}
    for kind in options.kinds:
        told, _ = in_child(partial(_tried, kind, options))
        if not told:
            raise ValueError(f"the trials of {kind} failed by themselves; see above")
        (found[kind],) = told
        note(f"{kind}: {json.dumps(found[kind])}")
    total = {key: sum(one.get(key, 0) for one in found.values()) for key in ("kills", "lost")}
    failed = sum(one.get("failed", 0) for one in found.values())
    return result("kills", {"seed": options.seed}, kinds=found, **total, failed=failed)


def _tried(kind: str, options: Namespace, tell: Callable[[Any], object]) -> None:
    """Try one kind in this process; tell the counts."""
    trial, count = KINDS[kind]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ragaccel-kills-") as folder:
        found = trial(Path(folder), options.seed).run(options.count or count)
    tell({**found, "seconds": round(time.perf_counter() - started, 1)})
