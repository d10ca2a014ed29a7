"""bench.steps and bench.generate: what they count and compare, a row of each on the CPU, and their pages."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import docs, generate, steps, tuning
from inductor_fusions import config

pytest.importorskip("transformers")
pytest.importorskip("peft")

LLAMA = steps.Case("llama-1b", 2, 32)
QUICK = argparse.Namespace(device="cpu", quick=True, rounds=1)


@pytest.mark.parametrize("grid", [steps.grid, generate.grid])
def test_names_are_unique(grid: Any) -> None:
    keys = [case.key for case in grid()]
    assert len(set(keys)) == len(keys)


# -- steps ------------------------------------------------------------------------------------------------


def test_flops() -> None:
    """Of a Llama of two narrow layers: every product once, the head too, and half of the scores."""
    module, batch = steps.build(LLAMA, "cpu", quick=True)
    width, inner, classes, tokens = 128, 512, 1000, 64
    layer = 2 * width * width + 2 * width * 64 + 3 * width * inner
    attention = 12 * 2 * 2 * 32 * 32 * width / 2
    assert steps.flops(module, batch) == 6 * tokens * (2 * layer + width * classes) + attention
    adapted, batch = steps.build(replace(LLAMA, lora=True), "cpu", quick=True)
    adapters = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    frozen = 4 * tokens * (2 * layer + width * classes)
    assert adapters and steps.flops(adapted, batch) == frozen + 6 * tokens * adapters + attention


def test_batches() -> None:
    """Padding has no label, BERT finds a part of its tokens, and each image has a class."""
    _, causal = steps.build(LLAMA, "cpu", quick=True)
    assert causal["labels"].equal(causal["input_ids"])
    _, masked = steps.build(steps.Case("bert-base", 2, 32, padded=True), "cpu", quick=True)
    asked = masked["labels"] >= 0
    assert asked.any() and asked.float().mean() < 0.2 and masked["attention_mask"][asked].all()
    assert (masked["input_ids"][asked] == 2).all()
    _, images = steps.build(steps.Case("vit-large", 2), "cpu", quick=True)
    assert images["labels"].tolist() == [0, 1] and "pixel_values" in images


@pytest.mark.parametrize(("changed", "within"), [
    ({}, True),
    ({"loss": [6.01, 5.0]}, True),
    ({"loss": [6.05, 5.0]}, False),
    ({"loss": [6.0, 5.2]}, False),
    ({"loss": [6.0, float("nan")]}, False),
    ({"norm": 2.1}, False),
])  # fmt: skip
def test_agreement_with_stock(changed: dict[str, Any], within: bool) -> None:
    stock = {"loss": [6.0, 5.0], "norm": 2.0}
    assert steps.agrees({**stock, **changed}, stock, dropout=False)[0] is within


def test_peak_of_a_device() -> None:
    assert steps.peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert steps.peak_flops("NVIDIA H100 PCIe") == 756e12
    assert steps.peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert steps.peak_flops("a CPU") is None


@pytest.mark.slow
def test_steps_row() -> None:
    """The loss head is fused where the logits stay inside or are declared detached, and losses agree."""
    with config.patch(policy="always"):
        row = steps.measure(LLAMA, "cpu", True, 2, ("stock", "fused", "detached"))
    assert row["correct"] and not row["failed_variants"]
    assert set(row["rate"]) == {"stock", "fused", "detached"}
    losses = row["learned"]["detached"]["loss"]
    assert len(losses) == steps.COMPARED and losses[-1] < losses[0]
    heads = {
        name: sum(n for what, n in sites["what"].items() if what.startswith("linear_cross_entropy: fused"))
        for name, sites in row["sites"].items()
    }
    assert heads == {"fused": 0, "detached": 1}
    assert "tokens/s" in steps.describe({"key": LLAMA.key, **row})


# -- generate ---------------------------------------------------------------------------------------------


def test_leading_tokens() -> None:
    assert generate.leading([1, 2, 3], [1, 2, 4]) == 2
    assert generate.leading([1, 2], [1, 2]) == 2 and generate.leading([0], [1]) == 0


def test_ties() -> None:
    """Equal logits are a tie; the best and the worst token are none."""
    server = generate.Server(generate.Case("llama-1b", 6, 2), "cpu", quick=True)
    with torch.no_grad():
        server.model.lm_head.weight[7] = server.model.lm_head.weight[9]
        logits = server.model(server.asked["input_ids"]).logits[:, -1].float()
        best, worst = int(logits[0].argmax()), int(logits[0].argmin())
        server.model.lm_head.weight[11] = server.model.lm_head.weight[best]
    assert server.ties([(0, [], [best, 11]), (0, [], [best, worst])]) == {"ties": [True, False]}


def test_comparison() -> None:
    """A sequence that differs is asked about, with the tokens before and both that come next."""
    asked = []

    def stock(do: str, **request: Any) -> Any:
        asked.append((do, request))
        return {"ties": [False]}

    said = {"stock": {"tokens": [[1, 2, 3], [4, 5, 6]]}, "fused": {"tokens": [[1, 2, 3], [4, 7, 6]]}}
    found = generate.compare({"stock": stock, "fused": stock}, said)  # type: ignore[dict-item]
    assert asked == [("ties", {"questions": [(1, [4], [5, 7])]})]
    assert found == {"equal": [3, 1], "differ": 1, "ties": 0, "correct": False}


@pytest.mark.slow
def test_generate_row(tmp_path: Path) -> None:
    """Both processes answer, and only one of them fuses."""
    row, usable = tuning.each(
        (generate.measure_case, generate.Case("llama-1b", 6, 1), QUICK), tmp_path / "lock"
    )
    assert usable and "failed" not in row and row["correct"], row
    assert row["sites"] and row["graphs"] == {"stock": 1, "fused": 1} and len(row["equal"]) == 1
    assert "tokens/s" in generate.describe(row)


@pytest.mark.slow
def test_process_that_dies(tmp_path: Path) -> None:
    """What it wrote last is the reason."""
    case = generate.Case("no such model", 6, 1)
    row, usable = tuning.each((generate.measure_case, case, QUICK), tmp_path / "lock")
    assert usable and "FileNotFoundError" in row["failed"]


# -- pages ------------------------------------------------------------------------------------------------

STEP = {
    "key": LLAMA.key, "correct": True, "failed_variants": {}, "unit": "tokens",
    "sites": {"fused": {"fused": 5}},
    "median_ms": {"stock": 30.0, "fused": 20.0}, "spread": {"stock": 0.0, "fused": 0.0},
    "rate": {"stock": 2000.0, "fused": 3000.0}, "peak_share": {"stock": 0.4, "fused": 0.6},
    "peak_gib": {"stock": 9.0, "fused": 7.5},
}  # fmt: skip
GENERATED = {
    "key": "llama-1b p128 b2", "correct": False, "tokens_s": {"stock": 100.0, "fused": 150.0}, "gain": 1.5,
    "token_ms": {"stock": 3.0, "fused": 2.0}, "sites": {"attention": 2, "qkv": 2}, "equal": [256, 3],
    "differ": 1, "ties": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "row", "shown"),
    [
        ("steps", STEP, "| 30.0 | 20.0 | 1.50 ± 0.00 | 5 | 9.00 | 7.50 | 2000 tokens | 3000 tokens | 40% |"),
        ("generate", GENERATED, "| 100 | 150 | 1.50 | 3.000 | 2.000 | 4 | 1 and 0 of 2 |"),
    ],
)  # fmt: skip
def test_page(name: str, row: dict[str, Any], shown: str, tmp_path: Path) -> None:
    """A file that the script writes is a section, with what is wrong."""
    path = tmp_path / f"{name}_h100.json"
    assert docs.sections(tmp_path) == []
    path.write_text(json.dumps({"device": "A device", "rows": [row]}))
    ((pattern, _, text),) = docs.sections(tmp_path)
    assert pattern in docs.SHOWN and shown in text
    assert ("Not as stock" in text) is (row["correct"] is False)
