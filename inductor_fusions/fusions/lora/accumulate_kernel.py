"""`inductor_fusions::lora_accumulate` in Inductor: one kernel that takes the time of reading and writing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ... import _inductor
from ...block_mm.lowering import check_factors
from ...decisions import Query, configured, row_with_tiles, tables
from ...decisions.problems import MOST_INNER
from ...decisions.schema import padded
from ...fusion import Rejected
from ...lowering import check_templates
from ...operands import known_size
from .accumulate import Sum
from .elements import render

aten = torch.ops.aten

#: The products that one kernel takes at most: its code grows with them.
MOST_PRODUCTS = 8
#: Columns of a and rows of b in one step: of so many all of K is one step.
STEP = 64
#: Steps that are on their way at once.
STAGES = 3
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Shape:
    """The sizes of the sum.

    Attributes:
        rows: M; None where it is symbolic.
        columns: N.
        inner: K of each product.
        masks: how many of them have a mask.
        narrow: of the operands of the products.
    """

    rows: int | None
    columns: int
    inner: tuple[int, ...]
    masks: int
    dtype: torch.dtype
    narrow: torch.dtype


@dataclass(frozen=True)
class Config:
    """One configuration of the template.

    Attributes:
        block_m, block_n: the tile of the result.
    """

    block_m: int
    block_n: int
    num_warps: int


def elements(shape: Shape) -> int:
    """The most elements of a tile that fit into the registers of a thread beside the loads in flight."""
    if shape.narrow == torch.float32 or shape.masks > 3:
        return 16
    # Of an odd width each element has an address of its own.
    addressed = shape.masks and shape.columns % 16
    return 32 if shape.masks > 1 or addressed else 64


def default(shape: Shape) -> Config:
    """A configuration that fits every device.

    On an H100 and an H200 it takes 4% longer than the fastest one, in the mean (`bench.lora_tiles`).
    """
    rows = 512 if shape.rows is None else shape.rows
    # A float32 product is three, and the parts of both sides are in registers; few rows need small tiles.
    if shape.narrow == torch.float32 or rows <= 512:
        return Config(16 if rows <= 16 else 32, 64, 4)
    if shape.masks > 1 or (shape.masks and max(shape.inner) > 256):  # a mask takes registers
        return Config(64, 64, 8)
    if sum(shape.inner) >= 32:
        return Config(64, 128, 8)
    return Config(32, 128 if rows > 2048 else 64, 4)


#: What is tried first beside the default: of the timed problems of `bench.lora_tiles` often the fastest.
TRIED = (Config(64, 64, 4), Config(16, 128, 4), Config(128, 64, 8))


def candidates(shape: Shape) -> list[Config]:
    """Configurations worth measuring, those that most often are the fastest first."""
    rows = 512 if shape.rows is None else shape.rows
    sizes = itertools.product((16, 32, 64, 128), (64, 128, 256), (4, 8))
    found = [default(shape)]
    for tried in (*TRIED, *(Config(*each) for each in sizes)):
        if not (tried.block_m > 16 and tried.block_m >= 2 * rows) and _fits_registers(tried, shape):
            found.append(tried)
    return list(dict.fromkeys(found))


def _fits_registers(choice: Config, shape: Shape) -> bool:
    """Whether a thread has as many elements of a tile as it can hold, and not much fewer."""
    most, step = elements(shape), min(STEP, padded(max(shape.inner)))
    each, of_b = (height * choice.block_n // (32 * choice.num_warps) for height in (choice.block_m, step))
    return most // 4 <= each <= most and of_b <= (32 if shape.masks > 1 else 64)


def key(shape: Shape) -> dict[str, Any]:
    """The columns of a table's row; its tokens are the rows."""
    return tables.columns_of(shape, "rows")


def measured(shape: Shape, device: torch.device) -> Config | None:
    """The configuration of the very problem, if it was measured."""
    if shape.rows is None:
        return None
    row = row_with_tiles(Query("lora_accumulate", problem(shape)), device)
    return None if row is None else Config(**row["config"])


