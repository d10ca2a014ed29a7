"""`python -m bench.convergence`: its text and batches, its criterion, and one short training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import convergence, curves, training_text
from bench.convergence import Load, Run

pytest.importorskip("transformers")


def run(variant: str, seed: int, losses: list[float], model: str = "a model") -> dict[str, Any]:
    return {"model": model, "variant": variant, "seed": seed, "loss": losses}


# -- the criterion --------------------------------------------------------------------------------------


def test_smoothed_loss() -> None:
    assert curves.smooth([1.0, 3.0, 5.0, 9.0], 2) == [2.0, 4.0, 7.0]
    assert curves.distance([1.0, 3.0, 5.0], [3.0, 1.0, 5.5], 2) == 0.75
    assert math.isnan(curves.distance([1.0, math.inf], [1.0, math.inf], 1))


@pytest.mark.parametrize(
    ("fused", "within"),
    [([2.25, 1.0], True), ([2.25, 1.5], True), ([2.0, 1.75], False), ([math.nan] * 2, False)],
)
def test_criterion(fused: list[float], within: bool) -> None:
    """The largest distance of stock counts, which here is that of the two other seeds."""
    rows = [run("stock", 0, [2.0, 1.0]), run("stock", 1, [2.25, 1.0]), run("stock", 2, [2.0, 1.5])]
    (found,) = curves.judge([*rows, run("fused", 0, fused)], 1)
    assert found["stock"] == 0.5 and found["within"] is within


def test_model_without_all_runs_is_not_judged() -> None:
    both = [run("stock", 0, [1.0]), run("fused", 0, [1.0])]
    assert curves.judge(both, 1) == []
    assert curves.judge([run("stock", 0, [1.0]), run("stock", 1, [2.0]), run("fused", 2, [1.0])], 1) == []
    other = [run("stock", 0, [1.0], "b"), run("stock", 1, [1.0], "b"), run("fused", 0, [1.0], "b")]
    assert [found["model"] for found in curves.judge([*both, *other], 1)] == ["b"]


# -- the text -------------------------------------------------------------------------------------------


def installed(root: Path) -> Path:
    """Packages with a few texts, one of which is there twice."""
    for name in ("one", "two"):
        (root / name).mkdir(parents=True)
        (root / name / "LICENSE").write_text("Permission is hereby granted, free of charge. " * 40)
        (root / name / "module.py").write_text(f"def {name}(x):\n    return x + 1\n\n\n" * 60)
    (root / "one" / "short.py").write_text("x = 1")
    return root


def test_texts(tmp_path: Path) -> None:
    root = installed(tmp_path)
    assert len(list(training_text.texts("documents", 10**6, root))) == 1
    sources = list(training_text.texts("sources", 10**6, root))
    assert sorted(text[4:7] for text in sources) == ["one", "two"]
    assert list(training_text.texts("sources", len(sources[0]), root)) == sources[:1]


def test_tokens_are_the_same_each_time(tmp_path: Path) -> None:
    root = installed(tmp_path / "root")
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        found.append(training_text.prepare(tmp_path / name, 300, 8, 10**6, root))
    assert found[0] == found[1] and set(found[0]) == set(training_text.KINDS)
    files = [(tmp_path / name / "sources.npy").read_bytes() for name in ("a", "b")]
    assert files[0] == files[1]


def test_batches(tmp_path: Path) -> None:
    """Seeds give another order of sequences, whose lengths are their own; labels are what was there."""
    training_text.prepare(tmp_path, 300, 8, 10**6, installed(tmp_path / "root"))
    path = tmp_path / "sources.npy"

    def made(seed: int, padded: bool, masked: bool) -> dict[str, torch.Tensor]:
        return training_text.batches(path, 40, 4, seed, 300, padded, masked)

    plain = made(0, False, False)
    assert set(plain) == {"input_ids", "labels"} and plain["labels"].equal(plain["input_ids"])
    assert plain["input_ids"].shape == (40, 4, 8) and plain["input_ids"].dtype is torch.int64
    again, other = made(0, True, True), made(1, True, True)
    assert again["input_ids"].equal(made(0, True, True)["input_ids"])
    assert not again["input_ids"].equal(other["input_ids"])
    real = again["attention_mask"].bool()
    assert (real.sum(-1) >= 4).all() and not real.all()
    assert (again["input_ids"][~real] == training_text.PAD).all() and (again["labels"][~real] == -100).all()
    chosen = again["labels"] >= 0
    assert 0.05 < chosen[real].float().mean() < 0.3
    assert again["labels"][chosen].equal(plain["input_ids"][chosen])
    assert again["input_ids"][real & ~chosen].equal(plain["input_ids"][real & ~chosen])
    assert (again["input_ids"][chosen] == training_text.MASK).float().mean() > 0.6
    alike = made(0, True, False)
    assert alike["labels"][real].equal(plain["input_ids"][real]) and (alike["labels"][~real] == -100).all()


# -- the runs -------------------------------------------------------------------------------------------


def test_runs() -> None:
    """Each model has what the criterion needs, and a fused run is one of the first."""
    keys = [one.key for one in convergence.runs()]
    for name in ("gpt2", "llama", "bert"):
        assert [key for key in keys if key.startswith(f"{name} ") and "adapters" not in key] == [
            f"{name} stock 0", f"{name} fused 0", f"{name} stock 1", f"{name} stock 2",
        ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", convergence.SUBJECTS)
def test_training(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few steps in a small size learn the same, stock and fused, and fused has its attentions fused."""
    if convergence.SUBJECTS[name].adapters:
        pytest.importorskip("peft")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # the run sets it
    training_text.prepare(tmp_path, 512, 32, 200_000)
    load = Load("cpu", True, 8, 2, 2, 32, 512, "always")
    found = {}
    for variant in ("stock", "fused"):
        row, usable = convergence.work((Run(name, variant, 0), load, str(tmp_path), True), tmp_path)
        assert "failed" not in row and usable
        assert len(row["loss"]) == 8 and all(map(math.isfinite, row["loss"])) and row["grad_norm"][0] > 0
        found[variant] = row
    assert found["stock"]["sites"]["total"] == 0
    attentions = [
        n for what, n in found["fused"]["sites"]["what"].items() if what.startswith("attention: fused")
    ]
    assert sum(attentions) == 2
    # Masks of dropout may be others.
    assert found["fused"]["loss"] == pytest.approx(found["stock"]["loss"], abs=0.03)
    assert "a step" in convergence.describe(found["fused"])
