"""Fusions on torch's pattern matcher: what each looks for there, what is counted, what functions replace."""

from __future__ import annotations

import inspect
import logging
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import inductor_fusions
from inductor_fusions import _inductor, config, registry
from inductor_fusions.driver import matching, passes
from inductor_fusions.fusion import Candidate, Fusion, Rejected, Scope
from inductor_fusions.fusions import (
    ALL,
    attention,
    dot_interaction,
    linear_cross_entropy,
    outer_product_linear,
)
from inductor_fusions.fusions.lora import inputs
from inductor_fusions.fusions.stock_misfires import FUSION as STOCK_MISFIRES
from inductor_fusions.graph import torch_ops
from tests.support.graphs import traced

aten = torch.ops.aten


def targets(fusion: Fusion) -> set[tuple[str, Any]]:
    """What the `PatternMatcherPass` of a fusion has entries for."""
    return set(matching._Matcher.of(fusion).patterns.matcher.patterns)


# -- registration ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fusion", ALL, ids=lambda fusion: fusion.name)
def test_every_fusion_is_in_a_matcher(fusion: Fusion) -> None:
    from torch._inductor.pattern_matcher import PatternMatcherPass

    matcher = matching._Matcher.of(fusion).patterns.matcher
    assert isinstance(matcher, PatternMatcherPass)
    assert (matcher.pass_name, matcher.subsystem) == (fusion.name, "inductor_fusions")
    keys = {entry.extra_check.args[0] for entries in matcher.patterns.values() for entry in entries}
    assert keys >= set(range(len(fusion.patterns))) and fusion.patterns


def namespaces() -> Iterator[tuple[str, Any]]:
    """What may be one of these in torch, by its name: all that Dynamo may put into a graph."""
    words = (
        "softmax", "attention", "sum", "linear", "mm", "matmul", "flatten", "reshape", "view", "mul",
        "masked_select", "cross_entropy", "nll_loss", "gather",
    )  # fmt: skip
    for container in (torch, F, torch.special, torch._C._nn, torch.Tensor, operator):
        for name in (each for each in dir(container) if any(word in each for word in words)):
            found = getattr(container, name, None)
            if callable(found) and not isinstance(found, (type, types.ModuleType)):
                yield name, found
    for name in (each for each in dir(aten) if any(word in each for word in words)):
        packet = getattr(aten, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            yield from ((name, getattr(packet, overload)) for overload in packet.overloads())


@pytest.mark.parametrize("method", [False, True])
@pytest.mark.parametrize(
    ("fusion", "names"),
    [
        (attention.FUSION, {"softmax", "_softmax"}),
        (attention.FUSION, {"scaled_dot_product_attention"}),
        (outer_product_linear.FUSION, {"linear", "matmul", "addmm"}),
        (inputs.FUSION, {"linear", "matmul"}),
        (
            dot_interaction.FUSION,
            {"flatten", "reshape", "view", "getitem", "masked_select", "index_select", "sum"},
        ),
        (linear_cross_entropy.FUSION, {"cross_entropy", "nll_loss", "gather"}),
        (STOCK_MISFIRES, {"softmax", "_softmax", "sum"}),
    ],
    ids=[
        "attention",
        "sdpa",
        "outer_product_linear",
        "lora_input",
        "dot_interaction",
        "linear_cross_entropy",
        "stock_misfires",
    ],
)
def test_every_spelling_is_an_anchor(fusion: Fusion, names: set[str], method: bool) -> None:
    """What a reader takes for one of these is looked for: nothing is listed twice by hand."""

    def meant(node: fx.Node) -> bool:
        op = torch_ops.read(node)
        known = node.op != "call_function" or op is None or bool(op.args) or not callable(node.target)
        return op is not None and op.name in names and not op.inplace and known

    x, found = fx.Graph().placeholder("x"), set()
    for name, function in namespaces():
        target = name if method else function
        if method and not hasattr(torch.Tensor, name):
            continue
        node = x.graph.create_node("call_method" if method else "call_function", target, (x, 1))
        if meant(node):
            found.add((node.op, node.target))
    assert found <= targets(fusion) and (found or method)


# -- searches -------------------------------------------------------------------------------------


class Doubled(Candidate):
    """`relu(x)` as `relu(2 * x)`."""

    def __init__(self, anchor: fx.Node) -> None:
        self.anchor = anchor

    def guard(self) -> None:
        if self.anchor.args[0].op == "placeholder":
            raise Rejected("an input")

    def rewrite(self) -> str:
        with self.anchor.graph.inserting_before(self.anchor):
            new = self.anchor.graph.call_function(aten.relu.default, self.anchor.args)
        new.meta.update(self.anchor.meta)
        self.anchor.replace_all_uses_with(new)
        self.anchor.graph.erase_node(self.anchor)
        return "doubled"


def test_what_was_replaced_is_read_anew() -> None:
    """A later match reads the graph as the sites before have left it; one that is gone is not read."""
    fusion, read = Fusion("again", "post_grad", "for tests"), list[tuple[str, str]]()

    @fusion.anchor(lambda: [aten.relu.default])
    def _(scope: Scope, match: Any) -> Candidate:
        node = match.output_node()
        read.append((node.name, match.args[0].name))
        return Doubled(node)

    @fusion.group(lambda: [aten.relu.default])
    def _(scope: Scope, matches: Any) -> list[Candidate]:
        read.append(("group", str(len(inductor_fusions.fusion.nodes_of(matches)))))
        return []

    graph = traced(lambda x: x.relu().exp().relu().relu(), torch.randn(3)).graph
    sites = passes.apply(fusion, graph)
    assert [site.verdict for site in sites] == ["rejected", "fused", "fused"]
    (_, (second, source), (third, replaced), group) = read
    assert (second, source, third, group) == ("relu_1", "exp", "relu_2", ("group", "1"))
    assert replaced not in ("relu", "relu_1")


def test_searching_leaves_the_graph_alone() -> None:
    graph = traced(lambda x: (x @ x).relu(), torch.randn(3, 3)).graph
    before = [(node, node.args, dict(node.meta)) for node in graph.nodes]
    for fusion in registry.of("post_grad"):
        assert all(isinstance(each, Candidate) for each in matching.candidates(fusion, graph))
    assert [(node, node.args, dict(node.meta)) for node in graph.nodes] == before


def test_dtypes_that_torch_passes_over_are_reported() -> None:
    """Inductor's matcher does not look at complex tensors."""
    fusion = Fusion("complex", "post_grad", "for tests")
    fusion.anchor(lambda: [aten.exp.default])(lambda scope, match: Doubled(match.output_node()))
    graph = traced(lambda x: x.exp(), torch.randn(3, dtype=torch.complex64)).graph
    assert [site.reason for site in passes.apply(fusion, graph)] == ["an input"]


# -- counters and debug output --------------------------------------------------------------------


def counted(fn: Callable[..., Any], *inputs: Any, train: bool) -> Any:
    """The report of a compile, and what torch has counted for each pattern of ours."""
    counters = _inductor.compile_counters()
    counters.clear()
    torch._dynamo.reset()
    inductor_fusions.clear()
    with config.patch(policy="always"), torch.set_grad_enabled(train):
        out = torch.compile(fn, backend=_inductor.passes_only())(*inputs)
        out = out if isinstance(out, torch.Tensor) else out[0]
        if train:
            out.float().sum().backward()
    ours = {fusion.name for fusion in ALL}
    found = counters["inductor_pattern_matcher_per_pattern"]
    own = {name: count for name, count in found.items() if name in ours}
    return inductor_fusions.report(), own, counters["inductor"]


def bert() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    transformers = pytest.importorskip("transformers")
    options = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=50
    )
    options._attn_implementation = "eager"
    return transformers.BertModel(options), (torch.randint(0, 50, (2, 8)), torch.ones(2, 8, dtype=torch.long))


