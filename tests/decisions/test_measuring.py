"""Measuring on this machine: what is measured, and when."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F

from inductor_fusions import config, decisions
from inductor_fusions.decisions import Query, Span, decide, decide_for_all, machine, measuring
from inductor_fusions.decisions.measuring import Measurer, Unanswered
from tests.block_mm.support import run

CPU = torch.device("cpu")
ATTENTION = {
    "batch": 1, "heads": 4, "q_len": 200, "kv_len": 200, "head_dim": 32, "dtype": "float32",
    "mask": "causal", "train": False,
}  # fmt: skip
LORA = {
    "inner": [1536], "outer": [1536], "ranks": [[8]], "dtype": "bfloat16", "adapters": "bfloat16",
    "layout": "t", "tokens": 4096,
}  # fmt: skip


def attention(**changes: Any) -> Query:
    return Query("attention", {**ATTENTION, **changes}, ("sdpa",))


def lora(**changes: Any) -> Query:
    return Query("lora", {**LORA, **changes})


class Measured:
    """Stands for the process that measures: every problem has this gain, and takes so many seconds."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.gain, self.takes, self.now = 1.5, 1.0, 0.0
        self.answer: Callable[[Any], dict[str, Any]] = self._rows

    def _rows(self, problem: Any) -> dict[str, Any]:
        section, row, kernels = problem
        gain = dict.fromkeys(kernels, self.gain) if section == "attention" else self.gain
        return {"rows": {section: [{**row, "gain": gain}]}}

    def answers(self, problems: Iterator[Any], left: Callable[[], float]) -> Iterator[tuple[Any, Any]]:
        while (seconds := left()) > 0 and (problem := next(problems, None)) is not None:
            self.asked.append((problem[0], dict(problem[1])))
            self.now += min(self.takes, seconds)
            found = self.answer(problem) if self.takes <= seconds else {"error": "the measurement timed out"}
            yield problem, json.loads(json.dumps(found))

    def end(self) -> None:
        pass


@pytest.fixture
def process(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Measured]:
    """What stands for the process; measuring is on."""
    fake, measurer = Measured(), Measurer()
    monkeypatch.setattr(measuring.time, "monotonic", lambda: fake.now)
    monkeypatch.setattr(measuring, "Worker", lambda device: fake)
    monkeypatch.setattr(measuring, "measurer", measurer)
    monkeypatch.setattr(decisions.deciding, "measurer", measurer)
    with config.patch(measure=True):
        yield fake


# -- what is decided ---------------------------------------------------------------------------------------


def test_a_problem_far_from_any_row_is_measured_once(process: Measured) -> None:
    found = decide(attention(), CPU)
    assert (found.kernel, found.source, found.note) == (
        "sdpa", "this machine", "1.50x measured on this machine",
    )  # fmt: skip
    assert decide(attention(), CPU) == found and len(process.asked) == 1


def test_what_is_slower_is_stock_and_not_asked_again(process: Measured) -> None:
    process.gain = 0.9
    found = decide(attention(), CPU)
    assert (found.kernel, found.source) == (None, "this machine")
    assert found.reason == "measured on this machine to be no faster than stock at this shape"
    decide(attention(), CPU)
    assert len(process.asked) == 1


def test_a_later_process_finds_it(process: Measured) -> None:
    decide(attention(), CPU)
    machine.forget()
    with config.patch(measure=False):
        assert decide(attention(), CPU).source == "this machine"
        assert decide(attention(dtype="bfloat16"), CPU).source == "stock"
    assert len(process.asked) == 1


def test_off_by_default(process: Measured) -> None:
    assert config.get_config_copy()["measure"] and not config._config["measure"].default
    with config.patch(measure=False):
        assert decide(attention(), CPU).source == "stock"
    assert process.asked == []


def test_near_rows_of_this_machine_are_estimated_from_and_far_ones_are_not(process: Measured) -> None:
    decide(lora(), CPU)
    near = decide(lora(tokens=4096 + 512), CPU)
    assert (near.kernel, near.source, len(process.asked)) == ("lora", "estimated", 1)
    far = decide(lora(inner=[8960]), CPU)
    assert (far.source, len(process.asked)) == ("this machine", 2)


def test_rows_of_a_table_are_near_wherever_they_say_anything(
    process: Measured, shelf: Callable[..., None]
) -> None:
    shelf(on="cpu", cpu={"lora": [{**LORA, "inner": [4096], "gain": 1.4}]})
    assert decide(lora(), CPU).source == "estimated"
    assert process.asked == []


