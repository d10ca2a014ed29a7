"""What Inductor makes of the operation: the wrapper, autotuning, toggles, and caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

import torch._inductor.config

from devtools import cuda_codegen
from inductor_fusions import config, disable, enable, ops
from inductor_fusions.block_mm import configurations, template
from inductor_fusions.block_mm.problem import Problem
from inductor_fusions.driver import containment, passes
from tests.block_mm.support import POST_GRAD, GatedMLP, Linears, rand, run


def generate(fn: Any, args: tuple[Any, ...], **options: Any) -> cuda_codegen.Generated:
    with config.patch(policy=options.pop("policy", "always"), strict=True):
        return cuda_codegen.generate(fn, args, **options)


def test_no_weight_is_copied() -> None:
    """One kernel, three outputs, and nothing else in memory."""
    model = Linears(64, (64, 32, 32), (True, False, True)).bfloat16()
    with torch.no_grad():
        module = generate(model, (rand(2, 16, 64),)).forward
    assert len(module.launches) == 1 and not module.extern_calls
    assert module.wrapper.count("= empty_strided_cuda(") == 3


def test_tail_is_fused_into_the_kernel() -> None:
    def fn(x: Any, w: Any, b: Any, y: Any) -> Any:
        return torch.sigmoid(F.linear(x, w) + 0.3 * y + b)

    with torch.no_grad():
        module = generate(fn, (rand(32, 64), rand(32, 64), rand(32), rand(32, 32))).forward
    assert len(module.launches) == 1 and module.kernels[0].is_template
    assert module.wrapper.count("= empty_strided_cuda(") == 1


@pytest.mark.parametrize("step", [1, 2], ids=["halves", "interleaved"])
def test_packed_weight_is_read_where_it_is(step: int) -> None:
    """Columns of one linear: one kernel that reads two parts of the weight and of the bias, and no copy."""

    def fn(x: Any, w: Any, b: Any) -> Any:
        h = F.linear(x, w, b)
        gate, up = h.chunk(2, -1) if step == 1 else (h[..., ::2], h[..., 1::2])
        return F.silu(gate) * up

    with torch.no_grad():
        module = generate(fn, (rand(2, 16, 64), rand(128, 64), rand(128))).forward
    assert len(module.launches) == 1 and not module.extern_calls
    assert module.wrapper.count("= empty_strided_cuda(") == 1
    assert module.kernels[0].is_template and f" + {64 if step == 2 else 64 * 64}" in module.kernels[0].source


def test_kernel_that_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The products are computed one by one, and a warning says so; in strict mode it is raised."""

    def broken(**_: Any) -> None:
        raise TypeError("generate() takes no such argument")

    monkeypatch.setattr("inductor_fusions._inductor.lower_to_template", broken)
    model = Linears(64, (64, 32, 32), (False,) * 3).bfloat16()
    with (
        torch.no_grad(),
        caplog.at_level("WARNING", logger="inductor_fusions"),
        config.patch(policy="always"),
    ):
        module = cuda_codegen.generate(model, (rand(16, 64),)).forward
    assert module.extern_calls == ["extern_kernels.mm"] * 3 and not module.launches
    assert "takes no such argument" in caplog.text
    with torch.no_grad(), pytest.raises(Exception, match="no such argument"):
        generate(model, (rand(16, 64),))


def test_reader_of_two_outputs_is_another_kernel() -> None:
    """Fused into the epilogue of one, it would read the other before that is written."""

    def fn(x: Any, w: Any, v: Any) -> Any:
        y, z = x @ w, x @ v
        return y, z, F.silu(y) * z

    with torch.no_grad(), config.patch(gated_mlp=False):
        module = generate(fn, (rand(32, 64), rand(64, 32), rand(64, 32))).forward
    assert [kernel.is_template for kernel in module.kernels] == [True, False]


@pytest.mark.parametrize("train", [False, True])
def test_switched_off_is_stock(train: bool) -> None:
    """Each toggle off gives the code of stock, and so does a policy without measurements."""
    model, x = GatedMLP(F.silu).bfloat16(), rand(2, 64, 64)

    def text(**options: Any) -> list[str]:
        with torch.set_grad_enabled(train):
            made = generate(model, (x,), train=train, **options)
        kernels = [kernel.source.split("@triton.jit")[1] for kernel in made.kernels]
        return kernels + [call for module in made.modules for call in module.extern_calls]

    with config.patch(enabled=False):
        stock = text()
    with config.patch(qkv=False, gated_mlp=False, linear_epilogue=False):
        assert text() == stock
    assert text(policy="profitable") == stock
    assert text() != stock


@pytest.mark.parametrize("ours", [True, False])
def test_autotuning_decides(ours: bool) -> None:
    """With max_autotune our kernels compete with the library's products, and the faster one is taken."""
    model = Linears(512, (512, 128, 128), (True, False, True)).bfloat16()
    options = {
        "config": {"max_autotune": True},
        "prefer": lambda name: 1.0 if ("block_mm" in name) == ours and "triton_mm" not in name else 2.0,
        "policy": "profitable",
    }
    with torch.no_grad():
        module = generate(model, (rand(400, 512),), **options).forward
    if ours:
        assert len(module.launches) == 1 and not module.extern_calls
    else:
        # Some versions of torch choose between two forms of addmm.
        products = [call.replace("bias_addmm", "addmm") for call in module.extern_calls]
        assert products == ["extern_kernels.addmm", "extern_kernels.mm", "extern_kernels.addmm"]
        assert not module.launches and module.wrapper.count("= empty_strided_cuda(") == 3


