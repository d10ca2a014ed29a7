"""A float64 run of an eager copy of the model, and how far others are from it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from ..checking.budget import Error, Values, worst
from ..checking.runs import Float64Mode
from .models import Case

#: The float64 run of a causal model takes this many tokens: they do not depend on later ones.
REFERENCE_TOKENS = 1024


def run_reference(case: Case, model: torch.nn.Module, inputs: dict[str, Any], cotangent: Any) -> Values:
    """The output of the first sample, and each parameter's gradient, of an eager copy in float64."""
    twin: Any = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    for parameter in twin.parameters():  # buffers stay: rotary frequencies are float32 by definition
        parameter.data = parameter.data.double()
    tokens = reference_tokens(case)
    inputs = {k: x[:1, :tokens] if isinstance(x, torch.Tensor) else x for k, x in inputs.items()}
    with torch.set_grad_enabled(case.train), Float64Mode():
        output = twin(**inputs).last_hidden_state
    if case.train:
        output.backward(cotangent[:1, :tokens].double())
    return Values(output.detach(), gradients_of(twin))


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The gradients of the parameters that have one."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def reference_tokens(case: Case) -> int:
    """How many tokens of the first sample the float64 run takes."""
    return min(case.seq, REFERENCE_TOKENS) if case.causal else case.seq


def shown(errors: Sequence[Error], of: str) -> dict[str, float]:
    """The relative error of the output, and in training of the worst gradient: "ours" or "stock"."""
    found = {False: "output", True: "gradient"}
    each = {name: [getattr(e, of) for e in errors if e.gradient is kind] for kind, name in found.items()}
    return {name: worst(values) for name, values in each.items() if values}
