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
