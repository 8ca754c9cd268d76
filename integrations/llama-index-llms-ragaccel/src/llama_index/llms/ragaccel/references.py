"""References: from what a caller gives, and what stands in a prompt, to what is copied from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from llama_index.core.schema import BaseNode, NodeWithScore

from llama_index.llms.ragaccel.callers import current_root
from llama_index.llms.ragaccel.nodes import as_passage
from ragaccel import ConfigurationError, Passage, Reference

if TYPE_CHECKING:
    from ragaccel import ReferenceRegistry, VisibleReferences

AnyReference = str | Passage | Reference
_ONE = (str, bytes, Mapping, BaseNode, NodeWithScore)  # iterable, but no lists of texts


def as_references(given: Any) -> list[AnyReference]:
    """Turn what a caller gave, one or several, into references.

    Raises:
        ConfigurationError: something that is neither str, node, Passage nor Reference.
    """
    if given is None:
        return []
    is_one = isinstance(given, _ONE) or not isinstance(given, Iterable)
    return [_as_reference(one) for one in ([given] if is_one else given)]


def visible_here(
    own: ReferenceRegistry | None, namespace: str, *, enabled: bool
) -> VisibleReferences | None:
    """What a call that is made here may look up; None where it does not.

    Raises:
        ConfigurationError: something that is no registry.
    """
    from ragaccel import auto_references_enabled, visible_references

    if own is not None and not hasattr(own, "match"):
        raise ConfigurationError(
            f"registry is a ragaccel.ReferenceRegistry, not {type(own).__name__}"
        )
    if not enabled or not auto_references_enabled():
        return None
    root = current_root()
    return visible_references(own, namespace, scopes=() if root is None else (root.scope,))


def _as_reference(given: Any) -> AnyReference:
    if isinstance(given, AnyReference):
        return given
    if isinstance(given, BaseNode | NodeWithScore):
        return as_passage(given)
    raise ConfigurationError(
        f"a reference is a str, node, Passage or Reference, not {type(given).__name__}"
    )
