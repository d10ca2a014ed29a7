"""Gates with functions that no kernel has, and products that are no gates."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .linear_form import form, forms

TWO = ((2, 48, 64), (128, 64), (128, 64))


def _gate(function: Any) -> Any:
    return lambda x, w, v: function(F.linear(x, w)) * F.linear(x, v)


forms(*TWO, of=_gate, reasons=("unsupported function",) * 2)(
    one_less_a_sigmoid=lambda gate: 1 - torch.sigmoid(gate),
    sine_gate=torch.sin,
    absolute_gate=torch.abs,
    root_of_a_relu=lambda gate: torch.sqrt(F.relu(gate) + 1e-3),
    arc_tangent_gate=torch.atan,
    softsign_gate=F.softsign,
    hard_gate=lambda gate: gate > 0,
    log_sigmoid_gate=F.logsigmoid,
    tanhshrink_gate=F.tanhshrink,
)
forms(*TWO, of=_gate, reasons=("the norm of a row",) * 2)(
    normalised_gate=lambda gate: F.normalize(gate, dim=-1),
    gate_of_a_layer_norm=lambda gate: F.layer_norm(gate, (128,)),
    gate_of_an_rms_norm=lambda gate: F.rms_norm(gate, (128,)),
    gate_of_a_group_norm=lambda gate: F.group_norm(gate.flatten(0, 1), 4).view_as(gate),
)


@form((2, 48, 64), (384, 64), left=(1, 1), reasons=("unsupported function",) * 2)
def gates_of_a_recurrence(x: Any, w: Any) -> Any:
    """SRU and QRNN, before the recurrence."""
    candidate, forget, output = F.linear(x, w).chunk(3, dim=-1)
    return ((1 - forget.sigmoid()) * candidate).cumsum(1), output.sigmoid()


def _turned(x: Any, cos: Any, sin: Any) -> Any:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


@form(*TWO, "frozen 48x1x32", "frozen 48x1x32", silent="gated_mlp")
def products_of_q_and_k_behind_norms(x: Any, w: Any, v: Any, cos: Any, sin: Any) -> Any:
    q, k = (F.rms_norm(F.linear(x, each).view(2, 48, 4, 32), (32,)) for each in (w, v))
    return (_turned(q, cos, sin) * _turned(k, cos, sin)).sum(-1)


@form(*TWO, silent="gated_mlp")
def cosine_of_two_linears(x: Any, w: Any, v: Any) -> Any:
    return F.cosine_similarity(F.linear(x, w), F.linear(x, v), dim=-1)


@form((2, 48, 64), (128, 64), (128,), left=(1, 1), silent="gated_mlp")
def norm_of_a_linear(x: Any, w: Any, gain: Any) -> Any:
    """It multiplies a linear by a function of the same one."""
    return F.rms_norm(F.linear(x, w), (128,), gain)


def _heads(x: Any, w: Any) -> Any:
    return F.linear(x, w).view(2, 48, 4, 32).transpose(1, 2)


def _scores(x: Any, w: Any) -> Any:
    q = _heads(x, w)
    return q @ q.mT


def _beside_a_gate(up: Any) -> Any:
    return lambda x, w, v, *more: F.silu(F.linear(x, w)) * up(x, v, *more)


def _norm_of_retention(x: Any, v: Any) -> Any:
    """RetNet, GLA, HSTU: the norm of an attention, which may have no softmax."""
    return F.rms_norm(_scores(x, v) @ _heads(x, v), (32,)).transpose(1, 2).reshape(2, 48, 128)


def _norm_of_mixed_tokens(x: Any, v: Any, weights: Any) -> Any:
    return F.layer_norm(torch.bmm(weights, F.linear(x, v)), (128,))


_BEHIND: dict[str, Any] = {"reasons": ("behind an attention",) * 2}
forms(*TWO, of=_beside_a_gate, left=(1, 0), **_BEHIND)(norm_of_retention=_norm_of_retention)
forms(*TWO, (2, 48, 48), of=_beside_a_gate, **_BEHIND)(norm_of_mixed_tokens=_norm_of_mixed_tokens)
forms((2, 48, 64), (64, 64), (64, 64), (2, 48, 48), left=(0, 0), **_BEHIND)(
    mixed_tokens_and_a_residual=lambda x, w, v, p: (
        F.silu(F.linear(x, w)) * (x + torch.bmm(p, F.linear(x, v)))
    ),
)


@form(*TWO, **_BEHIND)
def gate_of_an_attention(x: Any, w: Any, v: Any) -> Any:
    """Of Qwen3-Next, on an SDPA call."""
    q = _heads(x, v)
    attended = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(2, 48, 128)
    return attended * torch.sigmoid(F.linear(x, w))


@form(*TWO[:2], (2, 48, 128), left=(0, 0), silent="gated_mlp")
def norm_of_an_input_times_a_gate(x: Any, w: Any, y: Any) -> Any:
    return F.silu(F.linear(x, w)) * F.rms_norm(y, (128,))


@form((2, 48, 64), (256, 64), left=(1, 1), reasons=("put together", "put together"))
def mamba_out(x: Any, w: Any) -> Any:
    g, i, c = F.linear(x, w).split((128, 96, 32), dim=-1)
    return F.gelu(g) * torch.cat((i, torch.tanh(c)), dim=-1)


forms((2, 48, 64), (128, 64), (96, 64), reasons=("put together",) * 2)(
    gate_of_two_linears=(
        lambda x, w, u, v: F.gelu(F.linear(x, w)) * torch.cat((F.linear(x, u), F.linear(x, v)), -1), (32, 64),
    ),
    gate_of_a_linear_and_an_input=(
        lambda x, w, u, y: F.gelu(F.linear(x, w)) * torch.cat((F.linear(x, u), y), -1), (2, 48, 32),
    ),
)  # fmt: skip


@form((2, 48, 64), (128, 64), (2, 48, 96), (2, 48, 32), left=(0, 0), silent="gated_mlp")
def gate_of_two_inputs(x: Any, w: Any, y: Any, z: Any) -> Any:
    """No linear is in what it multiplies."""
    return F.gelu(F.linear(x, w)) * torch.cat((y, z), dim=-1)
