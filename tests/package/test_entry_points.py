"""Fusions of other packages: found, ordered, in the cache key, and contained where they break things."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from inductor_fusions import config, registry, testing
from inductor_fusions.driver import containment, passes
from inductor_fusions.fusion import Candidate, Fusion, Rejected, Scope, nodes_of
from tests.support.processes import start


def fusion(name: str, read: Callable = lambda scope, matches: (), **options: Any) -> Fusion:
    """A fusion whose reader is given all sigmoids of a graph."""
    found = Fusion(name, "pre_grad", f"{name} of sigmoids", **options)
    found.group(lambda: [torch.sigmoid])(read)
    return found


# -- order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "order"), [
    ([("a", {}), ("b", {}), ("c", {})], "abc"),
    ([("a", {}), ("b", {}), ("c", {"before": ("a",)})], "bca"),
    ([("a", {"after": ("c",)}), ("b", {}), ("c", {})], "bca"),
    ([("a", {"after": ("c",)}), ("b", {"after": ("a",)}), ("c", {})], "cab"),
    ([("a", {"before": ("nobody",)}), ("b", {"after": ("nobody",)})], "ab"),
])  # fmt: skip
def test_order(given: list, order: str) -> None:
    found = registry.ordered(fusion(name, **options) for name, options in given)
    assert "".join(f.name for f in found) == order


def test_order_that_cannot_be(caplog: pytest.LogCaptureFixture) -> None:
    found = registry.ordered([fusion("a", before=("b",)), fusion("b", before=("a",))])
    assert [f.name for f in found] == ["a", "b"]
    assert "before the other" in caplog.text


# -- containment ----------------------------------------------------------------------------------


class Rewrite(Candidate):
    """Replaces x * sigmoid(x) as `rewrite` of the test says."""

    def __init__(self, anchor: fx.Node, how: Callable[[fx.Node], object]) -> None:
        self.anchor, self.how = anchor, how

    def guard(self) -> None:
        if self.anchor.target is not torch.sigmoid:
            raise Rejected("no sigmoid")

    def rewrite(self) -> str:
        self.how(self.anchor)
        return "another"


def rewriting(how: Callable[[fx.Node], object]) -> Fusion:
    return fusion("foreign", lambda scope, matches: [Rewrite(node, how) for node in nodes_of(matches)])


def call(node: fx.Node, target: Callable, *args: object) -> fx.Node:
    with node.graph.inserting_before(node):
        return node.graph.call_function(target, args)


def right(node: fx.Node) -> None:
    half = call(node, torch.tanh, call(node, torch.mul, node.args[0], 0.5))
    node.replace_all_uses_with(call(node, torch.add, call(node, torch.mul, half, 0.5), 0.5))
    node.graph.erase_node(node)


def raises(node: fx.Node) -> None:
    right(node)
    raise RuntimeError("on purpose")


def wrong_shape(node: fx.Node) -> None:
    node.replace_all_uses_with(call(node, torch.sum, call(node, torch.sigmoid, node.args[0])))


def wrong_dtype(node: fx.Node) -> None:
    node.replace_all_uses_with(call(node, torch.Tensor.double, call(node, torch.sigmoid, node.args[0])))


def wrong_argument(node: fx.Node) -> None:
    node.replace_all_uses_with(call(node, torch.matmul, node.args[0], 3))


def wrong_order(node: fx.Node) -> None:
    """The new node stands after what reads it."""
    graph = node.graph
    with graph.inserting_before(next(n for n in graph.nodes if n.op == "output")):
        new = graph.call_function(torch.sigmoid, node.args)
    node.replace_all_uses_with(new)


def wrong_inputs(node: fx.Node) -> None:
    with node.graph.inserting_before(next(iter(node.graph.nodes))):
        node.replace_all_uses_with(node.graph.placeholder("another"))


def model(q, k, v):
    gate = torch.sigmoid(q)
    return torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1) @ v * gate * torch.sigmoid(v)


def inputs() -> list[torch.Tensor]:
    return [torch.randn(1, 2, 5, 8) for _ in range(3)]


def run(fn: Callable = model) -> testing.Capture:
    """Compiled with the passes alone: the result must be right whatever the fusion did."""
    args = inputs()
    found = testing.capture(fn, *args, backend=testing.EAGER_AFTER_PASSES)
    torch.testing.assert_close(found.outputs, fn(*args))
    return found


def test_right_fusion(also_run: Callable) -> None:
    also_run(rewriting(right))
    found = run()
    assert [(s.fusion, s.verdict) for s in found.sites] == [
        ("attention", "fused"),
        ("foreign", "fused"),
        ("foreign", "fused"),
    ]
    assert len(found.calls("tanh")) == 2 and not found.calls("sigmoid")


@pytest.mark.parametrize(("how", "says"), [
    (raises, "on purpose"),
    (wrong_shape, "has the shape []"),
    (wrong_dtype, "float64"),
    (wrong_argument, "matmul"),
    (wrong_order, "used before it has been defined"),
    (wrong_inputs, "inputs"),
])  # fmt: skip
def test_broken_fusion_is_undone(
    how: Callable, says: str, also_run: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    """And named, and the others of the package stay."""
    also_run(rewriting(how))
    found = run()
    assert [site.verdict for site in found.sites if site.fusion == "attention"] == ["fused"]
    failed = [site for site in found.sites if site.fusion == "foreign"]
    assert failed and {site.verdict for site in failed} == {"failed"}
    assert says in " ".join(site.reason for site in failed)
    assert "foreign" in caplog.text
    assert len(found.calls("sigmoid")) == 2 and len(found.calls("scaled_dot_product_attention")) == 1
    assert not found.calls("tanh")


def test_raises_while_it_looks(also_run: Callable, caplog: pytest.LogCaptureFixture) -> None:
    def read(scope: Scope, matches: Sequence[Any]) -> Iterator[Candidate]:
        first, second = nodes_of(matches)
        yield Rewrite(first, right)
        wrong_order(second)
        raise RuntimeError("on purpose")

    also_run(fusion("foreign", read))
    found = run()
    assert [site.verdict for site in found.sites] == ["fused", "failed", "failed"]
    assert "on purpose" in found.sites[-1].reason and "on purpose" in caplog.text
    assert len(found.calls("sigmoid")) == 2


def test_strict_raises(also_run: Callable) -> None:
    also_run(rewriting(wrong_shape))
    with config.patch(strict=True), pytest.raises(Exception, match="foreign made the graph invalid"):
        run()


def test_nested_body_is_restored(also_run: Callable) -> None:
    """A fusion that changes the body of a checkpointed region, and then breaks."""

    class Nested(Scope):
        def bodies(self) -> list[Scope]:
            return [Scope(m.graph) for m in self.graph.owning_module.children()]

    broken = rewriting(raises)
    also_run(dataclasses.replace(broken, scope=Nested))
    found = run(lambda q, k, v: torch.utils.checkpoint.checkpoint(model, q, k, v, use_reentrant=False))
    assert {site.verdict for site in found.sites if site.fusion == "foreign"} == {"failed"}
    assert not found.calls("tanh") and len(found.calls("sigmoid")) == 2


@pytest.mark.parametrize("name", ["attention", "strict"])
def test_names_that_are_taken(name: str) -> None:
    """By a fusion, or by an entry of config, which would switch it."""
    with pytest.raises(ValueError, match=f"the name '{name}' is already"):
        registry._checked(fusion(name), {"attention"})


def test_skip(also_run: Callable) -> None:
    also_run(rewriting(right))
    with config.patch(skip="another, foreign"):
        assert {site.fusion for site in run().sites} == {"attention"}


def test_skip_of_what_is_no_fusion(caplog: pytest.LogCaptureFixture) -> None:
    """A warning with the nearest name, once."""
    with config.patch(skip="atention, qkv"):
        for _ in range(2):
            registry.foreign()
    (record,) = caplog.records
    assert "atention" in record.getMessage() and "did you mean attention" in record.getMessage()


@pytest.mark.parametrize("patterns", [[torch.relu], torch.relu, lambda scope, match: None])
def test_patterns_without_a_lambda(patterns: object) -> None:
    """Also a decorator without arguments, whose reader would never be called."""
    for declare in (fusion("a").anchor, fusion("a").group):
        with pytest.raises(TypeError, match="function without arguments"):
            declare(patterns)


# -- source ---------------------------------------------------------------------------------------


def test_what_is_foreign() -> None:
    assert containment.is_foreign(fusion("a"))
    assert not any(containment.is_foreign(f) for f in registry.fusions.ALL)


def test_without_source_nothing_is_cached() -> None:
    namespace: dict = {"__name__": "typed_in"}
    exec("def read(scope, matches): return []", namespace)
    unknown = fusion("a", namespace["read"])
    assert containment.sources(unknown) == []
    assert passes.FusionPass("pre_grad", (unknown,)).uuid() is None


MODULE = """
import torch
from inductor_fusions.fusion import Candidate, Fusion
from . import helper

