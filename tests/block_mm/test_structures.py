"""Whatever the structure of a grouped GEMM, its kernel compiles to machine code and fits into shared memory.

What Triton refuses would break the compile of a user, and what it refuses depends on the structure: on
layouts, scales, how many steps K has, and on what the scheduler fuses behind the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

import torch._inductor.config

from devtools import cuda_codegen
from inductor_fusions import config
from inductor_fusions.block_mm import configurations, heuristics
from inductor_fusions.block_mm.configurations import Config
from inductor_fusions.block_mm.op import ACTIVATIONS, BLOCK_MM
from inductor_fusions.block_mm.problem import Problem

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LAYOUTS = ("nn", "nt", "tn", "tt")
#: What is computed from each output, and two tensors of its size, behind the kernel.
TAILS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "": lambda y, u, v: (y,),
    "bfloat16": lambda y, u, v: (y.relu().bfloat16(),),
    "float32": lambda y, u, v: (y.float(),),
    "float64": lambda y, u, v: (y.double(),),
    "both": lambda y, u, v: (y, y.float() * 2),
    "three": lambda y, u, v: (y.relu(), y.float(), y > 0),
    "added": lambda y, u, v: (y + u * v,),
    "columns": lambda y, u, v: (y + u.sum(0), y * u.sum(0)),
    "gated pair's gradient": lambda y, u, v: (
        y * torch.nn.functional.silu(u), torch.ops.aten.silu_backward(y * v, u)
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """A grouped GEMM and what is around it.

    Attributes:
        posed: sizes, groups and layouts; where `shared` is "a" or "b", the first products of all groups
            have that operand in common.
        scales: of each product.
        later: dtype of the products after the first of each group.
        biases: group -> (whether it has rows, dtype).
        activations: of each group.
        output: dtype of the outputs.
        tail: a key of `TAILS`.
        symbolic: whether the rows are symbolic.
        arch: 80, 90 or 100.
        chosen: which of the candidates, as a part of 1, the configuration, or what chooses it; None: the
            default one.
        norm: whether an RMSNorm with a vector is in front.
    """

    posed: Problem
    scales: tuple[float, ...] = ()
    later: torch.dtype | None = None
    biases: dict[int, tuple[bool, torch.dtype]] = field(default_factory=dict)
    activations: tuple[str, ...] = ()
    output: torch.dtype = BF16
    tail: str = ""
    symbolic: bool = False
    arch: int = 90
    chosen: float | Config | Callable[..., Config] | None = None
    norm: bool = False


def check(drawn: Drawn) -> None:
    """Its kernel compiles and can be launched. Registers may spill: that is slow, but it runs."""
    text = source(drawn)
    if text is not None:
        (found,) = cuda_codegen.compile_kernel(text, drawn.arch)
        assert found.shared_bytes <= found.shared_limit, str(found)


def source(drawn: Drawn) -> str | None:
    """The Triton code of its kernel and of what is fused behind it; None where there is no kernel for it."""
    found = [kernel.source for kernel in kernels(drawn) if kernel.is_template]
    assert len(found) <= 1
    return found[0] if found else None


def kernels(drawn: Drawn) -> list[cuda_codegen.Kernel]:
    """All kernels of its code."""
    posed, a, b = drawn.posed, [], []
    for p, group in enumerate(posed.groups):
        first = p == 0 or posed.groups[p - 1] != group
        m, k, n = posed.rows[group], posed.inner[p], posed.columns[group]
        assert m is not None and k is not None
        dtype = posed.dtype if first or drawn.later is None else drawn.later
        left, right = posed.layouts[p]
        a.append(a[0] if p and first and posed.shared == "a" else _matrix(m, k, left, dtype))
        b.append(b[0] if p and first and posed.shared == "b" else _matrix(k, n, right, dtype))
        if drawn.symbolic and m > 1:
            torch._dynamo.maybe_mark_dynamic(a[-1], 0)
    bias = {
        group: torch.empty((posed.rows[group] or 0, posed.columns[group])[not rows :], dtype=dtype)
        for group, (rows, dtype) in drawn.biases.items()
    }
    count = len(posed.rows)
    others = [
        [torch.empty(m or 0, n, dtype=drawn.output) for _ in range(2)]
        for m, n in zip(posed.rows, posed.columns, strict=True)
    ]
    if drawn.symbolic:
        for other in (other for pair in others for other in pair if other.shape[0] > 1):
            torch._dynamo.maybe_mark_dynamic(other, 0)
    scales = list(drawn.scales or [1.0] * len(a))
    activations = ",".join(drawn.activations or [""] * count)

    gain = torch.empty(posed.inner[0] or 0, dtype=posed.dtype) if drawn.norm else None

    def fn(a: Any, b: Any, bias: Any, gain: Any, others: Any) -> Any:
        offsets, groups = list(bias.values()), list(posed.groups)
        plain = a, b, offsets, list(bias), groups, scales, activations, posed.gated, drawn.output, ""
        made = BLOCK_MM(*plain, 0, 1e-5 if drawn.norm else None, gain, 1.0)
        return [TAILS[drawn.tail](y, *pair) for y, pair in zip(made, others, strict=False)]

    def choose(problem: Problem, device: torch.device, tokens: int | None) -> Config:
        if callable(drawn.chosen):
            return drawn.chosen(problem, device, tokens)
        if drawn.chosen is None or isinstance(drawn.chosen, Config):
            return drawn.chosen or configurations.default(problem, drawn.arch)
        options = configurations.candidates(problem, drawn.arch)
        return options[int(drawn.chosen * len(options))]

    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), config.patch(policy="always", strict=True):
        patch.setattr(heuristics, "choose", choose)
        made = cuda_codegen.generate(fn, (a, b, bias, gain, others), run=False, arch=drawn.arch)
    return made.kernels


def _matrix(rows: int, columns: int, letter: str, dtype: torch.dtype) -> torch.Tensor:
    made = torch.empty((rows, columns) if letter == "n" else (columns, rows), dtype=dtype)
    return made if letter == "n" else made.t()


# -- what was found ----------------------------------------------------------------------------------------


def groups(
    count: int, inner: tuple[int, ...], layouts: tuple[str, ...], rows: int = 4096, shared: str = "a"
) -> Problem:
    """Groups of products of these K and layouts, in bfloat16."""
    columns = (1024, 256, 512)[:count]
    owners = tuple(group for group in range(count) for _ in inner)
    return Problem((rows,) * count, columns, inner * count, owners, layouts * count, BF16, False, shared)


def pair(shared: str) -> Problem:
    """A gated pair."""
    return Problem((4096,) * 2, (2048,) * 2, (2048,) * 2, (0, 1), ("nt",) * 2, BF16, True, shared)


WIDE, TWO_EACH = Config("persistent", 128, 256, 64, 8, 3), Config("persistent", 128, 128, 64, 4, 3, 8, 1, 2)

FOUND = {
    # Triton fails on a loop over the tiles of all groups where something is behind the loop over K.
    "scaled": Drawn(groups(2, (2048,), ("nt",)), (2.0,) * 2),
    "scaled, one input each": Drawn(groups(3, (136,), ("tn",), shared=""), (2.0,) * 3),
    "scaled adapters": Drawn(groups(2, (2048, 16), ("nt", "nt")), (1.0, 2.0) * 2),
    "all scaled": Drawn(groups(2, (2048, 128), ("nn", "nn")), (2.0,) * 4),
    "adapters of float32": Drawn(groups(2, (1024, 16), ("nt", "nt")), later=FP32),
    "bias on Blackwell": Drawn(groups(3, (280,), ("nn",), 100), biases={1: (False, FP32)}, arch=100),
    "adapter on Blackwell": Drawn(groups(1, (256, 16), ("tt", "tn"), 512), output=FP32, arch=100),
    # Shared memory: the tiles of several products are under way, or what is stored is wide.
    "short products": Drawn(groups(2, (32, 16, 48), ("nt", "tn", "tn")), tail="float32"),
    "many short products": Drawn(groups(1, (48, 32, 16, 16, 48, 24), ("nn", "nt") * 3, 70)),
    "one step on Blackwell": Drawn(groups(1, (56,), ("nt",)), biases={0: (True, FP32)}, arch=100),
    "wider adapters of float32": Drawn(groups(3, (1024, 32), ("nn", "nn"), 300), later=FP32),
    **{
        f"{tail}, {each.block_n} columns": Drawn(groups(1, (768,), ("nt",)), tail=tail, chosen=each)
        for tail in ("float32", "float64", "both", "three")
        for each in (WIDE, TWO_EACH)
    },
    "gated sums": Drawn(
        Problem((65,) * 2, (8,) * 2, (8, 8, 128) * 2, (0,) * 3 + (1,) * 3, ("nn",) * 6, BF16, True, "a"),
        chosen=0.6875,
    ),
    "gated float32": Drawn(pair(""), output=FP32),
    "gated, stored as float32": Drawn(pair(""), tail="float32", chosen=replace(WIDE, block_n=128)),
}


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    assert source(FOUND[name]) is not None
    check(FOUND[name])


@pytest.mark.parametrize(
    ("tail", "parts"),
    [
        ("", 1), ("bfloat16", 1), ("float32", 2), ("both", 2), ("float64", 4), ("added", 1), ("columns", 1),
        ("gated pair's gradient", 4),
    ],
)  # fmt: skip
def test_parts(tail: str, parts: int) -> None:
    """A tile is stored in more parts than was measured only where wider elements, or many, are stored."""
    text = source(Drawn(groups(1, (768,), ("nt",)), tail=tail, chosen=WIDE))
    assert text is not None and f" SUBTILES : tl.constexpr = {parts}\n" in text


@pytest.mark.parametrize("tile", [WIDE, TWO_EACH], ids=["one", "two for each multiprocessor"])
def test_gradient_of_a_gated_pair_behind(tile: Config) -> None:
    """Two tensors that are read and two that are stored leave a thread without spills."""
    text = source(Drawn(groups(1, (768,), ("nt",)), tail="gated pair's gradient", chosen=tile))
    assert text is not None
    (found,) = cuda_codegen.compile_kernel(text, 90)
    assert found.fits, str(found)


# -- random structures -------------------------------------------------------------------------------------


@st.composite
def drawn_structures(draw: Any) -> Drawn:
    """Of one to six groups with one to eight products in all, or one for each."""
    dtype = draw(st.sampled_from([BF16, BF16, FP16, FP32]))
    gated = draw(st.integers(0, 5)) == 5
    count = 2 if gated else draw(st.integers(1, 6))
    each = draw(st.integers(1, max(1, 8 // count)))
    eights = st.one_of(
        st.sampled_from([8, 16, 64, 128, 1024, 4096, 8192]), st.integers(1, 1024).map(lambda n: 8 * n)
    )
    shared = draw(st.sampled_from(["a", "b", ""]))
    m, n = draw(st.one_of(st.integers(1, 128), eights)), draw(eights)
    same_rows, same_columns = gated or shared == "a", gated or shared == "b"
    rows = tuple(m if same_rows or not g else draw(st.sampled_from([m, 16, 4096])) for g in range(count))
    columns = tuple(n if same_columns or not g else draw(eights) for g in range(count))
    alike = draw(st.booleans()) or gated
    first = draw(eights)
    once = [
        (first if i == 0 else draw(st.sampled_from([8, 16, 64, 128, 2048])), draw(st.sampled_from(LAYOUTS)))
        for i in range(each)
    ]
    products = []
    for _ in range(count):
        for i, (k, layout) in enumerate(once):
            if not alike and not (shared and i == 0):
                k, layout = draw(eights), draw(st.sampled_from(LAYOUTS))
            products.append((k, layout))
    owners = tuple(group for group in range(count) for _ in range(each))
    inner, layouts = zip(*products, strict=True)
    posed = Problem(rows, columns, inner, owners, layouts, dtype, gated, shared)
    small = all(k <= 32 for p, (k, _) in enumerate(products) if p % each)
    return Drawn(
        posed,
        scales=tuple(draw(st.sampled_from([1.0, 1.0, 2.0])) for _ in products),
        later=FP32 if small and each > 1 and draw(st.booleans()) else None,
        biases={
            g: (draw(st.booleans()), draw(st.sampled_from([dtype, FP32])))
            for g in range(count)
            if draw(st.integers(0, 3)) == 3
        },
        activations=tuple(draw(st.sampled_from(["", "", *ACTIVATIONS])) for _ in range(count)),
        output=draw(st.sampled_from([dtype, dtype, FP32])),
        tail=draw(st.sampled_from(["", "", *TAILS])),
        symbolic=draw(st.integers(0, 3)) == 3,
        arch=draw(st.sampled_from([90, 90, 90, 80, 100])),
        chosen=draw(st.one_of(st.none(), st.floats(0, 1, exclude_max=True))),
    )


@pytest.mark.slow
@pytest.mark.parametrize("examples", [8, pytest.param(1000, marks=pytest.mark.long)])
def test_any_structure(examples: int) -> None:
    settings(max_examples=examples, suppress_health_check=list(HealthCheck))(
        given(drawn_structures())(check)
    )()
