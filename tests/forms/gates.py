"""Gates and cross layers as models write them: one linear or two, and what is done to them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .linear_form import form, forms

X = (2, 48, 64)
PACKED = (X, "frozen 256x64")
TWO = (X, "frozen 128x64", "frozen 128x64")


@form(*PACKED, left=(0, 1), reasons=("", "used-elsewhere"))
def phi_chunk(x: Any, w: Any) -> Any:
    gate, up = F.linear(x, w).chunk(2, dim=-1)
    return up * F.silu(gate)


@form(*PACKED, left=(0, 1), reasons=("", "used-elsewhere"))
def glm_split(x: Any, w: Any) -> Any:
    gate, up = torch.split(F.linear(x, w), 128, dim=-1)
    return F.silu(gate) * up


@form(*PACKED, left=(0, 1), reasons=("", "used-elsewhere"))
def geglu_slices(x: Any, w: Any) -> Any:
    h = F.linear(x, w)
    return h[..., :128] * F.gelu(h[..., 128:])


@form(*PACKED, left=(0, 1), reasons=("", "used-elsewhere"))
def interleaved(x: Any, w: Any) -> Any:
    h = F.linear(x, w)
    return F.silu(h[..., ::2]) * h[..., 1::2]


@form(X, "frozen 2x64x128", left=(0, 1), reasons=("", "used-elsewhere"))
def parts_in_front(x: Any, w: Any) -> Any:
    """One weight of both matrices, as Gemma has it in JAX."""
    gate, up = torch.einsum("bnd,cdf->cbnf", x, w)
    return F.gelu(gate, approximate="tanh") * up


@form(X, "frozen 64x2x128", left=(0, 1), reasons=("", "used-elsewhere"))
def parts_in_the_middle(x: Any, w: Any) -> Any:
    h = torch.einsum("bnd,dcf->bncf", x, w)
    return F.silu(h[..., 0, :]) * h[..., 1, :]


@form(X, "frozen 2x64x128", left=(1, 1), reasons=("another order", "another order"))
def parts_in_front_turned(x: Any, w: Any) -> Any:
    """Columns are in front of the rows."""
    gate, up = torch.einsum("bnd,cdf->cbfn", x, w)
    return F.gelu(gate, approximate="tanh") * up


@form(X, "frozen 2x64x4x32", left=(1, 1), reasons=("shapes", "shapes"))
def parts_of_heads(x: Any, w: Any) -> Any:
    """A row of a part is that of one head, not all columns of the part."""
    gate, up = torch.einsum("bnd,cdhf->cbnhf", x, w)
    return F.silu(gate) * up


@form(X, "frozen 2x64x4x32", left=(1, 1), reasons=("parts of heads", "parts of heads"))
def columns_of_heads(x: Any, w: Any) -> Any:
    """The first columns of each head, which are not the first columns of the product."""
    h = torch.einsum("bnd,cdhf->cbnhf", x, w)[0]
    return F.silu(h[..., :16]) * h[..., 16:]


@form(*PACKED, left=(1, 1), reasons=("some rows", "some rows"))
def first_row_times_all(x: Any, w: Any) -> Any:
    """As the scores of a class token: a row of the gate multiplies each row of the other part."""
    q, k = F.linear(x, w).chunk(2, dim=-1)
    return q[:, :1] * k


@form(*PACKED, left=(1, 1), reasons=("is returned", "is returned"))
def returned_gate(x: Any, w: Any) -> Any:
    gate, up = F.linear(x, w).chunk(2, dim=-1)
    return F.silu(gate) * up, gate


@form(*PACKED, left=(1, 1), reasons=("by cumsum", "used-elsewhere"))
def gate_that_is_summed_up(x: Any, w: Any) -> Any:
    gate, up = F.linear(x, w).chunk(2, dim=-1)
    return F.silu(gate) * up + gate.cumsum(1)


@form(*PACKED, left=(1, 1), reasons=("clamp_min", "clamp_min"))
def gpt_oss_clamped(x: Any, w: Any) -> Any:
    """Both are clamped, and the sigmoid has a factor."""
    h = F.linear(x, w)
    gate, up = h[..., ::2].clamp(max=7.0), h[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


@form(*PACKED, left=(1, 1), reasons=("clamp_max", "clamp_max"))
def clamped_behind_the_gate(x: Any, w: Any) -> Any:
    gate, up = F.linear(x, w).chunk(2, dim=-1)
    return F.silu(gate).clamp(max=7.0) * up.clamp(-7.0, 7.0)


@form((4, 48, 64), (4, 64, 256), (4, 256), reasons=("parts of one batch", "parts of one batch"))
def packed_experts(x: Any, w: Any, b: Any) -> Any:
    """Experts beside each other, as Llama 4 and GPT-OSS have them."""
    gate, up = (torch.bmm(x, w) + b[:, None]).chunk(2, dim=-1)
    return up * F.silu(gate)


@form((16, 32), (3, 64, 32), (3, 64, 32), reasons=("limit", "limit"))
def experts_of_each_token(x: Any, w: Any, v: Any) -> Any:
    """As Mixtral gathers them for a few tokens: the matrices stand on the left in both products."""
    chosen = (x[:, :2] > 0).long() + 1
    gate = F.silu(torch.einsum("ti,taoi->tao", x, w[chosen]))
    return gate * torch.einsum("ti,taoi->tao", x, v[chosen])


@form((4, 48, 64), (4, 48, 64), (4, 64, 256), reasons=("one operand in common", "one operand in common"))
def batches_that_share_a_weight(x: Any, y: Any, w: Any) -> Any:
    return F.silu(torch.bmm(x, w)) * torch.bmm(y, w)


@form((2, 48, 16), (2, 16, 16), silent="gated_mlp")
def weights_of_two_attentions(q: Any, k: Any) -> Any:
    """Each softmax is a site of attention."""
    scores = q @ k.mT
    return scores[..., :8].softmax(-1) * scores[..., 8:].softmax(-1)


@form((2, 48, 16), (2, 16, 16), reasons=("parts of one batch", "parts of one batch"))
def scores_times_a_softmax(q: Any, k: Any) -> Any:
    scores = q @ k.mT
    return scores[..., :8].softmax(-1) * scores[..., 8:].tanh()


@form((4, 48, 64), (4, 64, 256), (4, 256, 64), reasons=("batch of products", "batch of products"))
def experts_without_a_gate(x: Any, w: Any, v: Any) -> Any:
    return torch.bmm(F.gelu(torch.bmm(x, w)), v)


@form((48, 64), "frozen 4x64x32", "frozen 4x64x32", left=(2, 2), reasons=("another order", "another order"))
def all_experts_of_each_token(x: Any, w: Any, v: Any) -> Any:
    """A linear whose columns an einsum moves in front of the rows."""
    return F.silu(torch.einsum("td,edf->etf", x, w)) * torch.einsum("td,edf->etf", x, v)


@form((4, 48, 64), (4, 256, 64), (4, 64, 256), reasons=("batch of products", "batch of products"))
def experts_without_a_gate_by_einsum(x: Any, w: Any, v: Any) -> Any:
    return torch.einsum("ech,eoh->eco", F.relu(torch.einsum("eci,ehi->ech", x, w)), v)


@form(X, "frozen 128x64", "frozen 128x64", reasons=("", "used-elsewhere"))
def quick_gelu(x: Any, w: Any, v: Any) -> Any:
    """CLIP's, in a gate."""
    gate = F.linear(x, w)
    return gate * torch.sigmoid(1.702 * gate) * F.linear(x, v)


