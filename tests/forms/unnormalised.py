"""Weights that multiply elements instead of values, and products of pairs that no softmax normalises."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from .form import form, forms

QKV = ((2, 4, 9, 8),) * 3


@form((3, 5, 7, 8), (3, 5, 8), (3, 5, 7, 8), fused=0, reasons=("no-product",))
def views_of_a_ray(k: Any, q: Any, v: Any) -> Any:
    """Each channel has weights of its own, which are made of differences."""
    return (torch.softmax(k - q[:, :, None], dim=-2) * v).sum(dim=-2)


@form((6, 5, 2, 8), (8, 8), fused=0, reasons=("multiplied elementwise",))
def pooled_pairs_of_positions(x: Any, w: Any) -> Any:
    """Genomes: as many weights as elements."""
    return (x * torch.einsum("bnpd,de->bnpe", x, w).softmax(dim=-2)).sum(dim=-2)


@form((4, 9, 8), (8, 8), fused=0, reasons=("weights",))
def statistics_of_speakers(x: Any, w: Any) -> Any:
    """Mean and deviation under the same weights; no difference of two attentions."""
    weights = torch.softmax(torch.tanh(x) @ w, dim=1)
    mean = (weights * x).sum(dim=1)
    return torch.cat([mean, ((weights * x**2).sum(dim=1) - mean**2).clamp(min=1e-9).sqrt()], 1)


@form((2, 8, 6, 6), fused=0, reasons=("no-product",))
def expected_disparity(cost: Any) -> Any:
    return (cost.softmax(1) * torch.arange(8.0).view(1, 8, 1, 1).to(cost.dtype).expand_as(cost)).sum(1)


@form((4, 9), (4, 9), fused=0, reasons=())
def entropy_of_a_router(logits: Any, other: Any) -> Any:
    """A loss is no pooling."""
    p = logits.softmax(-1)
    return -(p * torch.log(p + 1e-6)).sum(-1) + (p * F.log_softmax(other, -1)).sum(-1)


#: Nothing is said of these.
forms(fused=0, reasons=())(
    # The choice of one weight is no pooling.
    gate_of_the_chosen_expert=(
        lambda logits: (logits.softmax(-1) * F.one_hot(logits.argmax(-1), 9)).sum(-1), (4, 9),
    ),
    # Linears of each sample are no pairs.
    experts=(lambda x, w, v: torch.bmm(F.relu(torch.bmm(x, w)), v), (3, 4, 8), (3, 8, 16), (3, 16, 8)),
    experts_turned=(
        lambda x, w, v: torch.bmm(F.relu(torch.bmm(x, w.mT)), v.mT), (3, 4, 8), (3, 16, 8), (3, 8, 16),
    ),
    experts_by_einsum=(
        lambda x, w, v: torch.einsum("ech,eoh->eco", F.silu(torch.einsum("eci,ehi->ech", x, w)), v),
        (3, 4, 8), (3, 16, 8), (3, 8, 16),
    ),
    classes_in_front_of_a_convolution=(lambda x, w: F.conv2d(x.softmax(1), w), (2, 8, 6, 6), (3, 8, 3, 3)),
    # A sum over fewer elements than its result has in a row is none over tokens.
    three_matrices=(lambda a, b, c: a @ (b.mT @ c), (2, 4, 3, 8), (2, 4, 3, 8), (2, 4, 3, 8)),
    # A linear of each token, not of pairs.
    linear_of_concatenated_tokens=(
        lambda x, y, w: F.relu(F.linear(torch.cat((x, y), -1), w)) / 9 @ y, (2, 9, 8), (2, 9, 8), (9, 16),
    ),
    # No step follows.
    one_outer_product=(
        lambda q, k, s: (s + k.unsqueeze(-1) * q.unsqueeze(-2)).mT @ k.unsqueeze(-1),
        (2, 4, 8), (2, 4, 8), (2, 4, 8, 8),
    ),
    three_tensors_and_no_keys=(
        lambda x, w, z: torch.einsum("nld,dm,nl->nlm", x, w, z), (2, 9, 8), (8, 8), (2, 9),
    ),
)  # fmt: skip


@form(*QKV, fused=0, reasons=("sigmoid, and no softmax",))
def sigmoid_of_masked_scores(q: Any, k: Any, v: Any) -> Any:
    scores = q @ k.mT * 8**-0.5 - math.log(9)
    return torch.sigmoid(scores).masked_fill(torch.ones(9, 9).triu(1).bool(), 0) @ v


@form((2, 9, 8), (2, 9, 8), fused=0, reasons=("pow, and no softmax",))
def gated_attention_unit(q: Any, v: Any) -> Any:
    return (F.relu(torch.bmm(q, q.transpose(1, 2)) / 9) ** 2).tril() @ v


@form(*QKV, fused=0, reasons=("mul, and no softmax",))
def retention(q: Any, k: Any, v: Any) -> Any:
    """Decays, and a sum of absolute values that takes no gradient."""
    distance = torch.arange(9)[:, None] - torch.arange(9)
    scores = (q @ k.mT) * (0.9**distance).tril().to(q.dtype)
    return (scores / scores.detach().abs().sum(-1, keepdim=True).clamp(min=1)) @ v


@form(*((2, 9, 4, 8),) * 3, fused=0, reasons=("sigmoid, and no softmax",))
def sigmoid_of_permuted_keys(q: Any, k: Any, v: Any) -> Any:
    """One permutation moves the heads and transposes the keys."""
    q, k, v = q.permute(0, 2, 1, 3), k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)
    return torch.sigmoid(q @ k) @ v


@form((2, 9, 8), (2, 9, 8), (9, 9), (2, 9, 8), fused=0, reasons=("matmul is between the product",))
def sigmoid_in_front_of_a_linear(q: Any, k: Any, w: Any, v: Any) -> Any:
    """ASTGCN: the matrix is none of values, and a softmax over the queries follows."""
    return torch.einsum("bij,bjd->bid", (w @ torch.sigmoid(q @ k.mT)).softmax(1), v)


@form((2, 9, 4, 8), (2, 9, 4, 8), fused=0, reasons=("silu, and no softmax",))
def recommender_by_silu(q: Any, v: Any) -> Any:
    weights = F.silu(torch.einsum("bihd,bjhd->bhij", q, q)) / 9
    return torch.einsum("bhij,bjhd->bihd", weights, v)


@form(*QKV, fused=0, reasons=("exp, and no softmax",))
def sticks_that_are_broken(q: Any, k: Any, v: Any) -> Any:
    scores, seen = q @ k.mT * 8**-0.5, torch.ones(9, 9).tril(-1).bool()
    rest = F.logsigmoid(-scores).masked_fill(~seen, 0)
    after = rest.flip(-1).cumsum(-1).flip(-1) - rest
    return (F.logsigmoid(scores).masked_fill(~seen, -1e5) + after).exp() @ v


@form(*QKV, fused=0, reasons=("linear attention",))
def linear_attention(q: Any, k: Any, v: Any) -> Any:
    """Functions of queries and keys, and none of their products."""
    return (F.elu(q) + 1) @ ((F.elu(k) + 1).mT @ v)


@form((2, 4, 8, 13), (2, 4, 13, 8), (2, 4, 8, 13), fused=0, reasons=("linear attention",))
def linear_attention_features_first(q: Any, k: Any, v: Any) -> Any:
    """Sana."""
    out = F.pad(v, (0, 0, 0, 1), value=1.0) @ F.relu(k) @ F.relu(q)
    return out[:, :, :-1] / (out[:, :, -1:] + 1e-15)


@form((2, 4, 8, 13), (2, 4, 13, 8), (2, 4, 8, 13), fused=0, reasons=("linear attention",))
def linear_attention_features_first_by_elu(q: Any, k: Any, v: Any) -> Any:
    q, k = F.elu(q) + 1, F.elu(k).add(1)
    return torch.einsum("bhde,bhen->bhdn", torch.einsum("bhdn,bhne->bhde", v, k), q)


@form(*((2, 4, 8, 13),) * 3, fused=0, reasons=("linear attention",))
def linear_attention_transposed_behind_the_function(q: Any, k: Any, v: Any) -> Any:
    """EfficientViT."""
    out = F.pad(v, (0, 0, 0, 1), value=1.0) @ F.relu(k).transpose(-1, -2) @ F.relu(q)
    return out[:, :, :-1] / (out[:, :, -1:] + 1e-15)


@form(*((2, 4, 8, 13),) * 3, fused=0, reasons=("linear attention",))
def linear_attention_all_features_first(q: Any, k: Any, v: Any) -> Any:
    states = torch.einsum("bhen,bhdn->bhed", v, k.relu())
    return torch.einsum("bhed,bhdn->bhen", states, q.relu())


@form(*((2, 4, 8, 13),) * 3, fused=0, reasons=())
def matrices_of_no_linear_attention(q: Any, k: Any, v: Any) -> Any:
    return v @ F.relu(k).mT @ q


@form((2, 4, 5, 13), (2, 4, 13, 3), (2, 4, 3, 13), fused=0, reasons=())
def low_rank_of_each_head(x: Any, a: Any, b: Any) -> Any:
    return F.relu(x) @ a @ b


@form((2, 4, 8, 13), (2, 4, 13, 8), (), fused=0, reasons=("linear attention",))
def linear_attention_behind_a_product_times_a_number(v: Any, k: Any, scale: Any) -> Any:
    scaled = torch.einsum("bhde,->bhde", v @ F.relu(k), scale)
    return F.relu(k) @ (F.relu(k).mT @ k) + scaled.sum()


@form((2, 4, 8, 13), (2, 4, 13, 8), (2, 4, 8, 10), fused=0, reasons=())
def product_of_three_with_other_tokens(v: Any, k: Any, q: Any) -> Any:
    return v @ F.relu(k) @ F.relu(q)


@form((2, 4, 9, 9), (2, 4, 9, 8), (2, 4, 8, 9), fused=0, reasons=())
def square_matrix_of_tokens(mix: Any, k: Any, q: Any) -> Any:
    return mix @ F.relu(k) @ F.relu(q)


@form(*QKV, fused=0, reasons=("add is between the exponentials",))
def two_chunks_of_keys(q: Any, k: Any, v: Any) -> Any:
    """As online softmax is taught: one maximum and one sum of both."""
    scores = [q @ keys.mT for keys in (k[:, :, :5], k[:, :, 5:])]
    largest = torch.maximum(*(s.amax(-1, keepdim=True) for s in scores))
    first, second = ((s - largest).exp() for s in scores)
    total = first.sum(-1, keepdim=True) + second.sum(-1, keepdim=True)
    return (first @ v[:, :, :5] + second @ v[:, :, 5:]) / total


@form((10, 8), (8, 3), (10, 3, 8), fused=0, reasons=("topk chooses among the scores",))
def router_of_the_largest(x: Any, w: Any, experts: Any) -> Any:
    scores, chosen = (x @ w).topk(2, dim=-1)
    gates = torch.zeros(10, 3, dtype=x.dtype).scatter(1, chosen, scores.softmax(-1))
    return torch.einsum("te,teo->to", gates, experts)


@form((2, 48, 10), fused=0, reasons=("no-product",))
def boxes_of_a_detector(x: Any) -> Any:
    """The expected distance to each side, by a convolution of size 1."""
    distances = torch.arange(12.0, dtype=x.dtype).view(1, 12, 1, 1)
    return F.conv2d(x.view(2, 4, 12, 10).transpose(2, 1).softmax(1), distances).view(2, 4, 10)


@form((3, 2, 9, 8), (3,), fused=0, reasons=("only one dim",))
def mixed_layers(states: Any, w: Any) -> Any:
    """Speech features: one weight for each layer."""
    return (w.softmax(0).view(-1, 1, 1, 1) * states).sum(0)


@form((3, 2, 9, 8), (3,), (1,), fused=0, reasons=("only one dim",))
def mixed_layers_in_a_loop(states: Any, w: Any, gamma: Any) -> Any:
    """ELMo: single weights, each with a layer of its own."""
    return gamma * sum(each * state for each, state in zip(w.softmax(0).split(1), states, strict=True))


@form((2, 16, 6, 6), (2, 2, 8), fused=0, reasons=("no-product",))
def split_attention(x: Any, w: Any) -> Any:
    """ResNeSt: weights of two halves of the channels."""
    weights = w.softmax(1).flatten(1)[..., None, None].split(8, dim=1)
    return sum(each * half for each, half in zip(weights, x.split(8, dim=1), strict=True))


@form((2, 8, 6, 6), (2, 2, 8), fused=0, reasons=())
def whole_weights_in_a_sum(x: Any, w: Any) -> Any:
    """The weights are not taken apart: there is nothing like values."""
    weights = w.softmax(1).mean(1)[..., None, None]
    return x + weights


@form((10, 8), (4, 8), (4, 10, 8), fused=0, reasons=("topk chooses among the weights",))
def router_in_a_loop(x: Any, w: Any, experts: Any) -> Any:
    gates, chosen = F.linear(x, w).softmax(-1).topk(2, -1)
    gates = gates / gates.sum(-1, keepdim=True)
    return sum((gates * (chosen == k)).sum(-1, keepdim=True) * experts[k] for k in range(4))


@form((10, 8), (4, 8), (4, 8, 8), fused=0, reasons=("max chooses among the weights",))
def router_of_one_expert(x: Any, w: Any, experts: Any) -> Any:
    """Switch transformers, of all experts."""
    gate, chosen = F.linear(x, w).softmax(-1).max(-1)
    mask = F.one_hot(chosen, 4).to(x.dtype) * gate[:, None]
    return torch.einsum("te,teo->to", mask, torch.einsum("ti,eio->teo", x, experts))


def edges() -> torch.Tensor:
    return torch.randint(0, 10, (2, 40), generator=torch.Generator().manual_seed(0))


# Nothing is divided by them.


@form((10, 4, 8), (10, 4, 8), (10, 4, 8), edges, fused=0, reasons=("index_add sums the exponentials",))
def attention_of_a_graph(q: Any, k: Any, v: Any, edges: Any) -> Any:
    """The softmax is over the edges that end at a node."""
    source, target = edges
    scores, index = (q[target] * k[source]).sum(-1) / 8**0.5, target[:, None].expand(-1, 4)
    largest = torch.zeros_like(q[..., 0]).scatter_reduce(0, index, scores.detach(), "amax")
    weights = torch.exp(scores - largest[target])
    total = torch.zeros_like(q[..., 0]).index_add(0, target, weights) + 1e-16
    weights = (weights / total[target])[..., None]
    return torch.zeros_like(v).index_add(0, target, v[source] * weights)


@form((5, 8), (8, 12), (8, 12), (144, 8), fused=0, reasons=("topk chooses among the scores",))
def keys_of_two_halves(q: Any, first: Any, second: Any, values: Any) -> Any:
    """A memory of products of keys, whose values are a bag of embeddings."""
    (s1, i1), (s2, i2) = ((q @ k).topk(4, -1) for k in (first, second))
    scores, chosen = (s1[:, :, None] + s2[:, None]).flatten(1).topk(4, -1)
    rows = (i1[:, :, None] * 12 + i2[:, None]).flatten(1).gather(1, chosen)
    return F.embedding_bag(rows, values, per_sample_weights=scores.softmax(-1), mode="sum")


#: Pixels whose channels are in front.
IMAGES = ((2, 4, 20),) * 3


@form(*IMAGES, fused=0, reasons=("a scale, and no softmax",))
def pixels_by_their_number(q: Any, k: Any, v: Any) -> Any:
    """The dot product of non-local networks."""
    pairs = torch.matmul(q.permute(0, 2, 1), k)
    return torch.matmul(pairs / pairs.size(-1), v.permute(0, 2, 1)).permute(0, 2, 1)


@form(*QKV, fused=0, reasons=("a scale, and no softmax",))
def tokens_by_their_number(q: Any, k: Any, v: Any) -> Any:
    return torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k) / 9, v)


@form(*((2, 4, 20, 8),) * 3, fused=0, reasons=("linear attention",))
def keys_and_values_by_their_number(q: Any, k: Any, v: Any) -> Any:
    """A linear attention: that product is none of pairs of tokens."""
    return (k.mT @ v / 20).mT @ q.mT


@form(
    (2, 9, 2, 8),
    (2, 9, 2, 8),
    (2, 9, 2, 8),
    (2, 9, 9, 2, 8),
    fused=0,
    reasons=("with dims in another order",),
)
def edges_of_all_pairs(q: Any, k: Any, v: Any, edges: Any) -> Any:
    """Graph transformers: the sum over all keys stands in front of the heads."""
    w = ((q.unsqueeze(2) * k.unsqueeze(1)) * edges).sum(-1).clamp(-5, 5).exp()
    return torch.einsum("bijh,bjhd->bihd", w, v) / w.sum(2).unsqueeze(-1)


@form(*QKV, fused=0, reasons=("linear attention",))
def galerkin_attention(q: Any, k: Any, v: Any) -> Any:
    """Norms in the place of a softmax."""
    k, v = F.layer_norm(k, (8,)), F.layer_norm(v, (8,))
    return q @ (torch.einsum("bhnd,bhne->bhde", k, v) / 9)


@form((2, 9, 8), (2, 9, 8), (1, 16), fused=0, reasons=("concatenated features",))
def pairs_by_concatenation(x: Any, y: Any, w: Any) -> Any:
    """A non-local block."""
    pairs = torch.cat((x[:, :, None].expand(-1, -1, 9, -1), y[:, None].expand(-1, 9, -1, -1)), -1)
    return F.relu(F.linear(pairs, w).squeeze(-1)) / 9 @ y


def delta_rule(q: Any, k: Any, v: Any, read: Any, outer: Any) -> Any:
    """A state of keys by values, to which each step adds what it lacks."""
    state, out = torch.zeros(2, 4, 8, 8), []
    for t in range(3):
        state = state * 0.9 + outer(k[:, :, t], v[:, :, t] - read(k[:, :, t], state))
        out.append(read(q[:, :, t], state))
    return torch.stack(out, 2)


@form(*QKV, fused=0, reasons=("a recurrence",))
def recurrence_by_elements(q: Any, k: Any, v: Any) -> Any:
    return delta_rule(
        q, k, v, lambda x, s: (s * x.unsqueeze(-1)).sum(-2), lambda x, y: x.unsqueeze(-1) * y.unsqueeze(-2)
    )


@form(*QKV, fused=0, reasons=("a recurrence",))
def recurrence_by_einsum(q: Any, k: Any, v: Any) -> Any:
    read, outer = "bhk,bhkv->bhv", "bhk,bhv->bhkv"
    return delta_rule(q, k, v, lambda x, s: torch.einsum(read, x, s), lambda x, y: torch.einsum(outer, x, y))


@form(*QKV, (4, 8), fused=0, reasons=("a recurrence",))
def recurrence_with_a_bonus(q: Any, k: Any, v: Any, u: Any) -> Any:
    """RWKV: a step reads its own pair times a vector."""
    state, out = torch.zeros(2, 4, 8, 8), []
    for t in range(3):
        pair = k[:, :, t].unsqueeze(-1) @ v[:, :, t].unsqueeze(-2)
        out.append(q[:, :, t].unsqueeze(-2) @ (state + u[None, :, :, None] * pair))
        state = state * 0.9 + pair
    return torch.cat(out, 2)


@form((2, 9, 4, 8), (2, 9, 4, 8), (2, 9, 4, 8), fused=0, reasons=("linear attention",))
def normaliser_in_the_same_einsum(q: Any, k: Any, v: Any) -> Any:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    z = 1 / torch.einsum("nlhd,nhd->nlh", q, k.sum(1))
    return torch.einsum("nlhd,nhmd,nlh->nlhm", q, torch.einsum("nshd,nshm->nhmd", k, v), z)


@form((40,), edges, fused=0, reasons=())
def sums_of_exponentials(x: Any, edges: Any) -> Any:
    """Nothing is divided by them."""
    return x.new_zeros(10).index_add(0, edges[0], x.exp()).log()


@form((2, 9, 4, 8), (2, 9, 4, 8), (2, 4, 9, 9), (2, 9, 4, 16), fused=0, reasons=("one einsum",))
def diagonal_blocks_of_mamba(c: Any, b: Any, decay: Any, x: Any) -> Any:
    """Mamba-2's minimal form: scores, decays and values in one product."""
    return torch.einsum("blhn,bshn,bhls,bshp->blhp", c, b, decay, x)


@form((2, 9, 4, 8), (2, 9, 4, 8), (2, 9, 4, 16), fused=0, reasons=("one einsum",))
def linear_attention_at_once(q: Any, k: Any, v: Any) -> Any:
    return torch.einsum("blhn,bshn,bshp->blhp", q, k, v)


@form((4, 8), (4, 8), (8, 8, 5), fused=0, reasons=("outer-product",))
def bilinear(x: Any, y: Any, w: Any) -> Any:
    return torch.einsum("bi,bj,ijk->bk", x, y, w)


@form((4, 9, 8), (4, 7, 8), (4, 5, 8), fused=0, reasons=())
def three_vectors_of_one_rank(x: Any, y: Any, z: Any) -> Any:
    """A canonical polyadic decomposition sums over one dim of all three."""
    return torch.einsum("bir,bjr,bkr->bijk", x, y, z)


@form(*QKV, fused=0, reasons=("gumbel_softmax draws",))
def sampled_weights(q: Any, k: Any, v: Any) -> Any:
    """Assigns tokens to groups, as GroupViT."""
    return F.gumbel_softmax(q @ k.mT, dim=-1) @ v
