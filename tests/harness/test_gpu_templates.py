"""What the tests of races run is the kernel that it is named after; looked at without a GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from devtools import cuda_codegen
from tests.gpu import sanitize
from tests.gpu.templates import TEMPLATES


@pytest.mark.parametrize("name", [name for name, each in TEMPLATES.items() if each.kernels])
def test_template(name: str) -> None:
    template = TEMPLATES[name]
    with template.active():
        made = cuda_codegen.generate(
            template.function, template.inputs("cpu"), train=template.train, run=False
        )
    kernels = [kernel for kernel in made.kernels if kernel.is_template]
    for wanted in template.kernels:
        assert any(wanted in kernel.name for kernel in kernels), [kernel.name for kernel in kernels]
    assert len(kernels) >= len(template.kernels)
    for mark in template.marks:
        assert any(mark in kernel.source for kernel in kernels), mark
    assert len({module.is_backward for module in made.modules}) == 1 + template.train


def test_inputs_are_finite_and_differ() -> None:
    for template in TEMPLATES.values():
        first, again, other = (template.inputs("cpu", seed) for seed in (0, 0, 1))
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
        assert not torch.equal(first[0], other[0]) and all(x.isfinite().all() for x in first)


#: Stands for compute-sanitizer: runs what it is given, and finds something under one tool.
SANITIZER = """#!/bin/sh
test "$1" = --tool && tool=$2 && shift 4
"$@" || exit
echo "========= a race"
test $tool = memcheck || exit 9
echo "========= ERROR SUMMARY: 0 errors"
"""


@pytest.mark.slow
def test_sanitizer_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for each tool and template; a run that was stopped goes on, and forgets nothing."""
    (tmp_path / "compute-sanitizer").write_text(SANITIZER)
    (tmp_path / "compute-sanitizer").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    path = tmp_path / "report.json"
    command = ["outer product", "--device", "cpu", "--json", str(path), "--tool", "memcheck"]
    assert sanitize.main(command) == 0
    assert sanitize.main([*command, "--tool", "racecheck"]) == 1
    monkeypatch.setattr(sanitize, "watched", None)  # nothing is left to run
    assert sanitize.main([*command, "--tool", "racecheck"]) == 1
    first, second = json.loads(path.read_text())["rows"]
    assert (first["clean"], first["said"]) == (True, "========= ERROR SUMMARY: 0 errors")
    assert (second["clean"], second["said"]) == (False, "========= a race")
    assert (second["tool"], second["template"]) == ("racecheck", "outer product")
