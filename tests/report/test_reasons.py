"""Every reason of the closed list is reached, its page is the list, and guards say none beside it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

from inductor_fusions import config, explain, testing
from inductor_fusions.driver import passes
from inductor_fusions.fusion import Candidate, Fusion, LeftToStock, Rejected
from inductor_fusions.operands import check_kind
from inductor_fusions.reasons import Reason, Said, code_of, like, page
from inductor_fusions.sites import Site
from tests.support.modules import Module

ROOT = Path(__file__).resolve().parents[2]


def test_page_is_the_list() -> None:
    assert (ROOT / "docs" / "reasons.md").read_text() == page(), "write inductor_fusions.reasons.page() there"


def test_codes_are_distinct_and_plain() -> None:
    codes = [each.code for each in Reason]
    assert len(set(codes)) == len(codes) == len(Reason.__members__)
    assert all(code.replace("-", "").isalnum() and code.islower() for code in codes)


def test_text_carries_its_reason() -> None:
    said = Reason.DTYPE("a result of dtype float64")
    assert said == "a result of dtype float64" and isinstance(said, str) and said.reason is Reason.DTYPE
    assert Reason.DTYPE.rejected("x").code == Reason.DTYPE.left_to_stock("x", "y").code == "dtype"
    assert code_of(said) == "dtype" and Rejected(said).code == LeftToStock(said).code == "dtype"
    assert code_of(like(said, f"behind it: {said}")) == "dtype" and not isinstance(like("a", "b"), Said)
    assert code_of("in words alone") == Rejected("in words alone").code == "other"


# -- what the sources say --------------------------------------------------------------------------------

#: Where a lowering has no kernel after all, or a rule finds nothing to do: no site says so.
UNSAID = ("lowering.py", "decode.py", "split.py", "elements.py", "accumulate_kernel.py", "scope.py")


def raised() -> Iterator[tuple[Path, int, ast.expr]]:
    """The reason of every guard that is written out in the package."""
    for path in sorted((ROOT / "inductor_fusions").rglob("*.py")):
        if path.name not in UNSAID:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Rejected", "LeftToStock"):
                    yield path, node.lineno, node.args[0]
                elif isinstance(node, ast.Attribute) and node.attr in ("rejected", "left_to_stock"):
                    yield path, node.lineno, node.value


def test_every_guard_names_one() -> None:
    seen = list(raised())
    assert len(seen) > 200
    bare = [f"{p.name}:{line}" for p, line, x in seen if isinstance(x, (ast.Constant, ast.JoinedStr))]
    assert not bare, f"a reason without a code: {bare}"


# -- each of them, reached -------------------------------------------------------------------------------


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def qkv(*shape: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(*(shape or (2, 3, 8, 16))) for _ in range(3))


def before(fn: Callable[..., Any], *args: Any, **options: Any) -> list[Site]:
    """The sites of a function on a CPU, before autograd and after it."""
    return testing.capture(fn, *args, backend=testing.EAGER_AFTER_PASSES, **options).sites


def after(fn: Callable[..., Any], *args: Any, **options: Any) -> list[Site]:
    """The sites of a function on what seems to be a GPU, after autograd."""
    from tests.block_mm import support  # skips where there is no Triton

    found: list[Site] = support.run(fn, args, **options).sites
    return found


def attention(between: Callable[[Any], Any] = lambda s: s, behind: Callable[[Any], Any] = lambda w: w) -> Any:
    """Attention with something in front of the softmax and behind it."""
    return lambda q, k, v: behind(torch.softmax(between(q @ k.mT * 0.25), -1)) @ v


def after_on_cpu(fn: Callable[..., Any], *args: Any) -> list[Site]:
    return explain(fn, *args).sites


def adapted(x: Any, w: Any, a: Any, b: Any) -> Any:
    return F.linear(x, w) + F.linear(F.linear(x, a), b)


def operands(dtype: torch.dtype = torch.bfloat16, **sizes: int) -> tuple[torch.Tensor, ...]:
    m, k, n, r = (sizes.get(name, size) for name, size in (("m", 32), ("k", 64), ("n", 96), ("r", 8)))
    return tuple(rand(*shape, dtype=dtype) for shape in ((m, k), (n, k), (r, k), (n, r)))


def linears(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [rand(*shape, dtype=dtype) for shape in ((32, 64), (96, 64), (96, 64))]


def two(x: Any, w: Any, v: Any) -> Any:
    return F.linear(x, w), F.linear(x, v)


class Always(Candidate):
    """A site of another package, which gives its reason in words alone."""

    def __init__(self, anchor: Any) -> None:
        self.anchor = anchor

    def guard(self) -> None:
        raise Rejected("in words alone")

    def rewrite(self) -> str:
        raise AssertionError("is never fused")


def foreign(kind: type[Always]) -> list[Site]:
    found = Fusion("foreign", "pre_grad", "nothing")
    found.anchor(lambda: [torch.relu])(lambda scope, match: kind(match.output_node()))
    traced = torch.fx.symbolic_trace(lambda x: torch.relu(x))
    return passes.apply(found, traced.graph)


def raising() -> list[Site]:
    class Raises(Always):
        def guard(self) -> None:
            raise ZeroDivisionError

    with config.patch(strict=False):
        return foreign(Raises)


def packed(x: Any, w: Any) -> Any:
    gate, up = F.linear(x, w).chunk(2, -1)
    return F.silu(gate) * up


def embedded() -> nn.Module:
    """An embedding with an adapter."""
    parts = {"base": nn.Embedding(32, 64), "a": nn.Embedding(32, 8), "b": nn.Linear(8, 64, bias=False)}
    return Module(lambda net, i: net.base(i) + net.b(net.a(i)), parts)


def overwritten(q: Any, k: Any, v: Any) -> Any:
    scores = q @ k.mT
    q.mul_(2)
    return torch.softmax(scores, -1) @ v


def off_between(q: Any, k: Any, v: Any) -> Any:
    scores = q @ k.mT
    with torch.no_grad():
        weights = torch.softmax(scores, -1)
    return weights @ v


def tangent(q: Any, k: Any, v: Any) -> Any:
    return torch.func.jvp(lambda x: attention()(x, k, v), (q,), (k,))


def pairs(t: Any) -> Any:
    i, j = torch.tril_indices(8, 8, -1)
    return torch.bmm(t, t.mT)[:, i, j]


def by_numbers(q: Any, k: Any, v: Any) -> Any:
    scores = torch.einsum(q, [0, 1, 2, 3], k, [0, 1, 4, 3], [0, 1, 2, 4])
    return torch.softmax(scores, -1) @ v


def late(x: Any, w: Any, v: Any) -> Any:
    first = F.linear(x, w)
    return F.linear(x, v * first.sum()), first


def large(x: Any, *weights: Any) -> Any:
    return sum(((x @ w).float().exp().sum(-1) @ torch.ones(256, 1)) for w in weights)


def sunk(q: Any, k: Any, v: Any) -> Any:
    scores = torch.cat((q @ k.mT, q[..., :2]), -1)
    return torch.softmax(scores, -1)[..., :-2] @ v


def dropped(x: Any, w: Any, a: Any, b: Any) -> Any:
    return F.linear(x, w) + F.linear(F.linear(F.dropout(x, 0.5), a), b)


def drawn_as_eager() -> list[Site]:
    from torch._inductor import config as inductor_config

    x, w, a, b = operands()
    with inductor_config.patch(fallback_random=True):
        return before(dropped, x, w, a.requires_grad_(), b.requires_grad_(), train=True)


def strict_bits() -> list[Site]:
    from inductor_fusions import _inductor

    asked = mock.Mock(wraps=_inductor.loading.inductor_config(), numerics="strict")
    with mock.patch.object(_inductor.loading, "inductor_config", lambda: asked):
        return before(attention(), *qkv())


def packaged() -> list[Site]:
    from inductor_fusions.graph import builder

    with mock.patch.object(builder, "makes_a_package", lambda: True):
        labels = torch.arange(4)
        return before(lambda x, w: F.cross_entropy(F.linear(x, w), labels), rand(4, 8), rand(16, 8))


def none_wanted() -> list[Site]:
    with config.patch(max="0"):
        return before(attention(), *qkv())


def stock_for_empty_rows() -> list[Site]:
    def fn(q: Any, k: Any, v: Any, hidden: Any) -> Any:
        return torch.softmax((q @ k.mT).masked_fill(hidden, -1e9), -1) @ v

    args = [t.requires_grad_() for t in qkv()]
    with config.patch(empty_rows="stock"):
        return before(fn, *args, torch.zeros(8, 8, dtype=torch.bool), train=True)


def nearly() -> list[Site]:
    from tests.graph.test_replacements import X, Y, by_functions

    fusion = by_functions(near=lambda: [torch.ops.aten.relu.default])
    traced = make_fx(lambda x, y: torch.relu(x - y), tracing_mode="fake")(X, Y)
    return passes.apply(fusion, traced.graph)


def gathered_once() -> list[Site]:
    from tests.graph.test_stored_indices import buckets

    def fn(x: torch.Tensor) -> Any:
        i = torch.arange(40)
        index = buckets(i[:, None] - i[None, :]).clamp(0, 15)
        return x[index.flatten()] + 1, x[index.flatten()] * 2

    return explain(fn, torch.randn(16)).sites


#: What each reason is reached by: sites, or a guard that raises.
REACHED: dict[Reason, Callable[[], list[Site] | None]] = {
    Reason.DEVICE: lambda: after_on_cpu(two, *linears()),
    Reason.DTYPE: lambda: after(two, *linears(torch.float64)),
    Reason.MIXED_DTYPES: lambda: after(
        lambda x, w, a, b: F.linear(x, w) + F.linear(F.linear(x.float(), a), b).half(),
        *operands(torch.float16)[:2], *operands(torch.float32)[2:],
    ),
    Reason.TF32: lambda: after(two, *linears(torch.float32)),
    Reason.LAYOUT: lambda: after(two, rand(32, 63), rand(96, 63), rand(96, 63)),
    Reason.SHAPES: lambda: after(
        lambda x, w, y: torch.sigmoid(F.linear(x, w) + y), rand(32, 64), rand(96, 64), rand(2, 32, 96)
    ),
    Reason.SYMBOLIC: lambda: before(pairs, rand(4, 8, 16), dynamic=True),
    Reason.EMPTY: lambda: before(attention(), *qkv(2, 3, 0, 16)),
    Reason.LIMIT: lambda: after(
        lambda x, w, *ab: F.linear(x, w) + sum(F.linear(F.linear(x, a), b) for a, b in ab),
        *operands()[:2], *(operands()[2:] for _ in range(16)),
    ),
    Reason.NOT_A_TENSOR: lambda: before(by_numbers, *qkv()),
    Reason.USED_ELSEWHERE: lambda: before(
        lambda q, k, v: ((s := q @ k.mT).softmax(-1) @ v, s.exp()), *qkv()
    ),
    Reason.OVERWRITTEN: lambda: before(overwritten, *qkv()),
    Reason.MODE: lambda: before(off_between, *(t.requires_grad_() for t in qkv()), train=True),
    Reason.TRANSFORM: lambda: before(tangent, *qkv()),
    Reason.SUBCLASS: lambda: check_kind(TwoTensor(torch.ones(2), torch.ones(2))),
    Reason.ORDER: lambda: after(late, *linears()),
    Reason.MEMORY: lambda: after(large, rand(256, 64), *(rand(64, 512) for _ in range(4))),
    Reason.ROUNDED: lambda: before(attention(behind=lambda w: w.half().float()), *qkv()),
    Reason.RANGE: lambda: before(attention(lambda s: s + 1e30), *qkv()),
    Reason.NOT_MEASURED: lambda: after(adapted, *operands(), policy="profitable"),
    Reason.NOT_FASTER: lambda: after(packed, rand(256, 64), rand(192, 64), policy="profitable"),
    Reason.EAGER_BITS: strict_bits,
    Reason.PACKAGE: packaged,
    Reason.LEFT_OUT: none_wanted,
    Reason.RAISED: raising,
    Reason.NEAR_MISS: nearly,
    Reason.OTHER: lambda: foreign(Always),
    Reason.NO_PRODUCT: lambda: before(lambda q, k, v: torch.softmax(q, -1) @ v.mT, *qkv()),
    Reason.IN_BETWEEN: lambda: before(attention(lambda s: s.cumsum(-1)), *qkv()),
    Reason.MASK: lambda: before(attention(lambda s: torch.where(s.isnan(), s, s)), *qkv()),
    Reason.SCALE: lambda: before(attention(lambda s: s.div(torch.ones(8), rounding_mode="floor")), *qkv()),
    Reason.SINK: lambda: before(sunk, *qkv()),
    Reason.WEIGHTS: lambda: before(lambda q, k, v: ((w := (q @ k.mT).softmax(-1)) @ v, w), *qkv()),
    Reason.DROPOUT: lambda: before(attention(lambda s: F.dropout(s, 0.5)), *qkv()),
    Reason.RANDOM: drawn_as_eager,
    Reason.EMPTY_ROWS: stock_for_empty_rows,
    Reason.NO_KERNEL: lambda: before(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.eye(8)), *qkv(3, 8, 16)
    ),
    Reason.CHOSEN: lambda: before(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), *qkv()),
    Reason.NO_BASE: lambda: after(lambda x, w, a, b: F.linear(F.linear(x, a), b), *operands()),
    Reason.NO_MATRIX: lambda: after(embedded().bfloat16(), torch.arange(16)),
    Reason.BEHIND_ADAPTER: lambda: after(
        lambda x, w, a, b: F.linear(x, w) + F.linear(F.linear(x, a), b) * (x[:, :1] * w[:, 0]), *operands()
    ),
    Reason.MERGED: lambda: before(lambda x, w, a, b: F.linear(x, w + (b @ a).tanh() * (b @ a)), *operands()),
    Reason.TERMS: lambda: after(
        lambda x, w, a, b: F.linear(x, w) + F.linear(F.linear(x, a), b) * w[0, 0] * w[0, 1], *operands()
    ),
    Reason.INPUTS: lambda: after(
        lambda x, y, w: F.silu(F.linear(x, w)) * F.linear(y, w), rand(32, 64), rand(32, 64), rand(96, 64)
    ),
    Reason.ACTIVATION: lambda: after(
        lambda x, w, v: F.silu(F.linear(x, w)) * F.linear(x, v).clamp(-7, 7),
        *(rand(rows, 64) for rows in (32, 96, 96)),
    ),
    Reason.NORM: lambda: after(
        lambda x, w: F.linear(F.layer_norm(x, (64,)), w), rand(1, 64), rand(96, 64)
    ),
    Reason.PAIRS: lambda: before(lambda t: torch.bmm(t, t.mT).flatten(1), rand(4, 8, 16)),
    Reason.OUTER_PRODUCT: lambda: before(
        lambda u, v, w: F.linear(torch.einsum("sbi,scj->bcij", u, v).flatten(2), w),
        rand(3, 5, 8), rand(3, 6, 4), rand(16, 32),
    ),
    Reason.GATHERED: gathered_once,
    Reason.LOSS: lambda: before(lambda x, i: F.cross_entropy(x.exp(), i), rand(4, 8), torch.arange(4)),
}  # fmt: skip


def test_each_has_a_case() -> None:
    assert set(REACHED) == set(Reason)


@pytest.mark.parametrize("reason", Reason, ids=lambda reason: reason.code)
def test_reached(reason: Reason) -> None:
    try:
        sites = REACHED[reason]()
    except Rejected as miss:
        assert miss.code == reason.code
        return
    found = {site.code: site.reason for site in sites or () if site.verdict != "fused"}
    assert reason.code in found, found
    assert type(found[reason.code]) is str and all(
        site.verdict != "fused" or not site.code for site in sites or ()
    )
