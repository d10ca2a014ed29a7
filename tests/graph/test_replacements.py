"""What one function computes, by another one; and what such a function matches, the readers must match."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import inductor_fusions
from inductor_fusions import _inductor, config
from inductor_fusions.driver import matching, passes
from inductor_fusions.fusion import Fusion, Rejected
from inductor_fusions.fusions import gated_mlp, linear_epilogue, lora, product_diagonal
from tests.support.errors import assert_within_budget
from tests.support.graphs import traced

aten = torch.ops.aten


def applied(fusion: Fusion, fn: Callable[..., Any], *inputs: torch.Tensor) -> list[tuple[str, str]]:
    """Verdicts and reasons; the graph computes what it did, about as exactly."""
    module = traced(fn, *inputs)
    sites = passes.apply(fusion, module.graph)
    module.graph.lint()
    module.recompile()
    exact = fn(*(x.double() for x in inputs))
    assert_within_budget(module(*inputs)[0], fn(*inputs), exact)
    return [(site.verdict, site.reason) for site in sites]


# -- the diagonal of a product --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b: torch.diagonal(a @ b.t()),
        lambda a, b: torch.diag(a @ b.t()) + 1,
        lambda a, b: torch.trace(a @ b.t()),
        lambda a, b: torch.diagonal(
            torch.bmm(torch.stack([a, a]), torch.stack([b, b]).mT), dim1=-2, dim2=-1
        ),
    ],
)  # fmt: skip
def test_diagonal(fn: Any, dtype: torch.dtype) -> None:
    a, b = torch.randn(6, 8).to(dtype), torch.randn(6, 8).to(dtype)
    try:
        fn(a, b)
    except NotImplementedError:  # 2.11 has no trace of bfloat16
        pytest.skip("eager mode of this torch has no such operation")
    assert applied(product_diagonal.FUSION, fn, a, b) == [("fused", "")]


@pytest.mark.parametrize(("fn", "reason"), [
    (lambda a, b: torch.diagonal(a @ b.t()[:, :5]), "the product is not proved to be square"),
    (lambda a, b: (p := a @ b.t()).diagonal() + p.sum(), "at mm: expected 1 user(s), got 2: diagonal, sum_1"),
    (lambda a, b: torch.diagonal(a @ b.t(), 1), None),
    (lambda a, b: torch.diagonal(a + b), None),
])  # fmt: skip
def test_other_diagonals(fn: Any, reason: str | None) -> None:
    found = applied(product_diagonal.FUSION, fn, torch.randn(6, 8), torch.randn(6, 8))
    assert found == ([] if reason is None else [("rejected", reason)])


def test_without_a_diagonal_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both functions, which takes as long as a small graph; every match ends in a diagonal."""
    matcher = matching._Matcher.of(product_diagonal.FUSION).patterns.matcher
    assert set(matcher.patterns) == {("call_function", torch.ops.aten.diagonal.default)}
    monkeypatch.setattr(matching._Matcher, "of", None)
    graph = traced(lambda a, b: a @ b, torch.randn(6, 8), torch.randn(8, 6)).graph
    assert not list(matching.candidates(product_diagonal.FUSION, graph))


def test_diagonal_of_different_dtypes() -> None:
    """The product raises; fake tensors do not say so."""
    graph = traced(lambda a, b: torch.diagonal(a @ b), torch.randn(6, 8), torch.randn(8, 6).half()).graph
    (site,) = passes.apply(product_diagonal.FUSION, graph)
    assert site.reason == "the operands have different dtypes"


def test_diagonal_of_symbolic_size() -> None:
    torch._dynamo.reset()
    inductor_fusions.clear()
    with torch.no_grad():
        compiled = torch.compile(
            lambda a, b: torch.diag(a @ b.t()), backend=_inductor.passes_only(), dynamic=True
        )
        compiled(torch.randn(6, 8), torch.randn(6, 8))
    (site,) = inductor_fusions.report()
    assert (site.fusion, site.verdict, site.kernel) == ("product_diagonal", "fused", "dot_products")


# -- the driver -----------------------------------------------------------------------------------


def added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.relu(x + y)


