"""Float32 inputs of a graph are split up many at a time, to the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

pytest.importorskip("triton")

from devtools import cuda_codegen
from inductor_fusions import config
from inductor_fusions.fusions.lora import gather, narrow_kernel
from inductor_fusions.fusions.lora.op import NARROW_MM
from inductor_fusions.fusions.lora.split import LORA_SPLIT
from tests.block_mm.support import Run, check, run
from tests.lora.spellings import Adapted
from tests.support.arguments import named

BF16, FP32 = torch.bfloat16, torch.float32


def adapted(inner: int, outer: int, rank: int) -> Adapted:
    return Adapted(nn.Linear(inner, outer, bias=False, dtype=BF16), inner, outer, rank)


class Layers(nn.Module):
    """Layers of two linears with adapters each."""

    def __init__(self, count: int = 2, rank: int = 16) -> None:
        super().__init__()
        self.ups = nn.ModuleList(adapted(80, 96, rank) for _ in range(count))
        self.downs = nn.ModuleList(adapted(96, 80, rank) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(up(x))
        return x


def rand(rows: int = 72, columns: int = 80) -> torch.Tensor:
    return torch.randn(rows, columns).to(BF16).requires_grad_()


def splits(seen: Run, graph: int = 0) -> list[int]:
    """How many matrices each call splits up."""
    return [len(named(node).matrices) for node in seen.graphs[graph].nodes if node.target is LORA_SPLIT]


def in_summands(seen: Run, graph: int = 0) -> int:
    """How many skinny GEMMs read summands."""
    calls = [node for node in seen.graphs[graph].nodes if node.target is NARROW_MM]
    return sum(named(node).b[0].meta["val"].dim() == 3 for node in calls)


def one_by_one(patch: pytest.MonkeyPatch) -> None:
    """Every matrix by itself, as one that is no input."""
    patch.setattr(gather, "takes", lambda matrix: False)


def test_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients, with the matrices split up together and by themselves."""
    torch.manual_seed(0)
    model, x = Layers(), rand()
    found = check(model, (x,), train=True, budget=3.0)
    # Forward A and B of each linear, backward A, B and the saved x A.
    assert splits(found) == [8] and splits(found, 1) == [12]
    assert in_summands(found) == 4 and in_summands(found, 1) >= 8
    one_by_one(monkeypatch)
    before = run(model, (x,), train=True)
    assert not splits(before) and not splits(before, 1) and not in_summands(before, 1)
    for y, z in zip((*found.outputs, *found.grads), (*before.outputs, *before.grads), strict=True):
        assert y is not None and z is not None and torch.equal(y, z)


