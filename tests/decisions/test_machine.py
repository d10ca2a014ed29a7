"""The file of this machine's measurements, and what processes that work together decide by."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import inductor_fusions
from inductor_fusions import config
from inductor_fusions.decisions import machine, tables

CPU = torch.device("cpu")
ROW = {
    "batch": 1, "heads": 4, "q_len": 200, "kv_len": 200, "head_dim": 32, "dtype": "float32",
    "mask": "causal", "train": False, "gain": {"sdpa": 1.5},
}  # fmt: skip


def add(**changes: Any) -> None:
    with machine.lock(CPU) as mine:
        assert mine
        machine.add(CPU, {"attention": [{**ROW, **changes}]})


def rows() -> list[Any]:
    found = machine.load(CPU)
    return [] if found is None else list(found["attention"])


def test_the_file_is_a_table(home: Path) -> None:
    assert machine.prepare() == ""
    add()
    add(q_len=7)
    add(gain={"sdpa": 2.0})
    (path,) = home.glob("*.json")
    found = json.loads(path.read_text())
    tables.check(found, "cpu")
    assert {name: found[name] for name in machine.HEADER} == machine.identity(CPU)
    assert found["attention"] == [{**ROW, "gain": {"sdpa": 2.0}}, {**ROW, "q_len": 7}] == rows()
    assert path.stat().st_mode & 0o077 == 0 and home.stat().st_mode & 0o077 == 0
    assert [p.name for p in home.iterdir() if p.suffix == ".tmp"] == []


def test_a_row_that_is_none_is_refused(home: Path) -> None:
    machine.prepare()
    with pytest.raises(ValueError, match="gain"), machine.lock(CPU):
        machine.add(CPU, {"attention": [{**ROW, "gain": {"sdpa": -1.0}}]})
    assert not list(home.glob("*.json"))


def test_another_torch_has_another_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.prepare()
    add()
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert rows() == []
    add(q_len=7)
    assert len(list(home.glob("*.json"))) == 2 and len(rows()) == 1


BROKEN: dict[str, Callable[[str], str]] = {
    "half": lambda text: text[: len(text) // 2],
    "no JSON": lambda text: "\x00",
    "an unknown column": lambda text: text.replace('"mask"', '"musk"'),
    "no driver": lambda text: text.replace('"driver"', '"schema2"'),
    "another schema": lambda text: text.replace('"schema": 1', '"schema": 2'),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_left_out_with_a_warning_and_replaced(
    name: str, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine.prepare()
    add()
    (path,) = home.glob("*.json")
    path.write_text(BROKEN[name](path.read_text()))
    machine.forget()
    assert rows() == [] and "is invalid" in caplog.text
    add(q_len=7)
    machine.forget()
    assert rows() == [{**ROW, "q_len": 7}]


@pytest.mark.parametrize(("what", "mode"), [("folder", 0o777), ("file", 0o666)])
def test_what_others_can_write_to_is_refused(
    what: str, mode: int, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine.prepare()
    add()
    (path,) = home.glob("*.json")
    (home if what == "folder" else path).chmod(mode)
    machine.forget()
    assert rows() == [] and "other users can write to" in caplog.text


def test_the_key_of_caches_knows_the_rows_that_a_process_begins_with(home: Path) -> None:
    machine.prepare()
    before = machine.digest()
    add()
    machine.forget()
    assert machine.digest() != before


def test_rows_that_another_process_has_added_stay(home: Path) -> None:
    machine.prepare()
    assert rows() == []
    code = (
        "import torch; from inductor_fusions.decisions import machine; d = torch.device('cpu')\n"
        f"torch.set_num_threads({torch.get_num_threads()})\n"
        f"with machine.lock(d): machine.add(d, {{'attention': [{ {**ROW, 'q_len': 7}!r}]}})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    add()
    machine.forget()
    assert sorted(row["q_len"] for row in rows()) == [7, 200]


def test_processes_that_were_launched_together_decide_by_no_file(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.prepare()
    add()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert rows() == []


def test_ranks_take_what_the_first_one_has_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.prepare()
    add()
    store = torch.distributed.HashStore()
    monkeypatch.setattr(machine._inductor, "has_peers", lambda: True)
    monkeypatch.setattr(
        machine._inductor, "first_to_say", lambda key, value: store.compare_set(key, "", value).decode()
    )
    first, digest = rows(), machine.digest()
    assert first == [ROW]
    for path in home.glob("*.json"):  # another host has none, or others
        path.unlink()
    machine.forget()
    assert rows() == first and machine.digest() == digest


def test_ranks_that_cannot_agree_decide_by_no_file(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(key: str, value: str) -> str:
        raise RuntimeError("the store is gone")

    machine.prepare()
    add()
    monkeypatch.setattr(machine._inductor, "has_peers", lambda: True)
    monkeypatch.setattr(machine._inductor, "first_to_say", refused)
    assert rows() == [] and "cannot exchange" in caplog.text


def test_the_store_of_a_job_answers_with_what_was_said_first() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert machine._inductor.first_to_say("key", "one") == "one"
        assert machine._inductor.first_to_say("key", "two") == "one"
    finally:
        torch.distributed.destroy_process_group()


def _rank(rank: int, store: str, home: str, found: Any) -> None:
    os.environ["XDG_DATA_HOME"] = home
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        if rank:
            found.put((rank, rows(), machine.digest()))
        torch.distributed.barrier()  # the second one asks first
        if not rank:
            found.put((rank, rows(), machine.digest()))
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def test_two_ranks_with_other_files_decide_alike(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the first rank has rows, and the one that asks first has none."""
    machine.prepare()
    add()
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    homes = [str(home.parents[1]), str(tmp_path / "other")]
    ranks = [
        context.Process(target=_rank, args=(rank, str(tmp_path / "store"), homes[rank], found))
        for rank in range(2)
    ]
    for each in ranks:
        each.start()
    said = [found.get(timeout=240) for _ in ranks]
    for each in ranks:
        each.join(60)
    assert sorted(rank for rank, _, _ in said) == [0, 1]
    assert [rows for _, rows, _ in said] == [[], []]
    assert said[0][2] == said[1][2]


