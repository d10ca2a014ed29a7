"""Operands of a fusion: their fake values, and whether kernels support them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from . import config
from ._inductor import (
    draws_as_eager,
    is_batched,
    is_wrapper,
    known_true,
    range_of,
    records_gradients,
    subclass_given,
    value_of,
)
from .decisions import Decision, Pending, Span, of_another_kind, too_old
from .decisions.tables import dtype_name
from .fusion import LeftToStock
from .reasons import Reason

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


class Seen:
    """A tensor of a graph seen through views: see `attention.operands.Operand`."""

    node: fx.Node
    value: torch.Tensor


def tensor(node: Any) -> torch.Tensor | None:
    """The fake tensor of a node, in Dynamo's graph or in one of aten operations; None if it is none."""
    if isinstance(node, Seen):
        return node.value
    found = value_of(node) if isinstance(node, fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None


def is_row_major(found: torch.Tensor) -> bool:
    """Whether a tensor is row-major, without gaps."""
    if any(known_true(length == 0) for length in found.shape):
        return True
    wanted: Any = 1
    for length, stride in zip(reversed(found.shape), reversed(found.stride()), strict=True):
        if not known_true(length == 1) and not known_true(stride == wanted):
            return False
        wanted = wanted * length
    return True


def requires_grad(node: Any) -> bool:
    """Whether a node is a tensor that takes a gradient."""
    found = tensor(node)
    return found is not None and found.requires_grad


def is_differentiated(results: Iterable[Any], operands: Iterable[Any]) -> bool:
    """Whether gradients are taken of results, as far as is known before autograd.

    Operands that are inputs of the graph require a gradient under `torch.no_grad` as well, and their results
    require none. Elsewhere one operand that does is enough: the result of a body may not show it.
    """
    of_operands = torch.is_grad_enabled() and any(records_gradients(tensor(node)) for node in operands)
    return of_operands or any(records_gradients(tensor(node)) for node in results)


def value(node: Any) -> torch.Tensor:
    """The fake tensor of a node that is known to have one."""
    found = tensor(node)
    assert found is not None, node
    return found


def known_size(size: Any) -> int | None:
    """A size that is a number; None for a symbolic one."""
    return size if isinstance(size, int) else None


def same_shape(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether two shapes are known to be equal."""
    return len(first) == len(second) and all(known_true(a == b) for a, b in zip(first, second, strict=True))


def repeated_dims(value: torch.Tensor) -> list[int]:
    """The dims over which a tensor is expanded: of more than one element, or perhaps so, all in one place."""
    dims = enumerate(zip(value.shape, value.stride(), strict=True))
    return [dim for dim, (size, step) in dims if known_true(step == 0) and not known_true(size == 1)]


def tokens_of(size: Any) -> int | Span | None:
    """A number of tokens, for a decision: a number, or a symbolic one's range; None if it has no value."""
    if isinstance(size, int):
        return size
    found = range_of(size)
    return None if found is None else Span(*found)


def text(value: torch.Tensor | None) -> str:
    """Dtype and shape for reports, such as "float32[8, 16]"; "" of None."""
    return "" if value is None else f"{dtype_name(value.dtype)}{list(value.shape)}"


def profitable(decision: Decision) -> Decision:
    """The decision, if it is for a kernel.

    Raises:
        LeftToStock: it is for stock.
        Pending: there is none yet.
    """
    if decision.source == "pending":
        raise Pending
    if decision.kernel is None:
        raise LeftToStock(decision.reason)
    return decision


def expected(decision: Decision) -> str:
    """The source of the expected gain, for the report.

    Raises:
        LeftToStock: the decision is for stock, and the policy asks for it.
    """
    return "not measured" if decision.kernel is None and config.always() else profitable(decision).note


def may_use_tf32() -> bool:
    """Whether torch may multiply float32 as TF32 on CUDA devices.

    `torch.get_float32_matmul_precision` raises where it was said by `torch.backends` since.
    """
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def check_kind(*values: Any) -> None:
    """Refuse tensors for which an operation may not be defined.

    Raises:
        Rejected: inside of vmap.
        LeftToStock: a DTensor, or another tensor around tensors.
    """
    for value in values:
        check_unbatched(value)
        if is_wrapper(value):
            raise Reason.SUBCLASS.left_to_stock(
                f"an operand is a {type(value).__name__}, for which a fused kernel may not be defined",
                "pass local tensors, as ColwiseParallel does by default",
            )


def check_unbatched(value: Any) -> None:
    """Refuse a tensor inside of vmap.

    Raises:
        Rejected: it is one.
    """
    if is_batched(value):
        raise Reason.TRANSFORM.rejected(
            "the site is inside torch.vmap, whose tensors have a hidden batch dim"
        )


def check_given(node: Any) -> None:
    """Leave what reads an input that is of a subclass of Tensor to stock: torch may refuse kernels for it.

    Raises:
        LeftToStock: with the name of the subclass.
    """
    kind = subclass_given(node)
    if kind is not None:
        raise Reason.SUBCLASS.left_to_stock(
            f"an operand is an input of type {kind.__name__}, for which torch may refuse a fused kernel",
            "pass x.as_subclass(torch.Tensor)",
        )


def check_random_numbers() -> None:
    """Leave a dropout to stock where compiled code is to draw what eager mode draws."""
    if draws_as_eager():
        raise Reason.RANDOM.left_to_stock(
            "torch._inductor.config.fallback_random is set, and the fused dropout draws other random numbers "
            "than eager"
        )


def check_device(value: torch.Tensor, dtypes: Collection[torch.dtype] | None = None) -> None:
    """Leave what there is no kernel for to stock.

    Args:
        value: an operand or the result.
        dtypes: those that there are kernels for; None: they are not asked for here.
    """
    device = value.device
    if device.type == "cpu":
        raise Reason.DEVICE.left_to_stock("runs on the CPU, where the library's GEMM is used")
    if why := of_another_kind(device):
        raise Reason.DEVICE.left_to_stock(why)
    if dtypes is not None and value.dtype not in dtypes:
        raise Reason.DTYPE.left_to_stock(
            f"no kernel supports {dtype_name(value.dtype)}", f"use {' or '.join(map(dtype_name, dtypes))}"
        )


def check_capability(device: torch.device) -> None:
    """Leave a GPU that is older than the kernels need to stock."""
    if why := too_old(device):
        raise Reason.DEVICE.left_to_stock(why)
