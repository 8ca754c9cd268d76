"""Processes: those that ``torchrun`` started, joined to hold one model between them."""

from __future__ import annotations

import os
from datetime import timedelta
from threading import Event
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import __version__ as transformers_version
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils.import_utils import is_accelerate_available

from ragaccel.errors import ConfigurationError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Mapping

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOADING = timedelta(hours=1)  # for the slowest to read its part
_PASS = timedelta(minutes=10)  # after which a pass that waits for others is given up
_OTHER_WAYS = ("distributed_config", "tp_plan", "tp_size")
_KEYS = ("k_proj", "qkv_proj", "query_key_value")  # projections that make the keys

_JOINED = Event()  # a program's processes hold one model, once
_MET_HERE = Event()  # not in the caller's own code


def checked_count(count: int | None, device: Any, device_map: Any, given: Mapping[str, Any]) -> int:
    """How many processes are to hold a model; checked before anything is loaded.

    Args:
        count: what ``tensor_parallel`` was given.
        device: given beside it.
        device_map: given beside it.
        given: arguments for transformers.

    Raises:
        ConfigurationError: they exclude each other, or ``torchrun`` did not start ``count``
            processes.
        MissingExtraError: what spreads models is not installed.
    """
    others = sorted(set(_OTHER_WAYS) & given.keys())
    if others:
        raise ConfigurationError(f"give tensor_parallel=N in place of {', '.join(others)}")
    if device is not None and device_map is not None:
        raise ConfigurationError("give device or device_map, not both")
    if count is not None and (device is not None or device_map is not None):
        raise ConfigurationError(
            "tensor_parallel gives every process a device of its own: give no device or device_map"
        )
    count = 1 if count is None else count
    if count < 1:
        raise ConfigurationError(f"tensor_parallel must be 1 or more, not {count}")
    if count > 1:
        _check_environment(count)
    if (count > 1 or device_map is not None) and not is_accelerate_available():
        raise MissingExtraError("accelerate", "multi-gpu")
    return count


def _check_environment(count: int) -> None:
    advice = f"start the program with: torchrun --nproc-per-node {count} script.py"
    if not dist.is_available():
        raise ConfigurationError("tensor_parallel needs a torch that can compute distributedly")
    if _JOINED.is_set():
        raise ConfigurationError(
            "the processes of this program hold a model already: load others without "
            "tensor_parallel, or in another program"
        )
    if dist.is_initialized():
        running = dist.get_world_size()
    elif all(name in os.environ for name in _VARIABLES):
        running = int(os.environ["WORLD_SIZE"])
    else:
        raise ConfigurationError(f"tensor_parallel={count} needs {count} processes: {advice}")
    if running != count:
        raise ConfigurationError(
            f"tensor_parallel={count} needs {count} processes, there are {running}: {advice}"
        )


def join_processes() -> torch.device:
    """Meet the other processes, unless that has been done; return the device of this one.

    Raises:
        ConfigurationError: there is a GPU, but not one for each process.
    """
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if local >= torch.cuda.device_count():
            raise ConfigurationError(
                f"{torch.cuda.device_count()} GPUs cannot serve {local + 1} processes, which need "
                "one each: start fewer, with a smaller tensor_parallel"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", timeout=_LOADING, device_id=device if on_gpu else None
        )
        _MET_HERE.set()
    _JOINED.set()
    return device


def expect_passes() -> None:
    """Wait for one another for minutes from now on: everything is loaded."""
    if _MET_HERE.is_set():
        dist.distributed_c10d._set_pg_timeout(_PASS)


def is_first() -> bool:
    """Whether this process is the one that speaks to the user."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def part_processes() -> None:
    """Undo ``join_processes`` at the end, which all reach at about the same time."""
    if _MET_HERE.is_set() and dist.is_initialized():
        dist.destroy_process_group()


def spread_arguments(config: Any, count: int) -> dict[str, Any]:
    """What transformers is told to load the parts of a model for ``count`` processes.

    Raises:
        ConfigurationError: they cannot share its heads evenly, or transformers is too old.
    """
    if count == 1:
        return {}
    check_heads(config, count)
    try:
        return {"distributed_config": DistributedConfig(tp_size=count)}
    except TypeError:
        raise ConfigurationError(
            f"tensor_parallel needs a newer transformers than {transformers_version}"
        ) from None


def check_heads(config: Any, count: int) -> None:
    """Check that processes can share a model's layers, and its heads evenly.

    Transformers would load uneven ones, and fail in the first pass.

    Raises:
        ConfigurationError: they cannot; the message says why.
    """
    text_config = config.get_text_config(decoder=True)
    name, plan = config.model_type, getattr(text_config, "base_model_tp_plan", None)
    if not plan:
        raise ConfigurationError(
            f"transformers cannot split the layers of a {name} model for tensor_parallel: "
            'spread it with device_map="auto"'
        )
    shares = (key.rsplit(".", 1)[-1] in _KEYS and way == "colwise" for key, way in plan.items())
    heads = getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
    if any(shares) and heads % count:
        raise ConfigurationError(
            f"tensor_parallel={count} does not divide the {heads} KV heads of this {name} model"
        )
