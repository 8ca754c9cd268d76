"""Listening: whether anyone wants an answer's pieces while it is being generated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.callbacks.base import BaseCallbackHandler
from langchain_core.tracers.base import BaseTracer

if TYPE_CHECKING:
    from langchain_core.callbacks.base import BaseCallbackManager

    from langchain_ragaccel.options import ModelOptions


def is_heard(model: ModelOptions, run_manager: Any) -> bool:
    """Whether an answer that is asked for whole shall be told of piece by piece.

    ``streaming`` says so for an object; where it is not given, handlers that take tokens do, such
    as those of ``astream_events``. Tracers only keep them, and the whole text says as much.
    """
    if run_manager is None or not run_manager.handlers:
        return False
    if model.streaming is not None:
        return model.streaming
    return any(_takes_tokens(handler) for handler in run_manager.handlers)


def _takes_tokens(handler: BaseCallbackManager | BaseCallbackHandler | Any) -> bool:
    if getattr(handler, "ignore_llm", False) or isinstance(handler, BaseTracer):
        return hasattr(handler, "tap_output_aiter")
    own = getattr(type(handler), "on_llm_new_token", None)
    return own is not BaseCallbackHandler.on_llm_new_token
