"""Kernels that go over the elements of several matrices, each with thread blocks of its own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ... import _inductor
from ...block_mm import template
from ...decisions import tables

#: Renders a template of this folder to the source that Inductor's templates take.
render = functools.partial(template.render, Path(__file__).parent / "templates")
#: Elements of a thread block.
ELEMENTS = 1024


def elements_of(index: int, matrix: Any, rows_dim: int | None = None) -> dict[str, Any]:
    """The description of a matrix for the template of parts.

    Args:
        rows_dim: the dim whose rows are to lie one behind the other; as they are in memory by default.
    """
    sizes, strides = _inductor.sizes(matrix), _inductor.strides(matrix)
    if rows_dim is None:
        rows_dim = 0 if strides[1] == 1 else 1
    return {
        "name": f"B{index}", "output": f"Y{index}" if index else "", "size": sizes[0] * sizes[1],
        "columns": sizes[1 - rows_dim], "rows_dim": rows_dim, "summands": 0,
        "dense": strides[rows_dim] == sizes[1 - rows_dim] and strides[1 - rows_dim] == 1,
    }  # fmt: skip


def by_elements(
    name: str,
    inputs: Sequence[Any],
    factors: list[dict[str, Any]],
    outputs: Sequence[tuple[str, tuple[Any, Any], torch.dtype]],
    dtype: torch.dtype,
    **structure: Any,
) -> list[Any]:
    """One kernel for several matrices, each with thread blocks of its own that go over its elements.

    Args:
        factors: what the template knows of each, its "name" and "size" among it; here they get "start" and
            "end", the thread blocks that are theirs.
        outputs: name, sizes and dtype of each; the first has no name.
        dtype: of 16 bits, or that of x.

    Raises:
        Rejected: Inductor took no template.
    """
    start = 0
    for factor in factors:
        factor["start"], start = start, start + -(-factor["size"] // ELEMENTS)
        factor["end"] = start
    names = tuple(output for output, _, _ in outputs[1:])
    text = render(
        f"{name}.py.jinja",
        names=[*(f["name"] for f in factors), *names],
        factors=factors,
        dtype=f"tl.{tables.dtype_name(dtype)}",
        **structure,
    )
    meta = {"BLOCK_M": ELEMENTS, "BLOCK_N": 1, "ACC_TYPE": "tl.float32"}
    found = _inductor.lower_to_template(
        name=f"lora_{name}",
        inputs=[(f["name"], value) for f, value in zip(factors, inputs, strict=True)],
        shapes=[sizes for _, sizes, _ in outputs],
        dtype=outputs[0][2],
        device=inputs[0].get_device(),
        variants=[_inductor.Variant(text, meta, num_warps=4, num_stages=1, outputs=names)],
        dtypes=[kind for _, _, kind in outputs],
        grid_sizes=[size for f in factors for size in (f["size"], 1)],
    )
    return found
