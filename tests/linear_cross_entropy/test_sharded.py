"""A loss head whose vocabulary is sharded over processes is left to stock, with the reason."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import inductor_fusions
from inductor_fusions import config

distributed = torch.distributed
pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch has no torch.distributed")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """A mesh of this process alone: its collectives are those of several, and have values."""
    from torch.distributed.tensor import init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def loss(h: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w).float(), labels)


def loss_of_the_whole(h: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    logits: Any = F.linear(h, w)
    return F.cross_entropy(logits.full_tensor().float(), labels)


def loss_of_sum(h: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    from torch.distributed._functional_collectives import all_reduce

    return F.cross_entropy(all_reduce(F.linear(h, w), "sum", distributed.group.WORLD).float(), labels)


@pytest.mark.parametrize("fn, parallel, local, code", [
    (loss, False, False, "subclass"),
    (loss, True, False, "subclass"),
    (loss_of_the_whole, False, False, "loss"),
    (loss_of_sum, False, True, "loss"),
], ids=["replicated loss", "loss_parallel", "full_tensor", "all_reduce"])  # fmt: skip
def test_it_is_left(mesh: Any, fn: Callable[..., Tensor], parallel: bool, local: bool, code: str) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    h, w, labels = torch.randn(12, 16), torch.randn(64, 16), torch.randint(0, 64, (12,))
    if local:
        w.requires_grad_()
    else:
        h, w = (
            distribute_tensor(x, mesh, [p]).requires_grad_() for x, p in ((h, Replicate()), (w, Shard(0)))
        )
        labels = distribute_tensor(labels, mesh, [Replicate()]) if fn is loss else labels
    inductor_fusions.clear()
    scope = loss_parallel() if parallel else contextlib.nullcontext()
    with scope, config.patch(policy="always"):
        found = torch.compile(fn)(h, w, labels)
        exact = fn(h, w, labels)
        report = inductor_fusions.report()
    found, exact = (x.full_tensor() if hasattr(x, "full_tensor") else x for x in (found, exact))
    torch.testing.assert_close(found, exact)
    sites = [site for site in report if site.fusion == "linear_cross_entropy"]
    assert [site.code for site in sites] == [code], sites
    assert not any(site.verdict in ("fused", "failed") for site in report)