def test_a_symbolic_number_of_tokens_is_measured_at_its_hint_alone(process: Measured) -> None:
    found = decide_for_all(lora(), Span(2, 2048, 1 << 20), CPU)
    assert found.kernel == "lora"
    assert [row["tokens"] for _, row in process.asked] == [2048]


def test_what_saves_most_comes_first(process: Measured) -> None:
    small, large, often = (attention(q_len=n, kv_len=n) for n in (64, 2048, 512))
    with decisions.measured_together():
        for query in (small, large, *[often] * 40):
            assert decide(query, CPU).source == "pending"
        assert process.asked == []
    assert [row["q_len"] for _, row in process.asked] == [512, 2048, 64]
    assert decide(small, CPU).source == "this machine"


def adapted(x: Any, w: Any, v: Any, u: Any, a: Any, b: Any) -> Any:
    """Three linears on one input, each with an adapter."""
    return [F.linear(x, base) + F.linear(F.linear(x, a + n), b) for n, base in enumerate((w, v, u))]


@pytest.mark.parametrize("gain", [1.5, 0.9])
def test_parts_of_a_group_are_measured_if_the_group_does_not_pay(
    gain: float, process: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "device_title", lambda device: "NVIDIA H200")
    monkeypatch.setattr(measuring._inductor, "is_absent", lambda: False)
    process.gain, rows = gain, process.answer
    process.answer = lambda problem: rows(problem) if problem[0] == "lora" else {"unable": problem[0]}
    matrices = [torch.randn(*shape, dtype=torch.bfloat16) for shape in [(512, 1024)] * 3 + [(8, 1024)]]
    args = torch.randn(4096, 1024, dtype=torch.bfloat16), *matrices, torch.randn(512, 8, dtype=torch.bfloat16)
    found = run(adapted, args, policy="profitable")
    groups = [len(row["outer"]) for section, row in process.asked if section == "lora"]
    assert groups == ([3] if gain > 1 else [3, 2, 1]), process.asked
    assert found.fused("lora") == (gain > 1)


def test_what_the_rows_of_others_say_enough_of_is_not_measured(process: Measured) -> None:
    large, near, far = (lora(tokens=n) for n in (1 << 16, (1 << 16) - 4096, 1 << 8))
    with decisions.measured_together():
        for query in (near, far, large):
            assert decide(query, CPU).source == "pending"
    assert [row["tokens"] for _, row in process.asked] == [1 << 16, 1 << 8]
    assert decide(near, CPU).source == "estimated"
    assert decisions.deciding.measurer.left == 0


def test_threads_collect_apart(process: Measured) -> None:
    """Another thread that compiles meanwhile measures at once."""
    found: list[str] = []
    with decisions.measured_together():
        thread = threading.Thread(target=lambda: found.append(measured_apart(attention(q_len=64, kv_len=64))))
        thread.start()
        thread.join()
        assert decide(attention(q_len=4096, kv_len=4096), CPU).source == "pending"
    assert found == ["this machine"]


def measured_apart(query: Query) -> str:
    with config.patch(measure=True):  # a patch holds for its thread
        return decide(query, CPU).source


def test_the_budget_is_of_the_process(process: Measured) -> None:
    process.takes = 25.0
    sizes = (64, 4096, 1 << 18)
    with config.patch(measure_budget="60"):
        found = [decide(attention(q_len=n, kv_len=n), CPU).source for n in sizes]
        assert found[:2] == ["this machine"] * 2 and found[2] != "this machine"
        measurer = decisions.deciding.measurer
        assert (measurer.left, len(measurer.measured)) == (1, 2)
        decide(attention(q_len=1, kv_len=1 << 12), CPU)
        assert len(process.asked) == 3 and measurer.spent == 60.0
        assert measurer.left == 2


