"""Nodes: LlamaIndex's nodes as passages."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

from ragaccel import Passage

if TYPE_CHECKING:
    from collections.abc import Mapping


def as_passage(node: BaseNode | NodeWithScore) -> Passage:
    """Turn a node into a passage, with its place in its document where the node tells it."""
    if isinstance(node, NodeWithScore):
        return replace(as_passage(node.node), score=max(0.0, node.score or 0.0))
    text = node.get_content(metadata_mode=MetadataMode.NONE)
    start = getattr(node, "start_char_idx", None) or 0
    metadata = node.metadata
    return Passage(
        passage_id=node.node_id,
        text=text,
        title=_first(metadata, "title", "file_name"),
        path=node.ref_doc_id or _first(metadata, "file_path"),
        start=start,
        end=start + len(text),
        page=_page(metadata),
    )


def _first(metadata: Mapping[str, Any], *names: str) -> str:
    """The first of some fields that is there, as text."""
    return next((str(metadata[name]) for name in names if metadata.get(name)), "")


def _page(metadata: Mapping[str, Any]) -> int | None:
    label = str(metadata.get("page_label", ""))
    return int(label) if label.isdecimal() else None
