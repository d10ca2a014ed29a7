"""Guards of the grouped GEMM: correctness and profitability."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx

from .. import config, operands
from .._inductor import known_true, max_autotune
from ..decisions import Span
from ..decisions.tables import dtype_name
from ..fusion import LeftToStock, Rejected, Reported
from ..graph.products import Product, identity, product
from ..graph.sharing import is_view, readers
from ..operands import tokens_of, value
from ..reasons import Reason, Said
from .heuristics import choose, decided
from .problem import Problem, describe, of_operands

#: Bulk copies and vector loads take 16 bytes at a time.
ALIGNMENT = 16
#: Of linears whose input is not contiguous and whose weight is frozen.
BATCHED_LINEAR = Reason.LAYOUT(
    "the rows of the input are apart in memory, so each linear with a frozen weight is a batch of products, "
    "and the kernels support one matrix each"
)
#: Kinds of problems for which stock computes the products one by one, as autotuning assumes.
MEASURED_WHILE_COMPILING = frozenset({"shared_a", "shared_b", "gated", "linear"})
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def reported(node: fx.Node, why: Said, hint: str = "") -> Reported:
    """A site for which there is no kernel; on devices without kernels, this is the reason."""
    reason: Rejected = LeftToStock(why, hint)
    try:
        operands.check_device(value(node))
    except Rejected as first:
        reason = first
    return Reported(node, reason, {"result": text(node)})


def reported_batch(node: fx.Node) -> Reported:
    """The site of a linear that is a batch of products (`graph.products.batched_linear`)."""
    return reported(node, BATCHED_LINEAR, "contiguous() on the input")


def check_operands(nodes: Sequence[fx.Node]) -> None:
    """Refuse matrices that the kernels cannot read."""
    first = value(nodes[0])
    for node in nodes:
        found = value(node)
        if found.dtype not in DTYPES:
            raise Reason.DTYPE.rejected(
                f"the matrices have dtype {dtype_name(found.dtype)}, which no kernel supports"
            )
        if found.dtype != first.dtype:
            raise Reason.MIXED_DTYPES.rejected(
                f"the matrices have different dtypes, {dtype_name(first.dtype)} and {dtype_name(found.dtype)}"
            )
        if found.device != first.device:
            raise Reason.MIXED_DTYPES.rejected("the matrices are on different devices")
    if first.dtype == torch.float32 and not operands.may_use_tf32():
        raise Reason.TF32.left_to_stock(
            "the operands are float32 and TF32 is off, where the library is as fast",
            'torch.set_float32_matmul_precision("high")',
        )
    for node in nodes:
        check_layout(value(node))


def check_layout(matrix: torch.Tensor) -> None:
    """Refuse a matrix without a dim of stride 1, or that vector loads cannot read."""
    per_load = ALIGNMENT // matrix.dtype.itemsize
    rows, columns = matrix.shape
    along, across = (1, 0) if known_true(matrix.stride(1) == 1) else (0, 1)
    if not known_true(matrix.stride(along) == 1):
        raise Reason.LAYOUT.rejected("a matrix has no dim of stride 1")
    size, stride = (rows, columns)[along], matrix.stride(across)
    for what, number in (("size", size), ("stride", stride), ("offset", matrix.storage_offset())):
        if not known_true(number % per_load == 0):
            raise Reason.LAYOUT.rejected(
                f"the {what} of a matrix, {number}, is not a multiple of {per_load}",
                f"pad it to a multiple of {per_load}",
            )


def check_result(node: fx.Node, product: fx.Node) -> None:
    """Refuse a result that is computed from products in float64, or broadcast."""
    found = value(node)
    if found.dtype not in DTYPES:
        raise Reason.DTYPE.rejected(
            f"the result has dtype {dtype_name(found.dtype)}, which no kernel supports"
        )
    if str(found.numel()) != str(value(product).numel()):
        raise Reason.SHAPES.rejected("the result of the linear is broadcast")


def text(node: fx.Node) -> str:
    """Dtype and shape, for reports."""
    return operands.text(value(node))


def called(node: fx.Node) -> str:
    """The name of a node's operation in reports."""
    if node.op != "call_function":
        return "an input of the graph"
    if product(node) is not None:
        return "another product"
    if node.target is torch.ops.aten.cat.default:
        return "cat or stack"
    return str(node.target).removeprefix("aten.").removeprefix("prims.").partition(".")[0]


