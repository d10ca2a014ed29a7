"""Whatever writes to memory that an attention reads, or that others read after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from inductor_fusions import testing
from tests.attention.support import flex_everywhere, qkv, same_as_eager

LENGTH = 9


def invert(x: torch.Tensor) -> None:
    x.logical_not_()


@pytest.fixture(autouse=True)
def operation() -> Iterator[None]:
    library = torch.library.Library("fusions_writers", "FRAGMENT")
    library.define("invert(Tensor(a!) x) -> ()")
    library.impl("invert", invert, "CompositeExplicitAutograd")
    torch.library.register_fake("fusions_writers::invert", lambda x: None, lib=library)
    yield
    library._destroy()


def triangle() -> torch.Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def by_an_operation(mask: Any) -> None:
    torch.ops.fusions_writers.invert(mask)


def by_a_checkpointed_region(mask: Any) -> None:
    checkpoint(lambda m: m.logical_not_().sum(), mask, use_reentrant=False)


def by_numpy(mask: Any) -> None:
    mask.numpy()[0] = True


def by_xor(mask: Any) -> None:
    mask ^= True


MASKS = [by_an_operation, by_a_checkpointed_region, by_numpy, by_xor]


@pytest.mark.parametrize("write", MASKS)
def test_mask_that_is_overwritten(write: Any) -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        mask = triangle()
        write(mask)
        return torch.softmax((q @ k.mT).masked_fill(~mask, -1e9), -1) @ v

    right(fn, qkv(LENGTH, LENGTH, grad=False))


def in_a_region(q: Any) -> None:
    checkpoint(lambda x: x.mul_(0.1).sum(), q, use_reentrant=False)


def momentum(q: Any) -> None:
    p, grad = torch.ones_like(q), torch.ones_like(q)
    options = dict(weight_decay=0.0, momentum=0.9, lr=0.1, dampening=0.0, nesterov=False, maximize=False)
    torch._fused_sgd_([p], [grad], [q], **options, is_first_step=False)


@torch.compiler.allow_in_graph
class FunctionOfTheUser(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(0.1)


@torch._dynamo.nonstrict_trace
def traced_apart(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(0.1).sum()


OPERANDS = {
    "dropout": lambda q: F.dropout(q, 1.0, True, True),
    "momentum": momentum,
    "region": in_a_region,
    "a differentiated function of the user's": FunctionOfTheUser.apply,
    "a function that is traced apart": traced_apart,
}


@pytest.mark.parametrize("write", OPERANDS.values(), ids=OPERANDS)
def test_queries_that_are_overwritten_behind_the_scores(write: Any) -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        q = q * 1.0
        scores = q @ k.mT
        write(q)
        return torch.softmax(scores, -1) @ v

    right(fn, qkv(LENGTH, LENGTH, grad=False))


def product_added_to(b: Any, q: Any, k: Any) -> Any:
    scores = b.view(6, LENGTH, LENGTH).baddbmm_(q.flatten(0, 1), k.flatten(0, 1).mT)
    return scores.view(2, 3, LENGTH, LENGTH)


#: The scores are written over a tensor that others see.
RESULTS = {
    "add_": lambda b, q, k: b.add_(q @ k.mT),
    "baddbmm_": product_added_to,
    "add": lambda b, q, k: torch.add(q @ k.mT, torch.ones(LENGTH, LENGTH), out=b),
    "mul": lambda b, q, k: torch.mul(q @ k.mT, 0.5, out=b),
    "where": lambda b, q, k: torch.where(triangle(), q @ k.mT, torch.full((), -1e9), out=b),
    "clamp": lambda b, q, k: torch.clamp(q @ k.mT, min=0.1, out=b),
}


@pytest.mark.parametrize("scores", RESULTS.values(), ids=RESULTS)
def test_scores_in_memory_of_others(scores: Any) -> None:
    def fn(q: Any, k: Any, v: Any, given: Any) -> Any:
        memory = given.clone()
        seen = memory.view_as(memory)
        result = torch.softmax(scores(memory, q, k), -1) @ v
        return result, seen * 1.0

    inputs = [*qkv(LENGTH, LENGTH, grad=False), torch.randn(2, 3, LENGTH, LENGTH)]
    right(fn, inputs)


@pytest.mark.parametrize("dim", [-1, -2])
def test_weights_in_memory_of_others(dim: int) -> None:
    def fn(q: Any, k: Any, v: Any, given: Any) -> Any:
        memory = given.clone()
        return torch.softmax(q @ k.mT, dim, out=memory) @ v, memory * 1.0

    right(fn, [*qkv(LENGTH, LENGTH, grad=False), torch.randn(2, 3, LENGTH, LENGTH)])


def test_attribute_of_an_array() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        q = q * 1.0
        scores = q @ k.mT
        total = torch.from_numpy(q.numpy().T).sum()
        return torch.softmax(scores, -1) @ v + total

    assert right(fn, qkv(LENGTH, LENGTH, grad=False)).fused


#: q is a DTensor: (its local part, what it is overwritten through).
SHARDED = {
    "the whole": lambda q: (q.to_local(), q),
    "a view of the whole": lambda q: (q.to_local(), q.transpose(1, 2)),
    "another part": lambda q: (q.to_local(), q.to_local()),
    "what is made of the part": lambda q: (
        part := q.to_local() * 1.0,
        type(q).from_local(part, q.device_mesh, q.placements, run_check=False),
    ),
    "nothing of it": lambda q: (q.to_local(), q * 1.0),
}


@pytest.mark.parametrize("name", SHARDED)
def test_part_of_what_is_sharded(name: str, mesh: Any, device: torch.device) -> None:
    from torch.distributed.tensor import DTensor, Shard

    def fn(q: Any, k: Any, v: Any) -> Any:
        part, written = SHARDED[name](DTensor.from_local(q * 1.0, mesh, [Shard(1)], run_check=False))
        scores = part @ k.mT
        written.mul_(0.1)
        return torch.softmax(scores, -1) @ v

    inputs = [x.to(device) for x in qkv(LENGTH, LENGTH, grad=False)]
    assert bool(right(fn, inputs).fused) == (name == "nothing of it")


def right(fn: Any, inputs: Any) -> testing.Capture:
    with flex_everywhere(), torch.no_grad():
        return same_as_eager(fn, inputs)
