"""`tune --why`: the decision for one problem, with its source and the rows behind it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from inductor_fusions import cli
from inductor_fusions.decisions import tables
from inductor_fusions.decisions.problems import SECTIONS


def is_measured(section: str) -> bool:
    """Whether the table of the H200 has gains of such problems."""
    table = tables.load("nvidia_h200")
    return table is not None and any(item.gains for item in table.rows(section))


GAINS = [name for name in SECTIONS if is_measured(name)]


def problem(section: str) -> dict[str, object]:
    """A problem that has a row of its own on the H200."""
    table = tables.load("nvidia_h200")
    assert table is not None
    kind = SECTIONS[section]
    row = next(item.row for item in table.rows(section) if item.gains)
    return {name: value for name, value in row.items() if name not in kind.measured}


def why(section: str, asked: object, *arguments: str, code: int = 0) -> str:
    command = ["tune", section, "--why", asked if isinstance(asked, str) else json.dumps(asked), *arguments]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == code, (done.output, done.exception)
    return " ".join((done.output + (done.stderr if code else "")).split())


@pytest.mark.parametrize("section", GAINS)
def test_a_problem_with_a_row(section: str) -> None:
    said = why(section, problem(section), "--target", "nvidia_h200")
    assert "x measured" in said or "measured on nvidia_h200 to be no faster than stock" in said
    assert "gain" in said


def test_a_problem_near_rows_is_estimated_and_shows_them() -> None:
    asked = {"batch": 8, "heads": 12, "q_len": 500, "kv_len": 500, "head_dim": 64, "dtype": "float16",
             "mask": "pad", "train": False}  # fmt: skip
    said = why("attention", asked, "--target", "h200")
    assert said.startswith(
        "sdpa, estimated from 8 measurements nearby, 3 of them on nvidia_h100_80gb_hbm3 (expected"
    )
    assert said.count("512") >= 2


def test_a_problem_of_another_device_names_it() -> None:
    said = why("attention", problem("attention"), "--target", "h100_nvl")
    assert "on nvidia_h100_80gb_hbm3 (expected" in said


def test_a_problem_far_from_all_rows_is_stock() -> None:
    asked = {"batch": 1, "heads": 1, "q_len": 1, "kv_len": 1, "head_dim": 8, "dtype": "float32",
             "mask": "bias", "train": True}  # fmt: skip
    assert why("attention", asked, "--target", "h200").startswith("stock: ")


@pytest.mark.parametrize(("section", "asked", "message"), [
    ("attention", "{", "--why: { is not JSON; the columns of attention are batch"),
    ("attention", {"batch": 8}, "heads is missing; the columns of attention are batch, heads"),
    ("attention", {**dict.fromkeys(SECTIONS["attention"].columns, 1)}, "dtype = 1"),
    ("lora_decode", {}, "tables have no section lora_decode"),
])  # fmt: skip
def test_mistakes(section: str, asked: object, message: str) -> None:
    assert message in why(section, asked, "--target", "h200", code=2)


def test_an_unknown_target() -> None:
    assert "unknown device" in why("attention", problem("attention"), "--target", "h201", code=2)
