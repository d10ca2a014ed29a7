"""torch.export and AOTInductor: a package with the fusions inside, for where they are not installed."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import inductor_fusions
from inductor_fusions import config, ops, reporting, testing
from tests import blocks
from tests.support.modules import Module
from tests.support.on_a_gpu import on_a_gpu

RUN = """
import sys
import torch

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name == "inductor_fusions":
            raise ImportError(name)

sys.meta_path.insert(0, NotInstalled())
run = torch._inductor.aoti_load_package(sys.argv[1])
torch.save(run(*torch.load(sys.argv[2])), sys.argv[3])
assert "inductor_fusions" not in sys.modules
"""


@pytest.fixture(scope="module")
def exported() -> torch.export.ExportedProgram:
    """One block, with a symbolic batch."""
    batch = torch.export.Dim("batch", min=2, max=64)
    return torch.export.export(blocks.model(1).eval(), (blocks.batch(),), dynamic_shapes=({0: batch},))


def test_export_knows_nothing_of_the_fusions(exported: torch.export.ExportedProgram) -> None:
    """An exported program is of torch alone; the fusions are for who compiles it."""
    assert "inductor_fusions" not in str(exported)
    assert "scaled_dot_product" not in str(exported)
    again = torch.export.export(blocks.model(1).eval(), (blocks.batch(),), strict=True)
    assert "softmax" in str(again.graph)


def test_compiled_after_export(exported: torch.export.ExportedProgram) -> None:
    run = testing.assert_fusions(exported.module(), (blocks.batch(3),), backend=testing.EAGER_AFTER_PASSES)
    (call,) = run.calls("scaled_dot_product_attention")
    assert call.kwargs["is_causal"] is True
    expected = blocks.model(1)(blocks.batch(3)).detach()
    torch.testing.assert_close(run.outputs, expected, rtol=1e-4, atol=1e-5)


def attention(q: Any, k: Any, v: Any) -> Any:
    return (torch.softmax(q @ k.mT * 0.3, -1) @ v,)


def in_a_branch(q: Any, k: Any, v: Any) -> Any:
    return torch.cond(q.sum() < 1e9, attention, lambda q, k, v: (q * 1.0,), (q, k, v))


@pytest.mark.parametrize(
    "mode, fn",
    [
        *((mode, attention) for mode in ("real", "fake", "symbolic")),
        ("real", in_a_branch),
        ("fake", in_a_branch),
    ],
)
def test_graph_of_make_fx(mode: str, fn: Any) -> None:
    """Handed to Inductor without Dynamo. With real inputs, each value is of a fake mode of its own."""
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = [torch.randn(2, 3, 9, 8) for _ in range(3)]
    graph = make_fx(fn, tracing_mode=mode)(*inputs)
    with (
        torch._inductor.config.patch(force_disable_caches=True),
        config.patch(policy="always", strict=True),
        reporting.isolated() as sites,
        torch.no_grad(),
    ):
        (found,) = torch._inductor.compile(graph, inputs)(*inputs)
    assert [site.verdict for site in sites] == ["fused"]
    torch.testing.assert_close(found, *attention(*inputs))


@pytest.mark.parametrize(
    "how, reported",
    [
        (lambda x, w, a, b, by: F.linear(x, w) + F.linear(F.linear(x, a), b) * by, False),
        (lambda x, w, a, b, by: (F.linear(x, w) + F.linear(F.linear(x, a), b)) * by, False),
        (lambda x, w, a, b, by: by * F.linear(x, w) + by * F.linear(F.linear(x, a), b), False),
        (lambda x, w, a, b, by: F.linear(x, w + (b @ a) * 2.0), True),
    ],
    ids=["factor", "norm", "factor of both", "merged"],
)
def test_adapters_of_exported_graphs(how: Callable[..., Any], reported: bool) -> None:
    """The passes before autograd read fake values where `torch.export` keeps them."""
    shapes = {"w": (64, 48), "a": (4, 48), "b": (64, 4), "by": (64,)}
    parts = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    model = Module(lambda net, x: how(x, net.w, net.a, net.b, net.by), parts)
    x = torch.randn(2, 9, 48)
    exported = torch.export.export(model, (x,))
    with on_a_gpu(), config.patch(policy="always", strict=True), reporting.isolated() as sites:
        testing.AfterPasses([])(exported.graph_module, [x])
    assert bool(sites) == reported, sites
    assert str(exported.graph).count("linear") + str(exported.graph).count("lora") >= 3
    torch.testing.assert_close(exported.module()(x), model(x), rtol=1e-4, atol=1e-4)


#: Fewer seconds in the C++ compiler.
QUICK = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}


def elsewhere(package: Path, inputs: Sequence[torch.Tensor], folder: Path) -> Any:
    """What a package gives in a process that cannot import the fusions."""
    given, result = folder / "x.pt", folder / "y.pt"
    torch.save(list(inputs), given)
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(package), str(given), str(result)],
        env=os.environ.copy(), cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return torch.load(result)


@pytest.mark.slow
def test_package(exported: torch.export.ExportedProgram, tmp_path: Path) -> None:
    """Packaged with the fusions, loaded in a process that cannot import them."""
    package = tmp_path / "block.pt2"
    inductor_fusions.clear()
    with config.patch(policy="always"):
        torch._inductor.aoti_compile_and_package(exported, package_path=str(package), inductor_configs=QUICK)
    assert inductor_fusions.report().count("fused", "attention") == 1
    with zipfile.ZipFile(package) as archive:
        sources = [archive.read(name).decode() for name in archive.namelist() if name.endswith(".cpp")]
    assert any("_scaled_dot_product" in source for source in sources)
    found = elsewhere(package, [blocks.batch(5)], tmp_path)
    torch.testing.assert_close(found, blocks.model(1)(blocks.batch(5)).detach(), rtol=1e-4, atol=1e-5)


class Head(torch.nn.Module):
    """Reads the logits of a linear.

    Args:
        read: takes them, and labels.
    """

    def __init__(self, read: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.read = torch.nn.Linear(16, 40, bias=False), read

    def forward(self, h: torch.Tensor, y: torch.Tensor) -> Any:
        return self.read(self.linear(h), y)


HEADS: dict[str, Callable[..., Any]] = {
    "loss": F.cross_entropy,
    "rows": lambda logits, y: F.log_softmax(logits, -1).gather(-1, y[:, None]),
}


def packaged(model: torch.nn.Module, inputs: Sequence[torch.Tensor], folder: Path, **settings: Any) -> Any:
    """The sites of a model that is packaged, and what it gives where the fusions cannot be imported."""
    package = folder / "model.pt2"
    exported = torch.export.export(model, tuple(inputs))
    with torch.no_grad(), config.patch(strict=True, **settings), reporting.isolated() as sites:
        torch._inductor.aoti_compile_and_package(exported, package_path=str(package), inductor_configs=QUICK)
    return sites, elsewhere(package, inputs, folder)


@pytest.mark.slow
@pytest.mark.parametrize("read", HEADS)
def test_package_of_a_loss_head(read: str, tmp_path: Path) -> None:
    """Its operations are Python functions, which a package cannot call; other compiled code can."""
    model, inputs = Head(HEADS[read]).eval(), (torch.randn(12, 16), torch.arange(12))
    sites, found = packaged(model, inputs, tmp_path, policy="always")
    (site,) = (each for each in sites if each.fusion == "linear_cross_entropy")
    assert (site.verdict, site.code) == ("left to stock", "package")
    torch.testing.assert_close(found, model(*inputs).detach())
    with torch.no_grad(), config.patch(policy="always"):
        expected = {"linear_cross_entropy": 1}
        testing.assert_fusions(model, inputs, expected=expected, backend=testing.EAGER_AFTER_PASSES)


class IntoABranch(torch.nn.Module):
    """An attention whose result, of other strides, a branch takes."""

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        found = ((q @ k.mT * 0.125).softmax(-1) @ v).transpose(1, 2)
        return torch.cond(found.sum() > 0, torch.sin, torch.cos, (found,))


class OfSomeSamples(torch.nn.Module):
    """An attention over samples that data choose: the strides of its result depend on their number."""

    def forward(self, x: Any, chosen: Any) -> Any:
        x = x[chosen]
        torch._check(x.shape[0] > 0)
        q, k, v = (y.view(x.shape[0], 6, 2, 16).transpose(1, 2) for y in x.chunk(3, -1))
        return (q @ k.mT * 0.25).softmax(-1) @ v


COPIED = {
    "branch": (IntoABranch(), [torch.randn(2, 4, 64, 16) for _ in range(3)]),
    "data": (OfSomeSamples(), [torch.randn(5, 6, 96), torch.arange(5) % 2 > 0]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", COPIED)
def test_package_with_a_copy_of_fixed_strides(case: str, tmp_path: Path) -> None:
    """A clone of aten is called, which Inductor cannot lay out as it likes."""
    model, inputs = COPIED[case]
    (site,), found = packaged(model, inputs, tmp_path, policy="always")
    assert (site.fusion, site.verdict) == ("attention", "fused")
    expected = model(*inputs)
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Short(torch.nn.Module):
    """Calls an attention over short sequences."""

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return ops.short_attention(q, k, v, causal=True)


class Direct(torch.nn.Module):
    """Calls an operation of the package itself."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (torch.nn.Parameter(torch.randn(8, 6)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = ops.block_mm([x, x], [self.left, self.right])
        return first - second


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, name, inputs",
    [
        (Direct, "block_mm", [torch.randn(5, 8)]),
        (Short, "short_attention", [torch.randn(2, 3, 7, 8) for _ in range(3)]),
    ],
    ids=["block_mm", "short_attention"],
)
def test_package_of_an_operation_of_ours(
    model: type[torch.nn.Module], name: str, inputs: list[torch.Tensor], tmp_path: Path
) -> None:
    """It is compiled to what torch has: the package needs nothing of ours."""
    run = model().eval()
    assert f"inductor_fusions.{name}" in str(torch.export.export(run, tuple(inputs)))
    _, found = packaged(run, inputs, tmp_path)
    torch.testing.assert_close(found, run(*inputs), rtol=1e-4, atol=1e-5)


