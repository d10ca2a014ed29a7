"""The skinny GEMM kernel and the arguments of its template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ... import _inductor
from ...operands import may_use_tf32
from . import narrow
from .elements import render

aten = torch.ops.aten

#: Dtypes of which float32 is a sum of three. float16 has too few exponents: there x is widened instead.
SUMMANDS = (torch.bfloat16,)

#: Up to so many rows, one thread block for each part of K reads the narrow matrices, and splits them up.
UNSPLIT_ROWS = 64


def _count(shape: narrow.Shape) -> int:
    """How many matrices of the dtype of x a narrow matrix of float32 is the sum of; 1 for others."""
    if shape.dtype == shape.narrow or shape.dtype not in SUMMANDS:
        return 1
    return 2 if may_use_tf32() else 3


def ahead(shape: narrow.Shape) -> int:
    """How many summands of each narrow matrix a kernel in front makes; 1: there is none.

    With few rows, few thread blocks read the narrow matrices, and split them up themselves.
    """
    if shape.made:
        return shape.made
    few = shape.rows is not None and shape.rows <= UNSPLIT_ROWS
    return 1 if few or shape.inner is None else _count(shape)


def variant(
    config: narrow.Config,
    shape: narrow.Shape,
    scales: Sequence[float],
    further: Sequence[float],
    transposed: bool,
    early: bool = False,
    waits: bool = False,
) -> _inductor.Variant:
    """The template for one configuration.

    Args:
        further: of each product the factor of its further form, or 0; none has one where it is empty.
        transposed: whether they are stored as (r, M).
        early: whether the kernel behind it may start before this one ends.
        waits: whether this one starts before the kernel in front of it ends.
    """
    outputs = [f"Y{i}" for i in range(1, len(shape.ranks))]
    outputs += [f"H{i}" for i, factor in enumerate(further) if factor]
    factors = [
        _factor(i, rank, shape, scales[i], further[i] if further else 0.0)
        for i, rank in enumerate(shape.ranks)
    ]
    ragged = shape.inner is None or shape.inner % (config.block_k * config.splits) != 0
    read = [factor["kept"] for factor in factors if factor["kept"]]
    for factor in factors:
        factor["mask"] = _mask(factor, ragged)
    text = render(
        "narrow.py.jinja",
        names=["X", *(factor["name"] for factor in factors), *read, *outputs],
        factors=factors,
        splits=config.splits,
        x_inner=shape.layout == "n",
        x_mask=_x_mask(shape, ragged),
        transposed=transposed,
        early=early,
        waits=waits,
        interpreted=_inductor.interprets_triton(),
    )
    meta = {"BLOCK_M": config.block_m, "BLOCK_N": 1, "BLOCK_K": config.block_k, "ACC_TYPE": "tl.float32"}
    return _inductor.Variant(
        source=text,
        meta={**meta, "SPLITS": config.splits},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        outputs=tuple(outputs),
        early=waits,
    )


def _mask(factor: dict[str, Any], ragged: bool) -> str:
    """Which elements of a tile of a narrow matrix are there, in the words of the template; "": all.

    Args:
        ragged: whether the last step of K is a part of one.
    """
    inside = ["(rk[:, None] < stop - k)"] if ragged else []
    if factor["beside"] > 1:
        column = f"column_{factor['index']}"
        if factor["block"] != factor["size"]:
            inside.append(f"({column} % {factor['block']} < {factor['size']})")
        if factor["beside"] != factor["summands"]:
            inside.append(f"({column} < {factor['block'] * factor['summands']})")
    elif factor["block"] != factor["size"]:
        inside.append(f"(rn_{factor['index']}[None, :] < {factor['size']})")
    return " & ".join(inside)


def _x_mask(shape: narrow.Shape, ragged: bool) -> str:
    """Which elements of a tile of x are there, likewise."""
    inside = ["(rk[None, :] < stop - k)"] if ragged else []
    return " & ".join([*inside, "(rm[:, None] < M)"] if shape.layout == "t" else inside)


def _factor(index: int, rank: int, shape: narrow.Shape, scale: float, further: float) -> dict[str, Any]:
    exact, summands = not may_use_tf32(), ahead(shape)
    # Left operands that are made in registers: a product is over before the next step makes another.
    apart = (exact and _count(shape) > 1) or shape.masks > 0
    return {
        "index": index,
        "apart": apart,
        "sum": f"{'step' if apart else 'acc'}_{index}",
        "name": f"B{index}",
        "kept": f"KEPT{index}" if shape.masks else "",
        "x": f"x_{index}" if shape.masks else "x",
        "summands": summands,
        "beside": narrow.beside(shape, summands),
        "size": rank,
        "block": narrow.padded(rank),
        "scale": scale,
        "output": f"Y{index}" if index else "",
        "form": f"H{index}" if further else "",
        "form_scale": further * scale,
        "halves": shape.dtype != shape.narrow,
        "parts": _count(shape) if summands == 1 else 1,
        "widen": shape.dtype != shape.narrow and _count(shape) == 1,
        "precision": "tf32x3" if exact else "tf32",
    }
