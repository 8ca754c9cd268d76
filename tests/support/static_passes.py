"""Targets that run static passes on a CPU, by the operations that a CUDA graph captures."""

from plain_kernel import PlainKernel
from tiny_models import tiny_model

from ragaccel.models import HuggingFaceModel


def static_target(family="llama", model=None):
    """Make a target model of a shared tiny one, or of a given one."""
    target = HuggingFaceModel(tiny_model(family) if model is None else model)
    target.enable_graphs(PlainKernel, capture=False)
    assert target.kv_pool is not None
    return target
