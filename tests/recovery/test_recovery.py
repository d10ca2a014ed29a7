"""A compile that raises with fused sites, and a first call that does: stock's code, and a failed site."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

import inductor_fusions
from inductor_fusions import _inductor, config, reporting, tags
from inductor_fusions.driver import attempts, containment, recovery, trials
from tests.support import faults
from tests.support.faults import Fault, compile_fx

pytestmark = [pytest.mark.recovers, pytest.mark.usefixtures("everything", "no_cache")]

#: Stages before any code is generated: Inductor's passes are all that is needed.
EARLY = ("trace", "joint", "post_grad")
STAGES = (*EARLY, "lowering", "codegen", "launch")


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1) @ v


def several(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        q = attention(q, k, v).sin()
    return q


def inputs(train: bool = False, length: int = 12) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(length)
    return tuple(torch.randn(2, 2, length, 8, requires_grad=train) for _ in range(3))


def compiled(fn: Callable[..., Any], stage: str = "launch", dynamic: bool = False) -> Callable[..., Any]:
    backend = _inductor.passes_only() if stage in EARLY else "inductor"
    return torch.compile(fn, backend=backend, dynamic=dynamic)


def assert_right(
    run: Callable[..., Any], fn: Callable[..., Any], train: bool, lengths: tuple[int, ...] = (12,)
) -> None:
    """Values and gradients are those of eager mode, in the first call and later."""
    for length in lengths:
        for _ in range(2):
            ours, eager = inputs(train, length), inputs(train, length)
            found, expected = run(*ours), fn(*eager)
            torch.testing.assert_close(found, expected)
            if train:
                found.sum().backward()
                expected.sum().backward()
                for one, other in zip(ours, eager, strict=True):
                    torch.testing.assert_close(one.grad, other.grad)


def verdicts() -> list[str]:
    return [site.verdict for site in inductor_fusions.report()]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("stage", STAGES)
def test_stock_takes_over(stage: str, train: bool, dynamic: bool, caplog: pytest.LogCaptureFixture) -> None:
    fault = Fault(stage)
    with fault.inject():
        assert_right(compiled(attention, stage, dynamic), attention, train, (12, 20) if dynamic else (12,))
    assert fault.raised
    assert verdicts() == ["failed"]
    site = inductor_fusions.report().sites[0]
    assert "injected" in site.reason and "test_recovery.py" in site.source
    assert [record.levelno for record in caplog.records if record.name.startswith("inductor_fusions")] == [
        logging.WARNING
    ]
    assert "test_recovery.py" in caplog.text
    assert counters["inductor_fusions"] == {"attention_failed": 1, "recovered": 1}


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_sizes_stay_numbers_behind_a_first_call(train: bool) -> None:
    seen = []

    def look(graph: torch.fx.Graph) -> None:
        seen.extend(str(node.meta["val"].shape) for node in graph.find_nodes(op="placeholder"))

    fault = Fault("launch")
    with fault.inject(), torch._inductor.config.patch(post_grad_custom_post_pass=look):
        assert_right(compiled(attention), attention, train)
    assert fault.raised and seen and not any("s" in shape.removeprefix("torch.Size") for shape in seen)


@pytest.mark.parametrize("guilty", range(4))
@pytest.mark.parametrize("stage", ["joint", "post_grad"])
def test_one_site_of_several(stage: str, guilty: int) -> None:
    with Fault(stage, lambda node: tags.number(node) == guilty).inject():
        assert_right(compiled(several, stage), several, False)
    assert verdicts() == ["failed" if i == guilty else "fused" for i in range(4)]


def test_two_sites_of_several() -> None:
    """Of the same kernel: all that become it are left out."""
    with Fault("joint", lambda node: tags.number(node) in (1, 3)).inject():
        assert_right(compiled(several, "joint"), several, True)
    assert verdicts().count("failed") >= 2
    assert all(verdicts()[i] == "failed" for i in (1, 3))


def test_compiles_are_few() -> None:
    with Fault("joint").inject() as fault:
        assert_right(compiled(several, "joint"), several, False)
    assert verdicts() == ["failed"] * 4
    assert fault.raised < trials.MOST


@pytest.mark.parametrize("stage", ["joint", "launch"])
def test_strict(stage: str) -> None:
    with config.patch(strict=True), Fault(stage).inject(), pytest.raises(Exception, match="injected"):
        compiled(attention, stage)(*inputs())


@pytest.mark.parametrize("stage", ["joint", "launch"])
def test_a_failure_of_stock_is_its_own(stage: str, caplog: pytest.LogCaptureFixture) -> None:
    """What is raised is the error without any site. There is no code, or that with the sites stays."""
    with Fault(stage, lambda node: True).inject() as fault, pytest.raises(Exception, match="injected"):
        compiled(attention, stage)(*inputs())
    assert fault.raised == 2
    (site,) = inductor_fusions.report()
    assert site.verdict == ("fused" if stage == "launch" else "failed")
    assert stage == "launch" or "without it too: Injected: injected" in site.reason
    assert counters["inductor"]["fusions_attention"] == (stage == "launch")
    assert not caplog.records


@pytest.mark.parametrize("make", [
    torch._dynamo.exc.SkipFrame,
    torch._dynamo.exc.TensorifyScalarRestartAnalysis,
    torch.OutOfMemoryError,
    MemoryError,
    KeyboardInterrupt,
])  # fmt: skip
def test_for_the_caller(make: Callable[[str], BaseException]) -> None:
    """Dynamo's control flow, and what another form of the graph would not help."""
    model = torch.fx.symbolic_trace(lambda x: (x.sin(),))
    site = reporting.Site("attention", "fused", "node")

    def compile(*args: Any, **kwargs: Any) -> Any:
        attempts.current().fused.append(attempts.Fused(("pre_grad", 1, "attention", "node", 1), site))
        calls.append(args)
        raise make("for the caller")

    calls: list[Any] = []
    with pytest.raises(make):
        recovery.around(compile, model, [torch.ones(2)])
    assert len(calls) == 1


