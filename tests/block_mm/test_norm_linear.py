"""An RMSNorm in front of linears of a few rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inductor_fusions.block_mm import heuristics
from inductor_fusions.block_mm.configurations import Config, step_with_norm, suits, with_norm
from inductor_fusions.block_mm.problem import Problem
from inductor_fusions.fusions import norm_linear
from tests.block_mm.support import GatedMLP, Linears, check, rand, run
from tests.support.arguments import named
from tests.support.modules import Module

BF16 = torch.bfloat16


class Llama(nn.Module):
    """Rounds before it multiplies by the weight, as the norms of T5 and Llama do."""

    def __init__(self, width: int = 64, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(1 + torch.randn(width) / 8), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Gemma(Llama):
    """Adds 1 to its weight, and rounds at the end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.to(wide.dtype))).to(x.dtype)


class Plain(Llama):
    """Without a weight, in the dtype of the input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Twice(Llama):
    """Widens its input in two places, which Inductor does not merge in inference."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        root = torch.rsqrt(x.to(dtype).pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (root * x.to(dtype)).to(x.dtype)


class Last(Llama):
    """Only its last row is read, and there is no other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[:, None])[:, -1:].squeeze(1)


def written(formula: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    """A norm as a formula of x and the mean of its squares, with a weight behind it."""

    class Written(Llama):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return formula(x, x.square().mean(-1, keepdim=True)) * self.weight

    return Written


NORMS: dict[str, Callable[[], nn.Module]] = {
    "llama": Llama,
    "gemma": Gemma,
    "plain": Plain,
    "twice": Twice,
    "last": Last,
    "torch": lambda: nn.RMSNorm(64, eps=1e-6),
    "eps of 0": lambda: nn.RMSNorm(64, eps=0.0),
    "reciprocal": written(lambda x, mean: x * (1 / torch.sqrt(mean + 1e-5))),
    "quotient": written(lambda x, mean: x / (mean + 1e-5).sqrt()),
    "power": written(lambda x, mean: x * (mean + 1e-5) ** -0.5),
    "root as a power": written(lambda x, mean: x / (mean + 1e-5).pow(0.5)),
    "sum": written(lambda x, mean: x * torch.rsqrt(x.square().sum(-1, keepdim=True) / 64 + 1e-5)),
    "sum without its dim": written(lambda x, mean: x * torch.rsqrt(x.square().sum(-1) + 1e-5)[..., None]),
    "another factor": written(lambda x, mean: x * torch.rsqrt(mean + 1e-5) * 0.3),
    "normalize": written(lambda x, mean: F.normalize(x, dim=-1) * 64**0.5),
    "by its length": written(lambda x, mean: x / x.norm(dim=-1, keepdim=True) * 8),
    "clamped length": written(lambda x, mean: x / (x.norm(dim=-1, keepdim=True) / 8).clamp(min=0.3)),
    "clamped mean": written(lambda x, mean: x * torch.rsqrt(mean.clamp(min=2.0)) * 2),
    "in parts": written(lambda x, mean: x / torch.sqrt((mean * 3 + 1e-5) / 2) * 2),
}


def model(norm: nn.Module, behind: nn.Module) -> nn.Module:
    return nn.Sequential(norm, behind).to(BF16).requires_grad_(False)


@pytest.fixture(autouse=True)
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default kernels: the table has tiles for some of these widths."""
    monkeypatch.setattr(heuristics, "tiles", lambda *_: None)


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("name", NORMS)
def test_norm(name: str, rows: int) -> None:
    seen = check(model(NORMS[name](), Linears(64, [96, 32, 32])), (rand(1, rows, 64, grad=False),))
    (call,) = seen.calls()
    assert seen.fused("norm_linear") == 1 and named(call).eps is not None
    assert not any(node.target is torch.ops.aten.rsqrt.default for node in seen.graphs[0].nodes)


def test_gated_mlp() -> None:
    seen = check(model(Gemma(), GatedMLP(F.silu)), (rand(2, 1, 64, grad=False),))
    assert seen.fused("norm_linear") == 1 and [named(call).shift for call in seen.calls()] == [1.0, 0.0]


def test_adapter() -> None:
    """The second product of the group reads something else."""

    parts = {"norm": Llama(), "base": nn.Linear(64, 96), "up": nn.Linear(16, 96, bias=False)}
    adapted = Module(lambda net, x, low: net.base(net.norm(x)) + 2 * net.up(low), parts).to(BF16)
    with torch.no_grad():
        seen = run(adapted, (rand(1, 64, grad=False), rand(1, 16, grad=False)))
    assert seen.fused("norm_linear") == 1