def llama(adapters: bool = False) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    transformers = pytest.importorskip("transformers")
    options = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=64, vocab_size=50,
    )  # fmt: skip
    options._attn_implementation = "eager"
    model = transformers.LlamaModel(options)
    if adapters:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    return model, (torch.randint(0, 50, (2, 8)),)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("make", [bert, llama, lambda: llama(True)], ids=["bert", "llama", "adapters"])
def test_models_are_counted(
    make: Any, train: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    fresh_cache: None,
) -> None:  # fmt: skip
    """torch's counters have each fused site of ours and no other; its debug output names what is matched."""
    from torch._inductor import pattern_matcher

    model, inputs = make()
    # torch counts for each pattern where some node is asked for, and prints all of its own for that node.
    monkeypatch.setenv("TORCHINDUCTOR_PATTERN_MATCH_DEBUG", "none of these")
    report, patterns, counters = counted(model.train(train), *inputs, train=train)
    fused = {site.fusion for site in report if site.verdict == "fused"}
    sites = {name: report.count("fused", name) for name in fused}
    counts_patterns = "per_pattern" in inspect.getsource(pattern_matcher)  # not on torch 2.11
    assert patterns == (sites if counts_patterns else {}) and sites["attention"] == 2
    assert counters["pattern_matcher_count"] >= sum(sites.values())
    assert counters["pattern_matcher_nodes"] >= 5 * sites["attention"]
    node = next(site.node for site in report if site.fusion == "attention")
    monkeypatch.setenv("TORCHINDUCTOR_PATTERN_MATCH_DEBUG", node)
    with caplog.at_level(logging.WARNING, logger="torch._inductor.pattern_matcher"):
        counted(model, *inputs, train=train)
    assert any(line.startswith(node) for line in caplog.messages)


def test_single_nodes_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's search, which visits every node, runs only for patterns of several nodes."""
    from torch._inductor.pattern_matcher import PatternMatcherPass

    searched: list[Any] = []
    apply = PatternMatcherPass.apply

    def noted(self: Any, module: Any) -> int:
        searched.append((self.subsystem, self.pass_name))
        return apply(self, module)

    monkeypatch.setattr(PatternMatcherPass, "apply", noted)
    model, inputs = llama(True)
    report, _, _ = counted(model, *inputs, train=True)
    assert {"attention", "lora"} <= {site.fusion for site in report}
    assert not [name for subsystem, name in searched if subsystem == "inductor_fusions"]
    counted(lambda a, b: torch.diagonal(a @ b), torch.randn(4, 8), torch.randn(8, 4), train=False)
    assert ("inductor_fusions", "product_diagonal") in searched
