"""`run` and `bisect`: scripts as they are."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inductor_fusions import Site, cli, config, testing
from inductor_fusions.checking import bisecting
from inductor_fusions.driver import passes
from tests.support.processes import start

#: Compiles six attentions, with the passes alone, and says what it was started with.
SCRIPT = """
import sys
import torch

def main():
    import helper
    fn = torch.compile(helper.model, backend=helper.backend())
    torch.manual_seed(0)
    loss = fn(*torch.randn(3, 1, 2, 5, 8).unbind(0)).sum().item()
    print(__name__, sys.argv[1:], helper.fused())
    print("loss", loss * (1.5 if helper.fused() >= 4 else 1.0))
    sys.exit(3 if "--fail" in sys.argv and helper.fused() >= 4 else 0)

if __name__ == "__main__":
    main()
"""

HELPER = """
import sys
import torch

def model(q, k, v):
    for _ in range(6):
        q = torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1) @ v
    return q

def fused():
    ours = sys.modules.get("inductor_fusions")
    return ours.report().count() if ours else 0

def backend():
    if "inductor_fusions" not in sys.modules:
        return "eager"
    from inductor_fusions import testing
    return testing.AfterPasses([])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "raises.py").write_text("def f():\n    raise KeyError('on purpose')\nf()\n")
    return tmp_path


def started(
    folder: Path, *arguments: str, launcher: tuple[str, ...] = ("-m",)
) -> subprocess.CompletedProcess[str]:
    command = (*launcher, "inductor_fusions", *arguments)
    return start(*command, folder=folder, INDUCTOR_FUSIONS_POLICY="always")


def test_run_script(folder: Path) -> None:
    """As `python train.py` does it, with its own options, from another folder, and a report at the end."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    done = started(elsewhere, "run", "--report", "--json", "report.json", "../train.py", "--json", "-m", "x")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "__main__ ['--json', '-m', 'x'] 6"
    assert "6 fused" in done.stderr and "helper.py" in done.stderr
    data = json.loads((elsewhere / "report.json").read_text())
    assert data["schema"] == 1 and [site["verdict"] for site in data["sites"]] == ["fused"] * 6


def test_run_module(folder: Path) -> None:
    done = started(folder, "run", "-m", "train", "--lr", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "__main__ ['--lr', '3'] 6"
    assert done.stderr == ""


def test_exit_code_and_traceback(folder: Path) -> None:
    """Those of the script; the traceback begins with its first line."""
    assert started(folder, "run", "train.py", "--fail").returncode == 3
    done = started(folder, "run", "raises.py")
    assert done.returncode == 1
    assert "KeyError: 'on purpose'" in done.stderr and "raises.py" in done.stderr
    assert "runpy" not in done.stderr and "running.py" not in done.stderr and "typer" not in done.stderr


def test_what_a_report_of_a_problem_needs(folder: Path) -> None:
    done = started(folder, "run", "--issue", "issue.json", "train.py", "--fail")
    assert done.returncode == 3, done.stderr
    found = json.loads((folder / "issue.json").read_text())
    assert found["environment"]["versions"]["torch"] and len(found["report"]) == 6 and found["error"] == ""
    assert found["graphs"] and all("def forward(" in graph["code"] for graph in found["graphs"])
    done = started(folder, "run", "--issue", "issue.json", "raises.py")
    found = json.loads((folder / "issue.json").read_text())
    assert done.returncode == 1 and "KeyError: 'on purpose'" in found["error"] and not found["graphs"]


@pytest.mark.slow
def test_under_torchrun(folder: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m")
    done = started(folder, "run", "train.py", "--lr", "3", launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert "__main__ ['--lr', '3'] 6" in done.stdout


@pytest.mark.parametrize(("arguments", "says"), [
    (["run", "no_such.py"], "no such file: no_such.py"),
    (["run", "-m", "no_such_module"], "no module named no_such_module"),
    (["run"], "SCRIPT"),
    (["run", "--json", "no/such/r.json", "train.py"], "--json: the folder no/such does not exist"),
    (["run", "--json", ".", "train.py"], "--json: . is a folder"),
    (["run", "--jsn", "r.json", "train.py"], "no such option: --jsn"),
    (["bisect", "-m", "no_such_module"], "no module named no_such_module"),
    (["bisect", "no_such.py"], "no such file: no_such.py"),
    (["bisect", "--by", "magic", "train.py"], "magic"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_mistakes_are_one_line(
    arguments: list[str], says: str, folder: Path, monkeypatch: pytest.MonkeyPatch, refuse: Callable[..., str]
) -> None:
    monkeypatch.chdir(folder)
    assert says in refuse(*arguments)


# -- INDUCTOR_FUSIONS_MAX -------------------------------------------------------------------------


def six(q, k, v):
    import torch

    for _ in range(6):
        q = torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1) @ v
    return q


def verdicts() -> list[str]:
    import torch

    passes.count_from(0)
    run = testing.capture(six, *torch.randn(3, 1, 2, 5, 8).unbind(0), backend=testing.EAGER_AFTER_PASSES)
    return [site.verdict for site in run.sites]


@pytest.mark.parametrize("most", [0, 1, 4, 100])
def test_first_sites_alone(most: int) -> None:
    with config.patch(max=str(most)):
        found = verdicts()
    assert found == ["fused"] * min(most, 6) + ["left to stock"] * max(6 - most, 0)


def test_caches_are_bypassed() -> None:
    """What is fused depends on what was compiled before."""
    ours = passes.FusionPass("pre_grad", ())
    assert ours.uuid() is not None
    with config.patch(max="2"):
        assert ours.uuid() is None
        assert ours.__reduce__() != ours.__reduce__()  # in the key of torch 2.11


def test_bisector_of_torch() -> None:
    """Our sites are a part of Inductor that torch's own bisector tries, and the first one."""
    from torch._inductor.compiler_bisector import CompilerBisector

    def right() -> bool:
        # The backends before Inductor have no passes.
        return CompilerBisector.get_backend() != "inductor" or verdicts().count("fused") < 4

    result = CompilerBisector.do_bisect(right)
    assert (result.backend, result.subsystem, result.bisect_number) == ("inductor", "inductor_fusions", 3)
    assert "attention at" in result.debug_info


