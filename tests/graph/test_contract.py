"""Nothing but the rewrite of a candidate changes a graph: where no site is fused, it is stock's."""

from __future__ import annotations

import json
import math
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn

from inductor_fusions import config, testing
from inductor_fusions.driver import passes, watching
from inductor_fusions.effects import inplace
from inductor_fusions.fusion import Candidate, Fusion, Rejected, Scope, Unfinished
from inductor_fusions.fusions import stock_misfires
from tests.selection import todays_seed
from tests.support.graphs import Seen, after_autograd, told

ROOT = Path(__file__).resolve().parents[2]
BOTH = pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])


def check_is_stock(fn: Any, args: Sequence[Any], kwargs: dict[str, Any], train: bool) -> None:
    """With INDUCTOR_FUSIONS_MAX=0 every graph is as stock has it, before and after autograd."""
    stock, none = after_autograd(fn, args, kwargs, train, enabled=False)
    assert stock and not none
    seen = Seen()
    with watching.observing(seen):
        ours, sites = after_autograd(fn, args, kwargs, train, max="0", strict=True, policy="always")
    assert not [site for site in sites if site.verdict == "fused"]
    assert {stage for stage, _ in seen.before} == {"pre_grad", "post_grad"}
    for before, after in zip(seen.before, seen.after, strict=True):
        assert before == after
    assert ours == stock


def check_is_read_alone(fn: Any, args: Sequence[Any], kwargs: dict[str, Any], train: bool) -> list[Any]:
    """Recognisers and guards leave graphs as they are (`strict`), also behind sites that are fused."""
    _, sites = after_autograd(fn, args, kwargs, train, strict=True, policy="always")
    return [site for site in sites if site.verdict == "fused"]


# -- functions -------------------------------------------------------------------------------------------