def test_nothing_is_paid_without_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """One compile, and a copy of the graph and of its backward that is never put in place."""
    made: list[str] = []
    for owner, name in (
        (containment.Copy, "__init__"), (containment.Copy, "restore"), (trials.Trials, "_again"),
    ):  # fmt: skip
        original = getattr(owner, name)

        def noted(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
            made.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)
    assert_right(compiled(attention), attention, True)
    assert made == ["__init__", "__init__"]
    assert verdicts() == ["fused"]


def test_later_compiles_are_as_before() -> None:
    """A trace that ends between two calls that switch backends leaves them as they were."""

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            o = attention(q, k, v)
        return o + attention(q, k, v)

    flags = _flags()
    with Fault("trace").inject():
        found = compiled(fn, "trace")(*inputs(True))
    assert _flags() == flags
    torch.testing.assert_close(found, fn(*inputs(True)), rtol=2e-2, atol=2e-2)
    assert "failed" in verdicts()
    torch._dynamo.reset()
    assert_right(compiled(attention, "trace"), attention, True)


def test_inference_mode_ends_with_the_compile_that_failed() -> None:
    """A trace that ends inside of it holds its guard: outputs of the next attempt would take no gradient."""
    model = torch.fx.symbolic_trace(lambda x: (x.sin(),))
    site = reporting.Site("attention", "fused", "node")
    inside: list[bool] = []

    def compile(*args: Any, **kwargs: Any) -> Any:
        inside.append(torch.is_inference_mode_enabled())
        if len(inside) == 1:
            attempts.current().fused.append(attempts.Fused(("pre_grad", 1, "attention", "node", 1), site))
            guard = torch.inference_mode()
            guard.__enter__()
            raise faults.Injected
        return torch.sin

    recovery.around(compile, model, [torch.ones(2)])
    assert inside == [False] * len(inside) and len(inside) > 1


def _flags() -> tuple[Any, ...]:
    return (
        torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(), torch.is_autocast_enabled("cpu"),
        torch.is_grad_enabled(), torch.get_autocast_dtype("cpu"),
    )  # fmt: skip


def test_random_numbers_go_on_as_they_would() -> None:
    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v) + torch.rand_like(q)

    args = inputs()
    with config.patch(enabled=False):
        torch.manual_seed(3)
        expected = compiled(fn)(*args), torch.rand(3)
    torch._dynamo.reset()
    with Fault("launch").inject():
        torch.manual_seed(3)
        found = compiled(fn)(*args), torch.rand(3)
    assert verdicts() == ["failed"]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_inputs_that_are_written_to() -> None:
    """They are what they were before the second call."""

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k += 1
        return attention(q, k, v)

    with Fault("launch").inject():
        assert_right(compiled(fn), fn, False)
    assert verdicts() == ["failed"]


def test_nested_regions_are_traced_again() -> None:
    """What was traced of a region with fused sites is not used for the same region without them."""

    @torch.compiler.nested_compile_region
    def region(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v).sin()

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return region(region(q, k, v), k, v)

    with Fault("codegen").inject() as fault:
        assert_right(compiled(fn), fn, False)
    if fault.raised:
        assert "fused" not in verdicts()


def test_nested_compiles_are_part_of_the_outer_one() -> None:
    model = torch.fx.symbolic_trace(lambda x: (x.sin(),))

    def inner(*args: Any, **kwargs: Any) -> Any:
        seen.append(attempts.current())
        return torch.sin

    seen: list[Any] = []
    recovery.around(lambda *args, **kwargs: recovery.around(inner, model, []), model, [])
    assert len(seen) == 1 and seen[0] is not None
    assert attempts.current() is None


def test_off_and_on_again() -> None:
    ours = compile_fx.compile_fx
    assert hasattr(ours, "_inductor_fusions_original")
    inductor_fusions.disable()
    try:
        assert compile_fx.compile_fx is ours._inductor_fusions_original
    finally:
        inductor_fusions.enable()
    assert hasattr(compile_fx.compile_fx, "_inductor_fusions_original")


def test_explain_shows_what_was_kept() -> None:
    with Fault("joint").inject():
        found = inductor_fusions.explain(attention, *inputs())
    assert [site.verdict for site in found] == ["failed"]
    assert sum(pair.stage == "pre_grad" for pair in found.graphs) == 1
