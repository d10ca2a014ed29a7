"""The workflows call make targets that exist, and the same script as everybody's CI."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


def commands(workflow: dict[str, Any]) -> str:
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    return "\n".join(str(step.get("run", "")) for step in steps)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_targets_exist(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    called = set(re.findall(r"\bmake (?:-C \S+ )?([a-z-]+)", commands(workflow)))
    assert called <= TARGETS
    assert called or ".ci/run" in commands(workflow)
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 90 for job in workflow["jobs"].values())


def test_cpu_runs_on_each_push_and_gpu_on_demand() -> None:
    cpu, gpu = (
        yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
        for name in ("cpu", "gpu")
    )
    # YAML reads the key `on` as true.
    assert {"push", "pull_request"} <= set(cpu[True])
    assert {"schedule", "pull_request"} <= set(gpu[True]) and "push" not in gpu[True]
    assert ".ci/run" in commands(cpu)
    assert "contains(github.event.pull_request.labels.*.name, 'gpu')" in gpu["jobs"]["gate"]["if"]


def test_ci_runs_the_quick_tests_and_then_the_others() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    first, then = re.findall(r"^make (\S+) PYTEST_ARGS=--durations", script, re.M)
    assert (first, then) == ("test", "rest")
    assert script.index("export TEST_SEED=") < script.index("make test"), "both parts have one seed"


def test_benchmarks_and_plots_run_each_night() -> None:
    """What `make test` does not install is not skipped everywhere."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "cpu.yml").read_text())
    steps = [str(step.get("run", "")) for step in workflow["jobs"]["long"]["steps"]]
    places = [i for i, step in enumerate(steps) if "make bench" in step or "-k plot" in step]
    assert len(places) == 2 and "make bench" in steps[places[0]]
    assert "tests/bench/test_bench.py tests/docs/test_plots.py" in steps[places[1]]
    assert "schedule" in workflow["jobs"]["long"]["if"]
