"""The code of the documentation runs, as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.installed import install

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("explain.md", "one_fusion.md", "adding_a_fusion.md", "supporting_a_new_model.md")

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of each block of code."""
    return _BLOCK.findall((ROOT / "docs" / page).read_text("utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_code_of_a_page(page: str, tmp_path: Path) -> None:
    """Files are written, then everything else runs, top to bottom, then commands and tests."""
    program, commands = [], []
    for language, text in blocks(page):
        named = re.match(r"# file: (\S+)\n", text)
        if named:
            (tmp_path / named[1]).write_text(text)
        elif language == "python":
            program.append(text)
        elif language == "console":
            commands += [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]
    if any("transformers" in command or "explain bert" in command for command in commands):
        pytest.importorskip("transformers")
    if (tmp_path / "pyproject.toml").exists():
        install(tmp_path / "pyproject.toml", tmp_path)
    path = os.pathsep.join(filter(None, [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    assert program
    (tmp_path / "page.py").write_text("\n".join(program))
    tests = "python -m pytest -q -p inductor_fusions_hooks.pytest_plugin -p no:cacheprovider ."
    for command in ("python page.py", *commands, tests):
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
