"""Products are read as the einsums that they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from inductor_fusions.graph.einsum import Equation, equation_of
from inductor_fusions.graph.torch_ops import read

PRODUCTS: dict[str, tuple[Callable[..., torch.Tensor], list[bool]]] = {
    "matmul": (lambda x, y: x(3, 5) @ y(5, 7), [False, True]),
    "transposed": (lambda x, y: x(2, 3, 5) @ y(2, 7, 5).mT, [False, False]),
    "both transposed": (lambda x, y: x(5, 3).t() @ y(7, 5).t(), [True, False]),
    "broadcast": (lambda x, y: x(2, 1, 3, 5) @ y(4, 5, 7), [False, True]),
    "permuted": (lambda x, y: x(2, 3, 4, 5).permute(0, 2, 1, 3) @ y(2, 7, 4, 5).permute(0, 2, 3, 1),
                 [False, False]),
    "vector": (lambda x, y: x(2, 3, 5) @ y(5), [False, False]),
    "of a vector": (lambda x, y: x(5) @ y(2, 5, 3), [False, True]),
    "vectors": (lambda x, y: x(5) @ y(5), [False, False]),
    "bmm": (lambda x, y: torch.bmm(x(2, 3, 5), y(2, 5, 7)), [False, True]),
    "baddbmm": (lambda x, y: torch.baddbmm(torch.zeros(2, 3, 7).double(), x(2, 3, 5), y(2, 7, 5).mT),
                [False, False]),
    "einsum": (lambda x, y: torch.einsum("bqd,bkd->bqk", x(2, 3, 5), y(2, 7, 5)), [False, False]),
    "tensordot": (lambda x, y: torch.tensordot(x(2, 3, 5), y(5, 7), 1), [False, True]),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_product(name: str) -> None:
    """An einsum of the operands by the letters gives the same."""
    product, keeps_last = PRODUCTS[name]
    given: dict[str, torch.Tensor] = {}
    found: list[Equation | None] = []

    def drawn(side: str) -> Callable[..., torch.Tensor]:
        return lambda *sizes: given.setdefault(side, torch.randn(*sizes, dtype=torch.float64))

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        (output,) = graph.graph.find_nodes(op="output")
        op = read(output.args[0][0])
        assert op is not None
        found.append(equation_of(op))
        return graph.forward

    exact = product(drawn("x"), drawn("y"))
    torch._dynamo.reset()
    torch.compile(lambda x, y: product(lambda *_: x, lambda *_: y), backend=keep)(given["x"], given["y"])
    (equation,) = found
    assert equation is not None and equation.keeps_last == keeps_last
    assert (equation.left.op, equation.right.op) == ("placeholder", "placeholder")
    text = f"{equation.first},{equation.second}->{equation.result}"
    torch.testing.assert_close(torch.einsum(text, given["x"], given["y"]), exact)


def test_other_operations() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.ones(3, 3)
    for node in (graph.call_function(torch.addmm, (x, x, x)), graph.call_function(torch.mul, (x, x))):
        op = read(node)
        assert op is not None and equation_of(op) is None
