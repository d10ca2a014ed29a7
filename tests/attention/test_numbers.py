"""Numbers that are tensors, on a CPU beside operands on a GPU, or symbols that flex attention captures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from devtools import cuda_codegen
from inductor_fusions import _inductor, config
from inductor_fusions.driver import passes
from inductor_fusions.fusions import attention
from inductor_fusions.sites import Site
from tests.attention.support import cases, check, code_for_a_gpu, flex_everywhere, qkv

Given = tuple[tuple[int, ...], torch.dtype, str]

QKV: list[Given] = [((2, 3, 32, 64), torch.bfloat16, "cuda")] * 3


@pytest.fixture
def device() -> Iterator[None]:
    with cuda_codegen.pretended(cuda_codegen.DEVICES[90]):
        yield


def on_a_gpu(fn: Callable[..., Any], inputs: Sequence[Given]) -> tuple[fx.Graph, list[Site]]:
    """A graph of fake tensors on a GPU, after the fusion, and its sites."""
    module, mode, given = fx.symbolic_trace(fn), FakeTensorMode(), iter(inputs)
    with mode:
        for node in module.graph.nodes:
            if node.op == "placeholder":
                shape, dtype, device = next(given)
                node.meta["example_value"] = torch.empty(shape, dtype=dtype, device=device)
            elif node.op != "output":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda x: x.meta["example_value"])
                call = getattr(args[0], node.target) if node.op == "call_method" else node.target
                node.meta["example_value"] = call(*(args[1:] if node.op == "call_method" else args), **kwargs)
    with config.patch(policy="always", strict=True):
        return module.graph, passes.apply(attention.FUSION, module.graph)


def divided(q: Any, k: Any, v: Any, s: Any) -> Any:
    return torch.softmax(q @ k.transpose(-1, -2) / s, -1) @ v


def multiplied(q: Any, k: Any, v: Any, s: Any) -> Any:
    return torch.softmax(q @ k.transpose(-1, -2) * s, -1) @ v


def behind_a_function(q: Any, k: Any, v: Any, s: Any) -> Any:
    return torch.softmax(torch.tanh(q @ k.transpose(-1, -2) / s) * s, -1) @ v


def added(q: Any, k: Any, v: Any, s: Any) -> Any:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.3 + s, -1) @ v


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@cases({fn.__name__: fn for fn in (divided, multiplied, behind_a_function)})
def test_scale_on_another_device(case: Any, dtype: torch.dtype) -> None:
    graph, sites = on_a_gpu(case, [*QKV, ((), dtype, "cpu")])
    assert [site.verdict for site in sites] == ["fused"], sites
    for node in graph.nodes:  # nothing but numbers is on the CPU
        value = node.meta.get("example_value")
        assert not isinstance(value, torch.Tensor) or value.device.type == "cuda" or value.dim() == 0


@pytest.mark.usefixtures("device")
def test_bias_on_another_device() -> None:
    _, (site,) = on_a_gpu(added, [*QKV, ((), torch.float32, "cpu")])
    assert site.reason == "a mask or a bias is a scalar tensor on another device"
    _, (site,) = on_a_gpu(added, [*QKV, ((1, 1, 32, 32), torch.bfloat16, "cuda")])
    assert site.verdict == "fused"


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "length, rows, fused",
    [(65_536, 65_536, True), (65_544, 65_544, not _inductor.mask_rows_have_32_bits()), (65_544, 1, True)],
)
def test_long_masks(length: int, rows: int, fused: bool) -> None:
    """Efficient attention reads wrong rows of a mask of each query with more than 2^32 elements."""
    qkv = [((1, 1, length, 64), torch.bfloat16, "cuda")] * 3
    _, (site,) = on_a_gpu(added, [*qkv, ((1, 1, rows, length), torch.bfloat16, "cuda")])
    assert (site.verdict == "fused") == fused and (fused or "2^32" in site.reason), site


@pytest.mark.usefixtures("device")
def test_part_of_a_long_mask() -> None:
    """Its rows are as far apart as those of the whole."""
    qkv: list[Given] = [((1, 1, n, 64), torch.bfloat16, "cuda") for n in (65_536, 64, 64)]

    def part(q: Any, k: Any, v: Any, s: Any) -> Any:
        return torch.softmax(q @ k.transpose(-1, -2) * 0.3 + s[:, :, :, :64], -1) @ v

    _, (site,) = on_a_gpu(part, [*qkv, ((1, 1, 65_536, 65_544), torch.bfloat16, "cuda")])
    assert (site.verdict == "fused") != _inductor.mask_rows_have_32_bits(), site


@pytest.mark.usefixtures("device")
def test_weights_of_another_dtype_than_values() -> None:
    """Eager raises, and so does stock: a compile that fails does so with the message that it has."""

    def mixed(q: Any, k: Any, v: Any) -> Any:
        return torch.softmax(q @ k.transpose(-1, -2), -1, dtype=torch.float32) @ v

    def cast(q: Any, k: Any, v: Any) -> Any:
        return torch.softmax(q @ k.transpose(-1, -2), -1, dtype=torch.float32).to(v.dtype) @ v

    try:
        _, (site,) = on_a_gpu(mixed, QKV)
    except RuntimeError:
        pytest.skip("fake tensors of this torch refuse it")
    assert site.reason == "the attention weights and the values have different dtypes"
    _, (site,) = on_a_gpu(cast, QKV)
    assert site.verdict == "fused"


def windowed(q: Any, k: Any, v: Any, width: int) -> Any:
    i = torch.arange(q.shape[-2])
    apart = i[:, None] - i
    return torch.softmax((q @ k.mT * 0.25).masked_fill(~((apart >= 0) & (apart < width)), -torch.inf), -1) @ v


def by_size(q: Any, k: Any, v: Any, x: Any) -> Any:
    return windowed(q, k, v, x.shape[1])


@pytest.mark.parametrize("width", [9, 12])
def test_window_that_changes(width: int) -> None:
    """The width is a symbol: what flex attention captures is a tensor of it."""
    x = torch.zeros(1, width)
    torch._dynamo.mark_dynamic(x, 1)
    with flex_everywhere("flex"):
        run = check(by_size, (*qkv(64, 64, batch=1, heads=2), x), kernel="flex")
    captured = [node for call in run.ours.calls("flex_attention") for node in (*call.args[7], *call.args[8])]
    assert captured and all("mul" in node.name or "as_strided" in node.name for node in captured), captured


def test_window_that_changes_on_a_gpu() -> None:
    """Inductor lowers the kernel where the width is a symbol, in inference and in training."""
    for train in (False, True):
        x = torch.zeros(1, 9)
        torch._dynamo.mark_dynamic(x, 1)
        with flex_everywhere("flex"), config.patch(policy="always"):
            inputs = (*qkv(64, 64, batch=1, heads=2, grad=train), x)
            code = code_for_a_gpu(by_size, inputs, train=train)
        assert any(kernel.is_template for kernel in code.forward.kernels)