def same(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.clamp_min(x + y, 0)


def by_functions(replace: Any = same, check: Any = lambda match: None, **options: Any) -> Fusion:
    fusion = Fusion("pair", "post_grad", "for tests")
    fusion.replacement(
        added, replace, inputs=lambda: [torch.empty(2, 3), torch.empty(2, 3)], check=check, **options
    )
    return fusion


X, Y = torch.randn(4, 5), torch.randn(4, 5)


def test_replaced() -> None:
    assert applied(by_functions(), lambda x, y: added(added(x, y), x), X, Y) == [("fused", "")] * 2


def test_undeclared_arguments_are_refused() -> None:
    """Before torch 2.15 its matcher drops them."""
    found = applied(by_functions(), lambda x, y: torch.relu(torch.add(x, y, alpha=3)), X, Y)
    assert found == [("rejected", "at add: the pattern has no alpha=3")]


def test_a_check_rejects() -> None:
    def refuse(match: Any) -> None:
        raise Rejected(f"no: {sorted(match.kwargs)}")

    assert applied(by_functions(check=refuse), added, X, Y) == [("rejected", "no: ['x', 'y']")]


def test_near_misses_name_the_node() -> None:
    def nearly(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x - y)

    assert applied(by_functions(), nearly, X, Y) == []
    wanted = by_functions(near=lambda: [aten.relu.default])
    assert applied(wanted, nearly, X, Y) == [("rejected", "at sub: expected aten.add.Tensor")]
    shared = "at add: expected 1 user(s), got 2: relu, mul"
    assert applied(by_functions(), lambda x, y: (s := x + y).relu() * s, X, Y) == [("rejected", shared)]
    assert applied(by_functions(near=list), lambda x, y: (s := x + y).relu() * s, X, Y) == []


@pytest.mark.parametrize("wrong", [lambda x, y: x.sum(), lambda x, y: (x + y).to(torch.float64)])
def test_another_kind_of_result_is_rejected(wrong: Any) -> None:
    ((verdict, reason),) = applied(by_functions(replace=wrong), added, X, Y)
    assert verdict == "rejected" and "the replacement returns" in reason


@pytest.mark.parametrize("where", ["search", "replace", "inputs"])
def test_a_trace_that_raises_leaves_the_graph(where: str, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def raising(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        raise ValueError("on purpose")

    fusion = Fusion("pair", "post_grad", "for tests")
    fusion.replacement(
        raising if where == "search" else added,
        raising if where == "replace" else same,
        inputs=(lambda: [raising(X, Y)])
        if where == "inputs"
        else lambda: [torch.empty(2, 3), torch.empty(2, 3)],
        check=lambda match: None,
    )
    with config.patch(strict=False):
        found = applied(fusion, added, X, Y)
    assert calls and found == ([("failed", "ValueError('on purpose')")] if where == "replace" else [])
    assert "on purpose" in caplog.text


def test_functions_belong_after_autograd() -> None:
    with pytest.raises(ValueError, match="post_grad"):
        Fusion("pair", "pre_grad", "").replacement(added, same, inputs=list, check=lambda match: None)


def test_tracing_counts_nothing() -> None:
    counters = _inductor.compile_counters()
    counters.clear()
    found = matching._Matcher(by_functions())
    assert found.searched and not any(counters["inductor"].values())


# -- search functions of what is read -------------------------------------------------------------


def linear(activation: Any) -> Any:
    return lambda x, w: activation(x @ w)


def gated(activation: Any) -> Any:
    return lambda x, w, v: activation(x @ w) * (x @ v)


def with_adapter(x: Any, w: Any, a: Any, b: Any) -> Any:
    return x @ w + 0.5 * ((x @ a) @ b)


W = [torch.randn(32, 48), torch.randn(32, 48), torch.randn(32, 4), torch.randn(4, 48)]
FORMS = [
    *((linear_epilogue.FUSION, linear(act), W[:1]) for act in (F.relu, torch.sigmoid, F.gelu, F.silu)),
    *((gated_mlp.FUSION, gated(act), W[:2]) for act in (F.relu, torch.sigmoid, F.gelu, F.silu)),
    (lora.FUSION, with_adapter, [W[0], *W[2:]]),
]


@pytest.mark.parametrize(("fusion", "search", "weights"), FORMS)
def test_readers_read_what_functions_match(fusion: Fusion, search: Any, weights: Any) -> None:
    """As a replacement the form is matched; the reader has a candidate that ends where the match does."""

    def twice(x: Any, *weights: Any) -> Any:
        return search(x.exp(), *weights) @ weights[0].t() + search(x, *weights).cos().sum()

    x = torch.randn(16, 32)
    names = "xabc"[: len(weights) + 1]
    same_arguments = eval(f"lambda {', '.join(names)}: search({', '.join(names)})", {"search": search})
    patterns = _inductor.Patterns("search")
    patterns.add_replacement(
        0, same_arguments, same_arguments, lambda: [torch.empty(*each.shape) for each in (x, *weights)],
        lambda match: True,
    )  # fmt: skip
    graph = traced(twice, x, *weights).graph
    wanted = {found.node for found in patterns.search(graph)}
    read: set[fx.Node] = set()
    for candidate in matching.candidates(fusion, graph):
        group = getattr(candidate, "group", [])
        read |= {getattr(candidate, "root", candidate.anchor), *(each.root for each in group)}
    assert len(wanted) == 2 and wanted <= read