def in_place(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Scores that are scaled and masked in place, by statements."""
    scores = q @ k.transpose(-2, -1)
    scores.mul_(0.125)
    scores.masked_fill_(hidden, -math.inf)
    return torch.softmax(scores, -1) @ v


def transposed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """What stock's patterns misread before torch 2.15: q permuted otherwise than they have it."""
    scores = q.transpose(1, 2).transpose(1, 2) @ k.transpose(-2, -1) / 3.0
    return torch.softmax(scores.masked_fill(hidden, -1e4), -1) @ v + scores.mean()


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """A causal mask that is written out, and one that may be anything."""
    causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    first = nn.functional.scaled_dot_product_attention(q, k, v, causal)
    return nn.functional.scaled_dot_product_attention(first, k, v, ~hidden)


def tensors() -> list[torch.Tensor]:
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    hidden = torch.zeros(2, 1, 16, 16, dtype=torch.bool)
    hidden[:, :, :, 12:] = True
    return [q, k, v, hidden]


@BOTH
@pytest.mark.parametrize("fn", [in_place, transposed, sdpa])
@mock.patch.object(stock_misfires, "patterns_ignore_constants", lambda: True)
def test_functions(fn: Callable[..., torch.Tensor], train: bool) -> None:
    check_is_stock(fn, tensors(), {}, train)
    assert check_is_read_alone(fn, tensors(), {}, train)


def test_flex_attention() -> None:
    """The query of the user's own call is settled, unless no site is wanted."""
    from torch.nn.attention.flex_attention import flex_attention

    def flex(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        q, k, v = ((x @ part).view(2, 16, 4, 16).transpose(1, 2) for part in w)
        return flex_attention(q, k, v)

    args = [torch.randn(2, 16, 64), torch.randn(3, 64, 64)]
    check_is_stock(flex, args, {}, False)
    graphs, _ = after_autograd(flex, args, {}, False, strict=True)
    assert any("as_strided" in str(node) for graph in graphs for node in graph)


# -- models ----------------------------------------------------------------------------------------------


@BOTH
def test_adapters(train: bool) -> None:
    pytest.importorskip("peft")
    from tests.block_mm.support import run
    from tests.lora.test_peft import Adapted, ids

    model, tokens = Adapted("Llama"), ids("Llama")
    check_is_stock(model, [tokens], {}, train)
    with config.patch(enabled=False):
        stock = run(model, [tokens], train=train)
    with config.patch(max="0"):
        none = run(model, [tokens], train=train)
    assert not stock.sites and none.sites and not any(site.verdict == "fused" for site in none.sites)
    assert [told(graph) for graph in none.graphs] == [told(graph) for graph in stock.graphs]


def surveyed() -> list[dict[str, Any]]:
    """The models that the survey has found right: name, attention, and whether they are trained."""
    rows = json.loads((ROOT / "bench/results/architectures_cpu.json").read_text())["rows"]
    return [row for row in rows if row["state"] == "right"]


def check_architecture(name: str, attention: str, train: bool) -> None:
    from tests.models import survey

    model, inputs, _ = survey.make(name, attention)
    check_is_stock(model, [], inputs, train)
    check_is_read_alone(model, [], inputs, train)


@BOTH
def test_bert(train: bool) -> None:
    pytest.importorskip("transformers")
    check_architecture("bert", "eager", train)


@pytest.mark.parametrize("number", range(3))
def test_some_architectures(number: int) -> None:
    """A few of all, and others with another seed."""
    pytest.importorskip("transformers")
    row = random.Random(todays_seed()).sample(surveyed(), 3)[number]
    check_architecture(row["name"], row["attention"], row["train"])


# -- the driver ------------------------------------------------------------------------------------------


class Half(Candidate):
    """Writes something wrong into a graph and raises; `erases` says whether that can be undone."""

    def __init__(self, anchor: fx.Node, erases: bool, error: type[Exception] = ValueError) -> None:
        self.anchor, self.erases, self.error = anchor, erases, error

    def guard(self) -> None:
        pass

    def rewrite(self) -> str:
        graph = self.anchor.graph
        with graph.inserting_before(self.anchor):
            new = graph.call_function(torch.neg, self.anchor.args)
        self.anchor.replace_all_uses_with(new)
        if self.erases:
            graph.erase_node(self.anchor)
        raise self.error("on purpose")


def relu_graph() -> fx.Graph:
    return fx.symbolic_trace(lambda x: torch.relu(x) + 1).graph


def apply(graph: fx.Graph, *candidates: Callable[[fx.Node], Candidate], **options: Any) -> list[Any]:
    """Apply a fusion that has these candidates, at each relu; its module is one of the package."""

    def read(scope: Scope, match: Any) -> Iterator[Candidate]:
        yield from (make(match.output_node()) for make in candidates)

    def patterns() -> list[Any]:
        return [torch.relu]

    read.__module__ = patterns.__module__ = passes.__name__
    fusion = Fusion("half", "pre_grad", "raises", **options)
    fusion.anchor(patterns)(read)
    return passes.apply(fusion, graph)


@pytest.mark.parametrize(("error", "verdict"), [(ValueError, "failed"), (Rejected, "rejected")])
def test_a_rewrite_that_raises_is_undone(error: type[Exception], verdict: str) -> None:
    graph = relu_graph()
    before = told(graph)
    (site,) = apply(graph, lambda node: Half(node, erases=False, error=error))
    assert site.verdict == verdict and "on purpose" in site.reason
    assert [(entry[:4]) for entry in told(graph)] == [(entry[:4]) for entry in before]


@pytest.mark.parametrize("error", [ValueError, Rejected])
def test_a_rewrite_that_cannot_be_undone_ends_the_compile(error: type[Exception]) -> None:
    with pytest.raises(Unfinished, match="on purpose"):
        apply(relu_graph(), lambda node: Half(node, erases=True, error=error))


@pytest.mark.recovers
def test_what_finishes_a_graph_undoes_it_where_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compile is made again without the sites: half of them would have strides that nobody expects."""
    from inductor_fusions.fusions.attention import scope

    def raises(*arguments: Any) -> Any:
        raise ValueError("on purpose")

    monkeypatch.setattr(scope, "settle", raises)
    q, k, v, hidden = (t.detach() for t in tensors())
    seen = testing.capture(sdpa, q, k, v, hidden, backend="inductor")
    assert [site.verdict for site in seen.sites if site.fusion == "attention"].count("fused") == 0
    assert any("on purpose" in site.reason for site in seen.sites)
    torch.testing.assert_close(seen.outputs, sdpa(q, k, v, hidden))


class Reads(Candidate):
    """Changes the graph while it guards."""

    def __init__(self, anchor: fx.Node) -> None:
        self.anchor = anchor

    def guard(self) -> None:
        self.anchor.kwargs = {"input": self.anchor.args[0]}
        self.anchor.args = ()

    def rewrite(self) -> str:
        return "nothing"


def test_readers_that_change_a_graph() -> None:
    with config.patch(strict=True), pytest.raises(RuntimeError, match="outside its rewrite"):
        apply(relu_graph(), Reads)


@pytest.mark.parametrize("late", [False, True], ids=["the function", "its generator"])
def test_a_reader_that_raises_is_a_failed_site(late: bool) -> None:
    """The other matches of the graph are read and fused."""

    def reads(node: fx.Node) -> Candidate:
        if node.args[0].op == "placeholder":
            raise ValueError("on purpose")
        return Quiet(node)

    def read(scope: Scope, match: Any) -> Any:
        return (reads(node) for node in [match.output_node()]) if late else reads(match.output_node())

    def patterns() -> list[Any]:
        return [torch.relu]

    read.__module__ = patterns.__module__ = passes.__name__
    fusion = Fusion("raises", "pre_grad", "raises")
    fusion.anchor(patterns)(read)
    graph = fx.symbolic_trace(lambda x: torch.relu(torch.relu(x) + 1)).graph
    (site,) = passes.apply(fusion, graph)
    assert (site.verdict, site.code, site.node) == ("failed", "raised", "relu")
    assert "on purpose" in site.reason
    assert len(graph.find_nodes(op="call_function", target=torch.sigmoid)) == 1
    with config.patch(strict=True), pytest.raises(ValueError, match="on purpose"):
        passes.apply(fusion, relu_graph())


class Quiet(Candidate):
    """Is in no report."""

    reported = False

    def __init__(self, anchor: fx.Node) -> None:
        self.anchor = anchor

    def guard(self) -> None:
        pass

    def rewrite(self) -> str:
        with self.anchor.graph.inserting_before(self.anchor):
            new = self.anchor.graph.call_function(torch.sigmoid, self.anchor.args)
        self.anchor.replace_all_uses_with(new)
        return "sigmoid"


@pytest.mark.parametrize(("most", "listed"), [(None, 0), ("0", 0), ("1", 1), ("2", 2)])
def test_quiet_candidates_are_counted_where_sites_are(most: str | None, listed: int) -> None:
    """`bisect` finds them by their number, so that it is the number of a site in its report."""
    passes.count_from(0)
    graph = relu_graph()
    with config.patch(max=most):
        sites = apply(graph, Quiet, Quiet)
    passes.count_from(0)
    assert [site.verdict for site in sites] == ["fused"] * listed
    assert len(graph.find_nodes(op="call_function", target=torch.sigmoid)) == (2 if most is None else listed)


def test_marks_are_taken_out() -> None:
    graph = fx.symbolic_trace(lambda x: torch.relu(torch.abs(x)) + 1).graph
    assert apply(graph, marks=(torch.abs,)) == []
    assert not graph.find_nodes(op="call_function", target=torch.abs)
    (relu,) = graph.find_nodes(op="call_function", target=torch.relu)
    assert relu.args[0].op == "placeholder"


# -- names ------------------------------------------------------------------------------------------------


def random_graph(seed: int) -> fx.Graph:
    """Sums of some values, some of which are written over; two names of one tensor are used at random."""
    draw, graph = random.Random(seed), fx.Graph()
    found = [graph.placeholder(name) for name in "xyz"]
    for node in found:
        node.meta["example_value"] = torch.zeros(2)
    for _ in range(20):
        first, second = draw.choice(found), draw.choice(found)
        how = draw.choice(["add", "add_", "mul_", "iadd"])
        target = {"iadd": operator.iadd}.get(how, how)
        node = graph.create_node("call_function" if how == "iadd" else "call_method", target, (first, second))
        over = how != "add"
        node.meta["example_value"] = first.meta["example_value"] if over else torch.zeros(2)
        found.append(node)
    graph.output(tuple(draw.sample(found, 4)))
    return graph


@pytest.mark.parametrize("seed", range(20))
def test_names(seed: int) -> None:
    """What is read through the names of a graph is what the renamed graph has."""
    graph, renamed = random_graph(seed), random_graph(seed)
    inplace.rename(renamed)
    changed = 0
    for node, other in zip(graph.nodes, renamed.nodes, strict=True):
        assert str(inplace.arguments(node)) == str((other.args, other.kwargs))
        assert [n.name for n in inplace.inputs(node)] == [n.name for n in other.all_input_nodes]
        assert {n.name for n in inplace.readers(node)} == {n.name for n in other.users}
        changed += node.args != other.args
    assert changed and told(renamed) != told(graph)
    inplace.rename(graph)
    assert [entry[:4] for entry in told(graph)] == [entry[:4] for entry in told(renamed)]


# -- every model ------------------------------------------------------------------------------------------


@pytest.mark.long
@BOTH
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_every_architecture(attention: str, train: bool) -> None:
    """All that the survey has found right."""
    pytest.importorskip("transformers")
    wrong = []
    for row in surveyed():
        if (row["attention"], row["train"]) == (attention, train):
            try:
                check_architecture(row["name"], attention, train)
            except Exception as error:
                wrong.append(f"{row['name']}: {type(error).__name__}: {str(error)[:300]}")
    assert not wrong, "\n".join(wrong)
