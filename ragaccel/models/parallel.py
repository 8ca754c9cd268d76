"""Models larger than one device: several processes hold a part each, and the first of them leads.

What is drafted, how much of it is worth a pass and what is chosen depends on measured times and on
who asks when, so processes that each decided for themselves would part. The first one alone
decides. Before each pass it tells the others what the pass is, and they run it over caches that
hold their parts of the same states.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import finalize, ref

import torch
import torch.distributed as dist

from ragaccel.errors import ParallelError
from ragaccel.models.channel import Channel
from ragaccel.models.messages import ALIVE, END, PASS, Journal, Mirror, message
from ragaccel.models.processes import expect_passes, is_first, part_processes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor

    from ragaccel.engine.kv_cache import KVCache
    from ragaccel.engine.layout import Rows
    from ragaccel.models.huggingface import HuggingFaceModel

logger = logging.getLogger("ragaccel")

_BEAT = 30.0  # seconds between signs of life while no pass runs
_PATIENCE = 10.0  # seconds for the last word of the first process


class ParallelModel:
    """A target model of which this process, the first, and others hold a part each.

    Passes run on all of them. Once one has failed anywhere the processes no longer agree on what
    their caches hold: every later pass is refused and the others leave.

    Args:
        target: this process's part; its passes exchange what is needed with the others'.
        channel: to the others, who ``follow``.
    """

    num_masks = 0  # an adapter's changes are not split

    def __init__(self, target: HuggingFaceModel, channel: Channel) -> None:
        self.target = target
        self._lead = lead = _Lead(channel)
        self._end = finalize(self, lead.end)  # at the latest when Python exits
        beat = Thread(target=lead.beat, args=(ref(self),), name="ragaccel-beat", daemon=True)
        beat.start()

    @property
    def model(self) -> Any:
        """The model of transformers; a pass through it by itself waits for the others for ever."""
        return self.target.model

    @property
    def device(self) -> torch.device:
        """Where token ids go in and logits come out."""
        return self.target.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the activations."""
        return self.target.dtype

    @property
    def max_positions(self) -> int | None:
        """The longest sequence the model reads, in tokens."""
        return self.target.max_positions

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id the model reads."""
        return self.target.vocab_size

    @property
    def joins_sequences(self) -> bool:
        """Whether one pass can take the rows of several sequences."""
        return self.target.joins_sequences

    @property
    def why_apart(self) -> str:
        """Why no pass can, and what helps."""
        return self.target.why_apart

    @property
    def num_captures(self) -> int:
        """How many passes were captured: none, as others take part in them."""
        return self.target.num_captures

    @property
    def cost_key(self) -> str:
        """Tells the model, so spread, from others whose passes cost differently."""
        return f"{self.target.cost_key}-by-{self._lead.num_processes}"

    @property
    def pass_lock(self) -> AbstractContextManager[Any]:
        """Held while a pass is computed and read."""
        return self.target.pass_lock

    @property
    def weight_bytes(self) -> int:
        """How much of its weights one pass of this process reads, in bytes."""
        return self.target.weight_bytes

    def compile(self) -> bool:
        """Return False: passes that others take part in are not replayed."""
        return False

    def refresh(self) -> int:
        """Follow this process's weights; whoever changes them changes them on all processes."""
        return self.target.refresh()

    def weights_changed(self) -> None:
        """Tell that weights were written to in a way that ``refresh`` may not see."""
        self.target.weights_changed()

    def new_cache(self, capacity: int | None, limit: int | None) -> KVCache:
        """Make an empty cache, which the others will mirror."""
        return self._lead.journal.new_cache(capacity, limit)

    def forward(self, rows: Rows, keep: int) -> Tensor:
        """Run the rows on all processes; return the logits of the last ``keep``, [keep, V].

        Raises:
            ParallelError: a process is gone or failed, now or before, or the model was closed.
        """
        with self._lead.ordered(rows, keep):
            return self.target.forward(rows, keep)

    def free_memory(self) -> None:
        """Free what this process keeps only to make later passes faster."""
        self.target.free_memory()

    def close(self) -> None:
        """Let the other processes end; nothing can be computed afterwards. Harmless if repeated."""
        self._end()