def problem(shape: Shape) -> dict[str, Any]:
    """The problem as a table's row."""
    return {**key(shape), "tokens": shape.rows}


def choose(shape: Shape, device: torch.device) -> Config:
    """The configuration for a shape: the table's where it has one."""
    usual = measured(shape, device) or default(shape)
    if shape.rows is None:
        return usual
    return configured("lora_accumulate", problem(shape), usual, lambda: candidates(shape))


# -- lowering -------------------------------------------------------------------------------------


def kernel(*given: Any) -> Any:
    """The result of one kernel; the arguments are those of the operation.

    Raises:
        Rejected: there is no kernel for it.
    """
    call = Sum(*given)
    base, a, b, masks, dtype = call.base, call.a, call.b, call.masks(), call.dtype
    device = base.get_device()
    check_templates(device)
    check_factors(call.scales)
    if len(a) > MOST_PRODUCTS:
        raise Rejected(f"there are more than {MOST_PRODUCTS} products")
    if not {base.get_dtype(), a[0].get_dtype(), dtype} <= set(DTYPES):
        raise Rejected("the kernel does not support the dtype of the matrices")
    a, b = _inductor.realize(a), _inductor.realize(b)
    inner = [_inductor.sizes(left)[1] for left in a]
    rows, columns = _inductor.sizes(a[0])[0], _inductor.sizes(b[0])[1]
    if not all(isinstance(k, int) and 0 < k <= MOST_INNER for k in inner) or not isinstance(columns, int):
        raise Rejected("the kernel does not support the layout or dtype of the matrices")
    shape = Shape(known_size(rows), columns, tuple(inner), len(masks), base.get_dtype(), a[0].get_dtype())
    inputs: dict[str, Any] = {}
    # What is computed in a loop is not stored for the kernel: the loop becomes the kernel's last step.
    stored = _inductor.in_memory(base)
    if stored:
        (inputs["BASE"],) = _inductor.realize([base])
    inputs |= {f"A{i}": left for i, left in enumerate(a)} | {f"B{i}": right for i, right in enumerate(b)}
    for i, mask in masks.items():
        (inputs[f"KEPT{i}"],) = _inductor.realize([mask])
    found = _inductor.lower_to_template(
        name="lora_accumulate",
        inputs=list(inputs.items()),
        shapes=[(rows, columns)],
        dtype=dtype if stored else torch.float32,
        device=device,
        variants=[variant(choose(shape, device), shape, call.scales, sorted(masks), stored)],
        over="BASE" if stored else "",
    )
    if stored:
        return found[0]
    total = _inductor.call_lowering(aten.add.Tensor, found[0], _inductor.cast(base, torch.float32))
    return _inductor.cast(total, dtype)


def variant(
    config: Config, shape: Shape, scales: Sequence[float], masks: Sequence[int], stored: bool = True
) -> _inductor.Variant:
    """The template for one configuration.

    Args:
        stored: whether the kernel reads the base; else it is added behind it.
    """
    products = [
        {
            "index": i, "a": f"A{i}", "b": f"B{i}", "kept": f"KEPT{i}" if i in masks else "",
            "size": k, "block": min(STEP, padded(k)), "stages": min(STAGES, -(-k // STEP)), "scale": scale,
        }
        for i, (k, scale) in enumerate(zip(shape.inner, scales, strict=True))
    ]  # fmt: skip
    count = range(len(products))
    names = [*(["BASE"] if stored else []), *(f"A{i}" for i in count), *(f"B{i}" for i in count)]
    text = render(
        "accumulate.py.jinja",
        names=[*names, *(f"KEPT{i}" for i in masks)],
        products=products,
        base=stored,
        ragged_columns=shape.columns % config.block_n != 0,
    )
    meta = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "ACC_TYPE": "tl.float32"}
    return _inductor.Variant(text, meta, config.num_warps, num_stages=1, outputs=())