@form(X, "frozen 128x64", "frozen 128x64", reasons=("pow, relu", "pow, relu"))
def cubed_relu(x: Any, w: Any, v: Any) -> Any:
    return F.relu(F.linear(x, w)) ** 3 * F.linear(x, v)


forms(*TWO, reasons=("", "used-elsewhere"))(
    squared_relu=lambda x, w, v: F.relu(F.linear(x, w)).square() * F.linear(x, v),
    twice_the_gate=lambda x, w, v: 2 * torch.sigmoid(F.linear(x, w)) * F.linear(x, v),
    scaled_columns_of_the_linear=(lambda x, w, v, s: F.silu(F.linear(x, w)) * (F.linear(x, v) * s), (128,)),
    bias_of_the_gate_by_itself=(lambda x, w, v, b: F.silu(x @ w.t() + b) * (x @ v.t()), "frozen 128"),
    # No activation at all.
    bilinear=lambda x, w, v: F.linear(x, w) * F.linear(x, v),
    # The gated linear units of time series.
    glu_of_two_beside_each_other=lambda x, w, v: F.glu(
        torch.cat((F.linear(x, w), F.linear(x, v)), dim=-1), dim=-1
    ),
)


@form(X, "frozen 64x128", "frozen 64x128")
def gate_by_einsum(x: Any, w: Any, v: Any) -> Any:
    """As models that come from JAX write their linears."""
    return F.gelu(torch.einsum("bnd,df->bnf", x, w)) * torch.einsum("bnd,df->bnf", x, v)