@pytest.mark.parametrize(("tf32", "count"), [(True, 2), (False, 3)])
def test_summands(tf32: bool, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two, where torch may use TF32."""
    monkeypatch.setattr(narrow_kernel, "may_use_tf32", lambda: tf32)
    (call,) = [n for n in run(Layers(1), (rand(),)).graphs[0].nodes if n.target is LORA_SPLIT]
    assert sorted(named(call).summands) == [0, 0, count, count]


def launches(train: bool) -> list[int]:
    """Kernels of the forward, and of the backward."""
    with config.patch(policy="always", strict=True), torch.set_grad_enabled(train):
        made = cuda_codegen.generate(Layers(), (rand(),), train=train, run=False)
    return [len([line for line in m.wrapper.splitlines() if ".run(" in line]) for m in made.modules]


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward one in the place of two for each linear; backward one in the place of three."""
    forward, backward = launches(True)
    (inference,) = launches(False)
    one_by_one(monkeypatch)
    assert launches(True) == [forward + 7, backward + 11]
    assert launches(False) == [inference + 7]


@pytest.mark.parametrize("rank", [1, 5, 12])
def test_ranks_that_are_filled_up(rank: int) -> None:
    """The zeros up to a rank that vector loads can read are in the kernel as well."""
    seen = check(Layers(1, rank), (rand(),), budget=3.0)
    assert splits(seen) == [4]
    pads = [n for n in seen.graphs[0].nodes if n.target is torch.ops.aten.constant_pad_nd.default]
    assert all(n.meta["val"].shape[0] == 72 for n in pads)  # of x A alone


def test_few_rows_split_by_themselves() -> None:
    """With few rows the skinny GEMM splits up what it reads."""

    def fn(x: Any, w: Any, a: Any, b: Any, z: Any) -> Any:
        h = x.to(a.dtype) @ a
        return (x @ w + h @ b).to(x.dtype), h + z

    some = rand(40, 64), rand(64, 96), rand(64, 16).float(), rand(16, 96).float(), torch.randn(40, 16)
    with torch.no_grad():
        seen = check(fn, tuple(t.detach() for t in some), budget=3.0)
    assert splits(seen) == [1] and not in_summands(seen)


def test_what_is_no_input_is_split_where_it_is_made() -> None:
    def fn(x: Any, w: Any, a: Any, b: Any) -> Any:
        return (x @ w + (x.to(a.dtype) @ a.sin()) @ b.cos()).to(x.dtype)

    some = rand(80, 64), rand(64, 96), rand(64, 16).float(), rand(16, 96).float()
    with torch.no_grad():
        seen = check(fn, tuple(t.detach() for t in some), budget=3.0)
    assert seen.fused("lora") == 1 and not splits(seen) and not in_summands(seen)


def graph_of(*shapes: tuple[int, int]) -> tuple[fx.Graph, list[fx.Node]]:
    """A graph of float32 inputs."""
    graph, found = fx.Graph(), []
    for i, shape in enumerate(shapes):
        node = graph.placeholder(f"p{i}")
        node.meta["val"] = torch.empty(shape, device="meta")
        found.append(node)
    return graph, found


def test_what_may_be_split_elsewhere() -> None:
    """Not what is written to, not what is large, not what is computed."""
    aten = torch.ops.aten
    graph, (kept, written, large) = graph_of((16, 64), (16, 64), (4096, 2048))

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = kept.meta["val"]
        return node

    turned = call(aten.permute.default, kept, [1, 0])
    turned.meta["val"] = kept.meta["val"].t()
    call(aten.copy_.default, call(aten.detach.default, written), kept)
    assert gather.takes(kept) and gather.takes(turned)
    assert not gather.takes(written) and not gather.takes(large)
    assert not gather.takes(call(aten.sin.default, kept))


@pytest.mark.parametrize(("layer", "length"), [(2, 24), (14, 14), (21, 21), (36, 18)])
def test_layers_share_a_kernel(layer: int, length: int) -> None:
    """Chunks repeat with the layers, though the last one lacks some matrices."""
    shapes = [(16, 64 + i) for i in range(layer)] * 16
    _, nodes = graph_of(*shapes[:-1])
    wanted = [gather._Wanted(node, 0, node, False, (3, 0, 0)) for node in nodes]
    chunks = list(gather._chunks(wanted))
    assert [w for chunk in chunks for w in chunk] == wanted
    assert {len(chunk) for chunk in chunks[:-1]} == {length}
    different = {tuple(w.kind for w in chunk) for chunk in chunks}
    assert len(different) <= -(-layer // length) + 1


def test_a_chunk_is_not_large() -> None:
    _, nodes = graph_of(*[(16, 65536)] * 12)
    wanted = [gather._Wanted(node, 0, node, False, (3, 0, 0)) for node in nodes]
    assert [len(chunk) for chunk in gather._chunks(wanted)] == [5, 5, 2]


def test_operation() -> None:
    """Its parts are those that products are made of."""
    matrices = [torch.randn(5, 6), torch.randn(6, 5).t(), torch.randn(4, 7), torch.randn(7, 4)]
    forms = [3, 2, 0, 0], [0, 0, 1, 0], [0, 0, 24, 24]
    three, two, along, across = LORA_SPLIT(matrices, *forms, BF16)
    assert torch.equal(three.float().sum(0), matrices[0])
    assert two.shape == (2, 5, 6) and (two.float().sum(0) - matrices[1]).abs().max() < 2**-15
    high, low, again, zeros = along.float().split([7, 7, 7, 3], dim=1)
    assert torch.equal(high, again) and not zeros.any() and (high + low - matrices[2]).abs().max() < 2**-14
    assert (high.abs() <= matrices[2].abs()).all()
    high, low, again, zeros = across.float().split([7, 7, 7, 3])
    assert torch.equal(high, again) and not zeros.any() and (high + low - matrices[3]).abs().max() < 2**-14
    with pytest.raises(ValueError, match="unknown form"):
        LORA_SPLIT(matrices[:1], [0], [0], [14], BF16)
    with pytest.raises(ValueError, match="float32"):
        LORA_SPLIT([torch.randn(4, 4).double()], [2], [0], [0], BF16)


def test_products_of_summands() -> None:
    """The operation takes summands in the place of a matrix."""
    x, b = torch.randn(80, 64).to(BF16), torch.randn(16, 64)
    (stack,) = LORA_SPLIT([b], [3], [0], [0], BF16)
    arguments = x, [stack.permute(0, 2, 1)], [0.5], [2.0], False, []
    for y, z in zip(NARROW_MM(*arguments), NARROW_MM(x, [b.t()], [0.5], [2.0], False, []), strict=True):
        assert torch.equal(y, z)
    with pytest.raises(ValueError, match="split into summands"):
        NARROW_MM(x, [stack.permute(0, 2, 1), b.t()], [0.5] * 2, [0.0] * 2, False, [])
    with pytest.raises(ValueError, match="dtype of x"):
        NARROW_MM(x.half(), [stack.permute(0, 2, 1)], [0.5], [0.0], False, [])