class _Lead:
    """The first process's side of the channel: one message at a time, signs of life between.

    The model's finalizer ends it, and garbage may be collected in any line of any thread: who has
    the lock therefore has the model too, and what the finalizer tells the thread that beats is
    told without a lock of Python's.
    """

    def __init__(self, channel: Channel) -> None:
        self.journal = Journal()
        self.num_processes = dist.get_world_size()
        self._channel, self._lock = channel, Lock()
        self._over = ""  # why nothing can be ordered any more
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._process = os.getpid()

    @contextmanager
    def ordered(self, rows: Rows, keep: int) -> Iterator[None]:
        """Order a pass, which runs in the context."""
        with self._lock:
            if self._over:
                raise ParallelError(self._over)
            try:
                self._channel.send(message(PASS, self.journal, rows, keep))
                yield
            except BaseException as error:  # an interrupt too leaves the others amid a pass
                self._break(error)
                if isinstance(error, Exception):
                    raise ParallelError(self._over) from error
                raise

    def end(self) -> None:
        """Let the others end."""
        if os.getpid() != self._process:  # a fork of the process that leads
            return
        self._ended.put(None)
        with self._lock:
            if self._over:
                return
            self._over = "this model was closed"
            with suppress(RuntimeError):
                self._channel.send(message(END, self.journal))
            self._channel.call_off(in_order=True)
            part_processes()

    def beat(self, model: ref[ParallelModel]) -> None:
        """Say now and then that this process lives; hear whether the others do."""
        while not self._has_ended_within(_BEAT):
            held = model()
            if held is None or not self._say_alive():
                return
            del held

    def _has_ended_within(self, seconds: float) -> bool:
        try:
            self._ended.get(timeout=seconds)
        except Empty:
            return False
        return True

    def _say_alive(self) -> bool:
        """Whether anything can still be ordered."""
        if not self._lock.acquire(blocking=False):
            return True  # a pass says as much
        try:
            if not self._over:
                self._channel.send(message(ALIVE, self.journal))
        except Exception as error:
            self._break(error)
        finally:
            self._lock.release()
        return not self._over

    def _break(self, error: BaseException) -> None:
        cause = f"{type(error).__name__}: {error}".split("\n")[0].split(". ")[0]
        self._over = (
            "a pass failed, or a process is gone that holds a part of this model; each says why on "
            f"its own stderr. Start the program again. Here: {cause}"
        )
        self._channel.call_off(in_order=False)


def follow(target: HuggingFaceModel, channel: Channel) -> None:
    """Run the passes that the first process orders, until it ends.

    Raises:
        ParallelError: a process is gone.
    """
    mirror = Mirror(target.device)
    watch = Thread(target=_watch, args=(channel,), name="ragaccel-watch", daemon=True)
    watch.start()
    with torch.inference_mode():
        while True:
            kind, rows, keep = mirror.read(channel.receive())
            if kind == END:
                break
            if rows is not None:
                target.forward(rows, keep)
    watch.join(_PATIENCE)


def _watch(channel: Channel) -> None:
    """Leave at once when the first process does: a pass may wait for it for ever."""
    try:
        if channel.wait_for_end():
            return
    except RuntimeError:
        os._exit(1)
    os._exit(0)  # it is the first one's to say what went wrong


def shared_by_processes(target: HuggingFaceModel) -> ParallelModel:
    """Make the first process the one that leads; the others follow and leave the program with it.

    Every process calls this with its part of the model, at about the same time.

    Raises:
        SystemExit: in every process but the first, when that ends.
    """
    channel = Channel()
    expect_passes()
    if not is_first():
        _serve(target, channel)
    return ParallelModel(target, channel)


def _serve(target: HuggingFaceModel, channel: Channel) -> NoReturn:
    """Follow to the end; after a failure leave without waiting for anybody."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process decides when to stop
    try:
        follow(target, channel)
    except ParallelError as error:
        logger.error("this process leaves: %s", error)
        os._exit(1)
    except Exception:
        logger.exception("this process leaves: a pass failed")
        os._exit(1)
    part_processes()
    raise SystemExit(0)
