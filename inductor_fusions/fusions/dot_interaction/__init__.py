"""Fuses pairwise dot products of features without materialising all of them.

The interaction of a DLRM: of the products of a sample's feature vectors with each other some pairs are read,
behind the dense features. It becomes `inductor_fusions::dot_interaction`, whose kernel reads the features
once and writes the pairs, of a triangle or as a tensor names them; so does its backward.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from ... import config
from ..._inductor import Match, known_true
from ...decisions import Query, decide, tables
from ...effects.liveness import are_read_elsewhere, replace
from ...effects.scope import DynamoScope
from ...fusion import Candidate, Fusion, Reported
from ...graph import torch_ops
from ...graph.builder import Builder
from ...layouts.keeping import Keeping
from ...operands import check_device, check_kind, profitable, tensor, text, value
from ...reasons import Reason
from . import recognise, unsupported
from .op import DOT_INTERACTION, DTYPES, fits, takes
from .recognise import InteractionSite
from .triangles import triangle

__all__ = ["FUSION"]


#: Inductor computes a concatenation of so few tensors where it is read (`max_complex_pointwise_cat_inputs` of
#: torch/_inductor/config.py); of more it may be in memory.
_MOST_INLINE = 8


def _other_pairs(read: fx.Node, how: str) -> Candidate:
    """Products of features that are read in a way for which there is no kernel."""
    hint = "" if how in unsupported.WITHOUT_HINT else "z[:, i, j] with vectors of indices"
    by_indices = how in (unsupported.OF_TWO, unsupported.ONE_SCALED)
    instead = "" if by_indices else ", not by indices of the matrix of products"
    why = Reason.PAIRS.rejected(f"{how}{instead}", hint)
    return Reported(read, why, {"products": text(tensor(read))})


class DotInteraction(Candidate):
    """The pairs of a batch of features, and the concatenation with the dense ones."""

    def __init__(self, scope: DynamoScope, site: InteractionSite) -> None:
        self.scope, self.site, self.anchor = scope, site, site.pairs
        self.triangle: tuple[bool, bool] | None = None
        self.tiles: list[int] = []
        self.note = ""

    def describe(self) -> dict[str, str]:
        found = {"features": text(self.site.features)}
        return found if self.site.dense is None else {**found, "dense": text(tensor(self.site.dense))}

    def savings(self) -> dict[str, int]:
        t = self.site.features
        samples, features, _ = t.shape
        if not isinstance(samples, int):
            return {}
        # The matrix of all products is written once, and read once.
        return {"bytes": 2 * samples * features * features * t.element_size(), "flops": 0}

    def guard(self) -> None:
        site = self.site
        t, pairs, out = site.features, tensor(site.pairs), tensor(site.last)
        assert pairs is not None and out is not None
        check_kind(t, out)
        if are_read_elsewhere(site.between, {*site.between, site.pairs}):
            raise Reason.USED_ELSEWHERE.rejected(
                "the matrix of all products is also used elsewhere",
                "read only the selected pairs of the matrix",
            )
        values = [tensor(node) for node in (*site.between, site.pairs)]
        if any(value is None or value.dtype != t.dtype for value in values):
            raise Reason.MIXED_DTYPES.rejected("the operands have different dtypes, or autocast is on")
        if not all(isinstance(size, int) for size in t.shape[1:]):
            raise Reason.SYMBOLIC.rejected("the number or the width of the features is symbolic")
        if known_true(pairs.shape[1] == 0):
            raise Reason.EMPTY.rejected("no pair is read")
        self.triangle = triangle(site.indices, int(t.shape[1]))
        if self.triangle is None and not takes(pairs.shape[1]):
            raise Reason.LIMIT.rejected("the number of pairs is symbolic, or too large for one thread block")
        saved = [site.t] if isinstance(site.t, fx.Node) else []
        self.scope.check_replaced(site.replaced, site.last, "the features and the pairs", saved)
        check_kernel(t)
        if not config.always():
            kind = "triangle" if self.triangle is not None else "given"
            self.note, self.tiles = measured(t, site, "gathered" if site.gathers else kind)

    def rewrite(self) -> str:
        site, out = self.site, tensor(self.site.last)
        # Its shape, dtype, and whether it takes a gradient, are those of what it replaces.
        build, t = Builder(site.last, self.anchor), site.t
        assert out is not None
        if not isinstance(t, fx.Node):
            t = build.call(torch.stack if value(t[0]).dim() == 2 else torch.cat, list(t), 1)
        elif site.gathers and out.requires_grad:  # eager keeps what is gathered instead
            t = Keeping(self.scope.graph).kept(t, site.last)
        out = out.squeeze(-1) if site.kept else out
        pairs = (self._cells(), False, False) if self.triangle is None else (None, *self.triangle)
        new = build.given(out, DOT_INTERACTION, t, site.dense, *pairs, list(self.tiles))
        new = build.given(tensor(site.last), torch.unsqueeze, new, -1) if site.kept else new
        for how, number in site.scales:
            new = build.given(out, operator.mul if how == "mul" else operator.truediv, new, number)
        replace(site.last, new, (*site.between, site.pairs))
        return f"dot_{'pairs' if self.triangle is None else 'interaction'}{self.note}"

    def _cells(self) -> fx.Node:
        """The cells of the pairs in the matrix of products: gathered from all, which checks the indices."""
        t = self.site.features
        features = t.shape[1]
        build = Builder(self.site.last, self.anchor)
        cells = build.call(torch.arange, features * features, device=t.device)
        if len(self.site.indices) == 1:
            return build.call(operator.getitem, cells, self.site.indices[0])
        return build.call(operator.getitem, build.call("view", cells, features, features), self.site.indices)


def check_kernel(t: torch.Tensor) -> None:
    """Leave features that there is no kernel for to stock.

    Raises:
        LeftToStock: another device than CUDA, another dtype than those of 16 bits, or too many features.
    """
    check_device(t, DTYPES)
    if not fits(t.shape[1], t.shape[2]):
        raise Reason.LIMIT.left_to_stock("the features of a sample do not fit into one thread block")


def measured(t: torch.Tensor, site: InteractionSite, pairs: str) -> tuple[str, list[int]]:
    """A note and the fastest tiles for a shape, from the table of the device.

    Args:
        pairs: a "triangle", or "given" by a tensor; or that stock has no matrix of products, since rows are
            "gathered" first.

    Raises:
        LeftToStock: it is not measured, or not faster.
    """
    samples, features, width = t.shape
    if not isinstance(samples, int):
        raise Reason.SYMBOLIC.left_to_stock("the number of samples is symbolic")
    if not isinstance(site.t, fx.Node) and len(site.indices[0]) <= _MOST_INLINE:
        raise Reason.NOT_MEASURED.left_to_stock(
            "the features of a few pairs are tensors of their own, which stock reads where they are"
        )
    # An input takes no gradient where none is taken of the result.
    trains = t.requires_grad and value(site.last).requires_grad
    wanted = {
        "dtype": tables.dtype_name(t.dtype), "train": trains, "features": features, "width": width,
        "dense": site.dense is not None, "samples": samples, "pairs": pairs,
    }  # fmt: skip
    decision = profitable(decide(Query("dot_interaction", wanted), t.device))
    nearest = decision.rows[0]
    # Tiles hold so many features of so many columns.
    fit = (nearest["features"], nearest["width"]) == (features, width)
    return f", {decision.note}", list(nearest["tiles"]) if fit else []


FUSION = Fusion(
    name="dot_interaction",
    stage="pre_grad",
    summary="pairwise dot products of features, without materialising all of them",
    scope=DynamoScope,
)


_ANCHORS = (
    "getitem", "masked_select", "index_select", "gather", "take_along_dim", "cat", "stack", "sum", "einsum",
    "bmm", "matmul", "tril", "triu", "max", "amax",
)  # fmt: skip


@FUSION.anchor(lambda: torch_ops.forms(*_ANCHORS))
def read(scope: DynamoScope, match: Match) -> Candidate | None:
    """A gather of pairs from products of features with themselves."""
    node = match.output_node()
    site = recognise.site(node)
    if site is not None:
        return DotInteraction(scope, site)
    how = unsupported.how(node)
    return _other_pairs(node, how) if how else None


@FUSION.anchor(lambda: torch_ops.forms(*recognise.FLATTENS))
def read_flattened(scope: DynamoScope, match: Match) -> Candidate | None:
    """Products of features with themselves as one row of each sample."""
    node = match.output_node()
    if any(map(recognise.site, node.users)):
        return None
    if not recognise.is_flattened(node):
        how = unsupported.of_two_sets(node)
        return _other_pairs(node, how) if how else None
    gathers = [by for user in node.users if (by := torch_ops.read(user)) is not None and by.name == "gather"]
    by_matrix = "pairs are gathered by a matrix of indices"
    return _other_pairs(node, by_matrix if gathers else unsupported.ALL)
