"""What is done to scores and weights in other words than those of the library."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .form import QKV, form, forms, scored, some

einsum = torch.einsum


def padded(q: Any, k: Any, seen: Any, fill: float = -1e9) -> Any:
    return scored(q, k).masked_fill(~seen[:, None, None], fill).softmax(-1)


def of_weights(change: Any) -> Any:
    """An attention whose weights are changed in front of the second product."""
    return lambda q, k, v, *further: change(scored(q, k).softmax(-1), *further) @ v


def of_padded_weights(change: Any) -> Any:
    """The same of weights with padding, of which the change gets the mask as well."""
    return lambda q, k, v, seen: change(padded(q, k, seen), seen[:, None, None]) @ v


def scored_behind(q: Any, k: Any) -> Any:
    """Weights of heads that are behind the keys."""
    return einsum("bihd,bjhd->bijh", q, k).softmax(2)


forms(*QKV, of=of_weights)(
    # The values lose what the weights lose for all queries.
    weights_times_another_mask=(lambda w, seen: w * seen[:, None, None].float(), some),
    weights_times_a_gate_of_keys=(lambda w, gate: w * gate, (9,)),
    weights_normalised_again=lambda w: w / (w.sum(-1, keepdim=True) + 1e-3),
)
forms(*QKV, of=of_weights, fused=0, reasons=("mask",))(
    weights_times_a_mask_of_pairs=(lambda w, seen: w * seen.float(), lambda: torch.rand(9, 9) > 0.3),
    # What is left of the weights is another softmax, which may underflow.
    normalised_behind_another_mask=(
        lambda w, seen: (w := w * seen[:, None, None].to(w.dtype)) / (w.sum(-1, keepdim=True) + 1e-9), some,
    ),
)  # fmt: skip
forms(*QKV, of=of_weights, fused=0, reasons=("in-between",))(
    weights_times_a_gate_of_pairs=(lambda w, gate: w * gate, (9, 9)),
    gated_weights_normalised_again=(
        lambda w, gate: (w := w * torch.sigmoid(gate)) / (w.sum(-1, keepdim=True) + 1e-3), (4, 1, 1),
    ),
)  # fmt: skip
forms(*QKV, of=of_weights, fused=0, reasons=("in-between",))(
    weights_of_one_head_tiled=lambda w: w[:, :1].tile(1, 4, 1, 1),
    weights_in_pools=lambda w: F.avg_pool2d(w, 3, stride=1, padding=1)[..., :9],
    weights_between_pixels=lambda w: F.interpolate(w, (12, 9)),
    sorted_weights=lambda w: w.sort(-1)[0],
    weights_in_one_row_and_back=lambda w: w.ravel().view(2, 4, 9, 9),
)
forms(*QKV, fused=0, reasons=("linalg_vecdot, which is not read",))(
    weights_times_values_by_vecdot=lambda q, k, v: torch.linalg.vecdot(scored(q, k).softmax(-1), v[..., :1]),
)
forms(*((2, 9, 4, 8),) * 3, of=lambda move: lambda q, k, v: move(scored_behind(q, k)) @ v.movedim(2, 1))(
    # Of a DenseGATConv of PyG: heads come last.
    weights_of_heads_moved_in_front=lambda w: w.movedim(3, 1),
    weights_of_heads_moved_by_axis=lambda w: torch.moveaxis(w, (3, 1, 2), (1, 2, 3)),
)
forms(*QKV, of=of_padded_weights)(
    no_key_and_weights_times_the_mask=(
        lambda w, seen: w * seen.to(w.dtype), lambda: torch.tensor([[False] * 9, [True] * 9]),
    ),
    # The sum is 1 already, or 0.
    masked_weights_normalised_again=(
        lambda w, seen: (w := w * seen.to(w.dtype)) / w.sum(-1, keepdim=True).clamp(min=1e-9),
        lambda: torch.tensor([[False] * 9, [True] * 5 + [False] * 4]),
    ),
    masked_weights_normalised_by_function=(
        lambda w, seen: torch.nn.functional.normalize(w.masked_fill(~seen, 0.0), p=1, dim=-1), some,
    ),
)  # fmt: skip


@form(*QKV, lambda: torch.rand(2, 1, 9, 9) > 0.4)
def weights_times_a_boolean_mask(q: Any, k: Any, v: Any, seen: Any) -> Any:
    return (torch.where(seen, scored(q, k), torch.tensor(-3e4)).softmax(-1) * seen) @ v


@form(*QKV, fused=0, reasons=("mean is between",))
def weights_averaged_over_heads(q: Any, k: Any, v: Any) -> Any:
    return scored(q, k).softmax(-1).mean(1) @ v[:, 0]


@form((2, 16), (2, 9, 16), (8, 16), fused=0, reasons=("weights are returned",))
def state_of_a_decoder_and_its_weights(state: Any, memory: Any, w: Any) -> Any:
    """The view in front of the product is no other reader."""
    weights = (torch.tanh(memory @ w.mT) @ (w @ state[0])).softmax(1)
    return torch.bmm(weights.unsqueeze(1), memory).squeeze(1), weights


@form((2, 16), (2, 9, 16), (2, 9), (8, 16), fused=0, reasons=("also used by add",))
def state_of_a_decoder_and_the_sum_of_weights(state: Any, memory: Any, seen: Any, w: Any) -> Any:
    """Tacotron adds up the weights of all steps."""
    weights = (torch.tanh(memory @ w.mT) @ (w @ state[0])).softmax(1)
    context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
    return context, (seen + weights).tanh()


@form(*QKV, fused=0, reasons=("also used by .mT",))
def inverse_of_the_weights(q: Any, k: Any, v: Any) -> Any:
    """Nystrom attention: the first step of an iterative inverse."""
    weights = scored(q, k).softmax(-1)
    return weights @ (weights.mT / weights.abs().sum(-2).amax() @ v)


@form((2, 9, 16), (2, 9, 16), (16, 2), fused=0, reasons=("weights are taken apart",))
def selective_kernel(x: Any, y: Any, w: Any) -> Any:
    """SKNet: two weights of one softmax, not those of two softmaxes."""
    weights = torch.softmax(x @ w, -1)
    return weights[..., :1] * x + weights[..., 1:] * y


@form((2, 9, 16), (3, 16), (3, 2, 9, 16), fused=0, reasons=("weights are taken apart",))
def experts_in_a_loop(x: Any, w: Any, experts: Any) -> Any:
    gates = (x @ w.mT).softmax(-1)
    return sum(gates[..., k, None] * expert for k, expert in enumerate(experts))


@form((2, 9, 16), (3, 16), (3, 2, 9, 16), fused=0, reasons=("weights are taken apart",))
def experts_of_parts(x: Any, w: Any, experts: Any) -> Any:
    gates = (x @ w.mT).softmax(-1).chunk(3, -1)
    return sum(gate * expert for gate, expert in zip(gates, experts, strict=True))


@form((2, 9, 16), (3, 16), (3, 2, 9, 16), fused=0, reasons=("weights are taken apart",))
def experts_of_unbound_weights(x: Any, w: Any, experts: Any) -> Any:
    gates = (x @ w.mT).softmax(-1).unbind(-1)
    return sum(gate[..., None] * expert for gate, expert in zip(gates, experts, strict=True))


@form(*QKV, (4, 4), (4,), fused=0, reasons=("linear is between",))
def heads_mixed_by_linears(q: Any, k: Any, v: Any, w: Any, b: Any) -> Any:
    """Talking heads, before and after the softmax."""

    def mixed(x: Any) -> Any:
        return torch.nn.functional.linear(x.permute(0, 2, 3, 1), w, b).permute(0, 3, 1, 2)

    return mixed(mixed(scored(q, k)).softmax(-1)) @ v


@form((2, 9, 8), (2, 9, 8), (2, 4, 9, 8))
def one_map_for_all_heads(q: Any, k: Any, v: Any) -> Any:
    return (q @ k.mT).softmax(-1)[:, None] @ v


@form(*QKV, some, fused=0, reasons=("empty-rows",))
def infinite_fill_times_the_mask(q: Any, k: Any, v: Any, seen: Any) -> Any:
    return (padded(q, k, seen, -float("inf")) * seen[:, None, None].to(q.dtype)) @ v


@form(*QKV, some)
def one_of_two_masks_again(q: Any, k: Any, v: Any, seen: Any) -> Any:
    scores = scored(q, k).masked_fill(torch.ones(9, 9).triu(1).bool(), -1e9)
    hidden = ~seen[:, None, None]
    return scores.masked_fill(hidden, -1e9).softmax(-1).masked_fill(hidden, 0.0) @ v


@form((4, 2, 5, 8), (4, 2, 9, 8), (4, 2, 9, 8), lambda: torch.tensor([[False] * 9, [True] * 5 + [False] * 4]))
def weights_assigned_zero(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """Routing: heads first, hidden scores and then their weights are assigned, the latter in a copy."""
    scores = 8**-0.5 * torch.matmul(q, k.transpose(2, 3))
    hidden = ~seen.view(1, 2, 1, 9).expand_as(scores)
    scores[hidden] = float("-inf")
    weights = torch.softmax(scores, dim=-1).clone()
    weights[hidden] = 0
    return torch.matmul(weights, v)


@form(*QKV, lambda: torch.rand(2, 4, 9, 9) > 0.3, fused=0, reasons=("mask",))
def other_weights_assigned_zero(q: Any, k: Any, v: Any, hidden: Any) -> Any:
    weights = scored(q, k).softmax(dim=-1).clone()
    weights[hidden] = 0
    return weights @ v


@form(*QKV, some, fused=0, reasons=("weights",))
def weights_assigned_another_number(q: Any, k: Any, v: Any, seen: Any) -> Any:
    weights = padded(q, k, seen).clone()
    weights[~seen[:, None, None].expand_as(weights)] = 0.1
    return weights @ v


@form(*QKV, some, fused=0, reasons=("empty-rows",))
def masked_weights_over_a_sum_that_may_be_zero(q: Any, k: Any, v: Any, seen: Any) -> Any:
    w = padded(q, k, seen) * seen[:, None, None].to(q.dtype)
    return (w / w.sum(-1, keepdim=True)) @ v


@form(*QKV, fused=0, reasons=("weights",))
def weights_normalised_over_the_queries(q: Any, k: Any, v: Any) -> Any:
    w = scored(q, k).softmax(-1)
    return (w / (w.sum(-2, keepdim=True) + 1e-9)) @ v


@form(*QKV, lambda: torch.tensor([[2] * 9, [1] * 5 + [0] * 4]))
def weights_times_counts(q: Any, k: Any, v: Any, count: Any) -> Any:
    return (padded(q, k, count > 0) * count[:, None, None].float()) @ v


@form(*QKV, (4, 1, 1), lambda: torch.tensor([[True] * 9, [True] * 5 + [False] * 4]))
def weights_times_gates_of_heads_and_queries(q: Any, k: Any, v: Any, gate: Any, seen: Any) -> Any:
    """What is the same for all keys goes behind the product; so does a scale that comes after the softmax."""
    weights = padded(q, k, seen) / 8**0.5 * torch.sigmoid(gate)
    return (weights * seen[:, None, :, None]) @ v


@form((2, 9, 4, 8), (2, 9, 4, 8), (2, 9, 4, 8), (4,))
def gates_of_heads_that_come_last(q: Any, k: Any, v: Any, gate: Any) -> Any:
    weights = einsum("bqhd,bkhd->bqkh", q, k).softmax(2) * gate
    return einsum("bqkh,bkhd->bqhd", weights, v)


@form(*QKV, fused=0, reasons=("sub is between",))
def weights_less_their_mean(q: Any, k: Any, v: Any) -> Any:
    w = scored(q, k).softmax(-1)
    equal = torch.ones_like(w) / 9
    return (equal + 1.5 * (w - equal)) @ v


@form(*QKV, fused=0, reasons=("no-product", "differential attention"))
def weights_mixed_with_distances(q: Any, k: Any, v: Any) -> Any:
    """The softmax of distances has no product."""
    at = torch.arange(9.0)
    near = (-(at[:, None] - at).abs()[None] * torch.ones(4, 1, 1)).softmax(-1)
    return (0.7 * scored(q, k).softmax(-1) + 0.3 * near) @ v


@form((2, 16, 9), (9, 4), fused=0, reasons=("sums over another dim",))
def adjacency_of_learned_nodes(x: Any, nodes: Any) -> Any:
    """Rows of a softmax of a function of products, over which the product sums: no keys."""
    return einsum("bcv,vw->bcw", x, (nodes @ nodes.T).relu().softmax(1))


@form((4, 9, 8), (4, 9, 8), (4, 9, 8), fused=0, reasons=("in-between",))
def weights_replaced_by_those_of_another_prompt(q: Any, k: Any, v: Any) -> Any:
    """Parts of the batch are edited and concatenated."""
    kept, edited = (q @ k.mT).softmax(-1).chunk(2)
    return torch.cat([kept, 0.8 * kept + 0.2 * edited]) @ v


@form((4, 9, 8), (4, 9, 8), (4, 9, 8), fused=0, reasons=("in-between",))
def weights_skewed_by_padding(q: Any, k: Any, v: Any) -> Any:
    w = torch.nn.functional.pad((q @ k.mT).softmax(-1), (0, 9)).flatten(1)[:, :-9].view(4, 9, 17)
    return w[..., :9] @ v


@form((2, 4, 5, 9), (2, 4, 5, 9), fused=0, reasons=("mixed-dtypes",))
def weights_of_frequencies(q: Any, k: Any) -> Any:
    """Moduli of complex products, and complex values."""
    q, k = torch.fft.rfft(q), torch.fft.rfft(k)
    w = (q.mT @ k).abs().softmax(-1)
    return torch.fft.irfft(torch.complex(w, torch.zeros_like(w)) @ k.mT)


@form((2, 9, 16), (2, 13, 16), fused=0, reasons=("sums over another dim",))
def matching_normalised_in_turn(q: Any, k: Any) -> Any:
    """Sinkhorn: rows, then columns; the product sums over the dim that is not the last to be normalised."""
    s = einsum("bnd,bmd->bnm", q, k)
    s = s - s.logsumexp(2, keepdim=True)
    return (s - s.logsumexp(1, keepdim=True)).exp() @ k


@form((2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 9, 8), (2, 9))
def weights_times_a_repeated_mask_of_queries(q: Any, k: Any, v: Any, tokens: Any) -> Any:
    """Ones where a token of the query is not padding, repeated for all keys."""
    seen = tokens.abs().sign()[:, None, :, None].repeat(1, 4, 1, 9)
    return ((q @ k.mT).softmax(-1) * seen) @ v


@form((2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 9, 8), (2, 9), fused=0, reasons=("in-between",))
def weights_times_a_repeated_mask_that_is_changed(q: Any, k: Any, v: Any, tokens: Any) -> Any:
    seen = tokens.abs().sign()[:, None, :, None].repeat(1, 4, 1, 9)
    seen[..., 0] = 0.5
    return ((q @ k.mT).softmax(-1) * seen) @ v


def distances() -> Any:
    steps = torch.arange(9)
    return (steps - steps[:, None]).clamp(-4, 4) + 4


#: q, k and v of one head, keys and values of each distance, and the distances.
BY_DISTANCE = ((2, 9, 8), (2, 9, 8), (2, 9, 8), (9, 8), (9, 8), distances)


def weights_by_distance(q: Any, k: Any, table: Any, at: Any) -> Any:
    return (q @ k.mT + torch.einsum("btd,tsd->bts", q, table[at])).softmax(-1)


@form(*BY_DISTANCE)
def keys_and_values_by_distance(q: Any, k: Any, v: Any, of_keys: Any, of_values: Any, at: Any) -> Any:
    """DynamiCrafter: the values of the second product are gathered behind the first one, by a cast index."""
    weights = weights_by_distance(q, k, of_keys, at)
    out = torch.einsum("bts,bsd->btd", weights, v)
    return out + torch.einsum("bts,tsd->btd", weights, of_values[(at + 0).long()])


@form(*BY_DISTANCE, fused=0, reasons=("another value before",))
def values_by_another_distance(q: Any, k: Any, v: Any, of_keys: Any, of_values: Any, at: Any) -> Any:
    """The index is overwritten behind the first product."""
    steps = at + 0
    weights = weights_by_distance(q, k, of_keys, at)
    out = torch.einsum("bts,bsd->btd", weights, v)
    steps.fill_(3)
    return out + torch.einsum("bts,tsd->btd", weights, of_values[steps.long()])


@form((2, 3), (2, 9, 8), fused=0, reasons=("no-product",))
def weights_repeated_for_each_element(scores: Any, v: Any) -> Any:
    """Autoformer: each weight is repeated to the size of what it multiplies, in a loop."""
    weights, out = (scores + 1).softmax(-1), torch.zeros_like(v)
    for shift in range(3):
        out = out + v.roll(-shift, 1) * weights[:, shift].unsqueeze(1).unsqueeze(1).repeat(1, 9, 8)
    return out


@form(*QKV, some)
def weights_times_the_mask(q: Any, k: Any, v: Any, seen: Any) -> Any:
    return (seen[:, None, None].float() * padded(q, k, seen)) @ v


@form((2, 8, 9), (8, 3), fused=0, reasons=("an input of the graph",))
def weights_of_a_convolution(x: Any, w: Any) -> Any:
    """fairseq's LightweightConv: each channel is convolved with a softmax of its own."""
    return F.conv1d(x, w.softmax(-1).unsqueeze(1), padding=1, groups=8)


