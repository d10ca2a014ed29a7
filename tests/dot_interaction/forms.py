"""Pairwise dot products of features as people write them.

Functions of dense features x (SAMPLES, D) and of features t (SAMPLES, F, D).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support.modules import Module

SAMPLES, F, D = 6, 5, 8
PAIRS = [(i, j) for i in range(F) for j in range(i)]
LI, LJ = [i for i, _ in PAIRS], [j for _, j in PAIRS]
Function = Callable[..., Any]


def products(t: Any) -> Any:
    return torch.bmm(t, torch.transpose(t, 1, 2))


def reference_dlrm(x: Any, t: Any) -> Any:
    """As in facebookresearch's DLRM: T is made of the dense features and the embeddings, pairs of lists."""
    features = torch.cat([x] + [t[:, i] for i in range(1, F)], dim=1).view((SAMPLES, -1, D))
    z = torch.bmm(features, torch.transpose(features, 1, 2))
    _, ni, nj = z.shape
    li = torch.tensor([i for i in range(ni) for j in range(i)])
    lj = torch.tensor([j for i in range(nj) for j in range(i)])
    return torch.cat([x] + [z[:, li, lj]], dim=1)


def with_indices(make: Function) -> Function:
    def fn(x: Any, t: Any) -> Any:
        i, j = make()
        return torch.cat([x, products(t)[:, i, j]], 1)

    return fn


def itself(x: Any, t: Any) -> Any:
    """A feature with itself as well."""
    i = torch.tensor([i for i in range(F) for j in range(i + 1)])
    j = torch.tensor([j for i in range(F) for j in range(i + 1)])
    return torch.cat((x, products(t)[:, i, j]), dim=1)


def beside(t: Any, dim: int = 1) -> Any:
    """As DeepCTR's products of features."""
    features = torch.split(t, 1, dim=dim)
    pairs = [(i, j) for i in range(len(features) - 1) for j in range(i + 1, len(features))]
    p, q = (torch.cat([features[pair[side]] for pair in pairs], dim=dim) for side in (0, 1))
    return torch.sum(p * q, dim=2, keepdim=True)


def own(t: Any, keeps_dim: bool = True) -> list[Any]:
    """Features that are tensors of their own, as the results of one embedding each."""
    found = [t[:, k : k + 1] * (k + 1) for k in range(F)]
    return found if keeps_dim else [feature.squeeze(1) for feature in found]


def both(features: list[Any], join: Function = torch.cat) -> list[Any]:
    """The first and the second features of all pairs."""
    return [join([features[k] for k in side], 1) for side in (LI, LJ)]


def one_by_one(feature: Function) -> Any:
    return torch.stack([(feature(i) * feature(j)).sum(-1) for i, j in PAIRS], 1)


def cells() -> torch.Tensor:
    return torch.tensor([i * F + j for i, j in PAIRS])