def test_without_the_passes_there_is_no_kernel() -> None:
    """Caches would not know of it: `disable()` leaves a direct call to the products one by one."""

    def fn(x: Any, w: Any, v: Any) -> Any:
        return ops.block_mm([x, x], [w, v])

    args = (rand(32, 64), rand(64, 32), rand(64, 32))
    with torch.no_grad():
        assert generate(fn, args).forward.kernels[0].is_template
        disable()
        try:
            module = generate(fn, args).forward
        finally:
            enable()
    assert not module.kernels and module.extern_calls == ["extern_kernels.mm"] * 2


@pytest.mark.parametrize("width", [60, 64])
def test_direct_call_with_odd_strides(width: int) -> None:
    """Bulk copies, which so many tiles are read by, would read them wrongly: the products one by one."""

    def fn(x: Any, w: Any, v: Any) -> Any:
        return ops.block_mm([x, x], [w.t(), v.t()])

    with torch.no_grad():
        module = generate(fn, (rand(8192, width), rand(4096, width), rand(4096, width))).forward
    assert bool(module.kernels) == (width == 64)
    assert len(module.extern_calls) == (0 if width == 64 else 2)


@pytest.mark.parametrize(("rank", "one"), [(16, True), (512, False)])
def test_direct_call_with_a_float32_adapter(rank: int, one: bool) -> None:
    """A second product of another dtype is in the kernel where it is one more step of it."""

    def fn(x: Any, w: Any, h: Any, b: Any) -> Any:
        return ops.block_mm([x, h], [w.t(), b], groups=[0, 0], scales=[1.0, 2.0])

    wide = torch.float32
    args = (rand(400, 64), rand(256, 64), rand(400, rank, dtype=wide), rand(rank, 256, dtype=wide))
    with torch.no_grad():
        module = generate(fn, args).forward
    assert (not module.extern_calls) is one
    if one:
        (found,) = cuda_codegen.compile_kernel(module.kernels[0].source, 90)
        assert found.fits and found.uses_wgmma, found


@pytest.mark.parametrize("name", ["tiled.py.jinja", "persistent.py.jinja", "activations.py.jinja"])
def test_uuid_covers_the_text_of_templates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's own key does not: a changed template would be served stale."""
    path = template.FOLDER / name
    assert path.is_file()

    def uuid() -> Any:
        containment.code_digest.cache_clear()
        return passes.FusionPass("post_grad", POST_GRAD).uuid()

    before, read = uuid(), Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda self: read(self) + b" " if self.name == name else read(self)
    )
    assert uuid() != before
    monkeypatch.undo()
    assert uuid() == before


def test_fused_sites_are_counted() -> None:
    """Those of each graph, while Inductor compiles it: a cache entry restores what was counted then."""
    from torch._dynamo.utils import counters

    before = counters["inductor"]["fusions_qkv"]
    with torch.no_grad():
        generate(Linears(64, (64, 32)).bfloat16(), (rand(16, 64),))
    assert counters["inductor"]["fusions_qkv"] == before + 1


def row(tokens: int, gain: float) -> dict[str, Any]:
    """A row of a table, for linears of 64 columns -> 64 + 32."""
    chosen = asdict(configurations.Config("tiled", 16, 32, 64, 4, 2)) if gain > 1 else None
    wanted = Problem((tokens,) * 2, (64, 32), (64,) * 2, (0, 1), ("nt",) * 2, torch.bfloat16, False, "a")
    return {**wanted.key, "tokens": tokens, "gain": gain, "config": chosen}


def test_symbolic_rows(shelf: Callable[..., None]) -> None:
    """Fused where it pays for what is likely, with tiles for the number that it is compiled with."""
    gains = {tokens: 1.5 if tokens > 300 else 0.9 for tokens in (128, 256, 512, 1024, 4096, 16384)}
    table = {"block_mm": [row(tokens, gain) for tokens, gain in gains.items()]}
    shelf(nvidia_h100_80gb_hbm3=table)
    model = Linears(64, (64, 32)).bfloat16()
    for tokens, says in ((256, "no faster than stock"), (1024, "this kernel is not faster for")):
        seen = run(model, (rand(tokens, 64),), policy="profitable", dynamic=True)
        assert not seen.calls() and says in seen.reasons("qkv")[0]
    table["block_mm"] = [row(tokens, 1.5) for tokens in (64, 512, 4096, 16384)]
    seen = run(model, (rand(1024, 64),), policy="profitable", dynamic=True)
    assert len(seen.calls()) == 1 and "tiled ? x (64 -> 64 + 32)" in seen.sites[0].kernel


def test_old_device() -> None:
    model = Linears(64, (64, 32)).bfloat16()
    old = cuda_codegen.Device("NVIDIA V100", (7, 0), 80, 98304, 2**34, 2**22)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cuda_codegen.DEVICES, 70, old)  # type: ignore[arg-type]
        assert run(model, (rand(16, 64),), arch=70).reasons("qkv") == [
            "the device is older than compute capability 8.0"
        ]


@pytest.mark.parametrize("scale", [float("inf"), float("nan"), 1e-40, 1e30])
def test_factors_that_no_kernel_takes(scale: float) -> None:
    """The accumulator is kept in units of a factor: with such a one the product is by itself."""

    def fn(x: Any, w: Any) -> Any:
        return ops.block_mm([x, x], [w, w], groups=[0, 0], scales=[1.0, scale])

    with torch.no_grad():
        module = generate(fn, (rand(16, 64), rand(64, 32))).forward
    assert not any(kernel.is_template for kernel in module.kernels)
