"""report() where a cache served the compiled code, so that no pass ran."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import inductor_fusions
from inductor_fusions import config, records, reporting
from tests import blocks
from tests.support.processes import start

PROGRAM = """
import json, sys
import torch
import inductor_fusions
from torch._dynamo.utils import counters

def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1) @ v

def refused(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1).cumsum(-1) @ v

for fn in attention, refused:
    torch.compile(fn)(*(torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))).sum().backward()
report = inductor_fusions.report()
print(json.dumps({
    "hits": counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
    "unknown": report.unknown,
    "sites": report.to_dict()["sites"],
}))
"""


def started(cache: Path) -> dict:
    done = start("-c", PROGRAM, TORCHINDUCTOR_CACHE_DIR=str(cache), INDUCTOR_FUSIONS_POLICY="always")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_second_process(tmp_path: Path) -> None:
    """It hits the cache and reports what the first one did; without the records it says so."""
    first, second = started(tmp_path), started(tmp_path)
    assert not first["hits"] and second["hits"]
    assert [site["verdict"] for site in first["sites"]] == ["fused", "rejected"]
    assert first["sites"][0]["backend"]
    assert second["sites"] == first["sites"] and not second["unknown"]
    shutil.rmtree(tmp_path / "inductor_fusions")
    third = started(tmp_path)
    assert third["sites"] == [] and third["unknown"] == 2


def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1) @ v


def compile_anew() -> None:
    torch._dynamo.reset()
    with config.patch(policy="always"):
        torch.compile(attention)(*(torch.randn(1, 2, 4, 8) for _ in range(3)))


def test_same_process(fresh_cache: None) -> None:
    """Once for each compile, whether a pass ran or a cache served it."""
    inductor_fusions.clear()
    for count in (1, 2, 3):
        compile_anew()
        assert inductor_fusions.report().count() == count
        assert len(inductor_fusions.report()) == count  # asking twice changes nothing
    assert counters["inductor"]["fusions_attention"] == 3
    inductor_fusions.clear()
    assert len(inductor_fusions.report()) == 0
    compile_anew()
    assert inductor_fusions.report().count() == 1
    counters.clear()
    assert inductor_fusions.report().count() == 1
    compile_anew()
    assert inductor_fusions.report().count() == 2


def with_other_calls(q, k, v):
    scores = torch.matmul(q, k.mT)
    return (scores * 0.3).softmax(-1).matmul(v)


def written(q, k, v):
    return torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.3, dim=-1) @ v


def called_then_written(q, k, v):
    return written(torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3), k, v)


def written_then_called(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(written(q, k, v), k, v, scale=0.3)


def report_each(first, second, train: bool) -> None:
    """Each is reported with its own lines, though the cache of aten graphs serves the code of the first."""
    served = counters["inductor"]["fxgraph_cache_hit"]
    for fn in (first, second, second):
        torch._dynamo.reset()
        inductor_fusions.clear()
        counted = counters["inductor"]["fusions_attention"]
        with config.patch(policy="always"), torch._functorch.config.patch(enable_autograd_cache=False):
            found = torch.compile(fn)(*(torch.randn(1, 2, 4, 8, requires_grad=train) for _ in range(3)))
            if train:
                found.sum().backward()
        report = inductor_fusions.report()
        lines = {f" in {each}: " for each in (fn.__name__, "written")}
        assert all(any(line in site.source for line in lines) for site in report), str(report)
        assert [site.backend for site in report if site.verdict == "fused"] == ["flash"]
        assert report.count() == counters["inductor"]["fusions_attention"] - counted == 1
        assert len(report) == len(inductor_fusions.report())
    assert counters["inductor"]["fxgraph_cache_hit"] == served + (4 if train else 2)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    "first, second", [("attention", "with_other_calls"), ("called_then_written", "written_then_called")]
)
def test_two_functions_with_one_aten_graph(first: str, second: str, train: bool, tmp_path: Path) -> None:
    """In a process of its own: whether graphs are cached depends on what else is registered."""
    program = f"from tests.caches import test_records as t; t.report_each(t.{first}, t.{second}, {train})"
    done = start("-c", program, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr


def again(q, k, v):
    return torch.softmax(torch.matmul(q, k.mT) * 0.3, dim=-1) @ v


def elsewhere(q, k, v):
    return torch.softmax(torch.matmul(q, k.mT) * 0.3, dim=-1) @ v


def with_a_name(q, k, v):
    weights = torch.softmax(torch.matmul(q, k.mT) * 0.3, dim=-1)
    return weights @ v


def test_lines_if_the_cache_of_autograd_serves(fresh_cache: None) -> None:
    """The code of an equal function: the lines are those of the function that is compiled."""
    for fn, lines in (
        (again, again),
        (elsewhere, elsewhere),
        (again, again),
        (with_a_name,) * 2,
        (with_a_name, None),
    ):
        torch._dynamo.reset()
        inductor_fusions.clear()
        with config.patch(policy="always"):
            torch.compile(fn)(*(torch.randn(1, 2, 4, 8) for _ in range(3)))
        (found,) = inductor_fusions.report()
        assert (found.verdict, found.backend) == ("fused", "flash")
        assert f" in {lines.__name__}: " in found.source if lines is not None else not found.source
        assert len(inductor_fusions.report()) == 1


def test_cache_that_has_one_of_two_graphs(fresh_cache: None) -> None:
    """Selective checkpointing is no entry of AOTAutograd: forward and backward are looked up apart."""
    for _ in range(3):
        torch._dynamo.reset()
        counters.clear()
        block = blocks.model(1).blocks[0]
        inductor_fusions.clear()
        with config.patch(policy="always"):
            torch.compile(checkpointed)(block, blocks.batch()).square().mean().backward()
        assert inductor_fusions.report().count("fused", "attention") == 1
        assert counters["inductor"]["fusions_attention"] == 1


def checkpointed(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False, context_fn=blocks.save_products)


def in_checkpoint(loss, *args):
    return checkpoint(loss, *args, use_reentrant=False)


@pytest.mark.parametrize("times", [1, 2])
def test_sites_in_a_checkpoint(times: int, fresh_cache: None) -> None:
    """Inductor passes the body of a checkpoint before the graph that runs it, which has a site as well."""

    def loss(x, w, y):
        return torch.nn.functional.cross_entropy(x @ w.mT, y)

    def fn(x, w, y, *qkv):
        return sum(in_checkpoint(loss, x, w, y + i) for i in range(times)) + attention(*qkv).sum()

    wanted = []
    for _ in range(3):
        torch._dynamo.reset()
        counters.clear()
        inductor_fusions.clear()
        x, w, *qkv = (torch.randn(s, requires_grad=True) for s in [(21, 32), (56, 32), *[(1, 2, 4, 8)] * 3])
        with config.patch(policy="always"):
            torch.compile(fn)(x, w, torch.zeros(21, dtype=torch.int64), *qkv).backward()
        found = [(site.fusion, site.verdict, site.backend) for site in inductor_fusions.report()]
        wanted = wanted or found
        assert found == wanted and found.count(("linear_cross_entropy", "fused", "")) == times
        assert ("attention", "fused", "flash") in found
        assert counters["inductor"]["fusions_linear_cross_entropy"] == times
        assert counters["inductor"]["fusions_attention"] == 1


def site(reason: str = "") -> inductor_fusions.Site:
    return inductor_fusions.Site("attention", "rejected", "n", reason=reason)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": 2, "sites": []}', '{"schema": 1}'])
def test_broken_record(content: str, fresh_cache: None) -> None:
    """Is no record: the report says that it does not know, and nothing raises."""
    inductor_fusions.clear()
    sites = [site("one")]
    records.write(sites, records.key(sites))
    path = records.path_of(records.key(sites))
    assert path is not None and path.is_file()
    counters["inductor"][reporting.RECORD + records.key(sites)] += 2
    assert len(inductor_fusions.report()) == 2
    inductor_fusions.clear()
    path.write_text(content)
    counters["inductor"][reporting.RECORD + records.key(sites)] += 1
    found = inductor_fusions.report()
    assert (len(found), found.unknown) == (0, 1)
    assert "from a cache without records" in str(found)


def test_key() -> None:
    """Other sites, other records; the backend is known later and counts not."""
    ours = site("one")
    key = records.key([ours])
    ours.backend = "flash"
    assert records.key([ours]) == key
    assert records.key([site("two")]) != key and records.key([ours, ours]) != key


def test_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "inductor_fusions").write_text("a file where the folder would be")
    monkeypatch.setattr(records._inductor, "cache_folder", lambda: tmp_path)
    sites = [site()]
    records.write(sites, records.key(sites))
    assert (tmp_path / "inductor_fusions").is_file()
