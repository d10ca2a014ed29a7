"""The model of tiles: its constants, the fit, and what its choices lose."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench import tile_model, tune_projections
from inductor_fusions.block_mm import cost
from inductor_fusions.block_mm.configurations import Config
from inductor_fusions.decisions.gemm_times import LIBRARY, Library

FILE = json.loads((tile_model.RESULTS / "tile_model.json").read_text())


@pytest.fixture(scope="module")
def problems() -> dict[str, list[tile_model.Timed]]:
    """Of each GPU, those that were timed."""
    return {name: tile_model.timed(tile_model.RESULTS / file) for name, file in tile_model.TIMED.items()}


@pytest.fixture(scope="module")
def judgement(problems: dict[str, list[tile_model.Timed]]) -> Any:
    """What is lost now."""
    return tile_model.judged(problems, tile_model.shipped())


def test_constants_are_those_of_the_file() -> None:
    """Written by python -m bench.tile_model --json bench/results/tile_model.json."""
    assert FILE["constants"] == tile_model.flat(cost.CONSTANTS)
    assert tile_model.constants_of(FILE["constants"]) == cost.CONSTANTS
    assert Library(**FILE["library"]) == LIBRARY and FILE["library_error"] < 0.1


@pytest.mark.parametrize("name", tile_model.TIMED)
def test_choices_without_the_width(name: str, judgement: Any) -> None:
    """The nearest problem's configurations would take 12% and 10% longer than the fastest ones."""
    nearest, chosen = (judgement[name]["ways"][way] for way in ("nearest", "shipped"))
    assert chosen["mean"] <= 0.03 < 0.1 <= nearest["mean"] and chosen["most"] < 0.4
    assert chosen["kept"] >= nearest["kept"] + 0.2
    # Of about a hundred problems that get the kernel, one may be at 0.95 to 0.98 of stock.
    assert chosen["below_0.98"] <= 1 and chosen["below_0.95"] == 0 < nearest["below_0.95"]


def test_file_is_current(judgement: Any) -> None:
    """python -m bench.tile_model --json bench/results/tile_model.json"""
    for name, found in judgement.items():
        known = FILE["judgement"][name]
        assert known["problems"] == found["problems"]
        assert {way: known["ways"][way] for way in found["ways"]} == found["ways"]
    # A fit does not lose more where the width is left out of it, and no fit is better than what is shipped.
    lost = {
        way: tile_model.loss(FILE["judgement"], way) for way in ("shipped", "held out", "fitted", "nearest")
    }
    assert lost["shipped"] <= lost["fitted"] <= 0.03 and lost["held out"] <= lost["shipped"] + 0.005


def test_fit_finds_constants(
    problems: dict[str, list[tile_model.Timed]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of times that a model with other constants makes, where activations cost nothing."""
    monkeypatch.setattr(tile_model, "STEPS", (0.4, 0.1, 0.03))
    changed = {
        "launch tiled": 2.0,
        "slowness persistent 128 256 8 3": 1.6,
        **dict.fromkeys(tile_model.LAST, 0.0),
    }
    hidden = tile_model.constants_of({**tile_model.flat(cost.CONSTANTS), **changed})
    name, some = next(iter(problems.items()))
    made = [
        tile_model.Timed(
            each.row, each.problem, each.stock,
            {c: cost.work(c, each.problem, 132).microseconds(hidden) for c in each.times},
        )
        for each in some[::5]
    ]  # fmt: skip
    found = tile_model.fit(tile_model.points((name, each) for each in made))
    assert found.launch["tiled"] == pytest.approx(2.0, rel=0.1)
    assert found.slowness["persistent", 128, 256, 8, 3] == pytest.approx(1.6, rel=0.1)
    assert max(found.activation.values()) < 0.1


@pytest.mark.parametrize(
    "choice",
    [Config("persistent", 128, 256, 64, 8, 3, 16, 2), Config("tiled", 64, 96, 128, 4, 5, across=True)],
)
def test_names_of_configurations(choice: Config) -> None:
    assert tune_projections.named(tune_projections.name_of(choice)) == choice
