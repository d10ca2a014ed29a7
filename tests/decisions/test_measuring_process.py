"""The process that measures: it is its parent's alone, and later processes find what it measured."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import inductor_fusions
from inductor_fusions.decisions import asking, measuring, problems
from inductor_fusions.decisions.asking import Unanswered
from inductor_fusions.decisions.problems import SECTIONS
from tests.decisions.test_measuring import ATTENTION, CPU


def _forked(answers: Any, worker: asking.Worker) -> None:
    measurer = measuring.measurer
    answers.put((len(measurer.workers), measurer.spent))
    worker.end()


def test_a_child_does_not_end_the_process_of_its_parent(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measurer, worker = measuring.measurer, asking.Worker(CPU)
    worker.process = subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    monkeypatch.setitem(measurer.workers, CPU, worker)
    monkeypatch.setattr(measurer, "spent", 5.0)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_forked, args=(answers, worker))
    child.start()
    assert answers.get(timeout=60) == (0, 0.0)
    child.join(60)
    try:
        assert worker.process.poll() is None
    finally:
        worker.end()
    assert worker.process is None


WORDS = {
    "section": "import json, sys\nfor line in sys.stdin:\n    asked = json.loads(line)\n"
    "    print(json.dumps({'unable': asked['section'], 'number': asked['number']}), flush=True)\n",
    "no answer": "import time\ntime.sleep(600)\n",
    "no words": "print('{', flush=True)\nimport time\ntime.sleep(600)\n",
    "another number": "print('{\"number\": 7}', flush=True)\nimport time\ntime.sleep(600)\n",
    "gone": "",
}


def problems_of(*sizes: int) -> Iterator[asking.Problem]:
    for size in sizes:
        yield "attention", {**ATTENTION, "q_len": size}, ("sdpa",)


@pytest.fixture
def talking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], asking.Worker]]:
    """A worker whose process says something else."""
    worker = asking.Worker(CPU)

    def with_words(name: str) -> asking.Worker:
        monkeypatch.setattr(asking, "_MAIN", WORDS[name].replace("{", "{{").replace("}", "}}"))
        return worker

    yield with_words
    worker.end()
    assert worker.process is None and worker.folder == ""


def test_problems_are_asked_side_by_side(
    talking: Callable[[str], asking.Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "side_by_side", lambda device: 2)
    taken: list[int] = []

    def noted() -> Iterator[asking.Problem]:
        for one in problems_of(1, 2, 3):
            taken.append(one[1]["q_len"])
            yield one

    found = talking("section").answers(noted(), lambda: 60.0)
    problem, answer = next(found)
    assert answer["unable"] == "attention" and problem[1]["q_len"] == 1 and taken == [1, 2]
    assert [problem[1]["q_len"] for problem, _ in found] == [2, 3]


def test_without_time_nothing_is_asked(talking: Callable[[str], asking.Worker]) -> None:
    assert list(talking("section").answers(problems_of(1, 2), lambda: 0.0)) == []


@pytest.mark.parametrize(
    ("name", "why"),
    [("no answer", "timed out"), ("no words", "died"), ("another number", "died"), ("gone", "died")],
)
def test_a_process_that_does_not_answer_is_ended(
    name: str, why: str, talking: Callable[[str], asking.Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "GRACE", 0.2)
    left = iter([1.0, 1.0])
    worker = talking(name)
    with pytest.raises(Unanswered, match=why):
        list(worker.answers(problems_of(1), lambda: next(left, 30.0 if why == "died" else 0.0)))
    assert worker.process is None and worker.folder == ""


def test_places_are_those_that_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asking.side_by_side(CPU) == 1
    monkeypatch.setattr(asking.os, "sched_getaffinity", lambda pid: range(12))
    for free, places in ((100 << 30, 6), (9 << 30, 2), (1 << 30, 1)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 100 << 30))
        assert asking.side_by_side(torch.device("cuda", 0)) == places


@pytest.mark.slow
def test_end_to_end(tmp_path: Path) -> None:
    """The first process measures an attention and fuses it; later ones find that, and measure nothing."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys, torch, inductor_fusions\n"
        "from inductor_fusions import decisions\nfrom inductor_fusions.decisions import tables\n"
        "tables.folders = lambda: iter(())\n"
        "def attention(q, k, v):\n"
        "    i = torch.arange(q.shape[-2])\n"
        "    scores = (q @ k.transpose(-2, -1) * 0.125).masked_fill(i > i[:, None], -1e9)\n"
        "    return torch.softmax(scores, -1) @ v\n"
        "q, k, v = (torch.randn(1, 16, 512, 64) for _ in range(3))\n"
        "found, exact = torch.compile(attention)(q, k, v), attention(q.double(), k.double(), v.double())\n"
        "assert (found - exact).abs().max() < 1e-5\n"
        "(site,) = inductor_fusions.report()\n"
        "measured = [row for _, row, _ in decisions.measurer.measured]\n"
        "print(json.dumps([site.verdict, site.kernel, site.reason, measured]))\n"
    )

    def run(number: int, measure: str) -> Any:
        own = {
            "XDG_DATA_HOME": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"cache{number}"),
            "INDUCTOR_FUSIONS_MEASURE": measure, "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        here = os.pathsep.join([str(Path(inductor_fusions.__file__).parents[1]), *sys.path])
        environment = {**os.environ, **own, "PYTHONPATH": here}
        environment.pop("WORLD_SIZE", None)
        done = subprocess.run(
            [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    verdict, kernel, reason, measured = run(1, "1")
    (row,) = measured
    assert (row["mask"], row["q_len"], row["batch"], row["heads"]) == ("causal", 512, 1, 16)
    assert verdict == "fused", reason
    assert "measured on this machine" in kernel
    assert run(2, "1") == [verdict, kernel, reason, []]
    assert run(3, "0") == [verdict, kernel, reason, []]
    (path,) = (tmp_path / "inductor_fusions" / "measured").glob("*.json")
    for each in json.loads(path.read_text())["attention"]:
        SECTIONS["attention"].check(each)
        assert each["gain"]["sdpa"] >= problems.MARGIN