NOT_COMPILED = """
import sys
import torch

try:
    torch.export.load(sys.argv[1])
except Exception as error:
    print(type(error).__name__, error)
import inductor_fusions
x = torch.ones(5, 8)
print(torch.export.load(sys.argv[1]).module()(x).shape == (5, 6))
"""


def test_exported_operation_of_ours_names_what_to_import(tmp_path: Path) -> None:
    """Not compiled, a program keeps the operation; without the import, torch's warning names it."""
    file = tmp_path / "direct.pt2"
    torch.export.save(torch.export.export(Direct().eval(), (torch.randn(5, 8),)), file)
    done = subprocess.run(
        [sys.executable, "-c", NOT_COMPILED, str(file)],
        env=os.environ.copy(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True"
    assert "RuntimeError" in done.stdout and "inductor_fusions" in done.stderr, done.stderr


LOADED = """
import sys
import torch

torch.set_num_threads(int(sys.argv[2]))
load = lambda: torch.compiler.load_compiled_function(open(sys.argv[1], "rb"))
x, w, y = torch.ones(24, 32), torch.ones(96, 32), torch.arange(24)
try:
    load()(x, w, y)
except AttributeError as error:
    print(error)
import inductor_fusions
print(load()(x, w, y).item())
"""


def test_artifact_that_calls_an_operation_of_ours(tmp_path: Path) -> None:
    """The code of a fused loss head calls one, so loading it needs the import."""

    def loss(x: Any, w: Any, y: Any) -> Any:
        return F.cross_entropy(F.linear(x, w).float(), y)

    file, inputs = tmp_path / "loss.bin", (torch.ones(24, 32), torch.ones(96, 32), torch.arange(24))
    with config.patch(policy="always"), torch._dynamo.config.patch(enable_aot_compile=True):
        compiled: Any = torch.compile(loss, fullgraph=True)
        compiled.aot_compile((inputs, {})).save_compiled_function(str(file))
    done = subprocess.run(
        [sys.executable, "-c", LOADED, str(file), str(torch.get_num_threads())],
        env=os.environ.copy(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *said, value = done.stdout.splitlines()
    assert "inductor_fusions" in said[-1] and "linear_cross_entropy" in said[-1]
    assert float(value) == pytest.approx(loss(*inputs).item(), rel=1e-5)