def read_elsewhere(what: str, users: Iterable[fx.Node], reason: str = "the backward") -> Said:
    """The reason for a report that a value is also read by other nodes.

    Args:
        what: the value, as the subject of a sentence.
        users: the other readers; views among them are looked through.
        reason: what it is saved for, if the graph returns it.
    """
    found = [each for user in users for each in (readers(user) if is_view(user) else [user])]
    if any(user.op == "output" for user in found):
        return Reason.USED_ELSEWHERE(f"{what} is returned, or saved for {reason}")
    names = sorted({called(user) for user in found})
    return Reason.USED_ELSEWHERE(f"{what} is read more than once, by {' and '.join(names)}")


def check_products(products: Sequence[Product]) -> None:
    """Refuse products that the kernels do not take.

    Raises:
        Rejected: see `check_operands`; or a width that is not a multiple of 16 bytes.
        LeftToStock: a device without kernels.
    """
    operands.check_device(value(products[0].node))
    check_operands([operand for p in products for operand in (p.a, p.b)])
    for p in products:
        found = value(p.node)
        per_load = ALIGNMENT // found.dtype.itemsize
        if found.dtype not in DTYPES:
            raise Reason.DTYPE.rejected(
                f"a product has dtype {dtype_name(found.dtype)}, which no kernel supports"
            )
        if not known_true(found.shape[1] % per_load == 0):
            raise Reason.LAYOUT.rejected(
                f"the number of columns, {found.shape[1]}, is not a multiple of {per_load}",
                f"pad the weight to a multiple of {per_load}",
            )
        if p.bias is not None and not value(p.bias).is_floating_point():
            raise Reason.DTYPE.rejected("a bias is not floating point")


def problem(groups: Sequence[Sequence[Product]], gated: bool = False, activation: str = "") -> Problem:
    """The sizes of a grouped GEMM of these products, with the activation of the first group."""
    flat = [(index, p) for index, group in enumerate(groups) for p in group]
    return problem_of(
        [p.a for _, p in flat], [p.b for _, p in flat], [index for index, _ in flat], gated, activation
    )


def problem_of(
    a: Sequence[fx.Node], b: Sequence[fx.Node], groups: Sequence[int], gated: bool, activation: str
) -> Problem:
    """The sizes of a call of the operation in a graph."""

    def shape(node: fx.Node) -> tuple[tuple[object, ...], tuple[object, ...]]:
        return tuple(value(node).shape), tuple(value(node).stride())

    names = [(identity(left), identity(right)) for left, right in zip(a, b, strict=True)]
    dtype = value(a[0]).dtype
    return of_operands([*map(shape, a)], [*map(shape, b)], groups, gated, dtype, names, activation)


def kernel(groups: Sequence[Sequence[Product]], gated: bool = False, activation: str = "") -> str:
    """Which kernel the products get, for the report.

    Args:
        gated: whether the two groups are multiplied.

    Raises:
        LeftToStock: none pays, or their sizes are not known.
    """
    posed, first = problem(groups, gated, activation), value(groups[0][0].a)
    tokens = tokens_of(first.shape[0])
    if not config.always() and posed.tokens is not None:
        if max_autotune() and posed.kind in MEASURED_WHILE_COMPILING:
            return f"block_mm or stock, whichever autotuning finds faster, {describe(posed)}"
    device, span = value(groups[0][0].node).device, tokens if isinstance(tokens, Span) else None
    note = operands.expected(decided(posed, device, span))
    chosen = choose(posed, device, None if span is None else span.hint)
    return f"block_mm, {chosen.template} {describe(posed)}, {note}"
