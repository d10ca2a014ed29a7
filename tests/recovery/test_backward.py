"""A backward that raises with fused sites: an attention's becomes products, other sites are left out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import inductor_fusions
from inductor_fusions.driver import trials, unfusing
from inductor_fusions.driver.passes import FusionPass
from inductor_fusions.fusion import Candidate, Fusion, Scope, nodes_of
from tests.recovery.test_recovery import assert_right, attention, compiled, inputs, verdicts
from tests.support.faults import Fault

pytestmark = [pytest.mark.recovers, pytest.mark.usefixtures("everything", "no_cache")]


def is_kernel(node: torch.fx.Node) -> bool:
    """Of the backward of an attention."""
    return "attention" in str(node.target) and "backward" in str(node.target)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("stage", ["post_grad", "lowering", "launch"])
def test_backward(stage: str, dynamic: bool) -> None:
    """It is compiled when the forward has run: the attention's backward is written as products."""
    with Fault(stage, is_kernel, backward=True).inject() as fault:
        assert_right(compiled(attention, stage, dynamic), attention, True, (12, 20) if dynamic else (12,))
    assert fault.raised == 1
    assert sorted(verdicts()) == ["failed", "fused"]
    site = next(site for site in inductor_fusions.report() if site.verdict == "failed")
    assert "injected" in site.reason and "test_recovery.py" in site.source


def test_backward_that_draws_cannot_be_written_out() -> None:
    with pytest.MonkeyPatch.context() as patch, Fault("post_grad", is_kernel, backward=True).inject():
        patch.setattr(unfusing, "write_out", _refuse)
        found = compiled(lambda q, k, v: attention(q, k, v), "post_grad")(*inputs(True))
        with pytest.raises(RuntimeError, match="INDUCTOR_FUSIONS_ATTENTION=0"):
            found.sum().backward()


def powers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q.sin() * k).cos() * v


@pytest.mark.parametrize("fn", [attention, powers])
def test_backward_that_stock_cannot_compile(fn: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Symbolic sizes: it is compiled with the forward. As in stock, the forward runs, and a call raises."""
    with Fault("post_grad", lambda node: True, backward=True).inject():
        found = compiled(fn, "post_grad", dynamic=True)(*inputs(True))
        torch.testing.assert_close(found, fn(*inputs(True)))
        sites = list(inductor_fusions.report())
        with pytest.raises(Exception, match="injected"):
            found.sum().backward()
    assert [site.verdict for site in sites] == (["failed"] if fn is attention else [])
    assert all("does not compile without it either" in site.reason for site in sites)
    assert not [each for each in caplog.records if "Please report" in each.getMessage()]


def _refuse(graph: torch.fx.Graph) -> None:
    raise ValueError("the refused kernel draws its dropout")


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_as_products(causal: bool) -> None:
    """Of the definition, with grouped keys, a broadcast bias and a fully masked row."""
    q, k, v, grad = (
        torch.randn(2, h, n, 8, dtype=torch.float64) for h, n in ((4, 5), (2, 7), (2, 7), (4, 5))
    )
    bias = torch.randn(1, 4, 5, 7, dtype=torch.float64)
    bias[0, 0, 2] = -torch.inf
    leaves = [each.clone().requires_grad_() for each in (q, k, v, bias)]
    wide = [each.repeat_interleave(2, 1) for each in leaves[1:3]]
    scores = leaves[0] @ wide[0].mT * 0.3 + leaves[3]
    if causal:
        scores = scores.masked_fill(~torch.ones(5, 7, dtype=torch.bool).tril(), -torch.inf)
    hidden = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0)
    expected = torch.autograd.grad(weights @ wide[1], leaves, grad)
    found = unfusing.gradients(grad, q, k, v, bias, 0.3, causal)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


class Again(Candidate):
    """A cosine as a sine: a site behind autograd."""

    def __init__(self, anchor: torch.fx.Node, ordinal: int) -> None:
        self.anchor, self.ordinal = anchor, ordinal

    def guard(self) -> None:
        return

    def rewrite(self) -> str:
        graph, (angle,) = self.anchor.graph, self.anchor.args
        with graph.inserting_before(self.anchor):
            shifted = graph.call_function(torch.ops.aten.add.Tensor, (angle, math.pi / 2))
            made = graph.call_function(torch.ops.aten.sin.default, (shifted,))
        for node in (shifted, made):
            node.meta.update(self.anchor.meta)
        made.meta["ordinal"] = self.ordinal
        self.anchor.replace_all_uses_with(made)
        self.anchor.graph.erase_node(self.anchor)
        return "again"


def again(name: str, function: Any, **options: Any) -> Fusion:
    """A fusion of every call of a function, each with its number."""
    found = Fusion(name, "post_grad", "again", **options)

    @found.group(lambda: [function])
    def read(scope: Scope, matches: Sequence[Any]) -> Iterator[Candidate]:
        for i, node in enumerate(nodes_of(matches)):
            if "ordinal" not in node.meta:
                yield Again(node, i)

    return found


def sines(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * 2).sin().square().sin()


@pytest.mark.parametrize("stage, failed", [("post_grad", [1]), ("lowering", [1]), ("launch", [0, 1, 2])])
def test_sites_of_a_backward(stage: str, failed: list[int]) -> None:
    """The one that is to blame is found where the compile raises; all of its kernel go where a call does."""
    x, y = (torch.linspace(0.1, 1, 8).requires_grad_() for _ in range(2))
    hook = FusionPass("post_grad", (again("cosines", torch.ops.aten.cos.default),))
    with (
        torch._inductor.config.patch(post_grad_custom_pre_pass=hook),
        Fault(stage, lambda node: node.meta.get("ordinal") == 1, backward=True).inject() as fault,
    ):
        compiled(sines, stage)(x).sum().backward()
    sines(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert fault.raised
    assert verdicts() == ["failed" if i in failed else "fused" for i in range(3)]


@pytest.mark.parametrize("guilty", ["other", "guard"])
def test_what_protects_stays(guilty: str) -> None:
    """What keeps a graph from a wrong kernel runs where other fusions are left out, unless it raises."""
    x = torch.linspace(0.1, 1, 8)
    guard = again("guard", torch.ops.aten.cos.default, protects=True)
    hook = FusionPass("post_grad", (guard, again("other", torch.ops.aten.sin.default)))
    made: list[list[str]] = []
    original = trials.Trials._again

    def repeated(self: trials.Trials, *args: Any) -> trials.Made:
        found = original(self, *args)
        made.append([each.key[2] for each in found.attempt.fused])
        return found

    with (
        torch._inductor.config.patch(post_grad_custom_pre_pass=hook),
        Fault("post_grad", lambda node: node.name.startswith(f"inductor_fusions_{guilty}")).inject(),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(trials.Trials, "_again", repeated)
        compiled(lambda x: x.cos().exp().sin(), "post_grad")(x)
    found = {site.fusion: site.verdict for site in inductor_fusions.report()}
    assert found == {each: "failed" if each == guilty else "fused" for each in ("other", "guard")}
    assert made[0] == (["guard"] if guilty == "other" else [])
