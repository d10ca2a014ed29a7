"""A form that fails is in no cache: not under its own key, and not under that of the form that takes over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes import forked

PROGRAM = """
import contextlib, json, sys
import torch
import inductor_fusions
from torch._dynamo.utils import counters
from tests.support.faults import Fault

def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1) @ v

stage, train = sys.argv[1], sys.argv[2] == "train"
fault = Fault(stage or "lowering")
args = [torch.randn(1, 2, 4, 8, requires_grad=train) for _ in range(3)]
with fault.inject() if stage else contextlib.nullcontext():
    found = torch.compile(attention)(*args)
    if train:
        found.sum().backward()
torch.testing.assert_close(found, attention(*args))
print(json.dumps({
    "raised": fault.raised,
    "hits": counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
    "verdicts": [site.verdict for site in inductor_fusions.report()],
}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage, train", [("codegen", True), ("launch", False), ("launch", True)])
def test_three_processes(tmp_path: Path, stage: str, train: bool) -> None:
    own = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "INDUCTOR_FUSIONS_POLICY": "always"}
    runs = forked(PROGRAM, [((each, "train" if train else "infer"), own) for each in (stage, stage, "")])
    assert not any(each.returncode for each in runs), [each.stderr for each in runs]
    first, second, third = (json.loads(each.stdout.splitlines()[-1]) for each in runs)
    assert first["raised"] == 1 and first["verdicts"] == ["failed"] and not first["hits"]
    # The form that fails is tried again; the one that took over is found.
    assert second["raised"] == 1 and second["verdicts"] == ["failed"] and second["hits"]
    assert third["verdicts"] == ["fused"]
