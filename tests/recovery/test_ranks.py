"""What several processes run together is not run again by one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import inductor_fusions
from inductor_fusions import _inductor, config, reporting
from tests.support.faults import Fault

distributed = torch.distributed
pytestmark = [
    pytest.mark.recovers,
    pytest.mark.usefixtures("peers"),
    pytest.mark.skipif(not distributed.is_available(), reason="this torch has no torch.distributed"),
]


@pytest.fixture
def peers() -> Iterator[None]:
    """This process takes itself for one of two; what it sends reaches nobody."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with (
        config.patch(policy="always"), reporting.isolated(keep=False),
        torch._inductor.config.patch(force_disable_caches=True),
    ):  # fmt: skip
        yield
    distributed.destroy_process_group()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1) @ v


def summed(x: torch.Tensor) -> torch.Tensor:
    from torch.distributed._functional_collectives import all_reduce

    return all_reduce(x, "sum", distributed.group.WORLD)


def reduced(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return summed(attention(q, k, v))


def in_place(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    o = attention(q, k, v)
    distributed.all_reduce(o)
    return o


@torch.library.custom_op("inductor_fusions_tests::exchange", mutates_args=())
def exchange(x: torch.Tensor) -> torch.Tensor:
    """What a library of somebody else may do with other processes."""
    return x.clone()


@exchange.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def of_others(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return exchange(attention(q, k, v))


class _Together(torch.autograd.Function):
    """Gradients are summed over the processes, as those of what tensor parallelism copies."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return summed(grad)


def backward_reduced(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attention(_Together.apply(q), k, v)


def inputs(train: bool = False) -> list[torch.Tensor]:
    return [torch.randn(2, 2, 12, 8, requires_grad=train) for _ in range(3)]


def verdicts() -> list[str]:
    return [site.verdict for site in inductor_fusions.report()]


@pytest.mark.parametrize("fn", [reduced, in_place, of_others])
def test_first_calls_are_made_once(fn: Callable[..., Any]) -> None:
    with Fault("launch").inject() as fault, pytest.raises(Exception, match="injected"):
        torch.compile(fn)(*inputs())
    assert fault.raised == 1
    assert verdicts() == ["fused"]


def test_sharded_inputs() -> None:
    """Which collectives their products become is known behind autograd alone."""
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    args = [distribute_tensor(each, mesh, [Replicate()]) for each in inputs()]
    found: list[bool] = []

    def backend(model: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(_inductor.communicates(model))
        return model

    torch.compile(attention, backend=backend)(*args)
    torch._dynamo.reset()
    torch.compile(attention, backend=backend)(*inputs())
    assert found == [True, False]


def test_what_no_process_waits_for_is_called_again() -> None:
    args = inputs()
    with Fault("launch").inject() as fault:
        found = torch.compile(attention)(*args)
    torch.testing.assert_close(found, attention(*args))
    assert fault.raised == 1
    assert verdicts() == ["failed"]


def is_kernel(node: torch.fx.Node) -> bool:
    """Of the backward of an attention."""
    return "attention" in str(node.target) and "backward" in str(node.target)


@pytest.mark.parametrize("fn, again", [(backward_reduced, False), (attention, True)])
def test_backwards(fn: Callable[..., Any], again: bool) -> None:
    with Fault("launch", is_kernel, backward=True).inject() as fault:
        found = torch.compile(fn)(*inputs(True)).sum()
        if again:
            found.backward()
        else:
            with pytest.raises(Exception, match="injected"):
                found.backward()
    assert fault.raised == 1
    assert ("failed" in verdicts()) == again


@pytest.mark.parametrize("together", [False, True])
def test_compiles(together: bool) -> None:
    """Nothing has run: the graph is compiled again, unless other processes take part in that."""
    compiled = torch.compile(reduced)
    with torch._functorch.config.patch(_sync_decision_cross_ranks=together), Fault("joint").inject() as fault:
        if together:
            with pytest.raises(Exception, match="injected"):
                compiled(*inputs())
        else:
            compiled(*inputs())
            assert verdicts() == ["failed"]
    assert fault.raised == 1


def test_a_process_alone() -> None:
    distributed.destroy_process_group()
    try:
        graph = torch.fx.symbolic_trace(lambda x: torch.ops.inductor_fusions_tests.exchange(x))
        assert not _inductor.communicates(graph)
    finally:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    assert _inductor.communicates(graph)
