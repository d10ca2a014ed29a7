"""Each kernel template in a package of AOTInductor, loaded where the fusions cannot be imported."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.templates import TEMPLATES, Template
from tests.support.errors import relative
from tests.support.packages import skip_unless_they_load
from tests.torch_features.test_export import elsewhere

pytestmark = pytest.mark.gpu


class Function(torch.nn.Module):
    """What `torch.export` takes."""

    def __init__(self, template: Template) -> None:
        super().__init__()
        self.function = template.function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


@pytest.mark.parametrize("name", [name for name, each in TEMPLATES.items() if each.kernels])
def test_package(name: str, tmp_path: Path) -> None:
    """The kernel is in the package, and computes there what it computes here."""
    template = TEMPLATES[name]
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor < template.least:
        pytest.skip(f"needs compute capability {template.least / 10}")
    skip_unless_they_load()
    inputs = [x.detach() for x in template.inputs("cuda")]
    package = tmp_path / "function.pt2"
    with torch.no_grad():
        exported = torch.export.export(Function(template), tuple(inputs))
        with template.active():
            torch._inductor.aoti_compile_and_package(exported, package_path=str(package))
        wide = [x.double() if x.is_floating_point() else x for x in inputs]
        results = [elsewhere(package, inputs, tmp_path), template.function(*inputs), template.function(*wide)]
    with zipfile.ZipFile(package) as archive:
        sources = [archive.read(n).decode() for n in archive.namelist() if n.endswith(".cpp")]
    assert all(any(kernel in source for source in sources) for kernel in template.kernels)
    found = [list(r) if isinstance(r, (tuple, list)) else [r] for r in results]
    for ours, eager, exact in zip(*found, strict=True):
        assert ours.dtype == eager.dtype and ours.shape == eager.shape
        slack = 16 if ours.dtype == torch.float32 else 2
        assert relative(ours, exact) <= 2 * relative(eager, exact) + slack * torch.finfo(ours.dtype).eps
