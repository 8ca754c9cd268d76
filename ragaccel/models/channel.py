"""The channel: how the first of several processes reaches the others, beside their passes."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ragaccel.errors import ParallelError

if TYPE_CHECKING:
    from ragaccel.models.messages import Words

_FIRST = 512  # words of a message sent at once: a tree of 64 rows; shorter ones take as long
_SILENCE = timedelta(minutes=10)  # after which another process counts as lost
_EVER = timedelta(days=3650)


class Channel:
    """Messages in order from the first process to all others, and an alarm that overtakes them.

    Made by all processes at one time. Both go over the processors (gloo), whatever the passes use:
    a process that waits for them leaves its device alone, and hears when the first one is gone.
    """

    def __init__(self) -> None:
        self._messages = dist.new_group(backend="gloo", timeout=_SILENCE)
        self._alarms = dist.new_group(backend="gloo", timeout=_EVER)

    def send(self, words: Words) -> None:
        """Send a message; returns when the others have begun to read it.

        Raises:
            RuntimeError: one of them is gone, or has not listened for minutes.
        """
        first = torch.zeros(_FIRST, dtype=torch.int64)
        head, rest = words[:_FIRST], words[_FIRST:]
        first[: len(head)] = torch.from_numpy(head)
        dist.broadcast(first, 0, group=self._messages)
        if len(rest):
            dist.broadcast(torch.from_numpy(rest), 0, group=self._messages)

    def receive(self) -> Words:
        """Wait for the next message.

        Raises:
            ParallelError: a process is gone, or the first one has said nothing for minutes.
        """
        words = torch.empty(_FIRST, dtype=torch.int64)
        try:
            dist.broadcast(words, 0, group=self._messages)
            size = int(words[1])
            if size > _FIRST:
                rest = torch.empty(size - _FIRST, dtype=torch.int64)
                dist.broadcast(rest, 0, group=self._messages)
                words = torch.cat((words, rest))
        except RuntimeError as error:
            raise ParallelError(f"another process is gone: {error}") from error
        found: Words = words.numpy()
        return found

    def call_off(self, *, in_order: bool) -> None:
        """Tell every other process to leave, whatever it is doing; lost ones are passed over."""
        word = torch.tensor([int(in_order)])
        for rank in range(1, dist.get_world_size()):
            with suppress(RuntimeError):
                dist.send(word, rank, group=self._alarms)

    def wait_for_end(self) -> bool:
        """Wait until the first process calls it off; say whether all is in order.

        Raises:
            RuntimeError: the first process is gone.
        """
        word = torch.empty(1, dtype=torch.int64)
        dist.recv(word, 0, group=self._alarms)
        return bool(word[0])