def _on_another_gpu(rank: int, store: str, found: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    from torch.distributed._functional_collectives import all_reduce

    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine.log, "warning", lambda text, *args: said.append(text % args))
        patch.setattr(machine.tables, "device_name", lambda device: ("nvidia_h100", "nvidia_a100")[rank])
        machine.load(CPU)
    with config.patch(policy=("always", "profitable")[rank]):
        torch.manual_seed(rank)
        inputs = [torch.randn(1, 2, 12, 8, requires_grad=True) for _ in range(3)]

        def step(q: Any, k: Any, v: Any) -> Any:
            o = torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1) @ v
            return all_reduce(o * o, "sum", torch.distributed.group.WORLD)

        def results(fn: Any) -> list[Any]:
            out = fn(*inputs)
            return [out.detach(), *torch.autograd.grad(out.sum(), inputs)]

        ours, exact = results(torch.compile(step)), results(step)
        error = max(float((a - b).abs().max()) for a, b in zip(ours, exact, strict=True))
        found.put((rank, [site.verdict for site in inductor_fusions.report()], error, said))
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_ranks_on_unlike_gpus(tmp_path: Path) -> None:
    """One fuses and the other does not: nobody waits for ever, the results are right, and one says why."""
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    ranks = [
        context.Process(target=_on_another_gpu, args=(rank, str(tmp_path / "store"), found))
        for rank in (0, 1)
    ]
    for each in ranks:
        each.start()
    (_, first, error, said), (_, second, other, more) = sorted(found.get(timeout=240) for _ in ranks)
    for each in ranks:
        each.join(60)
    assert first == ["fused"] and second == ["left to stock"]
    assert max(error, other) < 1e-5
    (warning,) = said + more
    assert "nvidia_h100" in warning and "nvidia_a100" in warning
