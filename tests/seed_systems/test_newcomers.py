"""What a newcomer does: the scripts in `examples`, with one line more, or none through `run`.

Each prints the same numbers as when it runs uncompiled.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import start

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def started(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run in a folder that is not the repository, as a user does."""
    done = start(*command, folder=folder, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


#: As it is, and then once more as it would run uncompiled: importing takes longer than a tiny model.
TWICE = """
import runpy
runpy.run_path({script!r}, run_name="__main__")
print("uncompiled")
import torch
torch._dynamo.config.disable = True
runpy.run_path({script!r}, run_name="__main__")
"""

#: What each needs, the policy, and a fusion besides attention that it finds.
SCRIPTS = {
    "trainer.py": ("transformers", "profitable", ""),
    "accelerate_loop.py": ("accelerate", "always", ""),
    "peft_lora.py": ("peft", "always", "lora"),
    "trl_dpo.py": ("peft", "always", "linear_cross_entropy"),
    "adapters_by_hand.py": ("torch", "always", "lora"),
    "generate.py": ("transformers", "always", "qkv"),
    "timm_vit.py": ("timm", "always", ""),
    "diffusers_unet.py": ("diffusers", "always", ""),
}
WITHOUT_A_LINE = "plain_pytorch.py"


def numbers(text: str) -> list[float]:
    """What a script prints of its results."""
    found = re.findall(r"^(?:loss|tokens|noise) (.+)$", text, re.MULTILINE)
    return [float(number) for line in found for number in line.split()]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_one_line_more(name: str, tmp_path: Path) -> None:
    """`import inductor_fusions` at the top, and nothing else."""
    needs, policy, fusion = SCRIPTS[name]
    pytest.importorskip(needs, exc_type=ImportError)
    code = TWICE.format(script=str(EXAMPLES / name))
    printed = started(tmp_path, "-c", code, INDUCTOR_FUSIONS_POLICY=policy).stdout
    ours, _, eager = printed.partition("uncompiled")
    assert re.search(r"\d+\s+attention\s+fused", ours), ours
    assert re.search(rf"\d+\s+{fusion or 'attention'}\s+(fused|left to stock)", ours), ours
    assert numbers(ours) and numbers(ours) == pytest.approx(numbers(eager), rel=1e-3)


@pytest.mark.slow
def test_no_line_more(tmp_path: Path) -> None:
    """A script in the manner of nanoGPT, through `python -m inductor_fusions run`."""
    script = str(EXAMPLES / WITHOUT_A_LINE)
    command = ("-m", "inductor_fusions", "run", "--json", "report.json", script, "--max_iters", "3")
    ours = started(tmp_path, *command, INDUCTOR_FUSIONS_POLICY="always").stdout
    sites = json.loads((tmp_path / "report.json").read_text())["sites"]
    assert [site["verdict"] for site in sites if site["fusion"] == "attention"] == ["fused"]
    eager = started(tmp_path, script, "--max_iters", "3", TORCH_COMPILE_DISABLE="1").stdout
    assert len(numbers(ours)) == 3 and numbers(ours) == pytest.approx(numbers(eager), rel=1e-3)


def test_each_example_is_run_and_told() -> None:
    page = (EXAMPLES / "README.md").read_text()
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {*SCRIPTS, WITHOUT_A_LINE}
    assert all(f"`{name}`" in page for name in names)