@form(X, "frozen 64x128")
def activation_by_einsum(x: Any, w: Any) -> Any:
    return F.gelu(torch.einsum("bnd,df->bnf", x, w))


@form(X, "frozen 64x128", left=(1, 1))
def einsum_that_turns_its_result(x: Any, w: Any) -> Any:
    """Large dims change places: that is no reshape."""
    return F.gelu(torch.einsum("bnd,df->bfn", x, w))


@form((96, 64), (96, 64), (64, 64), (64,), left=(0, 0))
def dcn_cross(x0: Any, x: Any, w: Any, b: Any) -> Any:
    """A cross layer: times the first input, plus the last one."""
    return x0 * F.linear(x, w, b) + x


@form((96, 64), (96, 64), (64, 64), (64,), left=(0, 0))
def torchrec_cross(x0: Any, x: Any, w: Any, b: Any) -> Any:
    """Its bias is a parameter by itself."""
    return x0 * (F.linear(x, w) + b) + x


@form((96, 64), (64, 64), (64, 1), left=(0, 0))
def cross_of_columns(x: Any, w: Any, b: Any) -> Any:
    """torchrec's CrossNet: each sample is a column."""
    x0 = x.unsqueeze(2)
    return (x0 * (torch.matmul(w, x0) + b) + x0).squeeze(2)


@form((96, 64), (96, 64), (64, 64), (96, 1), left=(1, 1))
def cross_without_the_last_input(x0: Any, x: Any, w: Any, b: Any) -> Any:
    return x0 * (F.linear(x, w) + b) + b


@form((2, 12, 12, 64), (64, 64), (64,), (64, 64), lambda: (torch.rand(2, 12, 12, 1) > 0.3).bfloat16(),
      reasons=("", "used-elsewhere"))  # fmt: skip
def masked_gate_of_triangles(x: Any, w: Any, b: Any, v: Any, mask: Any) -> Any:
    """OpenFold and AlphaFold3: a mask is multiplied in between."""
    return mask * torch.sigmoid(F.linear(x, w, b)) * F.linear(x, v)


@form((96, 64), (96, 64), (64, 64), (64,), (64, 64), reasons=("", "used-elsewhere"))
def gated_cross(x0: Any, x: Any, w: Any, b: Any, v: Any) -> Any:
    """GDCN."""
    return x0 * F.linear(x, w, b) * torch.sigmoid(F.linear(x, v)) + x


@form(X, "frozen 128x64", "frozen 128x64", (48, 1), reasons=("other tensors", "other tensors"))
def mask_inside_the_gate(x: Any, w: Any, v: Any, mask: Any) -> Any:
    """The linear is multiplied before the activation: that is no factor of both."""
    return F.silu(F.linear(x, w) * mask) * F.linear(x, v)


@form((2, 1, 48, 64), "frozen 128x64", "frozen 128x64", (2, 3, 48, 128), left=(0, 0))
def factor_that_is_larger(x: Any, w: Any, v: Any, other: Any) -> Any:
    return (F.silu(F.linear(x, w)) * other) * F.linear(x, v)


