"""Errors of the kernels, for Triton's interpreter."""

from __future__ import annotations

import itertools

import torch

from inductor_fusions.fusions.dot_interaction import kernels
from inductor_fusions.fusions.dot_interaction.op import Triangle
from tests.support.errors import relative

#: Samples, features, width, dense columns, samples of a thread block.
SIZES: dict[str, tuple[int, int, int, int, int]] = {
    "dlrm": (3, 27, 64, 64, 1),
    "odd sizes": (5, 7, 19, 13, 2),
    "without dense": (4, 27, 32, 0, 4),
    "one feature": (2, 1, 16, 3, 1),
    "two tiles": (2, 33, 16, 5, 1),
}
DTYPES = {"float16": torch.float16, "float32": torch.float32}
#: Which sizes, the dtype, whether the upper triangle is meant, and whether with the diagonal.
CASES = {
    f"{name}, {'upper' if upper else 'lower'}{' with diagonal' if diagonal else ''} {kind}": (
        name, dtype, upper, diagonal,
    )
    for name, (kind, dtype), upper, diagonal in itertools.product(
        SIZES, DTYPES.items(), (False, True), (False, True)
    )
}  # fmt: skip
#: Pairs that a tensor names, some of them more than once.
CASES |= {f"{n}, given {kind}": (n, dtype, None, False) for n in SIZES for kind, dtype in DTYPES.items()}


def errors(case: str) -> dict[str, float]:
    """Relative error of the result and of the gradient, against float64."""
    name, dtype, upper, diagonal = CASES[case]
    samples, f, d, x, block = SIZES[name]
    torch.manual_seed(0)
    # In layouts that differ.
    t = torch.randn(f, samples, 2 * d).to(dtype).transpose(0, 1)[..., ::2]
    dense = torch.randn(x, samples).to(dtype).t() if x else None
    tiles = [block, 1, block, 1]
    i, j = torch.randint(f, (2, 2 * f)) if upper is None else Triangle(upper, diagonal).indices(f)
    named = i * f + j if upper is None else Triangle(upper, diagonal)
    y = kernels.interaction(t, dense, named, tiles)
    dy = torch.randn(y.shape[1], samples).to(dtype).t() if f % 2 else torch.randn(y.shape).to(dtype)
    dt = kernels.gradient(dy, t, x, named, tiles)
    wide = t.double().requires_grad_()
    pairs = (wide @ wide.mT)[:, i, j]
    exact = pairs if dense is None else torch.cat([dense.double(), pairs], 1)
    (true,) = torch.autograd.grad(exact, wide, dy.double())
    assert y.dtype == dt.dtype == dtype
    return {"y": relative(y, exact.detach(), 1e-9), "dt": relative(dt, true, 1e-9)}
