"""What looks like pairwise dot products of features and is left alone, as people write it.

Functions of dense features x (SAMPLES, D) and of features t (SAMPLES, F, D).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.dot_interaction.forms import (
    LI,
    LJ,
    PAIRS,
    SAMPLES,
    D,
    F,
    Function,
    beside,
    both,
    cells,
    one_by_one,
    own,
    products,
)  # fmt: skip


def overwritten_index(x: Any, t: Any) -> Any:
    i, j = torch.tensor(LI), torch.tensor(LJ)
    j[0] = 3
    return torch.cat([x, products(t)[:, i, j]], 1)


def two_readers(x: Any, t: Any) -> Any:
    z = products(t)
    return torch.cat([x, z[:, LI, LJ]], 1), z.sum()


def matrices_of_pairs(x: Any) -> Any:
    """(pairs, D, D)"""
    return (x[0, :, None] * x[1]).expand(len(LI), -1, -1)


def outer_products(p: Any, q: Any, x: Any) -> Any:  # DeepCTR
    return ((p * matrices_of_pairs(x).transpose(0, 1)).sum(-1).transpose(1, 2) * q).sum(-1)


def selected(t: Any, features: list[int]) -> Any:
    return t.index_select(1, torch.tensor(features))


def fields(t: Any) -> Any:
    """(samples, fields, features for each field, D)"""
    return t[:, :, None] * t.flip(1)[:, None]


def pairs_of_fields(e: Any) -> list[Any]:
    return [e[:, i, j] * e[:, j, i] for i, j in PAIRS]


#: What is left alone, with a part of the reason; None: nothing is said.
OTHERS: dict[str, tuple[Function, str | None]] = {
    "gathered of two": (lambda x, t: (t[:, LI] * (t + 1)[:, LJ]).sum(-1), None),
    "summed over the pairs": (lambda x, t: (t[:, LI] * t[:, LJ]).sum(1), None),
    "beside each other, two rows each": (
        lambda x, t: (torch.cat((h := t.split(2, 1))[:2], 1) * torch.cat(h[:2][::-1], 1)).sum(-1), None
    ),
    "beside each other, over samples": (lambda x, t: beside(t, 0), None),
    "beside each other, of another": (
        lambda x, t: (torch.cat(t.split(1, 1)[:2], 1) * torch.cat((t + 1).split(1, 1)[1:3], 1)).sum(2), None
    ),
    "a triangle of zeros": (lambda x, t: products(t).tril(-1).flatten(1), "through tril"),
    "a causal mask": (lambda x, t: products(t).tril() @ t, None),
    "summed in another dtype": (lambda x, t: (t[:, LI] * t[:, LJ]).sum(-1, dtype=torch.float64), None),
    "used elsewhere": (two_readers, "used-elsewhere"),
    "overwritten index": (overwritten_index, "overwritten"),
    "another second operand": (lambda x, t: torch.bmm(t, (t + 1).mT)[:, LI, LJ], "products of two sets"),
    "another second operand, by einsum": (
        lambda x, t: torch.einsum("bid,bjd->bij", t, t + 1)[:, LI, LJ], "products of two sets"
    ),
    "a scaled operand": (lambda x, t: ((t * 0.25) @ t.mT)[:, LI, LJ], "an operand of the products is scaled"),
    "a scaled operand, all products": (lambda x, t: ((t * 0.25) @ t.mT).flatten(1), "both triangles"),
    "all products, scaled": (lambda x, t: (products(t) / 36).flatten(1) + x[:, :1], "both triangles"),
    "all products, through a function": (
        lambda x, t: torch.relu(products(t)).flatten(1) + x[:, :1], "both triangles"
    ),
    "pairs of a function of the products": (
        lambda x, t: torch.relu(products(t) * 2)[:, LI, LJ], "all products are read, by relu"
    ),
    "weights of all pairs": (lambda x, t: (products(t) / 8).flatten(1).softmax(-1), None),
    "weights of all pairs, behind a bias": (
        lambda x, t: ((products(t) / 8).flatten(1) + x[:, :1]).view(t.shape[0], F, F).softmax(-1), None
    ),
    "a row and a column of each head": (lambda x, t: (t[:, None] @ t[:, None].mT)[:, [0], [1]], None),
    "another transpose": (lambda x, t: (t @ t.transpose(0, 1).transpose(0, 2))[:, [1], [0]], None),
    "no pairs": (lambda x, t: products(t)[:, LI[:0], LJ[:0]], "no pair is read"),
    "permuted": (lambda x, t: torch.bmm(t, t.permute(0, 1, 2))[:, [1, 2], [0, 0]], None),
    "over the samples": (lambda x, t: torch.einsum("bid,bjd->ijb", t, t)[:, [1, 2], [0, 0]], None),
    "scaled by a tensor": (
        lambda x, t: (products(t) * x[:, :1, None])[:, LI, LJ], "all products are read, by mul"
    ),
    "scaled, used elsewhere": (
        lambda x, t: (lambda z: z[:, LI, LJ] + z.sum())(products(t) * 2), "used-elsewhere"
    ),
    "einsum over the pairs": (lambda x, t: torch.einsum("bpd,bpd->bd", t[:, LI], t[:, LJ]), None),
    "stacked, of two": (
        lambda x, t: (torch.stack([t[:, 0], t[:, 1]], 1) * torch.stack([x, t[:, 2]], 1)).sum(-1), None
    ),
    "stacked, over samples": (
        lambda x, t: (torch.stack([t[0], t[1]], 1) * torch.stack([t[2], t[3]], 1)).sum(-1), None
    ),
    "index_select of the width": (
        lambda x, t: (t.index_select(2, (i := torch.tensor([1, 0]))) * t.index_select(2, i)).sum(-1), None
    ),
    "all products": (lambda x, t: torch.bmm(t, t.transpose(1, 2)).flatten(1) + x[:, :1], "all products"),
    "all products, weighed": (lambda x, t: (products(t) * x.sum(0)[:F]).sum((1, 2)), "times a factor"),
    "all products, times vectors": (lambda x, t: products(t).unsqueeze(-1) * x[0], "each times a vector"),
    "all products, times numbers": (lambda x, t: products(t).unsqueeze(-1) * x[0, :1], None),
    "of two sets, times vectors": (lambda x, t: (t @ (t + 1).mT).unsqueeze(-1) * x[0], None),
    "other cells of each sample": (
        lambda x, t: products(t).flatten(1).gather(1, (x > 0).long() + 2), "a matrix of indices"
    ),
    "columns by columns of an index": (
        lambda x, t: products(t).flatten(1).gather(1, cells()[:SAMPLES, None].expand(-1, 4)),
        "a matrix of indices",
    ),
    "rows of two": (lambda x, t: torch.cat([products(t + k)[:, k, :k] for k in (1, 2, 3)], 1), None),
    "every second column": (lambda x, t: torch.cat([products(t)[:, i, ::2] for i in range(F)], 1), None),
    "all products, viewed": (lambda x, t: products(t).reshape(t.shape[0], -1), "all products"),
    "norms of tensors of their own": (
        lambda x, t: (torch.cat(e := own(t), 1) * torch.cat(e, 1)).sum(-1), None
    ),
    "tensors of their own, of two": (
        lambda x, t: (torch.cat(own(t), 1) * torch.cat(own(t + 1), 1)).sum(-1), None
    ),
    "tensors of their own, over the pairs": (lambda x, t: (lambda p, q: (p * q).sum(1))(*both(own(t))), None),
    "tensors of their own, of which some are broadcast": (
        lambda x, t: (
            lambda e: (both(e)[0] * both([feature[..., :1] for feature in e])[1]).sum(-1)
        )(own(t)),
        None,
    ),
    "tensors of their own, some without their dim": (
        lambda x, t: (both(own(t))[0] * both(own(t, False), torch.stack)[1]).sum(-1), None
    ),
    "tensors of their own, without a sum": (lambda x, t: torch.mul(*both(own(t))).relu(), "without a sum"),
    "slices without their dim": (lambda x, t: one_by_one(lambda i: t[:, i : i + 1].squeeze(1)), "one by one"),
    "tensors of their own, one by one": (lambda x, t: one_by_one(own(t, False).__getitem__), "one by one"),
    "tensors of their own, through a matrix": (  # FiBiNET
        lambda x, t: (
            lambda e: torch.cat([e[i] @ (x.t() @ x) * e[j] for i, j in PAIRS], 1)
        )(own(t)),
        "through matrices",
    ),
    "tensors of their own, through a matrix of each pair": (
        lambda x, t: (lambda p, q: outer_products(p.unsqueeze_(1), q, x))(*both(own(t))), "through matrices"
    ),
    "tensors of their own, weighted": (
        lambda x, t: (lambda p, q: (p * q * x.sum(0)).sum(-1))(*both(own(t))), "weights of each element"
    ),
    "others of their own, weighted": (
        lambda x, t: (both(own(t))[0] * both(own(t + 1))[1] * x.sum(0)).sum(-1), None
    ),
    "tensors of their own, added": (
        lambda x, t: (
            lambda e: torch.cat([e[i] + e[j] for i, j in PAIRS], 1)
        )(own(t)),
        None,
    ),
    "tensors that one product reads, one by one": (
        lambda x, t: torch.stack([(a * b).sum(-1) for a, b in zip(own(t), own(t + 1), strict=True)], 1), None
    ),
    "one gather": (lambda x, t: (t[:, LI] * x[:, None]).sum(-1), None),
    "a mask of others": (lambda x, t: t[:, torch.ones(F, D, dtype=torch.bool).tril(-1)], None),
    "all products of samples": (lambda x, t: products(t).flatten(0, 1), None),
    "matrices of pairs": (
        lambda x, t: (torch.einsum("bpd,pde->bpe", t[:, LI], matrices_of_pairs(x)) * t[:, LJ]).sum((1, 2)),
        "through matrices",
    ),
    "one matrix, element by element": (  # FiBiNET
        lambda x, t: (t @ (x.t() @ x))[:, LI] * t[:, LJ], "through matrices"
    ),
    "a matrix of each pair, by index_select": (
        lambda x, t: selected(t, LJ) * (selected(t, LI).unsqueeze(2) @ matrices_of_pairs(x)).squeeze(2),
        "through matrices",
    ),
    "one by one, through matrices": (
        lambda x, t: [nn.functional.linear(t[:, i], (x.t() @ x)) * t[:, 4] for i in range(4)],
        "through matrices",
    ),
    "a matrix of each pair, element by element": (
        lambda x, t: outer_products(t[:, LI].unsqueeze(1), t[:, LJ], x), "through matrices"
    ),
    "one by one, through a matrix of each pair": (
        lambda x, t: [t[:, i : i + 1] @ matrices_of_pairs(x)[i] * t[:, 4:5] for i in range(4)],
        "through matrices",
    ),
    "correlations over the samples": (  # Barlow Twins
        lambda x, t: (x.t() @ (x + 1) / 4 - torch.eye(x.shape[1], dtype=x.dtype)).pow(2).diagonal(),
        "all correlations",
    ),
    "covariances, by einsum": (
        lambda x, t: torch.einsum("ni,nj->ij", x, x).div(4).diagonal(), "all correlations"
    ),
    "a product over the samples": (lambda x, t: (x.t() @ (x + 1)).pow(2).sum(), None),
    "a diagonal of pairs of samples": (lambda x, t: (x @ (x + 1).t()).diagonal(), None),
    "without a sum": (lambda x, t: nn.functional.relu(t[:, LI] * t[:, LJ]), "without a sum"),  # AFM
    "pairs of fields": (  # FFM
        lambda x, t: sum((k + 1) * p.sum(-1) for k, p in enumerate(pairs_of_fields(fields(t)))), "field-aware"
    ),
    "pairs of fields, stacked": (lambda x, t: torch.stack(pairs_of_fields(fields(t)), 1), "field-aware"),
    "pairs of fields, of a list": (
        lambda x, t: (lambda e: torch.cat([e[i][:, j] * e[j][:, i] for i, j in PAIRS], 1))(
            [t * (k + 1) for k in range(F)]
        ),
        "field-aware",
    ),
    "pairs of fields, by indices": (
        lambda x, t: ((e := fields(t))[:, LI, LJ] * e[:, LJ, LI]).sum(-1), "field-aware"
    ),
    "of two sets, one by one": (
        lambda x, t: torch.stack([(t[:, i] * (t + 1)[:, j]).sum(-1) for i in range(3) for j in range(3)], 1),
        "two sets are multiplied one by one",
    ),
    "of two sets, shifted": (
        lambda x, t: torch.stack([t[:, i] * (t + 1)[:, i + 1] for i in range(3)], 1),
        "two sets are multiplied one by one",
    ),
    "through one matrix, to all others": (  # FiBiNET
        lambda x, t: torch.cat([(t @ (x.t() @ x))[:, i] * t[:, j] for i, j in PAIRS], 1),
        "through matrices",
    ),
    "two pairs of fields": (lambda x, t: torch.stack(pairs_of_fields(fields(t))[:2], 1), None),
    "fields of other pairs": (
        lambda x, t: torch.stack([(e := fields(t))[:, 0, k] * e[:, 1, k] for k in range(F)], 1), None
    ),
    "weights of each pair's elements": (  # PNN
        lambda x, t: (t[:, LI] * t[:, LJ] * x.sum(0)).sum(-1), "weights of each element"
    ),
    "weights of each pair's elements, behind a factor": (
        lambda x, t: ((t[:, LI] * t[:, LJ]) * x.sum(0)).sum(1), "without a sum"
    ),
    "weights of elements of two": (lambda x, t: (t[:, LI] * (t + 1)[:, LJ] * x.sum(0)).sum(-1), None),
    "without a sum, of two": (lambda x, t: t[:, LI] * (t + 1)[:, LJ], None),
    "two through a matrix": (
        lambda x, t: [nn.functional.linear(t[:, i], (x.t() @ x)) * t[:, 4] for i in range(2)], None
    ),
    "matrices, of two": (lambda x, t: (t @ (x.t() @ x))[:, LI] * (t + 1)[:, LJ], None),
    "matrices of pairs, of two": (
        lambda x, t: (torch.einsum("bpd,pde->bpe", t[:, LI], matrices_of_pairs(x)) * (t + 1)[:, LJ]).sum(-1),
        None,
    ),
    "of two sets": (lambda x, t: (t @ (t + 1).mT).flatten(1), "vectors of two sets"),
    "of two sets, by einsum": (
        lambda x, t: torch.einsum("bid,bjd->bij", t, t[:, :3] + 1).reshape(SAMPLES, -1), "vectors of two sets"
    ),
    "of a set and a weight": (lambda x, t: (t @ x[:3].t()).flatten(1), None),
    "of a set and a weight, by einsum": (
        lambda x, t: torch.einsum("bid,kd->bik", t, x[:3]).reshape(SAMPLES, -1), None
    ),
    "of two sets, in a matrix": (lambda x, t: t @ (t + 1).mT, None),
    "of two sets, over the vectors": (lambda x, t: (t.mT @ (t + 1)).flatten(1), None),
    "compressed": (lambda x, t: (t @ (t.mT @ x[:F])).flatten(1), "through matrices"),  # Wukong
    "compressed, from the left": (lambda x, t: (t @ t.mT @ x[:F]).flatten(1), "through matrices"),
    "compressed, of two": (lambda x, t: (t @ ((t + 1).mT @ x[:F])).flatten(1), None),
    "the largest, summed": (  # ColBERT
        lambda x, t: (t @ (t + 1).permute(0, 2, 1)).max(2).values.sum(1), "late interaction"
    ),
    "the largest of all pairs, masked": (
        lambda x, t: (
            torch.einsum("ash,bth->abst", t, t + 1)
            .masked_fill(x[None, :, None, :F] > 1, -1e4)
            .amax(-1)
            .sum(-1)
        ),
        "late interaction",
    ),
    "the largest, not summed": (lambda x, t: (z := t @ (t + 1).mT) - z.amax(-1, keepdim=True), None),
    "pairs in rows": (lambda x, t: products(t)[:, [[1, 2], [2, 3]], [[0, 0], [1, 2]]], None),
    "a slice of samples": (lambda x, t: products(t)[1:, LI, LJ], None),
}  # fmt: skip
