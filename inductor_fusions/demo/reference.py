"""Errors against a float64 run of an eager copy of the model, and their budget."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..checking.budget import worst
from .models import Case

#: An error may be this many times that of stock, plus eps of the dtype.
ERROR_FACTOR = 1.5
#: The float64 run of a causal model takes this many tokens: they do not depend on later ones.
REFERENCE_TOKENS = 1024


class _KeepFloat64(TorchFunctionMode):
    """Leaves out the casts of a float64 tensor to float32 that models spell out, in norms and softmax."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {k: torch.float64 if a is torch.float32 else a for k, a in kwargs.items()}
        return func(*args, **kwargs)


@dataclass
class Reference:
    """Output of the first sample, and each parameter's gradient, in float64."""

    output: torch.Tensor
    gradients: dict[str, torch.Tensor]

    def errors(self, output: torch.Tensor, gradients: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Relative error of an output, and in training of the worst gradient."""
        samples, tokens = self.output.shape[:2]
        found = {"output": relative_error(output[:samples, :tokens], self.output)}
        if self.gradients:
            each = [relative_error(gradients[name], g) for name, g in self.gradients.items() if g.any()]
            found["gradient"] = worst(each)
        return found


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """||value - reference|| / ||reference||, in float64."""
    return float((value.double() - reference).norm() / reference.norm())


def within_budget(fused: Mapping[str, float], stock: Mapping[str, float], dtype: torch.dtype) -> bool:
    """Whether each error is at most 1.5 times that of stock, plus eps of the dtype."""
    eps = torch.finfo(dtype).eps
    return all(fused[name] <= ERROR_FACTOR * stock[name] + eps for name in stock)


def run_reference(case: Case, model: torch.nn.Module, inputs: dict[str, Any], cotangent: Any) -> Reference:
    """Run an eager copy of the model in float64 on the first sample."""
    twin: Any = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    for parameter in twin.parameters():  # buffers stay: rotary frequencies are float32 by definition
        parameter.data = parameter.data.double()
    tokens = reference_tokens(case)
    inputs = {k: x[:1, :tokens] if isinstance(x, torch.Tensor) else x for k, x in inputs.items()}
    with torch.set_grad_enabled(case.train), _KeepFloat64():
        output = twin(**inputs).last_hidden_state
    if case.train:
        output.backward(cotangent[:1, :tokens].double())
    gradients = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    return Reference(output.detach(), gradients)


def reference_tokens(case: Case) -> int:
    """How many tokens of the first sample the float64 run takes."""
    return min(case.seq, REFERENCE_TOKENS) if case.causal else case.seq