SPELLINGS: dict[str, Function] = {
    "tensors of their own": lambda x, t: (lambda p, q: (p * q).sum(2, keepdim=True))(*both(own(t))),
    "tensors of their own, stacked": lambda x, t: torch.cat(
        [x, torch.einsum("bpd,bpd->bp", *both(own(t, False), torch.stack))], 1
    ),
    "beside each other": lambda x, t: beside(t),
    "beside each other, some": lambda x, t: (
        torch.cat(t.split(1, 1)[:2], 1) * torch.cat([t[:, 3:4], t.narrow(1, -1, 1)], dim=-2)
    ).sum(-1),
    "summed, a dim kept": lambda x, t: (t[:, LI] * t[:, LJ]).sum(-1, keepdim=True) * 2,
    "reference": reference_dlrm,
    "itself": itself,
    "tril_indices": with_indices(lambda: torch.tril_indices(F, F, -1)),
    "tril_indices, to": with_indices(lambda: torch.tril_indices(F, F, offset=-1).to("cpu").unbind()),
    "triu_indices": with_indices(lambda: torch.triu_indices(F, F, offset=1)),
    "triu with diagonal": with_indices(lambda: torch.triu_indices(F, F)),
    "tril with diagonal": with_indices(lambda: torch.tril_indices(row=F, col=F)),
    "lists": lambda x, t: torch.cat([x, products(t)[:, LI, LJ]], 1),
    "asarray": lambda x, t: torch.cat([x, products(t)[:, torch.asarray(LI), torch.as_tensor(LJ)]], 1),
    "matmul": lambda x, t: torch.cat([x, (t @ t.mT)[:, LI, LJ]], -1),
    "permute": lambda x, t: torch.cat([x, torch.matmul(t, t.permute(0, 2, 1))[:, LI, LJ]], dim=-1),
    "einsum": lambda x, t: torch.cat([x, torch.einsum("bid,bjd->bij", t, t)[:, LI, LJ]], 1),
    "beside a factor by its name": (
        lambda x, t: torch.cat([torch.mul(x, other=x), torch.bmm(t, t.mT)[:, LI, LJ]], 1)
    ),
    "einsum, turned": lambda x, t: torch.einsum("xyz,xwz->xwy", t, t)[:, LI, LJ] + x.sum(),
    "transposed first": lambda x, t: torch.bmm(t.mT, t)[:, [1, 2, 2], [0, 0, 1]] + x.sum(),
    "no concatenation": lambda x, t: products(t)[:, LI, LJ] * x.sum(1, keepdim=True),
    "behind another": lambda x, t: torch.cat([products(t)[:, LI, LJ], x], 1),
    "scaled": lambda x, t: torch.cat([x, (0.5 * products(t) / D**0.5)[:, LI, LJ]], 1),
    "scaled, flattened": lambda x, t: (products(t).flatten(1) * 0.5)[:, torch.tensor([1, 7])] * x.sum(),
    "index_select": lambda x, t: (
        (t.index_select(1, torch.tensor(LI)) * torch.index_select(t, 1, torch.tensor(LJ))).sum(2) * x.sum()
    ),
    "einsum of pairs": lambda x, t: torch.einsum("bpd,bpd->bp", t[:, LI], t[:, LJ]) * x.sum(),
    "stacked": lambda x, t: (
        (torch.stack([t[:, i] for i in LI], 1) * torch.stack([t[:, j] for j in LJ], dim=1)).sum(-1) * x.sum()
    ),
    "stacked, unbound": lambda x, t: (
        (
            torch.stack([t.unbind(1)[i] for i in LI], 1) * torch.stack([t.unbind(dim=1)[j] for j in LJ], -2)
        ).sum(-1)
        * x.sum()
    ),
    "three parts": lambda x, t: torch.cat([x, products(t)[:, LI, LJ], x], 1),
    "all other dims": lambda x, t: torch.cat([x, products(t)[..., LI, LJ]], 1),
    "rows": lambda x, t: (lambda z: torch.cat([x, *(z[:, i, :i] for i in range(1, F))], 1))(products(t)),
    "columns": lambda x, t: (
        (lambda z: torch.cat([z[:, i + 1 :, i] for i in range(F - 1)], -1))(products(t)) * x.sum()
    ),
    "elements": lambda x, t: (lambda z: torch.cat([x, torch.stack([z[:, i, j] for i, j in PAIRS], 1)], 1))(
        products(t)
    ),
    "gather": lambda x, t: torch.cat([x, products(t).flatten(1).gather(1, cells().expand(SAMPLES, -1))], 1),
    "take_along_dim": lambda x, t: (
        torch.take_along_dim(products(t).reshape(SAMPLES, -1), cells()[None], 1) + x.sum()
    ),
}


class Buffers(nn.Module):
    """As torchrec's InteractionArch: which pairs they are is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("triu_indices", torch.triu_indices(F, F, offset=1), persistent=False)

    def forward(self, x: Any, t: Any) -> Any:
        return torch.cat((x, products(t)[:, self.triu_indices[0], self.triu_indices[1]]), dim=1)


#: Pairs that are no triangle, or of which the graph does not say which they are.
GIVEN: dict[str, Function] = {
    "other pairs": lambda x, t: products(t)[:, [1, 2, 2], [0, 0, 0]],
    "a pair three times": lambda x, t: products(t)[:, [1, 2, 1, 0, 1], [0, 2, 0, 1, 0]],
    "negative": lambda x, t: products(t)[:, [1, -1, -2], [0, -2, 0]],
    "another order": lambda x, t: products(t)[:, LI[::-1], LJ[::-1]],
    "of fewer features": with_indices(lambda: torch.tril_indices(F - 1, F - 1, -1)),
    "another diagonal": with_indices(lambda: torch.tril_indices(F, F, -2)),
    "not square": with_indices(lambda: torch.tril_indices(F, F - 2, -1)),
    "rows and columns turned": with_indices(lambda: torch.tril_indices(F, F, -1).flip(0)),
    "computed": with_indices(lambda: torch.tril_indices(F, F, -1) * 1),
    "a buffer": Buffers(),
    # As in NVIDIA's DLRM: cells of the flattened products.
    "flattened, a buffer": Module(
        lambda net, x, t: torch.cat((x, products(t).view(-1, F * F)[:, net.cells]), dim=1),
        {"cells": torch.tensor([i * F + j for i in range(F) for j in range(i)])},
    ),
    "flattened": lambda x, t: products(t).flatten(1)[:, torch.tensor(LI) * F + torch.tensor(LJ)],
    "selected": lambda x, t: products(t).reshape(-1, F * F).index_select(1, torch.tensor([3, 3, 24])),
    "two gathers": lambda x, t: torch.cat([x, (t[:, [0, 1, 1]] * t[:, [2, 3, 3]]).sum(-1)], 1),
}
#: A triangle, written in other ways.
TRIANGLES: dict[str, Function] = {
    "flattened": lambda x, t: products(t).flatten(1)[:, [i * F + j for i, j in PAIRS]],
    "two gathers": lambda x, t: torch.sum(t[:, LI] * t[:, LJ], dim=2),
}