@form((2, 9, 8), (3, 8), fused=0, reasons=("copy is between the softmax and the product",))
def weights_in_a_band(x: Any, w: Any) -> Any:
    """fairseq's DynamicConv: the softmax of each row is copied into the band of a matrix."""
    band = x.new_zeros(2, 9, 11)
    band.as_strided((2, 9, 3), (99, 12, 1)).copy_(F.linear(x, w).softmax(-1))
    return band.narrow(2, 1, 9) @ x


def ones() -> torch.Tensor:
    return torch.ones(9, 9).tril()


@form(*QKV)
def weights_times_ones_where_a_key_is_seen(q: Any, k: Any, v: Any) -> Any:
    seen = ones()
    return (scored(q, k).masked_fill(seen == 0, -1e9).softmax(-1) * seen) @ v


@form(*QKV)
def weights_times_ones_of_each_head(q: Any, k: Any, v: Any) -> Any:
    seen = (torch.eye(9) == 0).float()[None]
    return (scored(q, k).masked_fill(seen == 0, -1e9).softmax(-1) * seen) @ v


forms(*QKV, fused=0, reasons=("in-between",))(
    weights_times_twos=lambda q, k, v: (
        scored(q, k).masked_fill(ones() == 0, -1e9).softmax(-1) * (2 * ones())
    ) @ v,
    weights_times_a_learned_mask=(
        lambda q, k, v, m: (scored(q, k).masked_fill(m == 0, -1e9).softmax(-1) * m) @ v, ones,
    ),
)  # fmt: skip


@form(*QKV, fused=0, reasons=("mask",))
def normalised_behind_a_causal_mask(q: Any, k: Any, v: Any) -> Any:
    """No row is empty, and the scores are not masked."""
    weights = scored(q, k).softmax(-1).masked_fill(ones() == 0, 0)
    return (weights / weights.sum(-1, keepdim=True)) @ v


@form(*QKV, fused=0, reasons=("from the result of the first one",))
def weights_on_their_own_result(q: Any, k: Any, v: Any) -> Any:
    """Zipformer's second attention shares the weights of the first."""
    weights = scored(q, k).softmax(-1)
    first = weights @ v
    return first + weights @ first.tanh()


@form((2, 9, 4, 8), (2, 9, 4, 8), (2, 9, 4, 8), (2, 9, 9, 32), (32, 32), fused=0, reasons=("elementwise",))
def weights_of_each_channel(q: Any, k: Any, v: Any, edges: Any, w: Any) -> Any:
    """DiGress's, whose scores are products of numbers and features of edges."""
    scores = q.unsqueeze(2) * k.unsqueeze(1) + F.linear(edges, w).view(2, 9, 9, 4, 8)
    return (torch.softmax(scores, 2) * v.unsqueeze(1)).sum(2)
