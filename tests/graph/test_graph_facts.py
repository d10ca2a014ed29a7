"""What is known of a graph while a fusion works on it: up to date, at a cost that grows with the graph."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

pytest.importorskip("triton")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import inductor_fusions
from inductor_fusions import _inductor
from inductor_fusions._inductor import graphs
from inductor_fusions.driver import passes
from inductor_fusions.graph import lifetimes
from inductor_fusions.graph.memory import Memory
from tests.support import passing

aten, prims = torch.ops.aten, torch.ops.prims
PACKAGE = str(Path(inductor_fusions.__file__).parent)


@pytest.mark.parametrize("case", passing.CASES)
def test_memory_is_kept_up_to_date(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """After each rewrite it is what one finds who looks at the whole graph again."""
    check = Memory.check
    compared = []

    def compare(self: Memory, products: Sequence[Any], position: fx.Node, *rest: Any) -> None:
        fresh = Memory(position.graph)
        assert self.intervals() == fresh.intervals()
        assert self.peak() == fresh.peak()
        compared.append(position)
        check(self, products, position, *rest)

    monkeypatch.setattr(Memory, "check", compare)
    passing.compile_case(case, 2, lambda call, graph: call(graph))
    assert len(compared) >= 4


@pytest.mark.parametrize("case", passing.CASES)
def test_what_is_remembered_is_up_to_date(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """After each site, what functions of nodes have returned is what they return now."""
    fuse = passes._fuse
    compared = 0

    def compare(*given: Any) -> Any:
        nonlocal compared
        found = fuse(*given)
        held = graphs._remembered.get()
        assert held is not None
        for read, known in held.results.items():
            for node, result in known.items():
                assert not _inductor.was_erased(node)
                assert read(node) == result
                compared += 1
        return found

    monkeypatch.setattr(passes, "_fuse", compare)
    passing.compile_case(case, 2, lambda call, graph: call(graph))
    assert compared > 1000


def calls(case: str, layers: int) -> list[int]:
    """How often functions of the package are called, for each graph of a case."""
    found: list[int] = []

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found[-1] += 1

    def run(call: Any, graph: fx.Graph) -> None:
        found.append(0)
        sys.setprofile(count)
        try:
            call(graph)
        finally:
            sys.setprofile(None)

    passing.compile_case(case, layers, run)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", passing.CASES)
def test_cost_is_linear(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many layers are about twice as many calls; they are four times as many if each site reads all.

    Through how many values that are in no memory a site looks is a constant. It is smaller here, so that four
    layers have as many: with 16, calls grow 2.65 times from 4 to 8 layers and 2.25 times from 16 to 32.
    """
    monkeypatch.setattr(lifetimes, "_DEPTH", 4)
    few, many = calls(case, 4), calls(case, 8)
    assert len(few) == len(many) >= 2
    for before, now in zip(few, many, strict=True):
        assert now < 2.3 * before


def layout(value: torch.Tensor, x: torch.Tensor) -> tuple[object, ...]:
    shared = value.untyped_storage()._cdata == x.untyped_storage()._cdata
    size = _inductor.hint(value.untyped_storage().nbytes())
    lies = tuple(value.shape), value.stride(), value.storage_offset(), size
    return *lies, value.dtype, value.device, shared, value.requires_grad


@pytest.mark.parametrize(("function", "args"), [
    (aten.permute.default, ([1, 0],)),
    (aten.reshape.default, ([2, -1, 4],)),
    (aten.slice.Tensor, (1, 2, 6)),
    (aten.view.dtype, (torch.int32,)),
    (aten.mul.Tensor, (2,)),
    (aten.split.Tensor, (3,)),
    (aten.detach.default, ()),
    (aten.add_.Tensor, (1,)),
    (prims.convert_element_type.default, (torch.bfloat16,)),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["dense", "transposed", "part", "symbolic"])
def test_fakes_of_calls_that_are_alike(
    function: torch._ops.OpOverload, args: tuple[object, ...], kind: str
) -> None:
    """A value that was not computed anew is what the call gives, in the memory of its own argument."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = _inductor.Fakes()

    def make() -> torch.Tensor:
        x = torch.empty(8, 8)
        x = x.t() if kind == "transposed" else torch.empty(9, 16)[1:, 4:12] if kind == "part" else x
        dim = DimDynamic.DYNAMIC if kind == "symbolic" else DimDynamic.STATIC
        return mode.from_tensor(x, symbolic_context=StatelessSymbolicContext([dim] * 2))

    seen = []
    for _ in range(3):
        x = make()
        found = fakes.call(mode, function, (x, *args), {})
        with torch.no_grad(), _inductor.computing_fakes(mode):
            wanted = function(x, *args)
        found, wanted = (y if isinstance(y, (list, tuple)) else [y] for y in (found, wanted))
        assert [str(layout(y, x)) for y in found] == [str(layout(y, x)) for y in wanted]
        assert not any(y is other for y in found for other in seen)
        seen += found
        with torch.no_grad(), mode:  # it can be computed with
            assert (found[0] + 1).shape == found[0].shape


def test_a_rename_is_no_change() -> None:
    """Who watches a graph is told of other inputs, and not of other names."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.relu.default, (x,))
    z = graph.call_function(aten.neg.default, (y,))
    graph.output(z)
    told: list[fx.Node] = []
    module = fx.GraphModule(torch.nn.Module(), graph)
    (_, y, z, _) = module.graph.nodes
    with _inductor.watching_nodes(module, told.append, told.append, lambda old, user: told.append(user)):
        _inductor.rename(y, "other")
        assert (y.name, told) == ("other", [])
        y.replace_all_uses_with(y.args[0])
    assert told == [z]
