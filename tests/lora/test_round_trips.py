"""Copies that casts to float32 and back leave: products read what is there, and what leaves stays a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor import config as inductor_config

from inductor_fusions.driver import passes

from ..support.arguments import named


def both_read(x: Any, w: Any, a: Any) -> Any:
    wide = x.float()
    return wide.bfloat16() @ w, wide @ a


def returned(x: Any, w: Any, a: Any) -> Any:
    wide = x.float()
    copy = wide.bfloat16()
    return copy @ w, wide @ a, copy


def view_returned(x: Any, w: Any, a: Any) -> Any:
    wide = x.float()
    copy = wide.bfloat16()
    return copy.view(2, 4, 16)[:, 1:] @ w, wide @ a, copy.view(32, 4)


def parts_returned(x: Any, w: Any, a: Any) -> Any:
    wide = x.float()
    copy = wide.bfloat16()
    return copy @ w, wide @ a, *copy.split(4)


def written_afterwards(x: Any, w: Any, a: Any) -> Any:
    wide = x.float()
    copy = wide.bfloat16()
    out = copy @ w, wide @ a, copy
    x.add_(1)
    return out


def operands() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(8, 16).bfloat16(), torch.randn(16, 16).bfloat16(), torch.randn(16, 4)


@pytest.mark.parametrize("fn", [returned, view_returned, parts_returned, written_afterwards])
def test_what_is_returned_is_a_copy(fn: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    given, (x, w, a) = operands(), operands()
    found, expected = torch.compile(fn)(*given), fn(x, w, a)
    for result, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=0.02, atol=0.05)
    torch.testing.assert_close(given[0], x, rtol=0, atol=0)
    storage = given[0].untyped_storage().data_ptr()
    assert storage not in [each.untyped_storage().data_ptr() for each in found]


@pytest.mark.parametrize(("fn", "casts"), [(both_read, 1), (returned, 2)])
def test_products_read_what_was_cast(
    fn: Callable[..., Any], casts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[fx.Graph] = []
    call = passes.FusionPass.__call__

    def seen(self: Any, graph: fx.Graph) -> None:
        call(self, graph)
        if self.stage == "post_grad":
            graphs.append(graph)

    monkeypatch.setattr(passes.FusionPass, "__call__", seen)
    torch._dynamo.reset()
    with inductor_config.patch(force_disable_caches=True):
        torch.compile(fn)(*operands())
    (graph,) = graphs
    inputs = graph.find_nodes(op="placeholder")
    products = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert any(named(node).self in inputs for node in products)
    cast = torch.ops.prims.convert_element_type.default
    assert len(graph.find_nodes(op="call_function", target=cast)) == casts
