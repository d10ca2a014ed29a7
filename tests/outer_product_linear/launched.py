"""The operation in a graph, where Inductor launches the kernels: its code, and the errors of that code."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from inductor_fusions.fusions.outer_product_linear import outer_products
from tests.outer_product_linear.interpreted import BLOCK, LINEAR
from tests.support.errors import relative

ROWS, P, Q, N = 40, 20, 12, 72


def operands(one: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """u, v (not where it is u) and w."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(ROWS, P), (N, P * P)] if one else [(ROWS, P), (ROWS, Q), (N, P * Q)]
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def written(one: bool, dtype: torch.dtype) -> str:
    """The code of the forward, for a process without the interpreter."""
    from devtools import cuda_codegen
    from inductor_fusions.fusions.outer_product_linear import launch, op

    def square(u: torch.Tensor, w: torch.Tensor) -> Any:
        return op.OUTER_PRODUCT_LINEAR(u, u, w)

    def product(u: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> Any:
        return op.OUTER_PRODUCT_LINEAR(u, v, w)

    with (
        mock.patch.multiple(launch, LINEAR=LINEAR, BLOCK_Q=dict.fromkeys((2, 4), BLOCK)),
        mock.patch.object(op, "_has_kernel", lambda u: True),
    ):
        inputs = tuple(operands(one, dtype))
        return cuda_codegen.generate(square if one else product, inputs, run=False).forward.wrapper


def errors(job: tuple[bool, torch.dtype, str]) -> float:
    """Relative error of the result against float64, where kernels are interpreted."""
    from types import SimpleNamespace

    from devtools.cuda_codegen.interpreter import interpret

    one, dtype, wrapper = job
    given = operands(one, dtype)
    (y,) = interpret(SimpleNamespace(wrapper=wrapper), given)
    u, v, w = given[0].double(), given[-2].double(), given[-1].double()  # where u is v, there are two of them
    exact = outer_products(u, v) @ w.t()
    return relative(y, exact)