# -- bisect ---------------------------------------------------------------------------------------


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Replaces the processes by a function of the number of sites; what it was asked is recorded."""

    def replace(total: int, run: Callable[[int], tuple[int, str]]) -> list[int]:
        asked: list[int] = []

        def simulate(script: object, arguments: object, most: int) -> bisecting._Run:
            asked.append(most)
            count = min(most, total)
            sites = [Site("attention", "fused", f"n{i}") for i in range(total)]
            (code, output), following = run(count), sites[count] if count < total else None
            fused = sites[:count] if code >= 0 else []
            return bisecting._Run(code, output, fused, following, killed=code < 0)

        monkeypatch.setattr(bisecting, "_run", simulate)
        return asked

    return replace


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("total", [1, 2, 7, 24])
def test_every_site_is_found(total: int, killed: bool, simulated: Callable) -> None:
    """A run that is killed has no report: its site is the first one that the last right run leaves out."""
    for wrong in range(1, total + 1):
        asked = simulated(total, lambda count, w=wrong: ((-11 if killed else 1) if count >= w else 0, ""))
        found = bisecting.bisect(["train.py"], [])
        sites = None if killed else total
        assert (found.number, found.sites, found.site.node) == (wrong, sites, f"n{wrong - 1}")
        assert len(asked) <= (3 + 2 * total.bit_length() if killed else 2 + total.bit_length())
        assert not killed or "None" not in str(found)


def test_by_output(simulated: Callable) -> None:
    simulated(8, lambda count: (0, f"step 1 loss {2.0 + (1.0 if count >= 5 else 1e-4 * count)}"))
    assert bisecting.bisect(["train.py"], [], bisecting.By.output).number == 5


@pytest.mark.parametrize(("total", "run", "says"), [
    (3, lambda count: (1, ""), "fails without fusions too"),
    (3, lambda count: (0, ""), "right with all 3 sites"),
])  # fmt: skip
def test_nothing_to_find(total: int, run: Callable, says: str, simulated: Callable, tmp_path: Path) -> None:
    simulated(total, run)
    with pytest.raises(bisecting.NotFound, match=says):
        bisecting.bisect(["train.py"], [])
    script = tmp_path / "train.py"
    script.write_text("")
    done = CliRunner().invoke(cli.app, ["bisect", "--json", str(script)])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["found"] is False


def test_numbers() -> None:
    same = bisecting.same_numbers
    assert same("loss 1.000 at 3", "loss 1.001 at 3", 1e-2)
    assert not same("loss 1.0", "loss 1.1", 1e-2)
    assert not same("loss 1.0", "loss 1.0 2.0", 1e-2)
    assert not same("loss nan", "loss 1.0", 1e-2)
    assert same("nan", "nan", 1e-2)


@pytest.mark.slow
def test_bisect_script(folder: Path) -> None:
    """The fourth of six sites makes this script fail."""
    done = started(folder, "bisect", "--json", "train.py", "--fail")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["found"], found["number"], found["sites"]) == (True, 4, 6)
    assert found["site"]["fusion"] == "attention" and "helper.py" in found["site"]["source"]
    assert "3 sites fused: right" in done.stderr
