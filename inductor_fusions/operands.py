"""The tensors that a fusion reads: their fake values, whether kernels take them, what is written in between.

What several fusions ask of them alike, above all on Dynamo's torch-level graph, which is not functional.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from .fusion import LeftToStock, Rejected
from .tables import dtype_name

_IN_PLACE = frozenset(
    {operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ior,
     operator.iand}
)  # fmt: skip

#: Dtypes to compute in. A cast to a floating dtype that is none of them (float8) quantises.
_COMPUTED_IN = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def holds(dtype: torch.dtype, *others: torch.dtype) -> bool:
    """Whether a dtype has all numbers of one of `others`, and both are dtypes to compute in.

    A cast may be left out where its dtype holds that of the operands, or that of the result, which is rounded
    itself: the error budget has room for it. Where it holds neither, the graph rounds for a purpose.
    """
    if dtype not in _COMPUTED_IN:
        return False
    mine, theirs = torch.finfo(dtype), map(torch.finfo, _COMPUTED_IN.intersection(others))
    return any(mine.eps <= each.eps and mine.max >= each.max for each in theirs)


def tensor(node: Any) -> torch.Tensor | None:
    """The fake value of a node, in a graph of Dynamo's or of aten operations, where it is a tensor."""
    found = node.meta.get("example_value", node.meta.get("val")) if isinstance(node, fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None


def known_size(size: Any) -> int | None:
    """A size that is a number; None for a symbolic one."""
    return size if isinstance(size, int) else None


def text(value: torch.Tensor | None) -> str:
    """Dtype and shape for reports, such as "float32[8, 16]"; "" of None."""
    return "" if value is None else f"{dtype_name(value.dtype)}{list(value.shape)}"


def may_use_tf32() -> bool:
    """Whether torch may multiply float32 as TF32 on CUDA devices.

    `torch.get_float32_matmul_precision` raises where it was said by `torch.backends` since.
    """
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def check_device(value: torch.Tensor, dtypes: Collection[torch.dtype] | None = None) -> None:
    """Leave what there is no kernel for to stock.

    Args:
        value: an operand or the result.
        dtypes: those that there are kernels for; None: they are not asked for here.

    Raises:
        LeftToStock: another device than CUDA, or another dtype.
    """
    device = value.device
    if device.type == "cpu":
        raise LeftToStock("on the CPU, where the library's matrix products are left as they are")
    if device.type != "cuda" or torch.version.hip is not None:
        raise LeftToStock(f"there is no kernel for devices of type {device.type}")
    if dtypes is not None and value.dtype not in dtypes:
        raise LeftToStock(
            f"there is no kernel for {dtype_name(value.dtype)}", f"use {' or '.join(map(dtype_name, dtypes))}"
        )


def check_between(nodes: Collection[fx.Node], last: fx.Node, where: str) -> None:
    """Refuse where something happens between what an operation replaces, in Dynamo's graph.

    That is a write in place, or gradients that are switched on or off, after the first of `nodes`; or a
    transform of torch.func anywhere before `last`.

    Args:
        nodes: from the first of these in the graph on, nothing may happen.
        last: the node that is replaced, where the operation reads its operands.
        where: between what and what this is, for the reason.

    Raises:
        Rejected: something does.
    """
    inside = False
    for node in last.graph.nodes:
        inside = inside or node in nodes
        if node is last:
            return
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        written = (
            node.op in ("call_function", "call_method") and name.endswith("_") and not name.endswith("__")
        )
        if name in ("_grad_increment_nesting", "_jvp_increment_nesting"):
            raise Rejected("behind torch.func.grad or jvp, which the operation has no rule for")
        if inside and name == "_set_grad_enabled":
            raise Rejected(f"gradients are switched on or off between {where}")
        if inside and (written or node.target in _IN_PLACE or "out" in node.kwargs):
            raise Rejected(f"{node.name} writes in place between {where}")
