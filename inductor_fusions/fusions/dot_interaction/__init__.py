"""The pairwise dot products of features, without writing the matrix of all of them.

The interaction of a DLRM: of the products of a sample's feature vectors with each other the pairs of a
triangle are read, behind the dense features. It becomes `inductor_fusions::dot_interaction`, whose kernel
reads the features once and writes what is wanted; so does its backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from ... import config, tables
from ...decisions import Query, decide
from ...derivatives import check_operation
from ...fusion import Candidate, Fusion, LeftToStock, Rejected, Scope
from ...graph.builder import Builder
from ...graph.torch_ops import spellings
from ...liveness import erase_dead_readers, readers
from ...modes import Modes
from ...operands import check_device, check_kind, tensor, text
from ...reasons import Reason
from ...writes import check_between, check_kept
from . import recognise
from .op import DOT_INTERACTION, DTYPES, fits
from .recognise import Site

if TYPE_CHECKING:
    from ..._inductor import Match

__all__ = ["FUSION"]


class OtherPairs(Candidate):
    """Products of features that are read in a way for which there is no kernel.

    Args:
        read: what reads them.
        how: in words.
    """

    def __init__(self, read: fx.Node, how: str) -> None:
        self.anchor, self.how = read, how

    def describe(self) -> dict[str, str]:
        return {"products": text(tensor(self.anchor))}

    def guard(self) -> None:
        raise Rejected(
            Reason.PAIRS(f"{self.how}, not by two indices of the matrix of products"),
            "read one triangle: z[:, i, j] with i, j of torch.tril_indices",
        )

    def rewrite(self) -> str:
        raise AssertionError("it is never fused")


class DotInteraction(Candidate):
    """The pairs of a batch of features, and the concatenation with the dense ones."""

    def __init__(self, graph: fx.Graph, site: Site) -> None:
        self.graph, self.site, self.anchor = graph, site, site.pairs
        self.triangle = (False, False)
        self.tiles: list[int] = []
        self.note = ""

    def describe(self) -> dict[str, str]:
        found = {"features": text(tensor(self.site.t))}
        return found if self.site.dense is None else {**found, "dense": text(tensor(self.site.dense))}

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
        check_kind(t, out)
        if readers(site.products) != [site.pairs]:
            raise Rejected(
                Reason.USED_ELSEWHERE("the matrix of all products is used elsewhere as well"),
                "let the pairs alone be read of it",
            )
        if t.dtype != z.dtype:
            raise Rejected(Reason.MIXED_DTYPES("operands of several dtypes, or under autocast"))
        if not all(isinstance(size, int) for size in t.shape[1:]):
            raise Rejected(Reason.SYMBOLIC("the number of features, or their width, is symbolic"))
        self.triangle = recognise.triangle(site, int(t.shape[1]))
        check_between(site.sources, site.last, "the features and the pairs", Modes(self.graph))
        check_kept([site.t], site.last)
        check_operation([*site.sources, site.last])
        check_kernel(t)
        if config.policy == "profitable":
            self.note, self.tiles = measured(t, site)

    def rewrite(self) -> str:
        site, out = self.site, tensor(self.site.last)
        # Its shape, dtype, and whether it takes a gradient, are those of what it replaces.
        build = Builder(site.last, self.anchor)
        new = build.given(out, DOT_INTERACTION, site.t, site.dense, *self.triangle, list(self.tiles))
        gone = [node for node in (site.cat, site.pairs, site.products) if node is not None]
        erase_dead_readers(gone)
        site.last.replace_all_uses_with(new)
        for node in gone:
            self.graph.erase_node(node)
        return f"dot_interaction{self.note}"


def check_kernel(t: torch.Tensor) -> None:
    """Leave features that there is no kernel for to stock.

    Raises:
        LeftToStock: another device than CUDA, another dtype than those of 16 bits, or too many features.
    """
    check_device(t, DTYPES)
    if not fits(t.shape[1], t.shape[2]):
        raise LeftToStock(Reason.LIMIT("the features of a sample do not fit into a thread block"))


def measured(t: torch.Tensor, site: Site) -> tuple[str, list[int]]:
    """What the table of the device says of a shape: a note, and the tiles that were fastest.

    Raises:
        LeftToStock: it is not measured, or not faster.
    """
    samples, features, width = t.shape
    if not isinstance(samples, int):
        raise LeftToStock(Reason.SYMBOLIC("the number of samples is symbolic"))
    wanted = {
        "dtype": tables.dtype_name(t.dtype), "train": t.requires_grad, "features": features, "width": width,
        "dense": site.dense is not None, "samples": samples,
    }  # fmt: skip
    decision = decide(Query("dot_interaction", wanted), t.device)
    if decision.kernel is None:
        raise LeftToStock(decision.reason)
    nearest = decision.rows[0]
    # Tiles hold so many features of so many columns.
    fit = (nearest["features"], nearest["width"]) == (features, width)
    return f", {decision.note}", list(nearest["tiles"]) if fit else []


FUSION = Fusion(
    name="dot_interaction",
    stage="pre_grad",
    summary="the pairwise dot products of features, without writing the matrix of all of them",
)


@FUSION.anchor(lambda: spellings("getitem", "masked_select", "mul"))
def read(scope: Scope, match: Match) -> Candidate | None:
    """A gather of pairs from products of features with themselves."""
    node = match.output_node()
    site = recognise.site(node)
    if site is not None:
        return DotInteraction(scope.graph, site)
    how = recognise.unread(node)
    return OtherPairs(node, how) if how else None


@FUSION.anchor(lambda: spellings(*recognise.FLATTENS))
def read_flattened(scope: Scope, match: Match) -> Candidate | None:
    """Products of features with themselves as one row of each sample."""
    node = match.output_node()
    if not recognise.is_flattened(node) or any(map(recognise.unread, node.users)):
        return None
    return OtherPairs(node, "all products are read, those of both triangles")