class Site(Candidate):
    def __init__(self, anchor):
        self.anchor = anchor
    def guard(self):
        pass
    def rewrite(self):
        graph = self.anchor.graph
        with graph.inserting_before(self.anchor):
            new = graph.call_function(torch.nn.functional.silu, (self.anchor.args[0],))
        self.anchor.replace_all_uses_with(new)
        return "silu"

FUSION = Fusion("swish", "pre_grad", "relu to silu, wrong on purpose", before=("attention",))
FUSION.anchor(lambda: [torch.relu])(lambda scope, match: Site(match.output_node()))
"""

#: The fusions before autograd, in order; with the one of the package, which wants to be before attention.
INTERACTIONS = "'outer_product_linear', 'dot_interaction', 'linear_cross_entropy', 'lora_input'"
OWN = f"['attention', 'stock_misfires', {INTERACTIONS}]"
PLACED = f"[{INTERACTIONS}, 'swish', 'attention', 'stock_misfires']"

PROGRAM = """
import torch
import inductor_fusions
from inductor_fusions import registry, _inductor
import torch._inductor.config
print([fusion.name for fusion in registry.of("pre_grad")])
print([(entry.name, entry.package, entry.problem) for entry in registry.foreign()])
(held,) = [item for item in _inductor.get_hook("pre_grad")]
print(held.uuid())
found = inductor_fusions.explain(torch.relu, torch.ones(2))
print([(site.fusion, site.verdict) for site in found])
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder on the path with an installed package that has a fusion."""
    package = tmp_path / "swish_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("VALUE = 1\n")
    (package / "fusions.py").write_text(MODULE)
    info = tmp_path / "swish_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: swish-package\nVersion: 1.0\n")
    entries = "[inductor_fusions.fusions]\nswish = swish_package.fusions:FUSION\n"
    (info / "entry_points.txt").write_text(entries)
    return tmp_path


def started(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return start("-c", PROGRAM, first=str(folder), PYTHONDONTWRITEBYTECODE="1", **variables)


def test_entry_point(installed: Path) -> None:
    """Found, put where it wants to be, run; and every file of its package is in the cache key."""
    done = started(installed)
    names, loaded, uuid, verdicts = done.stdout.splitlines()
    assert names == PLACED, done.stderr
    assert loaded == "[('swish', 'swish-package', '')]"
    assert verdicts == "[('swish', 'fused')]"
    (installed / "swish_package" / "helper.py").write_text("VALUE = 2\n")
    again = started(installed).stdout.splitlines()
    assert again[2] != uuid and again[0] == names


@pytest.mark.parametrize(
    "variables",
    [{"INDUCTOR_FUSIONS_PLUGINS": "0"}, {"INDUCTOR_FUSIONS_SKIP": "other, swish"}],
    ids=["plugins", "skip"],
)
def test_entry_point_that_is_not_wanted(variables: dict[str, str], installed: Path) -> None:
    """None of its code is imported."""
    (installed / "swish_package" / "__init__.py").write_text("print('imported')")
    done = started(installed, **variables)
    names, loaded, _, verdicts = done.stdout.splitlines()
    assert (names, loaded, verdicts) == (OWN, "[]", "[]"), done.stderr


def test_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of caches tells files of one name, and where one ends and the next begins."""
    found: dict[str, str] = {}

    def digest(**files: str) -> None:
        folder = tmp_path / str(len(found))
        paths = []
        for name, text in files.items():
            path = folder / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            paths.append(path)
        monkeypatch.setattr(containment, "sources", lambda fusion: paths)
        containment.code_digest.cache_clear()
        found[str(files)] = str(containment.code_digest((fusion("a"),)))

    digest(a__x="1", b__x="2", x="")
    digest(a__x="2", b__x="1", x="")
    digest(a__x="12", b__x="", x="")
    digest(b__x="1", c__x="2", x="")
    containment.code_digest.cache_clear()
    assert len(set(found.values())) == len(found) == 4


@pytest.mark.parametrize(("text", "says"), [
    ("raise RuntimeError('on purpose')", "on purpose"),
    ("FUSION = 3", "it is a int, not a Fusion"),
    ("pass", "FUSION"),
    (MODULE.replace('"swish", "pre_grad"', '"swish", "first"'), "stage 'first'"),
    (MODULE.replace('before=("attention",)', 'before="qkv"'), "not 'qkv'"),
    (MODULE.replace('Fusion("swish"', 'Fusion("attention"'), "already"),
], ids=["raises", "no-fusion", "no-name", "no-stage", "no-tuple", "same-name"])  # fmt: skip
def test_entry_point_that_does_not_load(text: str, says: str, installed: Path) -> None:
    """It is named in a warning, and everything else works."""
    (installed / "swish_package" / "fusions.py").write_text(text)
    done = started(installed)
    assert done.returncode == 0, done.stderr
    names, loaded, _, _ = done.stdout.splitlines()
    assert names == OWN and says in loaded
    assert "the fusion swish of swish-package was not loaded" in done.stderr and says in done.stderr
