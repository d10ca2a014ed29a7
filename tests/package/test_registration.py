"""enable() and disable(): what they do to Inductor's hooks, and what becomes of others' passes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

import inductor_fusions
from inductor_fusions import config, registration, testing
from inductor_fusions._inductor import hooks_hold_lists
from inductor_fusions.driver import passes

HOOKS = ("pre_grad_custom_pass", "post_grad_custom_pre_pass")


#: Whether a hook takes several passes; where it does not, ours holds the one that was there before.
LISTS = hooks_hold_lists()


def held(hook: str = HOOKS[0]) -> list:
    """The passes that a hook of Inductor's config runs, in order."""
    value = getattr(inductor_config, hook)
    passes_held = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
    return [
        item for held in passes_held for item in (getattr(held, "before", None), held) if item is not None
    ]


def ours(hook: str = HOOKS[0]) -> list:
    return [item for item in held(hook) if isinstance(item, passes.FusionPass)]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Each test starts enabled, with no other pass, and leaves it so."""
    saved = {hook: getattr(inductor_config, hook) for hook in HOOKS}
    inductor_fusions.enable()
    yield
    for hook, value in saved.items():
        setattr(inductor_config, hook, value)
    inductor_fusions.enable()


class Other(CustomGraphPass):
    """Someone else's pass, which notes that it ran."""

    def __init__(self, name: str, ran: list[str]) -> None:
        self.name, self.ran = name, ran

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.ran.append(self.name)

    def uuid(self) -> str:
        return self.name


def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1) @ v


def with_linears(q, k, v):
    return attention(q @ v[0, 0, :8], q @ v[0, 1, :8], v)


def inputs() -> list[torch.Tensor]:
    return [torch.randn(1, 2, 5, 8) for _ in range(3)]


def fused() -> int:
    """Number of sites fused by a compile now."""
    return len(testing.capture(attention, *inputs(), backend=testing.EAGER_AFTER_PASSES).fused)


def test_disable_and_enable() -> None:
    inductor_fusions.disable()
    assert not inductor_fusions.enabled()
    assert all(held(hook) == [] for hook in HOOKS)
    assert fused() == 0
    inductor_fusions.enable()
    assert inductor_fusions.enabled()
    assert fused() == 1


@pytest.mark.parametrize("order", ["ee", "dd", "eedd", "dee", "ded", "edede", "ddee", "ddeed"])
def test_any_order(order: str) -> None:
    """Twice is once, and the last one counts."""
    for letter in order:
        (inductor_fusions.enable if letter == "e" else inductor_fusions.disable)()
    on = order[-1] == "e"
    assert inductor_fusions.enabled() is on
    assert [len(ours(hook)) for hook in HOOKS] == [int(on)] * 2
    assert fused() == int(on)


def test_hook_is_restored() -> None:
    """What was there before is there again, as it was."""
    inductor_fusions.disable()
    several = [[Other("a", []), Other("b", [])]] if LISTS else []
    for value in (None, Other("a", []), *several):
        inductor_config.pre_grad_custom_pass = value
        before = held()
        inductor_fusions.enable()
        assert held()[:-1] == before
        inductor_fusions.disable()
        assert held() == before


