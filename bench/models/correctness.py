"""Errors of a model's output and gradients against float64."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.common import Json, error_limit, relative_error
from bench.model_cases import Case, build, first_tokens, model_config, reference_tokens
from bench.models.variants import Variant, attempt

#: Parameters of biases, position tables and sinks, whose gradient is small beside that of the weights.
TABLES = re.compile(r"sinks|relative|rel_embeddings|logit_scale|continuous_position_bias")


def total(parts: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The norms of several tensors together, from pairs of norms."""
    difference, norm = (math.hypot(*values) for values in zip(*parts, strict=True))
    return difference, norm


@dataclass
class Reference:
    """Output and gradients of the first tokens of the first sample, in float64."""

    output: torch.Tensor
    cotangent: torch.Tensor
    gradients: dict[str, torch.Tensor]

    def compare(self, variant: Variant, full: torch.Tensor) -> Json:
        """Relative errors of a variant's output and gradients; `full` is its whole output."""
        samples, tokens = self.output.shape[:2]
        errors: Json = {"out": relative_error(full[:samples, :tokens], self.output)}
        if not self.gradients:
            return errors
        variant.model.zero_grad(set_to_none=True)
        gradient = torch.zeros_like(full)
        gradient[:samples, :tokens] = self.cotangent.to(full.dtype)
        full.backward(gradient)
        parameters = dict(variant.model.named_parameters())
        parts: dict[str, tuple[float, float]] = {}
        for name, expected in self.gradients.items():
            found = parameters[name].grad
            found = torch.zeros_like(expected) if found is None else found.double()
            parts[name] = float((found - expected).norm()), float(expected.norm())
        difference, norm = total(parts.values())
        # A key's bias has no gradient in exact arithmetic: leave out what is only rounding.
        large = {
            name: d / size for name, (d, size) in parts.items() if size > 1e-3 * norm / len(parts) ** 0.5
        }
        most = max(large, key=lambda name: (math.isnan(large[name]), large[name]))
        errors |= {"grad": difference / norm, "worst_grad": large[most], "worst_grad_of": most}
        tables = [part for name, part in parts.items() if TABLES.search(name)]
        if tables:
            difference, norm = total(tables)
            errors["tables_grad"] = difference / norm
        variant.model.zero_grad(set_to_none=True)
        return errors


def make_reference(
    case: Case, model: torch.nn.Module, inputs: dict[str, Any], device: str, quick: bool
) -> Reference:
    """Run the float64 copy, eager and uncompiled."""
    copy = build(case, "eager", device, quick, experts="eager")
    copy.load_state_dict(model.state_dict())
    copy = copy.double()
    inputs = first_tokens(inputs, reference_tokens(case, model_config(case, quick)[1]))
    inputs = {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }
    with torch.set_grad_enabled(case.train):
        output = copy(**inputs).last_hidden_state
    dtype = getattr(torch, case.dtype)
    cotangent = torch.randn(output.shape, device=device).to(dtype).double()
    gradients: dict[str, torch.Tensor] = {}
    if case.train:
        output.backward(cotangent)
        gradients = {n: p.grad for n, p in copy.named_parameters() if p.grad is not None}
    return Reference(output.detach(), cotangent, gradients)


def is_compared(case: Case, variant: str) -> bool:
    """Whether a variant computes what the model does: not where it leaves out the attentions, the adapters or
    the padding."""
    return variant not in ("without", "frozen") and not (variant == "limit" and case.padded)


def check(case: Case, variants: dict[str, Variant], reference: Reference, failed: Json, device: str) -> Json:
    """Errors of each variant.

    A variant that runs out of memory is taken out, and named in `failed`.
    """
    errors: Json = {}

    def compare(name: str, variant: Variant) -> None:
        with variant.switched():
            errors[name] = reference.compare(variant, variant.output())

    for name, variant in list(variants.items()):
        if is_compared(case, name):
            attempt(name, partial(compare, name, variant), variants, failed, device)
    return errors


def is_correct(case: Case, errors: Json) -> bool | None:
    """Whether the errors of what is fused are within budget; None if there is nothing to compare.

    The budget is that of stock in the same mode.
    """
    dtype = getattr(torch, case.dtype)
    plain = errors.get("stock") or errors.get("uncompiled") or {}
    pairs = {"fused": plain, "fused_autotuned": errors.get("autotuned") or plain}
    compared = {name: unfused for name, unfused in pairs.items() if name in errors}
    if not compared:
        return None
    return all(
        errors[name][n] <= error_limit(unfused.get(n), dtype)
        for name, unfused in compared.items()
        for n in ("out", "grad", "tables_grad")
        if n in errors[name]
    )
