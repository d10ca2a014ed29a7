"""Adapters on a frozen linear whose weight is quantised: torchao's, and bases that compute what those do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inductor_fusions import explain
from inductor_fusions.fusions.lora.accumulate import LORA_ACCUMULATE
from inductor_fusions.reasons import Reason
from tests.block_mm.support import Run, differentiate, run
from tests.lora.spellings import Adapted, targets
from tests.support.errors import assert_within_budget

IN, OUT, RANK = 64, 48, 16


class Quantised(nn.Module):
    """A linear with an int8 weight and a scale for each output.

    Args:
        first: the weight is dequantised first, and is then multiplied as any other; else the scales are
            applied to the product with the integers.
    """

    def __init__(self, first: bool) -> None:
        super().__init__()
        weight = torch.randn(OUT, IN) / IN**0.5
        scale = weight.abs().amax(1) / 127
        self.register_buffer("scale", scale.bfloat16())
        self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8))
        self.first = first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            return F.linear(x, self.weight.to(x.dtype) * self.scale[:, None])
        return F.linear(x, self.weight.to(x.dtype)) * self.scale


def check(model: Adapted) -> Run:
    """Outputs and gradients of the adapter, against float64 behind the base's own result; and the input's."""
    x = torch.randn(96, IN).bfloat16().requires_grad_()
    stock = model(x)
    grads = differentiate(model, (x,), [stock])
    seen = run(model, (x,), train=True)
    wide, a, b = (t.detach().double().requires_grad_() for t in (x, model.a.weight, model.b.weight))
    exact = model.base(x).detach().double() + 2.0 * F.linear(F.linear(wide, a), b)
    exact_grads = differentiate(lambda a, b: None, (a, b), [exact])
    rows = [
        (seen.outputs[0], stock, exact),
        *zip(seen.grads[1:], grads[1:], exact_grads, strict=True),
        (seen.grads[0], grads[0], grads[0]),  # through the base: what eager mode gives
    ]
    assert_within_budget(*zip(*rows, strict=True))
    assert {"lora"} <= {site.fusion for site in seen.sites}
    assert all(site.verdict == "fused" or site.reason for site in seen.sites)
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_scales_behind_the_product(dtype: torch.dtype) -> None:
    """The adapter is added to what is no product, by a kernel that adds it to what is in memory."""
    seen = check(Adapted(Quantised(first=False), IN, OUT, RANK, dtype))
    assert len(targets(seen, LORA_ACCUMULATE)) == 1 and not seen.reasons("lora")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_dequantised_first(dtype: torch.dtype) -> None:
    seen = check(Adapted(Quantised(first=True), IN, OUT, RANK, dtype))
    assert not seen.reasons("lora") and not seen.products()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(
    "name", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig"]
)
def test_torchao(name: str, dtype: torch.dtype) -> None:
    """Its weights are tensors of classes of its own, whose operations are in the graph."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantisation: Any = pytest.importorskip("torchao.quantization")
    config: Callable[[], Any] = getattr(quantisation, name)
    model = nn.Sequential(nn.Linear(IN, OUT).bfloat16())
    quantisation.quantize_(model, config())
    assert type(model[0].weight) is not nn.Parameter  # it was quantised
    seen = check(Adapted(model[0], IN, OUT, RANK, dtype))
    assert len(targets(seen, LORA_ACCUMULATE)) == 1
    # A base without a gradient leaves the adapter's alone.
    assert set(seen.codes("lora")) <= {Reason.NO_BASE.code}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes(kind: str, dtype: torch.dtype) -> None:
    """QLoRA: four bits a weight, multiplied by an operation of bitsandbytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bitsandbytes: Any = pytest.importorskip("bitsandbytes")
    base = bitsandbytes.nn.Linear4bit(IN, OUT, quant_type=kind, compute_dtype=torch.bfloat16).to("cpu")
    assert base.weight.dtype == torch.uint8  # it was quantised
    model = Adapted(base, IN, OUT, RANK, dtype)
    seen = check(model)
    assert len(targets(seen, LORA_ACCUMULATE)) == 1 and not seen.reasons("lora")
    absent = explain(model, torch.ones(4096, IN, dtype=torch.bfloat16), gpu="nvidia_h200")
    assert "lora" in {site.fusion for site in absent}