@form(*PACKED, "frozen 256", left=(0, 1), reasons=("", "used-elsewhere"))
def packed_bias_by_itself(x: Any, w: Any, b: Any) -> Any:
    """Megatron's bias_swiglu."""
    gate, up = (F.linear(x, w) + b).chunk(2, dim=-1)
    return F.silu(gate) * up


@form(*PACKED, (48, 1), left=(1, 1))
def packed_with_a_number_of_each_row(x: Any, w: Any, c: Any) -> Any:
    gate, up = (F.linear(x, w) + c).chunk(2, dim=-1)
    return F.silu(gate) * up


@form(X, (2, 1, 64), "frozen 256x64", left=(0, 1), reasons=("", "used-elsewhere"))
def gate_of_a_modulated_input(x: Any, c: Any, w: Any) -> Any:
    """The input is in memory for the linear alone, and the parts of its result are no copies."""
    gate, up = F.linear(x * (1 + c), w).chunk(2, dim=-1)
    return up * F.gelu(gate)


@form(X, X, "frozen 128x64", "frozen 128x64", left=(2, 2))
def products_of_two_inputs(x: Any, y: Any, w: Any, v: Any) -> Any:
    """Linears of different inputs, of which nothing is said."""
    return F.linear(x, w) * F.linear(y, v)


@form((48, 33), (48, 25), (4, 33, 64), (4, 25, 64), left=(2, 2), reasons=("low-rank fusion",) * 2)
def low_rank_fusion(x: Any, y: Any, w: Any, v: Any) -> Any:
    """LMF: a linear of each rank and modality."""
    return ((x @ w) * (y @ v)).sum(0)


@form(X, X, X, *["frozen 128x64"] * 3, left=(3, 3), reasons=("low-rank fusion", "low-rank fusion"))
def products_of_three_inputs(x: Any, y: Any, z: Any, u: Any, v: Any, w: Any) -> Any:
    return F.linear(x, u) * F.linear(y, v) * F.linear(z, w)


@form(*PACKED, left=(1, 1), reasons=("(silu; silu)", "(silu; silu)"))
def both_activated(x: Any, w: Any) -> Any:
    """Mamba's gate, without what is in between."""
    left, right = F.linear(x, w).chunk(2, dim=-1)
    return F.silu(left) * F.silu(right)


@form(*PACKED, left=(1, 1), reasons=("layout", "layout"))
def gates_of_heads(x: Any, w: Any) -> Any:
    left, gate = F.linear(x, w).view(2, 48, 4, 64).chunk(2, dim=-1)
    return left * F.silu(gate)


@form(X, "frozen 128x64", "frozen 128x64", reasons=("where", "where"))
def leaky(x: Any, w: Any, v: Any) -> Any:
    return F.leaky_relu(F.linear(x, w)) * F.linear(x, v)


@form((64, 96), (128, 64), (128, 64), left=(0, 0), reasons=("", "used-elsewhere"))
def gate_of_a_copy(x: Any, w: Any, v: Any) -> Any:
    """The same matrix in another layout."""
    return torch.sigmoid(F.linear(x.t().contiguous(), w)) * F.linear(x.t(), v)


@form((64, 96), (128, 64), (128, 64), left=(1, 1), reasons=("different inputs", "different inputs"))
def gate_of_copies_of_two_halves(x: Any, w: Any, v: Any) -> Any:
    return torch.sigmoid(F.linear(x[:, :48].t().contiguous(), w)) * F.linear(x[:, 48:].t().contiguous(), v)


@form((48, 64), (48, 32), "frozen 256x64", "frozen 256x32", reasons=("sum of linears", "sum of linears"))
def gates_of_a_cell(x: Any, h: Any, w: Any, v: Any) -> Any:
    """An LSTM's: parts of the sum of a linear of the input and one of the state."""
    i, _, n, _ = (F.linear(x, w) + F.linear(h, v)).chunk(4, dim=1)
    return torch.sigmoid(i) * torch.tanh(n)