def test_threads() -> None:
    errors: list[BaseException] = []

    def toggle(times: int) -> None:
        try:
            for _ in range(times):
                inductor_fusions.disable()
                inductor_fusions.enable()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=toggle, args=(50,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [len(ours(hook)) for hook in HOOKS] == [1, 1]


def test_compile_in_a_thread() -> None:
    """Import in one thread, compile in another: configs of torch may be kept by thread."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(fused()))
    thread.start()
    thread.join()
    assert found == [1]


def run_passes() -> None:
    with torch._inductor.config.patch(force_disable_caches=True):
        torch._dynamo.reset()
        torch.compile(attention)(*inputs())
        torch._dynamo.reset()


def test_others_before_and_after() -> None:
    """Passes that were there, and passes that come later, run as well, in order."""
    ran: list[str] = []
    inductor_fusions.disable()
    for hook, name in zip(HOOKS, ("pre", "post"), strict=True):
        other = Other(f"{name} before", ran)
        setattr(inductor_config, hook, [other] if LISTS and name == "post" else other)
    inductor_fusions.enable()
    if LISTS:
        for hook, name in zip(HOOKS, ("pre", "post"), strict=True):
            setattr(inductor_config, hook, [*held(hook), Other(f"{name} after", ran)])
    inductor_fusions.clear()
    with config.patch(policy="always"):
        run_passes()
    assert inductor_fusions.report().count("fused") == 1
    orders = ("before", "after") if LISTS else ("before",)
    expected = [f"{stage} {order}" for stage in ("pre", "post") for order in orders]
    assert ran == expected
    inductor_fusions.disable()
    assert [item.name for hook in HOOKS for item in held(hook)] == expected


def test_overwritten_hook() -> None:
    """Someone assigns to the hook and so removes us; enable() puts us back beside them."""
    ran: list[str] = []
    inductor_config.pre_grad_custom_pass = Other("theirs", ran)
    assert not ours()
    inductor_fusions.enable()
    assert [type(item) for item in held()] == [Other, passes.FusionPass]


@pytest.mark.parametrize("hooks", [HOOKS[:1], HOOKS[1:], HOOKS], ids=["pre", "post", "both"])
def test_overwritten_hook_is_noticed(
    hooks: tuple[str, ...], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning, at the first compile: which hook, and what puts us back."""
    monkeypatch.setattr(registration, "_warned", set())

    def warned() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]

    with caplog.at_level(logging.WARNING, logger="inductor_fusions"):
        assert fused() == 1 and not warned()
        for hook in hooks:
            setattr(inductor_config, hook, Other("theirs", []))
        assert [fused() for _ in range(2)] == [0, 0]
        (text,) = warned()
        assert {hook for hook in HOOKS if hook in text} == set(hooks)
        inductor_fusions.enable()
        assert fused() == 1 and len(warned()) == 1


@pytest.mark.parametrize("by", ["patch", "option"])
def test_post_grad_hook_of_others(by: str) -> None:
    """The pass after autograd lays gradients out as eager does: without it nothing is fused before either."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad.view(-1).mul(2).view(grad.shape)

    def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(6, 6, dtype=torch.bool).tril()
        return (q @ k.mT * 0.3).masked_fill(~mask, float("-inf")).softmax(-1) @ v

    q, k, v = (torch.randn(2, 4, 6, 8, requires_grad=True) for _ in range(3))
    name, settings = HOOKS[1], {"force_disable_caches": True}
    torch._dynamo.reset()
    inductor_fusions.clear()
    with (
        config.patch(policy="always"),
        inductor_config.patch({**settings, name: Other("theirs", [])} if by == "patch" else settings),
    ):
        compiled = torch.compile(causal, options={name: None} if by == "option" else None)
        compiled(Doubled.apply(q), k, v).sum().backward()
    assert not inductor_fusions.report()
    found = q.grad
    q.grad = None
    causal(Doubled.apply(q), k, v).sum().backward()
    torch.testing.assert_close(found, q.grad)


def test_disabled_is_not_overwritten(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "_warned", set())
    with caplog.at_level(logging.WARNING, logger="inductor_fusions"):
        inductor_fusions.disable()
        assert fused() == 0
        inductor_fusions.enable()
        inductor_config.pre_grad_custom_pass = Other("theirs", [])
        with config.patch(enabled=False):
            assert fused() == 0
    assert not caplog.records


def test_patched_hook() -> None:
    """torch._inductor.config.patch puts another pass there for a while."""
    ran: list[str] = []
    with inductor_config.patch(pre_grad_custom_pass=Other("theirs", ran)):
        assert fused() == 0
    assert len(ours()) == 1
    assert fused() == 1


def test_options_of_compile() -> None:
    """torch.compile(options=...) and modes keep us."""
    for how in ({"options": {"max_autotune": False}}, {"mode": "reduce-overhead"}, {"fullgraph": True}):
        torch._dynamo.reset()
        inductor_fusions.clear()
        with config.patch(policy="always"), inductor_config.patch(force_disable_caches=True):
            torch.compile(attention, **how)(*inputs())
        assert inductor_fusions.report().count("fused") == 1, how


@pytest.mark.parametrize("hook", HOOKS)
def test_pass_in_options(hook: str) -> None:
    """A pass that the caller gives for one compile runs first, and ours behind it; the options stay."""
    ran: list[str] = []
    options = {hook: Other("theirs", ran)}
    given = dict(options)
    for on in (True, False):
        torch._dynamo.reset()
        inductor_fusions.clear()
        ran.clear()
        with config.patch(policy="always", enabled=on), inductor_config.patch(force_disable_caches=True):
            torch.compile(with_linears, options=options)(*(torch.randn(1, 2, 9, 8) for _ in range(3)))
        assert ran == ["theirs"]
        found = {site.fusion for site in inductor_fusions.report()}
        assert found == ({"attention", "qkv"} if on else set())
    assert options == given and len(ours(hook)) == 1
