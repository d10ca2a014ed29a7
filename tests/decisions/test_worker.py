"""The process that measures: problems are written out as fusions find them, and timed against stock."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import inductor_fusions
from inductor_fusions import config, decisions, worker
from inductor_fusions.decisions import Query, deciding, tables
from inductor_fusions.decisions.problems import SECTIONS
from inductor_fusions.worker import attention, measuring, problem
from inductor_fusions.worker.case import Case, UnableError
from tests.support.processes import start

#: Of each section, rows of the H200's table whose problem must be asked for when they are written out.
FOUND = {"attention": 425, "block_mm": 12, "lora": 206, "lora_sums": 252}


@contextlib.contextmanager
def asked() -> Iterator[list[Query]]:
    """The problems that are asked for inside."""
    found: list[Query] = []
    decided = deciding._from_tables

    def note(query: Query, device: torch.device) -> Any:
        found.append(query)
        return decided(query, device)

    with mock.patch.object(deciding, "_from_tables", note):
        yield found


def problems(section: str) -> list[dict[str, Any]]:
    table = tables.load("nvidia_h200")
    assert table is not None
    kind = SECTIONS[section]
    rows = [item.row for item in table.rows(section) if item.gains and not item.row.get("train")]
    rows = [row for row in rows if row.get("tokens", 0) <= 4096 and row.get("batch", 1) <= 64]
    return [{name: value for name, value in row.items() if name not in kind.measured} for row in rows]


@pytest.mark.parametrize("section", FOUND)
@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_what_is_written_out_asks_for_the_very_problem(section: str, place: float) -> None:
    rows = problems(section)
    row = rows[int(place * len(rows))]
    write = attention.case if section == "attention" else problem.CASES[section]
    try:
        case = write(row, "cpu")
    except UnableError:
        assert section == "block_mm" and row["kind"] in ("sum", "mixed")
        return
    with asked() as found, config.patch(policy="profitable"):
        inductor_fusions.explain(case.fn, *case.inputs, gpu="nvidia_h200")
    kind = SECTIONS[section]
    same = [
        query
        for query in found
        if query.section == section
        and kind.key(query.row) == kind.key(row)
        and query.row.get(kind.along) == row.get(kind.along)
    ]
    assert same, [(query.section, dict(query.row)) for query in found]


def test_kernels_get_one_configuration_after_another() -> None:
    @dataclass
    class Config:
        size: int

    row = {"tokens": 3}

    def chosen(section: str = "block_mm") -> int:
        candidates = [Config(size) for size in (1, 2, 3)]
        return decisions.configured(section, row, Config(2), lambda: candidates).size

    assert chosen() == 2
    for number, size in enumerate((2, 1, 3)):
        with decisions.trial("block_mm", number) as trial:
            assert (chosen(), chosen("narrow_mm"), trial.exhausted) == (size, 2, False)
        assert trial.rows == {
            "block_mm": [{**row, "config": {"size": size}}], "narrow_mm": [{**row, "config": {"size": 2}}],
        }  # fmt: skip
    with decisions.trial("block_mm", 3) as trial:
        assert (chosen(), trial.exhausted) == (2, True)
    assert chosen() == 2


ATTENTION = {
    "batch": 2, "heads": 3, "q_len": 33, "kv_len": 33, "head_dim": 16, "dtype": "float32", "mask": "causal",
    "train": True,
}  # fmt: skip


def ask(**changes: Any) -> dict[str, Any]:
    given = {
        "section": "attention", "row": ATTENTION, "kernels": ["sdpa"], "device": "cpu", "index": 0,
        "threads": 1, **changes,
    }  # fmt: skip
    saved = torch.get_num_threads()
    with mock.patch.object(worker, "set_up", lambda asked: None):
        try:
            return worker.answer(given, contextlib.nullcontext())
        finally:
            torch.set_num_threads(saved)


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", "window", "document", "pad", "causal+document", "window+pad"])
def test_what_is_seen_through_a_mask(mask: str) -> None:
    """Each part by itself, and together with others."""
    made = attention.case({**ATTENTION, "mask": mask}, "cpu")
    data, i = made.inputs[3], torch.arange(ATTENTION["kv_len"])
    parts = {
        "causal": i[:, None] >= i,
        "window": i[:, None] - i < 8,
        "document": data[:, None, :, None] == data[:, None, None, :],
        "pad": data[:, None, None, :] != 0,
    }
    wanted = torch.ones(1, 1, len(i), len(i), dtype=torch.bool)
    for name in mask.split("+"):
        wanted = wanted & parts[name]
    seen = attention.visible(types.SimpleNamespace(**ATTENTION | {"mask": mask, "window": 8}), data)
    assert seen is not None and torch.equal(seen.expand(wanted.shape), wanted)
    assert made.fn(*made.inputs)[0].isfinite().all()


@pytest.mark.parametrize("mask", ["none", "causal", "pad", "bias_grad", "causal+pad"])
def test_an_attention_is_measured(mask: str, fresh_cache: None) -> None:
    row = {**ATTENTION, "mask": mask, "train": mask != "causal+pad"}
    answer = ask(row=row, kernels=["sdpa", "row_bias"])
    (made,) = answer["rows"]["attention"]
    SECTIONS["attention"].check(made)
    assert {**made, "gain": 0} == {**row, "gain": 0}
    # cuDNN's kernel takes nothing on a CPU.
    assert set(made["gain"]) == {"sdpa"} and made["gain"]["sdpa"] > 0


def test_what_cannot_be_written_out_is_said() -> None:
    assert "not described" in ask(row={**ATTENTION, "mask": "softplus causal"})["unable"]
    assert "unknown column" in ask(row={**ATTENTION, "musk": 1})["error"]
    row = {"inner": 64, "outer": 64, "rank": 8, "dtype": "bfloat16", "adapters": "bfloat16", "masks": 1,
           "tokens": 8}  # fmt: skip
    assert "lora_dropout" in ask(section="lora_dropout", row=row)["unable"]


def test_tiles_that_were_not_tried_have_no_row() -> None:
    """A skinny GEMM in front of a linear keeps the row that it got when it was measured by itself."""
    row = {"inner": [64], "outer": [64], "ranks": [[8]], "dtype": "bfloat16", "adapters": "float32",
           "layout": "t", "tokens": 512}  # fmt: skip
    grouped, skinny = ({"tokens": 512, "config": {"size": size}} for size in (1, 2))
    made_of = {"block_mm": [grouped], "narrow_mm": [skinny]}
    with mock.patch.object(problem, "best", lambda *given: (1.5, made_of)):
        rows = ask(section="lora", row=row)["rows"]
    assert rows == {"lora": [{**row, "gain": 1.5}], "block_mm": [{**grouped, "gain": 1.5}]}


def test_memory_that_is_out_is_said() -> None:
    with mock.patch.object(attention, "case", side_effect=torch.OutOfMemoryError("CUDA out of memory")):
        assert ask() == {"error": "out of memory"}


def test_a_kernel_that_is_wrong_has_no_gain() -> None:
    x = torch.randn(64)
    case = Case(lambda x: [x.sin()], [x])

    def stock() -> list[torch.Tensor]:
        return [x.sin()]

    runs = {"right": stock, "wrong": lambda: [x.sin() * 1.001]}
    found = measuring._judged(case, stock, runs, "cpu")
    assert found["wrong"] == 0.0 and found["right"] > 0.5


def test_the_first_sample_alone_is_compared_where_samples_are_apart() -> None:
    for mask, sizes in (("pad", 1), ("bias_grad", 2)):
        case = attention.case({**ATTENTION, "mask": mask}, "cpu")
        exact, count = measuring._exact(case)
        assert (count, exact[0].shape[0], len(exact)) == (1, sizes, 1 + 3 + (mask == "bias_grad"))
        found = [*case.fn(*case.inputs)]
        torch.testing.assert_close(found[0][:sizes].double(), exact[0], rtol=1e-4, atol=1e-5)
        gradients = measuring._gradients(found, case.leaves)
        torch.testing.assert_close(gradients[0][:sizes].double(), exact[1], rtol=1e-3, atol=1e-4)


CHILDREN = """
import os, sys, time
from inductor_fusions import worker

