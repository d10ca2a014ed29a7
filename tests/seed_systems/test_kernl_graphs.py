"""Rows K9 to K11: what Kernl did to graphs before and after its kernels."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import inductor_fusions
from inductor_fusions import config, testing
from inductor_fusions.fusion import Candidate, Fusion, Scope
from tests import blocks
from tests.seed_systems.support import QUICK, check, leaf, padding, qkv

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_K9_clean_up(device: torch.device) -> None:
    """Dropout of an evaluated model, in-place operations and operators as methods do not block a match."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.1)

        def forward(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
            scores = torch.matmul(q, k.transpose(-2, -1)).div_(4.0)
            scores += mask
            weights = self.dropout(nn.Softmax(dim=-1)(scores))
            return weights.matmul(v).contiguous()

    check(Layer().eval(), (*qkv(), padding(2, 24)), device, kernel="pad")


def test_K10_graph_report(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """explain() and its command: each candidate with its verdict, reason and line, and the graphs."""
    from inductor_fusions import cli

    model = blocks.model(2)
    left = inductor_fusions.explain(model, blocks.batch(), train=True)
    assert all(site.reason and site.source for site in left if site.verdict != "fused")
    with config.patch(policy="always"):
        found = inductor_fusions.explain(model, blocks.batch())
    assert found.count("fused", "attention") == 2
    text = str(found)
    assert "blocks.py" in text and "is_causal" in text
    assert found.count("left to stock", "qkv") == 4 and "on the CPU" in text
    page = tmp_path / "model.html"
    found.to_html(page)
    assert "scaled_dot_product_attention" in page.read_text()
    pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        command = ["inductor-fusions", "explain", "bert", "--attn", "eager", "--layers", "1", "--seq", "16"]
        patch.setattr("sys.argv", command)
        cli.main()
    assert not end.value.code
    (line,) = re.findall(
        r"^ *1 +attention +(fused|rejected|left to stock) +(\S.*)$", capsys.readouterr().out, re.M
    )
    assert line[0] == "fused" or "CPU" in line[1] or "measure" in line[1] or "expected" in line[1], line


def test_K11_pattern_of_a_user(also_run: Callable[[Fusion], None]) -> None:
    """A rewrite in one file: two of them that overlap in a node, which is used again elsewhere."""

    class DoubleOfRelu(Candidate):
        def __init__(self, graph: fx.Graph, anchor: fx.Node) -> None:
            self.graph, self.anchor = graph, anchor

        def guard(self) -> None:
            pass

        def rewrite(self) -> str:
            with self.graph.inserting_before(self.anchor):
                x = self.anchor.args[0].args[0]
                new = self.graph.call_function(
                    torch.clamp_min, (self.graph.call_function(torch.mul, (x, 2)), 0)
                )
            self.anchor.replace_all_uses_with(new)
            self.graph.erase_node(self.anchor)
            return "clamp_min"

    own = Fusion("double_of_relu", "pre_grad", "2 * relu(x) to relu(2 * x)")

    @own.anchor(lambda: [torch.mul])
    def read(scope: Scope, match: Any) -> Candidate | None:
        node = match.output_node()
        return DoubleOfRelu(scope.graph, node) if node.args[0].target is torch.relu else None

    also_run(own)

    def fn(x: torch.Tensor) -> Any:
        y = torch.relu(x)
        return torch.mul(y, 2), torch.mul(y, 2), y + 1

    seen = testing.check(fn, (leaf(5, 7),), fused=2, backend=QUICK, kernel="clamp_min")
    assert len(seen.ours.calls("clamp_min")) == 2 and len(seen.ours.calls("relu")) == 1
