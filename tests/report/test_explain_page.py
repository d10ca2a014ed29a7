"""The page of an explanation: complete in itself, short for deep models, and shown by a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

from inductor_fusions import config, explain
from inductor_fusions.explaining import folding
from inductor_fusions.explaining.graphs import Line, short


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x):
        weights = torch.softmax(self.proj(x) @ x.transpose(-2, -1), dim=-1)
        return x + weights @ x


class Model(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum(dim=0) < 3  # an operator that HTML must escape


class Parsed(HTMLParser):
    """What a page has: tags that are closed, links to elsewhere, text."""

    VOID = frozenset("meta link br img input".split())

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elsewhere: list[str] = []
        self.text: list[str] = []
        self.summaries: list[str] = []
        self.names: list[str] = []
        self.classes: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs) -> None:
        values = dict(attrs)
        self.elsewhere += [v for k, v in attrs if k in ("src", "href") or "url(" in (v or "")]
        if "data-name" in values:
            self.names.append(values["data-name"])
            self.classes.append(values.get("class") or "")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        (self.summaries if self.open and self.open[-1] == "summary" else self.text).append(data.strip())


@pytest.fixture(scope="module")
def page() -> str:
    with config.patch(policy="always"):
        return explain(Model(24), torch.randn(2, 2, 4, 8)).to_html()


def test_page_is_complete(page: str) -> None:
    parsed = Parsed(page)
    assert parsed.open == [] and parsed.elsewhere == []
    assert "@import" not in page and "http" not in page.replace("http-equiv", "")
    text = " ".join(parsed.text)
    assert "Model: 24 fused" in text and "attention fused" in text
    assert "test_explain_page.py" in text and "layers.0 … layers.23" in text


def test_layers_are_folded(page: str) -> None:
    """24 layers that are alike are one, before and after."""
    parsed = Parsed(page)
    assert parsed.summaries.count("layers.0 … layers.23, 24 times the same") == 2
    assert len(page) < 100_000
    fused = [name for name, classes in zip(parsed.names, parsed.classes, strict=True) if "fused" in classes]
    assert [name for name in fused if "matmul" in name] == ["matmul", "matmul_1"]
    assert "inductor_fusions_attention_scaled_dot_product_attention" in fused


def test_layer_that_differs_is_shown() -> None:
    """One layer whose attention is not fused stands apart."""

    class Odd(Layer):
        def forward(self, x):
            weights = torch.softmax(self.proj(x) @ x.transpose(-2, -1), dim=-1).cumsum(-1)
            return x + weights @ x

    model = Model(6)
    model.layers[3] = Odd()
    with config.patch(policy="always"):
        parsed = Parsed(explain(model, torch.randn(2, 2, 4, 8)).to_html())
    assert parsed.summaries.count("layers.0 … layers.2, 3 times the same") == 2
    assert parsed.summaries.count("layers.3") == 2
    assert parsed.summaries.count("layers.4 … layers.5, 2 times the same") == 2
    assert any("missed" in classes for classes in parsed.classes)


def test_written_to_a_file(tmp_path: Path) -> None:
    found = explain(torch.relu, torch.randn(3))
    path = tmp_path / "page.html"
    assert found.to_html(path) == path.read_text("utf-8")


def line(name: str, module: str = "", uses: tuple[str, ...] = (), operation: str = "add", **values) -> Line:
    return Line(name, operation, ", ".join(uses), uses, "f32[2]", module, "", **values)


def test_fold_nested_layers() -> None:
    """Layers within layers, as in T5: block.0 has layer.0 and layer.1."""
    lines = [line("x", operation="input")]
    for block in range(3):
        for layer in range(2):
            module = f"block.{block}.layer.{layer}.fc"
            lines.append(line(f"n{block}{layer}", module, (lines[-1].name,)))
    rows = folding.rows(lines, lines, lambda line: line.site)
    labels = [row.before.label for row in rows if isinstance(row.before, folding.Group)]
    assert labels == ["1 inputs", "block.0 … block.2, 3 times the same"]
    (inner,) = rows[-1].before.items
    assert inner.label == "block.0.layer.0 … block.0.layer.1, 2 times the same"


@pytest.mark.parametrize("changed", [{"operation": "mul"}, {"dead": True}, {"site": 1}])
def test_what_differs_is_not_folded(changed) -> None:
    lines = [line("a", "layers.0", ("x",)), line("b", "layers.1", ("x",), **changed)]
    rows = folding.rows(lines, lines, lambda line: line.site)
    assert [row.before.label for row in rows] == ["layers.0", "layers.1"]


def test_only_one_side_differs() -> None:
    before = [line("a", "layers.0"), line("b", "layers.1")]
    after = [line("a", "layers.0"), line("b", "layers.1", operation="mul")]
    rows = folding.rows(before, after, lambda line: line.site)
    assert [row.after.label for row in rows] == ["layers.0", "layers.1"]


def test_short_names() -> None:
    name = "l_fn_modules_encoder_modules_layer_modules_0_modules_query_parameters_weight_"
    assert short(f"x, {name}, 1") == "x, encoder.layer.0.query.weight, 1"
    assert short("l_x_, all_modules_") == "l_x_, all_modules_"


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser")
def test_in_a_browser(page: str, tmp_path: Path) -> None:
    """Its script runs, and what it shows is as high as one layer, not as 24."""
    path = tmp_path / "page.html"
    probe = (
        "<script>addEventListener('load', () => { const fused = document.querySelector('.after .fused');"
        "fused.dispatchEvent(new MouseEvent('mouseenter'));"
        "document.body.dataset.probe = [document.body.dataset.ready, document.body.scrollHeight,"
        "getComputedStyle(fused).backgroundColor, document.querySelectorAll('.use').length].join('|'); })"
        "</script></body>"
    )
    path.write_text(page.replace("</body>", probe), "utf-8")
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}/profile",
    ]
    command += ["--window-size=1400,900", "--virtual-time-budget=3000", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'data-probe="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    ready, height, color, used = found[1].split("|")
    assert ready == "yes" and 300 < int(height) < 2500
    assert color.startswith("rgb(") and color != "rgb(255, 255, 255)"
    assert int(used) >= 2  # what the fused line reads is outlined
