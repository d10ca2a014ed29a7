"""How much memory the loop over chunks needs, and that a graph has no value of the size of all logits."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from inductor_fusions import testing
from inductor_fusions.fusions.linear_cross_entropy import chunks
from inductor_fusions.fusions.linear_cross_entropy.chunks import Head, Pulls, walk
from tests.support.modules import Module

ROWS, WIDTH, CLASSES = 512, 16, 640


class Peak(TorchDispatchMode):
    """The bytes of memory that is made inside and in use at once, at the most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id_of(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and id_of(tensor) not in given | self.known:
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def id_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.mark.parametrize("trains", [False, True])
def test_chunks(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some chunks at a time, and the gradients; all logits would be 1.3 MB."""
    each = 32 * CLASSES * 4
    monkeypatch.setitem(chunks.CHUNK, "cpu", each)
    h, w = torch.randn(ROWS, WIDTH), torch.randn(CLASSES, WIDTH)
    labels = torch.randint(CLASSES, (ROWS,))
    ones = torch.ones(ROWS)
    pulls = Pulls(ones, ones) if trains else None
    with Peak() as peak:
        found = walk(h, Head(w, None, 1.0, 0.0), labels, None, False, pulls, (trains, trains, False))
    gradients = sum(d.numel() * 4 for d in (found.dh, found.dw))
    assert (gradients > 0) == trains
    # The chunk itself, its logarithms of a softmax, and what is small.
    assert each <= peak.most - gradients <= 3 * each + 32 * ROWS, (peak.most, gradients, each)
    assert 3 * each < ROWS * CLASSES * 4 / 4


@pytest.mark.parametrize("each_row", [False, True])
def test_graph_has_no_logits(each_row: bool) -> None:
    """Neither the logits nor a cast of them is a value of the graph any more."""

    def loss(net: Any, h: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = net.head(h).float()
        return nn.functional.cross_entropy(logits, labels, reduction="none" if each_row else "mean").sum()

    model = Module(loss, {"head": nn.Linear(WIDTH, CLASSES)})
    inputs = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randint(CLASSES, (ROWS,))
    seen = testing.capture(model, *inputs, train=True, backend=testing.EAGER_AFTER_PASSES)
    assert len(seen.fused) == 1
    values = [n.meta.get("example_value") for graph in seen.graphs for n in graph.graph.nodes]
    sizes = [v.numel() for v in values if isinstance(v, torch.Tensor)]
    assert sizes and max(sizes) < ROWS * CLASSES