def answer(asked, turn):
    print("words")
    if asked["section"] == "dies":
        os._exit(1)
    if asked["section"] == "slow":
        time.sleep(600)
    with turn:
        open("turns", "a").write("in ")
        time.sleep(0.3)
        open("turns", "a").write("out ")
    return {"unable": asked["section"]}

worker.prepare, worker.answer = (lambda: None), answer
worker.main()
"""


def test_each_problem_is_measured_in_a_child(tmp_path: Path) -> None:
    """What is printed meanwhile is no answer; one that dies or hangs is said; turns are one after another."""
    here = os.pathsep.join([str(Path(inductor_fusions.__file__).parents[1]), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", CHILDREN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": here},
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    for number, section in enumerate(["slow", "one", "dies", "two"]):
        asked = {"section": section, "number": number, "seconds": 2.0 if section == "slow" else 120.0}
        process.stdin.write(json.dumps(asked) + "\n")
    process.stdin.flush()
    found = [json.loads(process.stdout.readline()) for _ in range(4)]
    assert sorted(found, key=lambda each: each["number"]) == [
        {"error": "the measurement timed out", "number": 0},
        {"unable": "one", "number": 1},
        {"error": "the measuring process died", "number": 2},
        {"unable": "two", "number": 3},
    ]
    assert (tmp_path / "turns").read_text() == "in out in out "
    process.stdin.write(json.dumps({"section": "slow", "number": 5, "seconds": 60.0}) + "\n")
    process.stdin.close()
    assert process.stdout.read() == "" and process.wait(30) == 0


def test_the_process_takes_no_setting_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from inductor_fusions.decisions import asking

    made: dict[str, Any] = {}
    monkeypatch.setattr(asking.subprocess, "Popen", lambda *args, **given: made.update(given))
    monkeypatch.setenv("INDUCTOR_FUSIONS_MAX", "0")
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path))
    own = asking.Worker(torch.device("cpu"))
    own._start()
    try:
        assert "INDUCTOR_FUSIONS_MAX" not in made["env"] and made["env"][tables.VARIABLE] == str(tmp_path)
        assert made["cwd"] == own.folder
        assert made["env"]["TORCHINDUCTOR_CACHE_DIR"].startswith(own.folder)
    finally:
        own.process = None
        own.end()


STOCK_ALONE = """
import sys
import torch
from torch._inductor.utils import run_and_get_code
from inductor_fusions import config, worker

def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) * 0.25, -1) @ v

if sys.argv[1] == "worker":
    worker.prepare()
    worker.set_up({"row": {}, "device": "cpu", "threads": 1})
with config.patch(enabled=False), torch.no_grad():
    _, code = run_and_get_code(torch.compile(attention), *(torch.randn(2, 3, 33, 16) for _ in range(3)))
print("scaled_dot_product" in "".join(code))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("where", "matches"), [("worker", "False"), ("elsewhere", "True")])
def test_the_baseline_is_an_attention_written_out(where: str, matches: str, tmp_path: Path) -> None:
    """Stock's attention patterns match this attention, but not where an attention is measured."""
    done = start("-c", STOCK_ALONE, where, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert done.stdout.split()[-1:] == [matches], done.stderr