@pytest.mark.parametrize(("other", "why"), [
    (lambda y, linear: (linear(y), y), "returned"),
    (lambda y, linear: (linear(y), y.sum(-1)), "read more than once"),
])  # fmt: skip
def test_read_elsewhere(other: Callable[..., Any], why: str) -> None:
    norm, linear = Llama().to(BF16), nn.Linear(64, 96).to(BF16)
    with torch.no_grad():
        seen = run(lambda x: other(norm(x), linear), (rand(1, 64, grad=False),))
    assert seen.fused("norm_linear") == 0 and why in seen.reasons("norm_linear")[0]


@pytest.mark.parametrize(
    "norm",
    [
        lambda x, w: x * torch.rsqrt(x.square().mean(0, keepdim=True) + 1e-5) * w,
        lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True) - 1e-5) * w,
        lambda x, w: x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True).abs() + 1e-5) * w,
        lambda x, w: (x + 1) * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w,
        lambda x, w: x * (x.square().mean(-1, keepdim=True) + 1e-5) ** -0.25 * w,
        lambda x, w: x * torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w,
        lambda x, w: (
            (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w).to(torch.float8_e4m3fn).to(BF16)
        ),
    ],
    ids=["over rows", "less eps", "cube", "of another", "fourth root", "times the root", "rounded"],
)
def test_no_norm(norm: Callable[..., Any]) -> None:
    args = (rand(2, 64, grad=False), rand(64, grad=False), rand(96, 64, grad=False))
    seen = run(lambda x, w, weight: F.linear(norm(x, w).to(weight.dtype), weight), args)
    assert seen.fused("linear_epilogue") == 1 and seen.fused("norm_linear") == 0


