"""Kernels of Triton on a CUDA device, or interpreted without one."""

import importlib.util
from contextlib import contextmanager

import numpy as np
import pytest
import torch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


@contextmanager
def load(name):
    """Import a separate copy of a module of kernels, interpreted if there is no device."""
    with pytest.MonkeyPatch.context() as patch:
        if not CUDA:
            _interpret(patch)
        spec = importlib.util.find_spec(f"ragaccel.engine.{name}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


def _interpret(patch):
    """Interpret Triton's own kernels too, though it may be imported already, to be compiled."""
    import triton
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, _LangPatchScope

    set_attribute, seen = _LangPatchScope.set_attr, set()

    def remembered(scope, owner, name, value):
        # The interpreter restores only a part of it, and other tests compile kernels.
        if (owner, name) not in seen:
            seen.add((owner, name))
            patch.setattr(owner, name, value, raising=False)
        set_attribute(scope, owner, name, value)

    patch.setattr(_LangPatchScope, "set_attr", remembered)
    patch.setenv("TRITON_INTERPRET", "1")
    patch.setattr(InterpreterBuilder, "create_dot", _dot)
    for name in ("cast_impl", "create_fp_to_fp"):
        patch.setattr(InterpreterBuilder, name, _rounding(getattr(InterpreterBuilder, name)))
    for module in (triton.language, triton.language.standard):
        for name, value in list(vars(module).items()):
            if isinstance(value, triton.JITFunction):
                patch.setattr(module, name, InterpretedFunction(value.fn))


def _rounding(convert):
    """Convert to and from bfloat16 as a device does: the interpreter cuts bits off."""
    from triton.language import bfloat16, float32

    def converted(builder, source, target, *mode):
        kinds = source.dtype.scalar, target.scalar
        if kinds == (float32, bfloat16):
            rounded = torch.from_numpy(np.array(source.data)).to(torch.bfloat16)
            data = rounded.view(torch.int16).numpy().view(np.uint16)
        elif kinds == (bfloat16, float32):
            data = (source.data.astype(np.uint32) << 16).view(np.float32)
        else:
            return convert(builder, source, target, *mode)
        return type(source)(data, target.scalar)

    return converted


def _dot(builder, a, b, acc, *_):
    """Multiply as a device does: the interpreter reads bfloat16 as integers, and BLAS rounds a row
    by where it lies in its matrix."""
    from triton.language import bfloat16

    left, right = (
        (part.data.astype(np.uint32) << 16).view(np.float32)
        if part.dtype.scalar == bfloat16
        else part.data.astype(np.float32)
        for part in (a, b)
    )
    product = (left[:, :, None] * right[None]).sum(axis=1)
    return type(acc)(product + acc.data, acc.dtype.scalar)