def test_what_was_not_reached_is_measured_by_the_next_process(
    process: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    with config.patch(measure_budget="0"):
        assert decide(attention(), CPU).source == "stock"
    later = Measurer()
    monkeypatch.setattr(decisions.deciding, "measurer", later)
    assert decide(attention(), CPU).source == "this machine"


# -- when nothing is measured ------------------------------------------------------------------------------


def launched(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("WORLD_SIZE", "2")


def together(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine._inductor, "has_peers", lambda: True)
    patch.setattr(machine._inductor, "first_to_say", lambda key, value: value)


def deterministic(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)


def deterministic_inductor(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(measuring._inductor, "is_deterministic", lambda: True)


def absent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(measuring._inductor, "is_absent", lambda: True)


@pytest.mark.parametrize("setting", [launched, together, deterministic, deterministic_inductor, absent])
def test_nothing_is_measured(
    setting: Callable[[pytest.MonkeyPatch], None], process: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting(monkeypatch)
    assert decide(attention(), CPU).source == "stock"
    assert process.asked == []


def test_inductor_says_whether_it_is_deterministic() -> None:
    assert not measuring._inductor.is_deterministic()
    if "deterministic" in torch._inductor.config.get_config_copy():
        with torch._inductor.config.patch(deterministic=True):
            assert measuring._inductor.is_deterministic()


def test_nothing_is_measured_where_everything_is_fused_anyway(process: Measured) -> None:
    with config.patch(policy="always"):
        assert decide(attention(), CPU).source == "stock"
    assert process.asked == []


def test_nothing_is_measured_while_a_graph_is_captured(
    process: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert "graph" in decisions.deciding.measurer.forbidden(torch.device("cuda", 0))
    assert decisions.deciding.measurer.forbidden(CPU) == ""


ANSWERS: dict[str, dict[str, Any]] = {
    "out of memory": {"error": "out of memory"},
    "unable": {"unable": "its mask is not known"},
    "another problem": {"rows": {"attention": [{**ATTENTION, "q_len": 7, "gain": {"sdpa": 9.0}}]}},
    "no row": {"rows": {"attention": [{**ATTENTION, "gain": {"sdpa": "fast"}}]}},
    "no section": {"rows": {"elsewhere": []}},
    "nothing": {},
}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_goes_wrong_leaves_it_to_stock_and_is_said_once(
    name: str, process: Measured, caplog: pytest.LogCaptureFixture
) -> None:
    process.answer = lambda problem: ANSWERS[name]
    with caplog.at_level(logging.WARNING, measuring.__name__):
        assert decide(attention(), CPU).source == "stock"
        assert decide(attention(), CPU).source == "stock"
    assert len(process.asked) == 1 and len(caplog.records) == (name != "unable")


def test_no_process_can_be_started(process: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(problems: Any, left: Any) -> Any:
        raise OSError("no more processes")

    monkeypatch.setattr(process, "answers", refused)
    assert decide(attention(), CPU).source == "stock"
    assert decisions.deciding.measurer.left == 1


def test_a_process_that_dies_leaves_the_rest_to_stock(
    process: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(problems: Iterator[Any], left: Any) -> Iterator[Any]:
        first, _ = next(problems), next(problems)
        yield first, process.answer(first)
        raise Unanswered("the measuring process died")

    monkeypatch.setattr(process, "answers", dying)
    sizes = (4096, 256, 16)
    with decisions.measured_together():
        for n in sizes:
            decide(attention(q_len=n, kv_len=n), CPU)
    found = [decide(attention(q_len=n, kv_len=n), CPU).source for n in sizes]
    assert found[0] == "this machine" and "this machine" not in found[1:]
    measurer = decisions.deciding.measurer
    assert (measurer.left, len(measurer.measured)) == (2, 1)


# -- one process of several ----------------------------------------------------------------------------------


def _hold(folder: str, locked: Any, done: Any) -> None:
    os.environ["XDG_DATA_HOME"] = folder
    with machine.lock(CPU) as mine:
        locked.put(mine)
        done.get(timeout=60)


def test_one_process_measures(process: Measured, home: Path) -> None:
    """The other one takes stock, and does not wait."""
    machine.prepare()
    context = multiprocessing.get_context("fork")
    locked, done = context.Queue(), context.Queue()
    other = context.Process(target=_hold, args=(str(home.parents[1]), locked, done))
    other.start()
    try:
        assert locked.get(timeout=60) is True
        assert decide(attention(), CPU).source == "stock" and process.asked == []
    finally:
        done.put(None)
        other.join(60)
    with machine.lock(CPU) as mine:
        assert mine


def test_nothing_is_measured_for_a_folder_that_others_can_write_to(process: Measured, home: Path) -> None:
    machine.prepare()
    home.chmod(0o777)
    machine.forget()
    assert decide(attention(), CPU).source == "stock" and process.asked == []


# -- progress --------------------------------------------------------------------------------------------


def test_progress_is_said_from_the_third_second_on(capfd: pytest.CaptureFixture[str]) -> None:
    with measuring._progress(4, 60.0) as done:
        done[0] = 1
        time.sleep(0.2)
    assert capfd.readouterr().err == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "SILENT", 0.05)
        with measuring._progress(4, 60.0) as done:
            done[0] = 1
            time.sleep(0.4)
    said = capfd.readouterr().err
    assert said == "inductor_fusions: measuring on this machine, 2 of 4, 0 s of at most 60 s\n"