OTHERS: dict[str, Callable[..., torch.Tensor]] = {
    "layer norm": lambda x, w: F.layer_norm(x, (64,), w, w),
    "layer norm by hand": lambda x, w: (
        (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5) * w
    ),
    "weight in the root": lambda x, w: x * (torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w),
    "eps added to the root": lambda x, w: x / (x.norm(dim=-1, keepdim=True) + 1e-2) * w,
    "smallest norm of 0": lambda x, w: F.normalize(x, dim=-1, eps=1e-25) * w,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_norms(name: str) -> None:
    """Which no kernel computes: that is said."""
    args = (rand(2, 64, grad=False), rand(64, grad=False), rand(96, 64, grad=False))
    seen = check(lambda x, w, weight: F.linear(OTHERS[name](x, w), weight), args, budget=3.0)
    assert seen.fused("linear_epilogue") == 1
    assert seen.codes("norm_linear") == ["range" if name == "smallest norm of 0" else "norm"]


@pytest.mark.parametrize("size", [0.0, 1e-14, 1.0])
def test_rows_of_small_numbers(size: float) -> None:
    """What is smaller than the smallest norm is divided by that."""
    norm, linear = NORMS["normalize"]().to(BF16), nn.Linear(64, 96).to(BF16)
    with torch.no_grad():
        seen = check(nn.Sequential(norm, linear).requires_grad_(False), (rand(2, 64, grad=False) * size,))
    assert seen.fused("norm_linear") == 1


def test_a_mean_without_its_dim() -> None:
    """Each row is multiplied by those of all rows: the result is larger than the input."""
    args = rand(2, 1, 64, grad=False), rand(96, 64, grad=False)
    seen = check(lambda x, w: F.linear(x * torch.rsqrt(x.square().mean(-1) + 1e-5), w), args, budget=3.0)
    assert seen.fused("linear_epilogue") == 1 and seen.fused("norm_linear") == 0


@pytest.mark.parametrize(
    "view",
    [lambda x: x[:1, ::2], lambda x: x[:1, :1].expand(1, 64), lambda x: x.t()[:1, :64]],
    ids=["every other", "expanded", "transposed"],
)
def test_input_apart_in_memory(view: Callable[..., Any]) -> None:
    """The kernel would not be made, and the norm and the linear run one by one."""
    norm, linear = Llama().to(BF16), nn.Linear(64, 96).to(BF16)
    with torch.no_grad():
        seen = run(lambda x: linear(norm(view(x))), (rand(64, 128, grad=False),))
    assert seen.fused("linear_epilogue") == 1 and seen.codes("norm_linear") == ["layout"]


@pytest.mark.parametrize("gain", [True, False])
@pytest.mark.parametrize("width", [32, 128])
def test_rows_of_another_width(gain: bool, width: int) -> None:
    """A reshape between the norm and the linear makes other rows: each was divided by what others have."""
    norm = Llama().to(BF16) if gain else Plain()

    def fn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(norm(x).view(-1, width), weight)

    with torch.no_grad():
        seen = run(fn, (rand(2, 64, grad=False), rand(96, width, grad=False)))
    assert seen.fused("linear_epilogue") == 1
    assert seen.fused("norm_linear") == 0 and not seen.reasons("norm_linear")


def test_mean_read_elsewhere() -> None:
    """Stock's kernel of the mean stays."""

    def fn(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = x.square().mean(-1, keepdim=True)
        return F.linear(x * torch.rsqrt(mean + 1e-5), weight), mean

    seen = run(fn, (rand(1, 64, grad=False), rand(96, 64, grad=False)))
    assert seen.fused("linear_epilogue") == 1 and seen.fused("norm_linear") == 0


def test_a_vector_of_each_row() -> None:
    """Not a weight: it differs from row to row."""
    norm, linear = Plain(), nn.Linear(64, 96).to(BF16)
    args = rand(2, 64, grad=False), rand(2, 64, grad=False)
    with torch.no_grad():
        seen = run(lambda x, w: linear(norm(x) * w), args)
    assert seen.fused("norm_linear") == 0


def test_many_rows() -> None:
    """Tiles on tensor cores do not read the whole input."""
    seen = check(model(Llama(), Linears(64, [96, 32])), (rand(16, 64, grad=False),))
    assert seen.fused("qkv") == 1 and seen.fused("norm_linear") == 0 and not seen.reasons("norm_linear")


class Around(nn.Module):
    """What computes the input of a norm, the norm, and a linear whose widths are in tables."""

    def __init__(self, before: Callable[..., Any], width: int = 2048) -> None:
        super().__init__()
        self.before, self.norms = before, nn.ModuleList(Llama(width) for _ in range(2))
        self.linears = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.before(x, y, *self.norms[1:], *self.linears[1:])
        return self.linears[0](self.norms[0](total)), total


BEFORE: dict[str, tuple[Callable[..., Any], bool]] = {
    "behind a linear": (lambda x, y, norm, linear: x + linear(y), True),
    "result of a linear": (lambda x, y, norm, linear: linear(y), True),
    "behind a norm": (lambda x, y, norm, linear: x + norm(linear(y)), False),
    "sum": (lambda x, y, norm, linear: x + y, False),
    "input": (lambda x, y, norm, linear: x, True),
    "embedding": (lambda x, y, norm, linear: F.embedding(x[:, 0].long(), linear.weight), False),
}


@pytest.mark.parametrize("name", BEFORE)
def test_profitable(name: str) -> None:
    """Where the input of the norm is in memory without a kernel of its own."""
    before, fused = BEFORE[name]
    model = Around(before).to(BF16).requires_grad_(False)
    args = rand(1, 2048, grad=False), rand(1, 2048, grad=False)
    seen = run(model, args, policy="profitable")
    assert seen.fused("linear_epilogue") and seen.fused("norm_linear") == fused
    assert seen.codes("norm_linear") == ["not-faster"] * (not fused)


@pytest.mark.parametrize("rows", [1, 2])
def test_measured_rows(rows: int) -> None:
    model = Around(BEFORE["input"][0]).to(BF16).requires_grad_(False)
    args = rand(rows, 2048, grad=False), rand(rows, 2048, grad=False)
    seen = run(model, args, policy="profitable")
    assert seen.codes("norm_linear") == ["not-measured"] * (rows - 1)


@pytest.mark.parametrize("width", [2048, 2304])
@pytest.mark.parametrize("apart", [False, True])
def test_wide(monkeypatch: pytest.MonkeyPatch, width: int, apart: bool) -> None:
    """The head of a language model keeps its norm apart, sooner if its kernel takes short steps."""
    size = 2 * width * width * (1 if width % 1024 == 0 else 2)
    monkeypatch.setattr(norm_linear, "_WIDE", size - apart)
    model = Around(BEFORE["input"][0], width).to(BF16).requires_grad_(False)
    seen = run(model, (rand(1, width, grad=False), rand(1, width, grad=False)), policy="profitable")
    assert seen.fused("linear_epilogue") and seen.codes("norm_linear") == ["not-faster"] * apart


@pytest.mark.parametrize(("width", "warps"), [(2048, 4), (3072, 4), (4096, 8)])
def test_tiles(width: int, warps: int) -> None:
    """A long gated pair has eight warps for its registers; a linear of that width has four."""
    gated = Problem((1, 1), (64, 64), (width, width), (0, 1), ("nt", "nt"), BF16, gated=True)
    alone = Problem((1,), (64,), (width,), (0,), ("nt",), BF16)
    chosen = [with_norm(Config("row", 1, 1, 512, 2, 1), each) for each in (gated, alone)]
    assert [each.num_warps for each in chosen] == [warps, 4]
    assert all(suits(each, problem) for each, problem in zip(chosen, (gated, alone), strict=True))


@pytest.mark.parametrize(
    ("width", "step"),
    [(64, 64), (896, 1024), (1536, 2048), (2048, 1024), (2304, 512), (2880, 1024), (3584, 512)],
)
def test_steps(width: int, step: int) -> None:
    assert step_with_norm(width) == step


def test_autotuned() -> None:
    seen = run(
        model(Llama(), Linears(64, [96, 32])), (rand(1, 64, grad=False),), inductor={"max_autotune": True}
    )
    assert seen.codes("norm_linear") == ["not-faster"]
