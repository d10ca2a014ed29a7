"""Products in other words, several products with the same weights, and values of pairs."""

from __future__ import annotations

from typing import Any

import torch

from .form import QKV, form, scored

einsum = torch.einsum


@form((9, 16), (13, 16), (13, 8))
def product_by_tensordot(q: Any, k: Any, v: Any) -> Any:
    weights = torch.softmax(torch.tensordot(q, k, dims=([1], [1])) * 0.25, dim=1)
    return torch.tensordot(weights, v, dims=1)


@form((9, 16), (13, 16), (13, 8))
def product_by_inner(q: Any, k: Any, v: Any) -> Any:
    return torch.inner((torch.inner(q, k) * 0.25).softmax(-1), v.mT)


@form((2, 9, 16), (13, 16), (13, 8))
def product_by_inner_of_a_batch(q: Any, k: Any, v: Any) -> Any:
    return torch.inner((torch.inner(q, k) * 0.25).softmax(-1), v.mT)


@form((9, 16), (13, 16), (13, 8), (8, 4), fused=0, reasons=("linalg_multi_dot, which is not read",))
def chain_of_products(q: Any, k: Any, v: Any, w: Any) -> Any:
    return torch.linalg.multi_dot([(q @ k.mT * 0.25).softmax(-1), v, w])


@form((9, 16), (13, 16), (13, 8), (9, 13))
def bias_by_addmm(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return torch.mm(torch.addmm(bias, q, k.t(), alpha=0.25).softmax(1), v)


@form((9, 16), (13, 16), (13, 8), (9, 8), fused=0, reasons=("in-between",))
def residual_by_addmm(q: Any, k: Any, v: Any, x: Any) -> Any:
    return torch.addmm(x, (q @ k.t() * 0.25).softmax(1), v)


@form((2, 9, 16), (2, 13, 16), fused=0, reasons=("elementwise",))
def products_by_elements(q: Any, k: Any) -> Any:
    return ((q[:, :, None] * k[:, None]).sum(-1) * 0.25).softmax(-1) @ k


@form(*QKV, fused=0, reasons=("differential attention",))
def difference_of_heads(q: Any, k: Any, v: Any) -> Any:
    w = scored(q, k).softmax(-1).view(2, 2, 2, 9, 9)
    return (w[:, :, 0] - 0.8 * w[:, :, 1]) @ v[:, :2]


@form(*((2, 4, 9, 8),) * 4, (2, 4, 9, 16), (1,), fused=2)
def difference_of_results(q1: Any, k1: Any, q2: Any, k2: Any, v: Any, factor: Any) -> Any:
    return scored(q1, k1).softmax(-1) @ v - factor * (scored(q2, k2).softmax(-1) @ v)


@form(*QKV, fused=0, reasons=("no-product",))
def weights_and_values_by_elements(q: Any, k: Any, v: Any) -> Any:
    return (scored(q, k).softmax(-1).unsqueeze(-1) * v.unsqueeze(2)).sum(3)


@form(*QKV, fused=0, reasons=("weights",))
def two_steps_along_the_same_weights(q: Any, k: Any, v: Any) -> Any:
    w = scored(q, k).softmax(-1)
    return w @ (w @ v)


@form(*QKV, (2, 4, 9, 8), fused=0, reasons=("weights",))
def values_overwritten_between_two_products(q: Any, k: Any, v: Any, u: Any) -> Any:
    u, w = u * 1, scored(q, k).softmax(-1)
    x = w @ v
    u.mul_(2)
    return x, w @ u.relu()


@form((9, 16), (13, 16), (16, 16), fused=0, reasons=("no-product",))
def values_less_those_of_the_query(x: Any, candidates: Any, w: Any) -> Any:
    """TabR: candidates are weighed by their distance, and what they add depends on the query as well."""
    weights = (2 * x @ candidates.mT - candidates.square().sum(-1)).softmax(-1)
    return (weights.unsqueeze(1) @ ((x[:, None] - candidates) @ w)).squeeze(1)


def by_groups(q: Any, k: Any, v: Any) -> Any:
    """Keys and values have a dim of groups that is summed over."""
    weights = einsum("bthd,bsgd->bhts", q * 0.25, k).softmax(-1)
    return einsum("bhts,bsgd->bthd", weights, v)


@form((2, 9, 4, 8), (2, 13, 1, 8), (2, 13, 1, 8))
def one_group_of_keys_by_einsum(q: Any, k: Any, v: Any) -> Any:
    """YOCO with one key head."""
    return by_groups(q, k, v)


@form((2, 9, 4, 8), (2, 13, 2, 8), (2, 13, 2, 8), fused=0, reasons=("no-product",))
def two_groups_of_keys_by_einsum(q: Any, k: Any, v: Any) -> Any:
    return by_groups(q, k, v)


@form(*QKV)
def products_of_linalg(q: Any, k: Any, v: Any) -> Any:
    return torch.linalg.matmul(torch.linalg.matmul(q, k.mT).softmax(-1), v)


@form((2, 9, 16), (2, 12, 16), fused=0, reasons=("in-between",))
def weights_expanded_as_the_keys(q: Any, k: Any) -> Any:
    weights = (q[:, :1] @ k.mT)[:, 0].softmax(-1)
    return (weights.unsqueeze(-1).expand_as(k) * k).sum(1)


#: Queries and keys of (q or 1, 9 and 8, 11 and 8), values that differ where they do not.
REPEATED = {
    "weights_of_tied_rows": ((2, 1, 4, 9, 8), (2, 1, 4, 11, 8), (2, 3, 4, 11, 8)),
    "several_matrices_of_values": ((9, 8), (11, 8), (3, 5, 11, 8)),
    "values_of_more_heads": ((2, 1, 9, 8), (2, 1, 11, 8), (2, 5, 11, 6)),
    "values_of_more_samples": ((1, 5, 9, 8), (1, 5, 11, 8), (2, 5, 11, 6)),
    "values_of_more_samples_and_one_head": ((1, 5, 9, 8), (1, 5, 11, 8), (2, 1, 11, 6)),
}
for name, shapes in REPEATED.items():
    form(*shapes, name=name)(lambda q, k, v: scored(q, k).softmax(-1) @ v)


@form(*QKV[:2], (2, 3, 4, 9, 8))
def weights_of_all_rows(q: Any, k: Any, v: Any) -> Any:
    """RoseTTAFold: tied rows of an alignment have the same weights."""
    return scored(q, k).softmax(-1).unsqueeze(1) @ v


@form((2, 1, 9, 8), (2, 1, 11, 8), (2, 5, 11, 6), fused=0, reasons=("shapes",))
def repeated_weights_behind_the_values(q: Any, k: Any, v: Any) -> Any:
    return v.mT @ scored(q, k).softmax(-1).mT
