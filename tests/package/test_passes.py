"""The pass object: its identity in cache keys, copies, and hooks that hold a single callable."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from inductor_fusions import _inductor, config, fusions
from inductor_fusions.decisions import machine, tables
from inductor_fusions.driver import containment, passes


def new(before=None) -> passes.FusionPass:
    return passes.FusionPass("pre_grad", fusions.ALL, before)


class Other(CustomGraphPass):
    def __init__(self, name: str | None) -> None:
        self.name, self.ran = name, 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.ran += 1

    def uuid(self) -> str | None:
        return self.name


def test_uuid_is_stable() -> None:
    assert new().uuid() == new().uuid()


TOGGLES = {
    "enabled": False, "attention": False, "attention_kernel": "flex", "stock_misfires": False,
    "qkv": False, "gated_mlp": False, "linear_epilogue": False, "max": "3", "skip": "another",
    "lora": False, "flex_backward": False, "stored_indices": False, "outer_product_linear": False,
    "linear_cross_entropy": False, "dot_interaction": False, "kernel_defects": False,
    "product_diagonal": False, "norm_linear": False, "estimate": False, "plugins": False, "measure": True,
    "measure_budget": "7",
    "returned_logits": "detached", "policy": "always", "empty_rows": "ignore", "strict": True,
}  # fmt: skip


@pytest.mark.parametrize("name", TOGGLES)
def test_uuid_covers_toggles(name: str) -> None:
    before = new().uuid()
    with config.patch({name: TOGGLES[name]}):
        assert new().uuid() != before
    assert new().uuid() == before


def test_every_toggle_is_tried() -> None:
    assert set(TOGGLES) == set(config.get_config_copy())


def test_uuid_covers_stage_and_fusions() -> None:
    uuids = {
        new().uuid(),
        passes.FusionPass("post_grad", fusions.ALL).uuid(),
        passes.FusionPass("pre_grad", ()).uuid(),
    }
    assert len(uuids) == 3


@pytest.mark.parametrize("rows", [tables, machine])
def test_uuid_covers_tables(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = new().uuid()
    monkeypatch.setattr(rows, "digest", lambda: "another")
    assert new().uuid() != before


def test_uuid_that_cannot_be_computed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The cache is bypassed with one warning, and the compile goes on; strict mode raises."""

    def unreadable(fusions: Any) -> str:
        raise PermissionError("on purpose")

    monkeypatch.setattr(containment, "code_digest", unreadable)
    passes._say_bypassed.cache_clear()
    with config.patch(strict=False):
        assert new().uuid() is None and new().uuid() is None
    assert [record.getMessage().count("on purpose") for record in caplog.records] == [1]
    with config.patch(strict=True), pytest.raises(PermissionError):
        new().uuid()


def test_uuid_covers_what_ran_before() -> None:
    uuids = [new().uuid(), new(Other("a")).uuid(), new(Other("b")).uuid()]
    assert len(set(uuids)) == 3
    assert new(Other("a")).uuid() == uuids[1]


def test_uuid_of_what_has_none() -> None:
    """A plain callable, or a pass that asks for no caching, makes Inductor bypass its cache."""
    assert new(Other(None)).uuid() is None
    assert new(lambda graph: None).uuid() is None


def test_copies() -> None:
    """Configs are copied; a pass is its own copy."""
    ours = new()
    assert copy.deepcopy(ours) is ours
    assert copy.deepcopy([ours])[0] is ours


def test_pickle_follows_the_uuid() -> None:
    """torch 2.11 hashes the pickled hook."""
    first = pickle.dumps(new())
    assert pickle.dumps(new()) == first
    with config.patch(empty_rows="ignore"):
        assert pickle.dumps(new()) != first


def test_hook_that_holds_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.13: what was there is chained, and is back when we go."""
    import inductor_fusions

    theirs = Other("theirs")
    inductor_fusions.disable()
    try:
        for module in (_inductor, _inductor.hooks):
            monkeypatch.setattr(module, "hooks_hold_lists", lambda: False)
        inductor_config.pre_grad_custom_pass = theirs
        inductor_fusions.enable()
        (held,) = _inductor.get_hook("pre_grad")
        assert isinstance(held, passes.FusionPass) and held.before is theirs
        held(torch.fx.Graph())
        assert theirs.ran == 1
        inductor_fusions.enable()
        assert _inductor.get_hook("pre_grad") == [held]
        inductor_fusions.disable()
        assert inductor_config.pre_grad_custom_pass is theirs
    finally:
        inductor_fusions.disable()
        monkeypatch.undo()
        inductor_config.pre_grad_custom_pass = None
        inductor_fusions.enable()


def test_empty_graph() -> None:
    new()(torch.fx.Graph())


def test_graph_without_values() -> None:
    """Nodes without fake tensors, as from symbolic_trace: nothing is fused, nothing raises."""
    graph = torch.fx.symbolic_trace(lambda q, k, v: torch.softmax(q @ k.transpose(-2, -1), dim=-1) @ v).graph
    before = str(graph)
    with config.patch(strict=True, policy="always"):
        new()(graph)
    assert str(graph) == before
