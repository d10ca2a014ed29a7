"""CPU builds of torch bring no Triton: everything works without, and no kernel of ours is chosen."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes import start

CODE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import torch
import inductor_fusions
from torch.nn import functional as F

def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) * 0.3, -1) @ v

def gated(x, w, u):
    return F.silu(x @ w) * (x @ u)

def interaction(z):
    i, j = torch.tril_indices(5, 5, -1)
    return torch.bmm(z, z.transpose(1, 2))[:, i, j]

def outer(u, v, w):
    return F.linear((u[:, :, None] * v[:, None, :]).flatten(1), w)

torch.manual_seed(0)
programs = {
    attention: [(1, 2, 64, 16)] * 3,
    gated: [(8, 32), (32, 32), (32, 32)],
    interaction: [(4, 5, 8)],
    outer: [(4, 8), (4, 8), (16, 64)],
}
inductor_fusions.config.policy = "always"
for program, shapes in programs.items():
    inputs = [torch.randn(shape) for shape in shapes]
    torch.testing.assert_close(torch.compile(program)(*inputs), program(*inputs), rtol=1e-4, atol=1e-4)
sites = inductor_fusions.report().sites
assert not [site for site in sites if site.verdict == "failed"], sites
print(*sorted(site.fusion for site in sites if site.verdict == "fused"))
"""


def test_without_triton(tmp_path: Path) -> None:
    done = start("-c", CODE, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["attention"]
