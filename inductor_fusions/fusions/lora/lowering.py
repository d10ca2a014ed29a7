"""`inductor_fusions::narrow_mm` in Inductor: one kernel, or the products one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ... import _inductor
from ...block_mm.lowering import check_factors
from ...decisions import configured
from ...fusion import Rejected
from ...lowering import check_templates
from ...operands import known_size
from . import narrow
from .elements import by_elements, elements_of
from .narrow_kernel import ahead, variant
from .op import Narrow

aten = torch.ops.aten


def kernel(*given: Any) -> list[Any]:
    """The outputs of one kernel; the arguments are those of the operation.

    Raises:
        Rejected: there is no kernel for it.
    """
    call = Narrow(*given)
    x, b, kept = call.x, call.b, call.kept
    scales, further, transposed = call.scales, call.further, call.transposed
    device = x.get_device()
    check_templates(device)
    check_factors([*scales, *further])
    made = len(b[0].get_size()) == 3 and _inductor.static(b[0].get_size()[0])
    x, *b = _inductor.realize([x, *(_firsts(b) if made else b)])
    ranks = [_inductor.static(right.get_size()[1]) for right in b]
    thin = torch.float32 if made else b[0].get_dtype()
    rows, inner = _inductor.sizes(x)
    strides = _inductor.strides(x)
    if not all(isinstance(r, int) and r <= narrow.MOST_COLUMNS for r in ranks) or 1 not in strides:
        raise Rejected("the kernel does not support the layout or dtype of the matrices")
    if sum(narrow.padded(r) for r in ranks) > narrow.MOST_TOGETHER:
        raise Rejected(f"the low-rank matrices have more than {narrow.MOST_TOGETHER} columns together")
    shape = narrow.Shape(
        known_size(rows), known_size(inner),
        tuple(ranks), "n" if strides[1] == 1 else "t", x.get_dtype(), thin, int(made), len(kept),
    )  # fmt: skip
    config = choose(shape, device)
    if config.splits > 1 and (not isinstance(rows, int) or (transposed and any(further))):
        config = replace(config, splits=1)
    read = {f"KEPT{i}": mask for i, mask in enumerate(_inductor.realize(list(kept)))}
    whole = config.splits == 1
    wide = thin if whole else torch.float32
    shapes: list[tuple[Any, Any]] = [(rank, rows) if transposed else (rows, rank) for rank in ranks]
    stacked = [(config.splits * height, width) for height, width in shapes]
    forms = [i for i, factor in enumerate(further) if factor and whole]
    wider = 1 if thin == x.get_dtype() else 3
    outputs = _inductor.lower_to_template(
        name="lora_narrow_mm",
        inputs=[("X", x), *narrow_inputs(b, shape), *read.items()],
        shapes=stacked + [(rows, wider * ranks[i]) for i in forms],
        dtype=wide,
        device=device,
        variants=[variant(config, shape, scales, further if whole else (), transposed)],
        dtypes=[wide] * len(b) + [x.get_dtype()] * len(forms),
        grid_sizes=[rows, 1],
    )
    if not whole:
        outputs = _added_up(outputs, shapes, config.splits, x.get_dtype(), thin, further)
    return outputs


def _firsts(stacks: Sequence[Any]) -> list[Any]:
    """The first of the summands of each narrow matrix, with the others behind it in memory."""
    for held in _inductor.realize(stacks):
        _, rows, columns = _inductor.sizes(held)
        if _inductor.strides(held) not in ((rows * columns, columns, 1), (rows * columns, 1, rows)):
            raise Rejected("the two halves of a split matrix are not adjacent in memory")
    return [_inductor.call_lowering(aten.select.int, stack, 0, 0) for stack in stacks]


def narrow_inputs(b: Sequence[Any], shape: narrow.Shape) -> list[tuple[str, Any]]:
    """The kernel's inputs by name: the narrow matrices, or the first summand of each, in memory.

    The other summands are behind the first one. One kernel makes those of all narrow matrices.
    """
    count = ahead(shape)
    values = list(b) if count == 1 or shape.made else _summands(b, shape, count)
    return [(f"B{i}", value) for i, value in enumerate(values)]


def _summands(b: Sequence[Any], shape: narrow.Shape, count: int) -> list[Any]:
    factors = [{**elements_of(i, right), "summands": count} for i, right in enumerate(b)]
    outputs = [(f["output"], (count, f["size"]), shape.dtype) for f in factors]
    stacks = by_elements("split", b, factors, outputs, dtype=shape.dtype)
    call, found = _inductor.call_lowering, []
    for stack, factor in zip(stacks, factors, strict=True):
        columns = factor["columns"]
        stored = call(aten.view.default, stack, [count, factor["size"] // columns, columns])
        first = call(aten.select.int, stored, 0, 0)
        found.append(first if factor["rows_dim"] == 0 else call(aten.permute.default, first, [1, 0]))
    return _inductor.realize(found)


def choose(shape: narrow.Shape, device: torch.device) -> narrow.Config:
    """The configuration for a shape: the table's where it has one."""
    usual = narrow.measured(shape, device) or narrow.default(shape)
    row = narrow.problem(shape)
    return configured("narrow_mm", row, usual, lambda: narrow.candidates(shape)) if row else usual


def _added_up(
    outputs: Sequence[Any],
    shapes: Sequence[tuple[int, int]],
    splits: int,
    dtype: torch.dtype,
    wide: torch.dtype,
    further: Sequence[float],
) -> list[Any]:
    """The products as sums over the parts of K, which follow each other in memory."""
    if len(outputs) > 1 or (any(further) and wide != dtype):
        # Inductor's loops would be a kernel for each product, and one for its form.
        factors: list[dict[str, Any]] = [
            {
                "name": f"P{i}", "output": f"Y{i}" if i else "", "size": height * width, "width": width,
                "halves": wide != dtype, "form": f"H{i}" if factor else "", "form_scale": factor,
            }
            for i, ((height, width), factor) in enumerate(zip(shapes, further, strict=True))
        ]  # fmt: skip
        columns = 1 if wide == dtype else 3
        named = [(f["output"], shape, wide) for f, shape in zip(factors, shapes, strict=True)]
        named += [
            (f["form"], (height, columns * width), dtype)
            for f, (height, width) in zip(factors, shapes, strict=True)
            if f["form"]
        ]
        values = _inductor.realize(list(outputs))
        return by_elements("sums", values, factors, named, dtype, splits=splits)
    # What reads a single one is fused with the sum.
    call = _inductor.call_lowering
    total = call(aten.sum.dim_IntList, call(aten.view.default, outputs[0], [splits, *shapes[0]]), [0])
    (factor,) = further
    form = call(aten.mul.Tensor, total, factor) if factor not in (0, 1) else total
    return [_inductor.cast(total, wide), *([_inductor.cast(form, dtype)] if factor else [])]
