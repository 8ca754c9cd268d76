"""The proposer that vLLM loads by its class path."""

from __future__ import annotations

import sys
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any

from ragaccel.errors import ConfigurationError

from vllm_ragaccel.batch import BatchDrafter, Ids

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ragaccel.decoding import Reference

WORKING_VERSIONS = "0.32"
"""Versions of vLLM that this package was tested with."""


class RagaccelProposer:
    """A vLLM proposer that drafts what prompt and answer say already.

    ``vllm serve MODEL --speculative-config '{"method": "custom_class",
    "model": "vllm_ragaccel.RagaccelProposer", "num_speculative_tokens": 16}'``

    Options are in ``--additional-config '{"ragaccel": {…}}'``: ``history`` (false), whether to
    draft from earlier requests of the server as well, whoever sent them; ``reproducible`` (false),
    whether a seed must give the same text again: drafts are then as long as they are likely to be
    right, however long a step takes; ``index``, the path of a file that ``ragaccel index`` made, to
    draft from the text around its passages that a prompt quotes.

    Raises:
        ConfigurationError: this vLLM has another interface, or an option is unknown.
        RagaccelError: there is no index at the path, or it cannot be used.
    """

    def __init__(self, vllm_config: Any) -> None:
        _check_interface()
        try:
            num_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
            max_len = int(vllm_config.model_config.max_model_len)
            vocab_size = int(vllm_config.model_config.get_vocab_size())
            options = vllm_config.additional_config
        except (AttributeError, TypeError) as error:
            raise ConfigurationError(_other_interface(str(error))) from error
        checked = _checked(options)
        index = checked.get("index")
        self._batch = BatchDrafter(
            num_tokens,
            max_len,
            vocab_size,
            history=checked.get("history", False),
            reproducible=checked.get("reproducible", False),
            references=_references(index, vllm_config.model_config) if index else None,
        )

    def load_model(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Compile the drafting functions; vLLM calls this while it loads the model."""
        self._batch.warm_up()

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Ids,
        token_ids_cpu: Ids,
        slot_mappings: Any = None,  # noqa: ARG002
    ) -> list[list[int]]:
        """Return the draft tokens of each slot of the batch.

        Args:
            sampled_token_ids: the tokens that each slot gained; none while it reads its prompt.
            num_tokens_no_spec: [slots] the number of tokens of each slot.
            token_ids_cpu: [slots, max_model_len] their tokens.
            slot_mappings: ignored.
        """
        return self._batch.draft(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)


def _check_interface() -> None:
    name = "vllm.v1.spec_decode.custom_class_proposer"
    try:
        parameters = signature(import_module(name).create_custom_proposer).parameters
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(_other_interface(str(error))) from error
    if len(parameters) != 1:
        problem = f"create_custom_proposer({', '.join(parameters)})"
        raise ConfigurationError(_other_interface(problem))


def _other_interface(problem: str) -> str:
    return (
        f"vLLM {_vllm_version()} has another interface for proposers ({problem}): "
        f"vllm-ragaccel works with vLLM {WORKING_VERSIONS}"
    )


def _vllm_version() -> str:
    return str(getattr(sys.modules.get("vllm"), "__version__", "(not installed)"))


def _references(index: str, model_config: Any) -> Callable[[Sequence[int]], list[Reference]]:
    """Return the function that finds the text around a prompt's passages in an index."""
    from vllm_ragaccel.index import IndexReferences  # many imports, needed with an index alone

    try:
        tokenizer = import_module("vllm.tokenizers").cached_tokenizer_from_config(model_config)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(_other_interface(str(error))) from error
    if tokenizer is None:
        raise ConfigurationError(
            'additional_config["ragaccel"]["index"] needs the tokenizer of the model: start vLLM '
            "without --skip-tokenizer-init"
        )
    return IndexReferences(index, tokenizer).references


def _checked(additional_config: Any) -> dict[str, Any]:
    """Return the options of this package."""
    config = additional_config if isinstance(additional_config, dict) else {}
    given = config.get("ragaccel", {})
    if not isinstance(given, dict):
        raise ConfigurationError(
            'additional_config["ragaccel"] must be an object such as {"history": false}, '
            f"not {given!r}"
        )
    unknown = sorted(map(str, given.keys() - {"history", "reproducible", "index"}))
    if unknown:
        raise ConfigurationError(
            f'additional_config["ragaccel"] has no option {", ".join(unknown)}: there are '
            "history, reproducible and index"
        )
    for name, value in given.items():
        if name == "index":
            is_right, what = isinstance(value, str) and value != "", "the path of an index file"
        else:
            is_right, what = isinstance(value, bool), "true or false"
        if not is_right:
            raise ConfigurationError(
                f'additional_config["ragaccel"]["{name}"] must be {what}, not {value!r}'
            )
    if given.get("history") and given.get("reproducible"):
        raise ConfigurationError(
            'additional_config["ragaccel"]: with history, drafts depend on earlier requests, so '
            "they are not reproducible: choose one of both"
        )
    return given
