"""The pairwise dot products of features, without writing the matrix of all of them.

The interaction of a DLRM: of the products of a sample's feature vectors with each other the pairs of a
triangle are read, behind the dense features. It becomes `inductor_fusions::dot_interaction`, whose kernel
reads the features once and writes what is wanted; so does its backward.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from ... import config, tables
from ..._inductor import is_batched, is_wrapper
from ...fusion import Candidate, Fusion, LeftToStock, Rejected
from . import recognise
from .op import DOT_INTERACTION, DTYPES, fits
from .recognise import Site, tensor

__all__ = ["FUSION"]

#: How many times more or fewer samples than a measured number are covered by it.
REACH = 2.0


def candidates(graph: fx.Graph) -> Iterator[Candidate]:
    """Every gather of pairs from products of features with themselves."""
    for site in recognise.sites(graph):
        yield DotInteraction(graph, site)


class DotInteraction(Candidate):
    """The pairs of a batch of features, and the concatenation with the dense ones."""

    def __init__(self, graph: fx.Graph, site: Site) -> None:
        self.graph, self.site, self.anchor = graph, site, site.pairs
        self.triangle = (False, False)
        self.tiles: list[int] = []
        self.note = ""

    def describe(self) -> dict[str, str]:
        found = {"features": _text(self.site.t)}
        return found if self.site.dense is None else {**found, "dense": _text(self.site.dense)}

    def savings(self) -> dict[str, int]:
        t = tensor(self.site.t)
        assert t is not None
        samples, features, _ = t.shape
        if not isinstance(samples, int):
            return {}
        # The matrix of all products is written once, and read once.
        return {"bytes": 2 * samples * features * features * t.element_size(), "flops": 0}

    def guard(self) -> None:
        site = self.site
        t, z, out = tensor(site.t), tensor(site.products), tensor(site.last)
        assert t is not None and z is not None and out is not None
        if is_batched(out):
            raise Rejected("inside torch.vmap, whose values have a hidden dim")
        if set(site.products.users) != {site.pairs}:
            raise Rejected(
                "the matrix of all products is used elsewhere as well", "let the pairs alone be read of it"
            )
        if t.dtype != z.dtype or any(is_wrapper(x) for x in (t, out)):
            raise Rejected("operands of several dtypes, or under autocast")
        if not all(isinstance(size, int) for size in t.shape[1:]):
            raise Rejected("the number of features, or their width, is symbolic")
        self.triangle = recognise.triangle(site, int(t.shape[1]))
        recognise.check_between(site)
        check_device(t)
        if config.policy == "profitable":
            self.note, self.tiles = measured(t, site)

    def rewrite(self) -> str:
        site, out = self.site, tensor(self.site.last)
        with self.graph.inserting_before(site.last):
            new = self.graph.call_function(
                DOT_INTERACTION, (site.t, site.dense, *self.triangle, list(self.tiles))
            )
        # Shape, dtype, and whether it takes a gradient.
        new.meta["example_value"] = out
        if "stack_trace" in self.anchor.meta:
            new.meta["stack_trace"] = self.anchor.meta["stack_trace"]
        site.last.replace_all_uses_with(new)
        for node in filter(None, (site.cat, site.pairs, site.products)):
            self.graph.erase_node(node)
        return f"dot_interaction{self.note}"


def check_device(t: torch.Tensor) -> None:
    """Leave what there is no kernel for to stock.

    Raises:
        LeftToStock: another device than CUDA, another dtype than those of 16 bits, or too many features.
    """
    if t.device.type == "cpu":
        raise LeftToStock("on the CPU, where the library's matrix products are left as they are")
    if t.device.type != "cuda" or torch.version.hip is not None:
        raise LeftToStock(f"there is no kernel for devices of type {t.device.type}")
    if t.dtype not in DTYPES:
        raise LeftToStock(f"there is no kernel for {_name(t.dtype)}", "use bfloat16 or float16")
    if not fits(t.shape[1], t.shape[2]):
        raise LeftToStock("the features of a sample do not fit into a thread block")


def measured(t: torch.Tensor, site: Site) -> tuple[str, list[int]]:
    """What the table of the device says of a shape: a note, and the tiles that were fastest.

    Raises:
        LeftToStock: it is not measured, or not faster.
    """
    samples, features, width = t.shape
    if not isinstance(samples, int):
        raise LeftToStock("the number of samples is symbolic")
    name = tables.device_name(t.device)
    wanted = (_name(t.dtype), t.requires_grad, features, width, site.dense is not None)
    near = [
        row
        for row in (tables.load(name) or {}).get("dot_interaction", [])
        if (row["dtype"], row["train"], row["features"], row["width"], row["dense"]) == wanted
        and 1 / REACH <= samples / row["samples"] <= REACH
    ]
    if not near:
        raise LeftToStock(f"not measured on {name} for this shape")
    # Both neighbours must agree: what pays for more samples may not pay for fewer.
    gain = min(row["gain"] for row in near)
    if gain < tables.MARGIN:
        raise LeftToStock("not measured to be faster for this shape")
    nearest = min(near, key=lambda row: abs(row["samples"] - samples))
    return f", {gain:.2f}x measured", list(nearest["tiles"])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _text(node: fx.Node) -> str:
    found = tensor(node)
    return "" if found is None else f"{_name(found.dtype)}{list(found.shape)}"


FUSION = Fusion(
    name="dot_interaction",
    stage="pre_grad",
    summary="the pairwise dot products of features, without writing the matrix of all of them",
    recognise=candidates,
)
