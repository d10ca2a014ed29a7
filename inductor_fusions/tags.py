"""Which operations a fusion before autograd has made, and what became of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import fx

from .sites import Site

#: In `node.meta["custom"]` of a node that a fusion made, the number of its site in the graph. AOTAutograd
#: copies it to the operations that the node becomes, forward and backward.
TAG = "inductor_fusions"

_SDPA = re.compile(r"_scaled_dot_product_(?:fused_)?(\w+?)_attention")


def put(node: fx.Node, number: int) -> None:
    """Say that a node belongs to the site of this number."""
    node.meta["custom"] = {**node.meta.get("custom", {}), TAG: number}


def number(node: fx.Node) -> int | None:
    """Number of the fused site, of the graph before autograd, that a node belongs to."""
    found: int | None = node.meta.get("custom", {}).get(TAG)
    return found


def is_ours(node: fx.Node) -> bool:
    """Whether a node was made by a fusion before autograd, not by the user."""
    return number(node) is not None


def name_backends(graph: fx.Graph, sites: Sequence[Site]) -> None:
    """Set the backend of the fused sites: the operation that Inductor got for them."""
    if not any(site.verdict == "fused" and not site.backend for site in sites):
        return
    for node in graph.nodes:
        tag = number(node) if node.op == "call_function" else None
        if not isinstance(tag, int) or tag >= len(sites) or sites[tag].backend:
            continue
        name = getattr(node.target, "__name__", str(node.target))
        found = _SDPA.match(name)
        if found is not None:
            sites[tag].backend = found[1]
        elif name.startswith("flex_attention"):
            sites[tag].backend = "flex"
        elif name.startswith("_softmax"):
            sites[tag].backend = "math"
