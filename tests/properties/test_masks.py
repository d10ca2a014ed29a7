"""What holds of every mask that is a predicate: numbers, symbolic sizes, blocks, code for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from inductor_fusions import config, testing
from tests.attention.support import capture, check, code_for_a_gpu, flex_everywhere, qkv
from tests.cases.masks import (
    CASES,
    HEADS,
    NO_WINDOWS,
    Case,
    heads_of_projections,
    projections,
    segments,
    written,
)
from tests.support.arguments import named


def of(choice: Any) -> pytest.MarkDecorator:
    """One test for each case that `choice` takes."""
    found = {name: case for name, case in CASES.items() if choice(case)}
    return pytest.mark.parametrize("case", list(found.values()), ids=list(found))


def kind_of(seen: testing.Checked) -> str:
    """The class in the name of the only kernel."""
    (site,) = seen.sites
    return site.kernel.partition("block mask: ")[2].partition(",")[0]


@of(lambda case: True)
def test_numbers(case: Case) -> None:
    """Forward and gradients are those of the unfused graph, fully masked rows included."""
    inputs = (*qkv(case.length, case.length, heads=HEADS), segments(2, case.length))
    with flex_everywhere("flex"):
        seen = check(case.fn, inputs, kernel="flex")
    assert kind_of(seen) == case.kind


@of(lambda case: case.generated)
def test_lower_dtype(case: Case) -> None:
    """The fill is the lowest number of the dtype; the class is the same."""
    inputs = (*qkv(case.length, case.length, heads=HEADS), segments(2, case.length))
    with flex_everywhere("flex"):
        check(case.fn, inputs, kernel=case.kernel, dtype=torch.bfloat16)


def symbolic() -> Iterator[Any]:
    """Cases; those of which code is made are trained, and run in inference in long runs alone."""
    for name, case in CASES.items():
        for train in (False, True) if case.generated else (False,) if case.symbolic else ():
            marks = [pytest.mark.long] if case.generated and not train else []
            yield pytest.param(case, train, id=f"{name}-{'training' if train else 'inference'}", marks=marks)


@pytest.mark.parametrize(("case", "train"), list(symbolic()))
def test_symbolic_sizes(case: Case, train: bool) -> None:
    """The class is the same, and the numbers are right, with a symbolic batch and length."""
    inputs = projections(3, 200, grad=train)
    with flex_everywhere("flex"):
        seen = check(heads_of_projections(case.fn), inputs, kernel="flex", train=train, dynamic=True)
    assert kind_of(seen) == case.kind


@pytest.mark.parametrize("name", NO_WINDOWS)
def test_no_window(name: str) -> None:
    """What only looks like one is left to the mask."""
    fn = written(lambda data, n: NO_WINDOWS[name](n), "fill")
    with flex_everywhere("flex"):
        seen = check(fn, (*qkv(300, 300, batch=1, heads=1), segments(1, 300)))
    assert "window" not in seen.sites[0].kernel


#: Of these, symbolic sizes are for long runs: their masks and scores are put together as those of others.
LIKE_OTHERS = (
    "blocks, fill", "chunks", "softcap", "softcap and padding", "alibi", "alibi of merged heads",
)  # fmt: skip


def with_sizes() -> Iterator[Any]:
    """Each class with sizes that are numbers, and with symbolic ones."""
    for name, case in CASES.items():
        if case.generated:
            yield pytest.param(case, False, id=f"{name}-numbers")
            marks = [pytest.mark.long] if name in LIKE_OTHERS else []
            yield pytest.param(case, True, id=f"{name}-symbols", marks=marks)


@pytest.mark.parametrize(("case", "dynamic"), list(with_sizes()))
def test_no_buffer_of_pairs(case: Case, dynamic: bool) -> None:
    """Compiled for a GPU, forward and backward, nothing as large as (queries, keys) is allocated."""
    length = 640
    with flex_everywhere("flex"), config.patch(strict=True):
        code = code_for_a_gpu(
            heads_of_projections(case.fn), projections(2, length, dtype=torch.float16),
            train=True, dynamic=dynamic,
        )  # fmt: skip
    assert [module.is_backward for module in code.modules] == [False, True]
    for module in code.modules:
        assert any(kernel.is_template and "flex_attention" in kernel.name for kernel in module.kernels)
        if not dynamic:
            assert max(module.buffers) < length * length
        for shape in module.shapes:
            symbols = [size for size in shape if size.isidentifier()]
            assert len(set(symbols)) == len(symbols), shape


@of(lambda case: case.generated)
def test_inference_is_lowered(case: Case) -> None:
    """Compiled for a GPU without a backward, where what leads to a mask or a bias is in the same graph.

    Of two layers: the second reads what the first has put into memory.
    """
    attention = heads_of_projections(case.fn)

    def layers(q: Any, k: Any, v: Any, data: Any) -> Any:
        return attention(attention(q, k, v, data), k, v, data)

    inputs = projections(2, 640, dtype=torch.float16, grad=False)
    with flex_everywhere("flex"), config.patch(strict=True):
        code = code_for_a_gpu(layers, inputs)
    assert len([name for name in code.forward.launches if "flex_attention" in name]) == 2


#: Documents with numbers whose differences no int32 holds.
FAR_APART = Case(
    written(lambda data, n: data[:, None, :, None] >= data[:, None, None, :], "fill"), "", 300,
    shown=lambda data, n: data[:, None, :, None] >= data[:, None, None, :],
)  # fmt: skip
SHOWN = {name: case for name, case in CASES.items() if case.shown} | {"far apart": FAR_APART}


@pytest.mark.parametrize("name", SHOWN)
def test_blocks(name: str) -> None:
    """What the intervals say is true: an empty block holds no visible pair, a full one no hidden pair."""
    case, batch, length = SHOWN[name], 2, 300
    data = segments(batch, length)
    data = (data.int() - 2) * (2**30 - 1) if name == "far apart" else data
    with flex_everywhere("flex"):
        run = capture(case.fn, *qkv(length, length, heads=HEADS), data, policy="always", train=True)
    (call,) = run.calls("flex_attention")
    wanted = [node for node in named(call).block_mask if isinstance(node, torch.fx.Node)][:8]
    values = evaluate(call.graph, wanted, data)
    assert case.shown is not None
    seen = torch.nn.functional.pad(case.shown(data, length).expand(batch, 1, length, length), (0, 84, 0, 84))
    # (batch, 1, blocks, blocks, 128, 128)
    seen = seen.unflatten(2, (3, 128)).unflatten(4, (3, 128)).transpose(3, 4)
    some, everything = seen.any(-1).any(-1), seen.all(-1).all(-1)
    for first, transpose in ((0, False), (4, True)):
        partial, full = (ordered(*values[i : i + 2]) for i in (first, first + 2))
        if transpose:
            partial, full = partial.mT, full.mT
        partial, full = (t.expand(batch, 1, 3, 3) for t in (partial, full))
        assert not (partial & full).any()
        assert (full <= everything).all()  # a full block hides nothing
        assert (some <= (partial | full)).all()  # an empty block holds nothing
    assert (partial | full).float().mean() < 0.95 or case.kind == "blocks"


def ordered(count: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The blocks listed, as a boolean matrix."""
    listed = torch.arange(order.shape[-1]) < count[..., None]
    return torch.zeros(order.shape, dtype=torch.bool).scatter(-1, order.long(), listed)


def evaluate(graph: torch.fx.Graph, wanted: list[torch.fx.Node], data: torch.Tensor) -> list[torch.Tensor]:
    """Values of some nodes, which depend on `data` alone among the inputs of the graph."""
    copied = torch.fx.Graph()
    mapping: dict[torch.fx.Node, torch.fx.Node] = {}
    needed = set(wanted)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    for node in graph.nodes:
        if node in needed:
            mapping[node] = copied.node_copy(node, lambda n: mapping[n])
    copied.output(tuple(mapping[node] for node in wanted))
    module = torch.fx.GraphModule(graph.owning_module, copied)
    return list(module(*[data for node in copied.nodes if node.op == "placeholder"]))
