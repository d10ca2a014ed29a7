"""torch.export and AOTInductor: a package with the fusions inside, for where they are not installed."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import inductor_fusions
from inductor_fusions import config, testing
from tests import blocks

RUN = """
import sys
import torch

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name == "inductor_fusions":
            raise ImportError(name)

sys.meta_path.insert(0, NotInstalled())
run = torch._inductor.aoti_load_package(sys.argv[1])
torch.save(run(torch.load(sys.argv[2])), sys.argv[3])
assert "inductor_fusions" not in sys.modules
"""


@pytest.fixture(scope="module")
def exported() -> torch.export.ExportedProgram:
    """One block, with a symbolic batch."""
    batch = torch.export.Dim("batch", min=2, max=64)
    return torch.export.export(blocks.model(1).eval(), (blocks.batch(),), dynamic_shapes=({0: batch},))


def test_export_knows_nothing_of_the_fusions(exported: torch.export.ExportedProgram) -> None:
    """An exported program is of torch alone; the fusions are for who compiles it."""
    assert "inductor_fusions" not in str(exported)
    assert "scaled_dot_product" not in str(exported)
    again = torch.export.export(blocks.model(1).eval(), (blocks.batch(),), strict=True)
    assert "softmax" in str(again.graph)


def test_compiled_after_export(exported: torch.export.ExportedProgram) -> None:
    run = testing.assert_fusions(exported.module(), (blocks.batch(3),), backend=testing.EAGER_AFTER_PASSES)
    (call,) = run.calls("scaled_dot_product_attention")
    assert call.kwargs["is_causal"] is True
    expected = blocks.model(1)(blocks.batch(3)).detach()
    torch.testing.assert_close(run.outputs, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_package(exported: torch.export.ExportedProgram, tmp_path: Path) -> None:
    """Packaged with the fusions, loaded in a process that cannot import them."""
    package, given, result = (tmp_path / name for name in ("block.pt2", "x.pt", "y.pt"))
    options = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}
    inductor_fusions.clear()
    with config.patch(policy="always"):
        torch._inductor.aoti_compile_and_package(
            exported, package_path=str(package), inductor_configs=options
        )
    assert inductor_fusions.report().count("fused", "attention") == 1
    with zipfile.ZipFile(package) as archive:
        sources = [archive.read(name).decode() for name in archive.namelist() if name.endswith(".cpp")]
    assert any("_scaled_dot_product" in source for source in sources)

    torch.save(blocks.batch(5), given)
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(package), str(given), str(result)],
        env=os.environ.copy(), cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = blocks.model(1)(blocks.batch(5)).detach()
    torch.testing.assert_close(torch.load(result), expected, rtol=1e-4, atol=1e-5)