@form((48, 64), (48, 32), "frozen 64x64", "frozen 64x32", left=(0, 0))
def sum_of_linears_times_a_state(x: Any, h: Any, w: Any, v: Any) -> Any:
    """A state is no linear: nothing is said."""
    return torch.sigmoid(F.linear(x, w) + F.linear(h, v)) * h.repeat(1, 2)


@form(X, (2, 64), "frozen 128x64", "frozen 64x64", left=(1, 1))
def gate_of_all_tokens(x: Any, c: Any, w: Any, o: Any) -> Any:
    """A transformer of diffusion: one gate for all tokens of a sample, of which nothing is said."""
    scale, gate = F.linear(F.silu(c), w).unsqueeze(1).chunk(2, dim=-1)
    return gate * F.linear(x * (1 + scale), o)


@form(X, "frozen 128x64", "frozen 128x64", left=(0, 0), reasons=("pow", "pow"))
def square_times_a_linear(x: Any, w: Any, v: Any) -> Any:
    return F.linear(x, w) ** 2 * F.linear(x, v)


@form(X, "frozen 128x64", "frozen 128x64", left=(0, 0), reasons=("add", "add"))
def one_more_than_a_linear(x: Any, w: Any, v: Any) -> Any:
    return (1 + F.linear(x, w)) * F.linear(x, v)


@form(X, (2, 48, 32), "frozen 64x64", "frozen 64x32", reasons=("different inputs", "different inputs"))
def functions_of_two_inputs(x: Any, y: Any, w: Any, v: Any) -> Any:
    """GMU, MUTAN."""
    return torch.tanh(F.linear(x, w)) * torch.sigmoid(F.linear(y, v))


@form(*TWO, reasons=("", "used-elsewhere"))
def two_beside_each_other(x: Any, w: Any, v: Any) -> Any:
    gate, up = torch.cat((F.linear(x, w), F.linear(x, v)), dim=-1).chunk(2, dim=-1)
    return F.silu(gate) * up


@form(*TWO, reasons=("", "used-elsewhere"))
def two_in_a_stack(x: Any, w: Any, v: Any) -> Any:
    gate, up = torch.stack((F.linear(x, w), F.linear(x, v)), dim=-2).unbind(-2)
    return F.silu(gate) * up


@form(*TWO, reasons=("unsupported function", "unsupported function"))
def two_beside_each_other_with_another_function(x: Any, w: Any, v: Any) -> Any:
    h = torch.cat((F.linear(x, w), F.linear(x, v)), dim=-1)
    return F.mish(h[..., :128]) * h[..., 128:]


@form(*TWO, silent="gated_mlp")
def columns_of_both(x: Any, w: Any, v: Any) -> Any:
    """One column of the second linear is in the gate."""
    h = torch.cat((F.linear(x, w), F.linear(x, v)), dim=-1)
    return F.silu(h[..., 1:129]) * h[..., :128]


@form(*TWO, silent="gated_mlp")
def glu_of_tokens(x: Any, w: Any, v: Any) -> Any:
    return F.glu(torch.cat((F.linear(x, w), F.linear(x, v)), dim=-1), dim=1)


@form(*TWO, reasons=("used-elsewhere", "used-elsewhere"))
def two_beside_each_other_and_returned(x: Any, w: Any, v: Any) -> Any:
    h = torch.cat((F.linear(x, w), F.linear(x, v)), dim=-1)
    return F.silu(h[..., :128]) * h[..., 128:], h


@form((2, 48, 32), (2, 48, 32), "frozen 128x32", "frozen 128x32", left=(2, 2), reasons=("inputs", "inputs"))
def glu_of_two_inputs(x: Any, y: Any, w: Any, v: Any) -> Any:
    return F.glu(torch.cat((F.linear(x, w), F.linear(y, v)), dim=-1), dim=-1)


@form(*TWO, reasons=("", "used-elsewhere"))
def divided_as_a_sigmoid_divides(x: Any, w: Any, v: Any) -> Any:
    return F.linear(x, v) / (1 + torch.exp(-F.linear(x, w)))
