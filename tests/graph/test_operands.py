"""What fusions ask of the tensors that they read."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.two_tensor import TwoTensor

from inductor_fusions import lowering, operands
from inductor_fusions.decisions import unsupported
from inductor_fusions.fusion import LeftToStock, Rejected
from inductor_fusions.fusions.attention.decode import op as decode
from inductor_fusions.fusions.attention.decode import plan
from inductor_fusions.fusions.attention.short import terms
from inductor_fusions.fusions.dot_interaction import op as dots
from inductor_fusions.fusions.dot_interaction.op import DTYPES
from inductor_fusions.fusions.linear_cross_entropy import chunks
from inductor_fusions.fusions.outer_product_linear import op as outer_product
from tests.support.processes import start


def made(device: str, dtype: torch.dtype = torch.float32, *lead: int) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(*lead, 8, 16, dtype=dtype, device=device)


@pytest.mark.parametrize("key", ["example_value", "val"])
def test_tensor(key: str) -> None:
    node = fx.Graph().placeholder("x")
    assert operands.tensor(node) is None and operands.tensor(3) is None and operands.tensor(None) is None
    node.meta[key] = (made("cpu"),)
    assert operands.tensor(node) is None
    node.meta[key] = value = made("cpu")
    assert operands.tensor(node) is value


def test_repeated_dims() -> None:
    """Not those of one element; a size without a value may be one, and no guard is asked for it."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        unknown = mode.shape_env.create_unbacked_symint()
        expanded = torch.empty(1, 4, 1, 1).expand(1, 4, unknown, 8)
    assert operands.repeated_dims(expanded) == [2, 3]
    assert operands.repeated_dims(torch.ones(1).expand(1)) == []


def test_text() -> None:
    assert operands.text(made("cpu", torch.bfloat16)) == "bfloat16[8, 16]"
    assert operands.text(None) == ""


@pytest.mark.parametrize(("device", "dtype", "reason", "hint"), [
    ("cpu", torch.bfloat16, "runs on the CPU, where the library's GEMM is used", ""),
    ("meta", torch.bfloat16, "no kernel supports devices of type meta", ""),
    ("cuda", torch.float32, "no kernel supports float32", "use bfloat16 or float16"),
])  # fmt: skip
def test_no_kernel(device: str, dtype: torch.dtype, reason: str, hint: str) -> None:
    with pytest.raises(LeftToStock) as left:
        operands.check_device(made(device, dtype), DTYPES)
    assert (left.value.reason, left.value.hint) == (reason, hint)


def test_kind() -> None:
    """Not among the values of vmap, and not a tensor around others, whichever operand it is."""
    plain = torch.ones(2, 3)
    operands.check_kind(plain, None)
    with pytest.raises(LeftToStock, match="an operand is a TwoTensor, for which"):
        operands.check_kind(plain, TwoTensor(plain, plain))
    with pytest.raises(Rejected, match=r"inside torch\.vmap"):
        torch.vmap(lambda x: operands.check_kind(plain, x))(plain)


def test_kernels() -> None:
    operands.check_device(made("cuda"))
    for dtype in DTYPES:
        operands.check_device(made("cuda", dtype), DTYPES)


@pytest.mark.parametrize(("hip", "capability", "reason"), [
    (None, (8, 0), ""),
    (None, (7, 5), "the device is older than compute capability 8.0"),
    ("6.4", (9, 4), "no kernel supports AMD GPUs"),
])  # fmt: skip
def test_devices(
    hip: str | None, capability: tuple[int, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations, guards and lowerings agree in which devices have kernels."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    x = made("cuda", torch.bfloat16)
    assert unsupported(x.device) == reason
    with pytest.raises(Rejected, match=reason) if reason else contextlib.nullcontext():
        lowering.check_templates(x.device)
    problem: Any = SimpleNamespace(q=SimpleNamespace(value=x))
    for refused in (terms.refused, plan.refused) if reason else ():
        assert refused(problem) == reason
    for has_kernel in (chunks.has_kernel, decode._has_kernel, outer_product._has_kernel):
        assert has_kernel(x) is not bool(reason)
    assert dots.has_kernel(made("cuda", torch.bfloat16, 1)) is not bool(reason)


SETTINGS = """
import torch
from inductor_fusions.operands import may_use_tf32

matmul = torch.backends.cuda.matmul
found = [may_use_tf32()]
torch.set_float32_matmul_precision("high")
found.append(may_use_tf32())
torch.set_float32_matmul_precision("highest")
found.append(may_use_tf32())
matmul.allow_tf32 = True
found.append(may_use_tf32())
torch.set_float32_matmul_precision("high")
matmul.allow_tf32 = False  # after this, torch.get_float32_matmul_precision() raises
found.append(may_use_tf32())
matmul.fp32_precision = "tf32"
found.append(may_use_tf32())
assert found == [False, True, False, True, False, True], found
"""


def test_tf32_however_it_is_allowed() -> None:
    """By the old settings, by the new ones, and by a mixture; in a process of its own, since they stick."""
    done = start("-c", SETTINGS)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("records", [False, True])
def test_inputs_that_require_a_gradient(records: bool) -> None:
    """Under `no_grad` only a result says whether a gradient is taken."""
    graph, x = fx.Graph(), torch.randn(3).requires_grad_()
    given, result = graph.placeholder("x"), graph.placeholder("y")
    with torch.set_grad_enabled(records):
        given.meta["example_value"], result.meta["example_value"] = x, x * 2
        assert operands.is_differentiated([result], [given]) == records
        result.meta["example_value"] = x.detach()
        assert operands.is_differentiated([result], [given]) == records
    result.meta["example_value"] = x * 2
    with torch.no_grad():
        assert operands.is_differentiated([result], [given])
