"""The capture of a pass as a CUDA graph: checked before it begins, undone if it fails.

An operation that waits for the device, or copies from pageable memory, invalidates a capture. Torch
then leaves the thread on the capture's stream, the allocator in the capture's memory pool and the
random generator in its capturing state. So a pass is first run outside a capture and watched, and
what a failed capture left behind is put back.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack, contextmanager, suppress
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

_WARM_UPS = 2
_WAITS = "called a synchronizing CUDA operation"  # torch's warning

Result = TypeVar("Result")


class CaptureError(RuntimeError):
    """Raised if a pass cannot be captured as a CUDA graph.

    The model synchronizes with the device, or runs operations that graphs do not support.
    """


class SynchronizationGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raise ``CaptureError`` in this thread where a pass waits for the device or copies to another.

    It sees the operations of Python code, on any device. ``watch_synchronization`` sees those
    inside torch's operations too, on a GPU only.
    """

    # In inference mode, operations that are made of others arrive whole: item and is_nonzero.
    _WAITING = frozenset(
        "_local_scalar_dense _unique _unique2 bincount equal is_nonzero item masked_select nonzero "
        "unique_consecutive unique_dim".split()
    )
    _INDEXING = frozenset(("index", "index_put", "index_put_"))
    _COPYING = frozenset(("copy_", "_to_copy", "to"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation if it may be captured."""
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        indices = args[1] if name in self._INDEXING else ()
        selects = any(one is not None and one.dtype == torch.bool for one in indices)
        if name in self._WAITING or selects:
            raise CaptureError(f"{name} waits for the device")
        if name in self._COPYING and _crosses_devices(args, found):
            raise CaptureError(f"{name} copies between the host and the device")
        return found


def _crosses_devices(args: Sequence[Any], found: Any) -> bool:
    """Return whether an operation copied to a device of another kind.

    A number that is written into a tensor of a GPU is a CPU's tensor without axes, but no copy.
    """
    if not isinstance(found, torch.Tensor):
        return False
    given = [one for one in args if isinstance(one, torch.Tensor)]
    to_device = found.device.type != "cpu"
    return any(
        one.device.type != found.device.type and (one.dim() > 0 or not to_device) for one in given
    )


_guard = cast("Callable[[], AbstractContextManager[Any]]", SynchronizationGuard)


@contextmanager
def watch_synchronization() -> Iterator[None]:
    """Raise ``CaptureError`` at the end if this thread waited for a GPU inside the context.

    Torch's mode is the process's, so it only warns: in other threads, which may use the device
    meanwhile, nothing fails, and their warnings of this kind are dropped.
    """
    thread, waited, usual_mode = get_ident(), [], torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def watched(message: Any, *rest: Any, **options: Any) -> None:
            if not str(message).startswith(_WAITS):
                show(message, *rest, **options)
            elif get_ident() == thread:
                waited.append(message)

        warnings.showwarning = watched
        warnings.filterwarnings("always", message=_WAITS)
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(usual_mode)
    if waited:
        raise CaptureError("an operation inside torch waits for the device")


class GraphRecorder:
    """A recorder of CUDA graphs on one device, which share a stream and a memory pool.

    Args:
        device: the GPU, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None  # memory freed by one capture is reused only on its own stream
        self._pool: Any = None
        self.guards_warm_up = True
        """Whether a pass runs under a ``SynchronizationGuard`` first; compiled passes cannot."""

    def forget_pool(self) -> None:
        """Begin a new memory pool: torch frees one with its last graph."""
        self._pool = None

    def record(self, compute: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Run ``compute`` until it allocates and compiles nothing new, then capture it.

        Returns:
            The graph and what ``compute`` returned: the tensors that the graph writes.

        Raises:
            CaptureError: it cannot be captured. Nothing of the capture is left, unless the device
                itself failed: then torch's own error is raised, as it will be for every operation.
        """
        stream = self._stream = self._stream or cast("Any", torch.cuda).Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(stream):  # of this device, and left again if the capture fails
                for _ in range(_WARM_UPS - 1):
                    compute()
                self._check(compute)
                torch.cuda.synchronize(self._device)
                return self._capture(compute)
        finally:
            # If memory ran out in a warm-up, the stream may still read inputs that are freed now:
            # later work must not write there before it has ended.
            torch.cuda.current_stream(self._device).wait_stream(stream)

    def _check(self, compute: Callable[[], object]) -> None:
        """Run ``compute`` once more; raise CaptureError if it waits for the device."""
        with ExitStack() as watches:
            watches.enter_context(watch_synchronization())
            if self.guards_warm_up:
                watches.enter_context(_guard())
            compute()

    def _capture(self, compute: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        pool = self._pool = self._pool or cast("Any", torch.cuda).graph_pool_handle()
        generator = torch.cuda.default_generators[self._device.index]
        state, graph = generator.clone_state(), torch.cuda.CUDAGraph()

        def end() -> None:
            try:
                graph.capture_end()
            except BaseException:
                generator.graphsafe_set_state(state)
                _leave_pool(self._device, pool)
                raise

        # Other threads may use the device meanwhile, for example an embedder.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            found = compute()
        except BaseException:
            with suppress(RuntimeError):  # the pass's own error tells more
                end()
            raise
        end()
        return graph, found


def _leave_pool(device: torch.device, pool: Any) -> None:
    """Stop allocating in a failed capture's pool, and give up the capture's share of it.

    Torch releases may do so themselves; then the first call raises.
    """
    binding = cast("Any", torch._C)
    with suppress(RuntimeError):
        binding._cuda_endAllocateToPool(device.index, pool)
        binding._cuda_releasePool(device.index, pool)
