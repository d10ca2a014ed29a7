"""Softmaxes in other words: exponentials and their sums, merged rows, one more in the sum."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .form import QKV, form, forms, scored

einsum = torch.einsum


def exponentials(q: Any, k: Any, dim: int = -1) -> Any:
    """Of scores less the largest along a dim: -1 is that of the keys."""
    s = scored(q, k)
    return torch.exp(s - torch.max(s, dim=dim, keepdim=True)[0])


def of_exponentials(divided: Any) -> Any:
    """Of the exponentials of scores less the largest of a row, and of the values."""
    return lambda q, k, v: divided(exponentials(q, k), v)


forms(*QKV, of=of_exponentials)(
    softmax_by_exponentials=lambda e, v: torch.matmul(e / torch.sum(e, dim=-1, keepdim=True), v),
    exponentials_divided_behind_the_product=lambda e, v: (e @ v) / e.sum(-1, keepdim=True),
    product_times_the_reciprocal_of_the_sums=lambda e, v: (1 / e.sum(-1))[..., None] * (e @ v),
    exponentials_times_the_reciprocal_of_their_sum=lambda e, v: (
        (e * e.sum(-1, keepdim=True).reciprocal()) @ v
    ),
    exponentials_over_hardly_more_than_their_sum=lambda e, v: (
        (e / (1e-8 + e.sum(-1, keepdim=True)).clamp(min=1e-6)) @ v
    ),
)
forms(*QKV, of=of_exponentials, fused=0, reasons=("in-between",))(
    exponentials_over_more_than_their_sum=lambda e, v: (e / (e.sum(-1, keepdim=True) + 0.1)) @ v,
    product_over_more_than_the_sum=lambda e, v: (e @ v) / (e.sum(-1, keepdim=True) + 0.1),
    product_divided_in_part=lambda e, v: (out := e @ v) / e.sum(-1, keepdim=True) + out,
    product_times_more_than_the_reciprocal=lambda e, v: (e @ v) * (1 / e.sum(-1, keepdim=True) + 1e-8),
    product_over_the_reciprocal=lambda e, v: (e @ v) / (1 / e.sum(-1, keepdim=True)),
    nan_to_num_of_exponentials=lambda e, v: (torch.nan_to_num(e) @ v) / e.sum(-1, keepdim=True),
)


@form((2, 9, 4, 8), (2, 13, 4, 8), (2, 13, 4, 8), lambda: torch.rand(2, 13) > 0.4)
def exponentials_of_masked_scores(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """Padding, a maximum that takes no gradient, a sum without its dim, dims of einsum in another order."""
    s = einsum("bihd,bjhd->bhij", q, k) * 8**-0.5
    s = s.masked_fill(~seen[:, None, None], -1e9)
    e = (s - s.detach().amax(-1, keepdim=True)).exp()
    return einsum("bhij,bjhd->bihd", e / e.sum(-1).unsqueeze(-1), v)


@form(*QKV)
def exponential_of_log_softmax(q: Any, k: Any, v: Any) -> Any:
    return torch.log_softmax(scored(q, k), dim=-1).exp() @ v


@form(*QKV)
def exponential_beside_logsumexp(q: Any, k: Any, v: Any) -> Any:
    s = scored(q, k)
    return torch.exp(s - torch.logsumexp(s, dim=-1, keepdim=True)) @ v


@form(*QKV, fused=0, reasons=("range",))
def exponentials_as_they_are(q: Any, k: Any, v: Any) -> Any:
    e = scored(q, k).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@form(*QKV, fused=0, reasons=("range",))
def exponentials_less_the_largest_of_queries(q: Any, k: Any, v: Any) -> Any:
    e = exponentials(q, k, -2)
    return (e / e.sum(-1, keepdim=True)) @ v


@form(*QKV, fused=0, reasons=("in-between",))
def exponentials_times_a_mask(q: Any, k: Any, v: Any) -> Any:
    e = exponentials(q, k) * torch.ones(9, 9).tril()
    return (e / (e.sum(-1, keepdim=True) + 1e-6)) @ v


@form(*QKV, lambda: torch.rand(2, 9) > 0.4)
def sums_beside_the_product(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """As online softmax is taught: the sum has no dim, and a small number is added to it."""
    s = einsum("bhid,bhjd->bhij", q * 8**-0.5, k).masked_fill(~seen[:, None, None], -1e9)
    e = (s - s.max(dim=-1).values.unsqueeze(-1)).exp()
    total = e.sum(dim=-1) + 1e-9
    return einsum("bhij,bhjd->bhid", e, v) / total[..., None]


@form((2, 4, 4, 8), (2, 9, 4, 8), (2, 9, 4, 8))
def sums_in_another_layout(q: Any, k: Any, v: Any) -> Any:
    """As fla: of (batch, heads, queries), with as many heads as queries."""
    e = exponentials(q.transpose(1, 2), k.transpose(1, 2))
    return einsum("bhij,bjhd->bihd", e, v) / e.sum(-1).permute(0, 2, 1)[..., None]


@form((2, 4, 4, 8), (2, 9, 4, 8), (2, 9, 4, 8), fused=0, reasons=("in-between",))
def sums_of_other_rows(q: Any, k: Any, v: Any) -> Any:
    e = exponentials(q.transpose(1, 2), k.transpose(1, 2))
    return einsum("bhij,bjhd->bihd", e, v) / e.sum(-1)[..., None]


@form((2, 4, 4, 8), (2, 9, 4, 8), (2, 9, 4, 8), fused=0, reasons=("in-between",))
def scores_with_heads_behind_queries(q: Any, k: Any, v: Any) -> Any:
    """The result has its heads in front, and the sums have not."""
    s = einsum("bihd,bjhd->bihj", q, k)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return einsum("bihj,bjhd->bhid", e, v) / e.sum(-1, keepdim=True)


@form(*QKV, (4,), fused=0, reasons=("a tensor is added to the sum",))
def sink_in_the_sum(q: Any, k: Any, v: Any, sink: Any) -> Any:
    s, z = scored(q, k), sink.view(1, -1, 1, 1)
    m = torch.maximum(s.amax(-1, keepdim=True), z)
    e = (s - m).exp()
    return (e @ v) / (e.sum(-1, keepdim=True) + torch.exp(z - m))


@form(*QKV)
def exponentials_computed_twice(q: Any, k: Any, v: Any) -> Any:
    s = scored(q, k)
    s = s - s.amax(-1, keepdim=True)
    return (s.exp() / s.exp().sum(dim=-1, keepdim=True)) @ v


@form(*QKV, fused=0, reasons=("weights",))
def exponentials_that_are_returned(q: Any, k: Any, v: Any) -> Any:
    e = exponentials(q, k)
    return (e / e.sum(-1, keepdim=True)) @ v, e


@form(*QKV, fused=0, reasons=("no-product",))
def exponentials_over_the_queries(q: Any, k: Any, v: Any) -> Any:
    e = exponentials(q, k, -2)
    return (e / e.sum(-2, keepdim=True)) @ v


@form(*QKV, fused=0, reasons=("used-elsewhere",))
def logsumexp_that_is_returned(q: Any, k: Any, v: Any) -> Any:
    """As hashing attention combines its rounds."""
    s = scored(q, k)
    total = torch.logsumexp(s, dim=-1, keepdim=True)
    return torch.exp(s - total) @ v, total


@form(*QKV, fused=0, reasons=("range",))
def exponentials_less_the_largest_of_all(q: Any, k: Any, v: Any) -> Any:
    s = scored(q, k)
    e = torch.exp(s - s.max())
    return (e / e.sum(-1, keepdim=True)) @ v


@form(*QKV, fused=0, reasons=("overwritten",))
def exponentials_in_place(q: Any, k: Any, v: Any) -> Any:
    s = scored(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp_()
    return (e / e.sum(-1, keepdim=True)) @ v


@form((8, 9, 8), (8, 9, 8), (8, 9, 8), lambda: torch.tensor([9, 5]))
def queries_merged_with_samples(q: Any, k: Any, v: Any, lengths: Any) -> Any:
    """A mask of (batch * queries, keys), as textbooks write it."""
    scores = torch.bmm(q, k.transpose(1, 2)) / 8**0.5
    shape = scores.shape
    lengths = torch.repeat_interleave(lengths, repeats=4, dim=0)
    rows, lengths = scores.reshape(-1, shape[-1]), torch.repeat_interleave(lengths, shape[1])
    seen = torch.arange(shape[-1], dtype=torch.float32)[None, :] < lengths[:, None]
    rows[~seen] = -1e6
    return torch.bmm(rows.reshape(shape).softmax(dim=-1), v)


@form((2, 9, 8), (2, 13, 8))
def softmax_of_merged_rows(q: Any, k: Any) -> Any:
    weights = torch.bmm(q, k.transpose(1, 2)).view(-1, 13).softmax(dim=1)
    return torch.bmm(weights.view(2, -1, 13), k)


@form((2, 9, 8), (2, 9, 8), fused=0, reasons=("in-between",))
def softmax_of_merged_rows_in_part(q: Any, k: Any) -> Any:
    weights = torch.bmm(q, k.transpose(1, 2)).view(-1, 9).relu().softmax(dim=1)
    return torch.bmm(weights.view(2, -1, 9), k)


@form((2, 9, 8), (2, 9, 8), fused=0, reasons=("no-product",))
def softmax_of_merged_keys(q: Any, k: Any) -> Any:
    """Each sample has one softmax over all of its pairs."""
    weights = torch.bmm(q, k.transpose(1, 2)).view(2, -1).softmax(dim=1)
    return torch.bmm(weights.view(2, 9, 9), k)


@form(*QKV)
def powers_of_two(q: Any, k: Any, v: Any) -> Any:
    scores = q @ k.mT * (8**-0.5 * 1.4426950408889634)
    powers = torch.exp2(scores - scores.amax(-1, keepdim=True))
    return (powers / powers.sum(-1, keepdim=True)) @ v


@form(*QKV)
def softmax_with_zeros_of_its_own(q: Any, k: Any, v: Any) -> Any:
    """Softmax-n: a number of zeros in the sum, shifted as the scores are; one row is fully masked."""
    s = scored(q, k).masked_fill(torch.ones(9, 9).tril(-2).bool().flip(0), -1e9)
    highest = s.max(dim=-1, keepdim=True).values
    e = torch.exp(torch.subtract(s, highest))
    zeros = torch.exp(torch.multiply(highest, -1)) * 2
    return (e / torch.add(e.sum(dim=-1, keepdim=True), zeros)) @ v


@form(*QKV)
def quiet_attention(q: Any, k: Any, v: Any) -> Any:
    """The largest is raised to the zero, and takes no gradient."""
    s = scored(q, k)
    m = s.detach().amax(-1, keepdim=True).clamp(min=0)
    e = torch.exp(s - m)
    return (e / ((-m).exp() + e.sum(-1, True))) @ v


@form(*QKV)
def zero_in_front_of_the_scores(q: Any, k: Any, v: Any) -> Any:
    """Made of a part of them."""
    s = scored(q, k)
    return torch.cat([torch.zeros_like(s[..., :1]), s], -1).softmax(-1)[..., 1:] @ v


@form(*QKV, fused=0, reasons=("not by their plain sum",))
def another_number_than_zero(q: Any, k: Any, v: Any) -> Any:
    s = scored(q, k)
    m = s.amax(-1, keepdim=True)
    e = torch.exp(s - m)
    return (e / (torch.exp(-2 * m) + e.sum(-1, keepdim=True))) @ v


@form(*QKV, fused=0, reasons=("which is not 1",))
def quiet_weights_normalised_again(q: Any, k: Any, v: Any) -> Any:
    s = scored(q, k)
    m = s.amax(-1, keepdim=True)
    e = torch.exp(s - m)
    w = e / (torch.exp(-m) + e.sum(-1, keepdim=True))
    return (w / w.sum(-1, keepdim=True)) @ v


@form(*QKV, fused=0, reasons=("are also used by",))
def returned_maximum(q: Any, k: Any, v: Any) -> Any:
    s = scored(q, k)
    m = s.amax(-1, keepdim=True)
    e = torch.exp(s - m)
    return (e / (torch.exp(-m) + e.sum(-1, keepdim=True))) @ v, m


def some_row_masked() -> torch.Tensor:
    mask = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(0)) > 0.6
    mask[..., 0] = False
    mask[1, 0, 3] = True
    return mask


def of_masked_weights(replaced: Any) -> Any:
    """Of the weights of scores with a mask of -inf, some rows of which are NaN."""
    return lambda q, k, v, hidden: replaced(scored(q, k).masked_fill(hidden, float("-inf")).softmax(-1)) @ v


forms(*QKV, some_row_masked, of=of_masked_weights)(
    nan_of_masked_rows_is_zero=torch.nan_to_num,
    nan_is_what_differs_from_itself=lambda w: w.masked_fill(w != w, 0),
    where_weights_are_nan=lambda w: torch.where(torch.isnan(w), 0.0, w),
)


@form(*QKV, some_row_masked)
def nan_by_index(q: Any, k: Any, v: Any, hidden: Any) -> Any:
    w = scored(q, k).masked_fill(hidden, float("-inf")).softmax(-1) * 1.0  # which no backward reads
    w[torch.isnan(w)] = 0.0
    return w @ v


@form(*QKV, some_row_masked, fused=0, reasons=("weights",))
def nan_is_replaced_by_one(q: Any, k: Any, v: Any, hidden: Any) -> Any:
    w = scored(q, k).masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.where(torch.isnan(w), 1.0, w) @ v


@form(*QKV, some_row_masked)
def no_row_is_nan(q: Any, k: Any, v: Any, hidden: Any) -> Any:
    return scored(q, k).masked_fill(hidden, -1e9).softmax(-1).nan_to_num(0.0) @ v


@form(*QKV, lambda: torch.tensor([[True] * 3 + [False] * 6, [False] * 9]))
def nan_of_rows_of_two_fills(q: Any, k: Any, v: Any, padding: Any) -> Any:
    """Padding on the left beside a causal mask: the first rows are fully masked."""
    scores = scored(q, k).masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
    scores = torch.where(~padding[:, None, None], scores, float("-inf"))
    return torch.nan_to_num(scores.softmax(-1)) @ v


@form(*QKV, some_row_masked, fused=0, reasons=("in-between",))
def nan_of_masked_rows_is_one(q: Any, k: Any, v: Any, hidden: Any) -> Any:
    return torch.nan_to_num(scored(q, k).masked_fill(hidden, float("-inf")).softmax(-1), nan=1.0) @ v


@form(
    *QKV, some_row_masked, lambda: torch.tensor([0.0] * 8 + [float("-inf")]), fused=0, reasons=("empty-rows",)
)
def nan_of_rows_of_two_masks(q: Any, k: Any, v: Any, hidden: Any, mask: Any) -> Any:
    return torch.nan_to_num((scored(q, k).masked_fill(hidden, float("-inf")) + mask).softmax(-1)) @ v


@form((9, 8), (9, 8), (9, 8))
def over_the_implicit_dim(q: Any, k: Any, v: Any) -> Any:
    """Without a dim: the last one of a matrix."""
    return F.softmax(q @ k.t()) @ v


@form((2, 9, 8), (2, 9, 8), (2, 9, 8), fused=0, reasons=("no-product",))
def over_the_implicit_dim_of_samples(q: Any, k: Any, v: Any) -> Any:
    """Without a dim: the first one of three, which holds the samples."""
    return F.softmax(q @ k.mT) @ v


@form(*QKV, (1, 4, 3, 8), (1, 4, 3, 8), fused=0, reasons=("no product of",))
def linear_attention_with_memories(q: Any, k: Any, v: Any, mk: Any, mv: Any) -> Any:
    """Keys that are concatenated are no scores, whatever the number of columns."""
    k, v = torch.cat([mk.expand(2, 4, 3, 8), k], dim=2), torch.cat([mv.expand(2, 4, 3, 8), v], dim=2)
    return F.elu(q) @ (k.mT.softmax(-1) @ v)


@form((2, 9, 8), (2, 9, 8), (2, 12, 8), (2, 9, 3), fused=0, reasons=("more than one column",))
def scores_beside_given_ones(q: Any, k: Any, v: Any, given: Any) -> Any:
    return torch.cat([q @ k.mT, given], dim=-1).softmax(-1) @ v


SEEN = (lambda: torch.rand(2, 1, 1, 9) > 0.4,)
forms(*QKV)(
    softmin=lambda q, k, v: F.softmin(scored(q, k), dim=-1) @ v,
    softmin_of_masked_scores=(
        lambda q, k, v, seen: F.softmin(scored(q, k).masked_fill(~seen, 1e9), dim=-1) @ v, *SEEN,
    ),
)  # fmt: skip
forms(*QKV, fused=0, reasons=("range",))(
    softmin_of_raised_scores=(
        lambda q, k, v, seen: F.softmin(scored(q, k).masked_fill(~seen, -1e9), dim=-1) @ v, *SEEN,
    ),
)  # fmt: skip
