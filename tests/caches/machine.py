"""Two processes that share one cache directory, and a copy of the package to change between them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import inductor_fusions

PACKAGE = Path(inductor_fusions.__file__).parent

#: Compiles one attention from cold, and prints what it found in the caches and what runs.
PROGRAM = """
import json, sys
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

if sys.argv[1] == "with":
    import inductor_fusions

def attention(q, k, v, mask):
    return torch.softmax(q @ k.transpose(-2, -1) * 0.3 + mask, dim=-1) @ v

torch.manual_seed(0)
q, k, v = (torch.randn(2, 2, 8, 16, requires_grad=sys.argv[2] == "train") for _ in range(3))
mask = torch.randn(8, 8)
out = torch.compile(attention)(q, k, v, mask)
if sys.argv[2] == "train":
    out.sum().backward()
torch.testing.assert_close(out, attention(q, k, v, mask))
found = counters["aot_autograd"]
# An entry of AOTAutograd's cache holds the compiled code as well.
hits = counters["inductor"]["fxgraph_cache_hit"] + found["autograd_cache_hit"]
misses = counters["inductor"]["fxgraph_cache_miss"] + found["autograd_cache_miss"]
bypassed = counters["inductor"]["fxgraph_cache_bypass"] + found["autograd_cache_bypass"]
counted = counters["inductor"]["fusions_attention"]
torch._dynamo.reset()
with torch.profiler.profile() as profile:
    torch.compile(attention)(q, k, v, mask)
kernels = {event.key for event in profile.key_averages()}
print(json.dumps({
    "hits": hits, "misses": misses, "bypassed": bypassed,
    "fused": any("scaled_dot_product" in kernel for kernel in kernels),
    "counted": counted,
}))
"""


#: Imports torch once, then runs PROGRAM in a child for each line of JSON that it reads: what importing
#: torch costs would be most of the time of these tests.
NURSERY = f"""
import json, os, sys
import torch, torch._inductor.compile_fx
program = compile({PROGRAM!r}, "program", "exec")
for line in sys.stdin:
    command = json.loads(line)
    child = os.fork()
    if child == 0:
        os.environ.update(command["environment"])
        sys.argv[1:] = command["arguments"]
        exec(program, {{"__name__": "__main__"}})
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(1)
"""


class Machine:
    """One cache directory, and a copy of the package to change."""

    def __init__(self, folder: Path) -> None:
        self.cache, self.root = folder / "cache", folder / "root"
        #: As in an installed package.
        self.tables = self.root / PACKAGE.name / "configs"
        self.root.mkdir()
        shutil.copytree(PACKAGE, self.root / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        tables = next((d for d in (PACKAGE / "configs", PACKAGE.parent / "configs") if d.is_dir()), None)
        if tables is not None:
            shutil.copytree(tables, self.tables, dirs_exist_ok=True)
        (self.tables / "devices").mkdir(parents=True, exist_ok=True)
        self.nursery: subprocess.Popen[str] | None = None

    def start(self, code: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("INDUCTOR_FUSIONS")}
        env.update(
            TORCHINDUCTOR_CACHE_DIR=str(self.cache),
            TORCHINDUCTOR_COMPILE_THREADS="1",
            TORCHINDUCTOR_VEC_ISA_OK="0",  # does not try the compiler's vector instructions in each new cache
            PYTHONPATH=str(self.root),
            PYTHONDONTWRITEBYTECODE="1",
            OMP_NUM_THREADS="1",
            **variables,
        )
        # -P: not the current directory, so that it is the copy that is imported.
        return subprocess.Popen(
            [sys.executable, "-P", "-c", code, *arguments],
            env=env, cwd=self.root, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, package: bool = True, train: bool = False, fresh: bool = False, **variables: str) -> dict:
        """What a new process found.

        Args:
            package: whether it imports the package.
            train: whether it runs a backward.
            fresh: start an interpreter of its own, with other hash seeds.
        """
        arguments = ["with" if package else "without", "train" if train else "infer"]
        if fresh:
            out, errors = self.start(PROGRAM, *arguments, **variables).communicate(timeout=300)
            assert out, errors
            return json.loads(out.splitlines()[-1])
        if self.nursery is None:
            self.nursery = self.start(NURSERY)
        assert self.nursery.stdin is not None and self.nursery.stdout is not None
        self.nursery.stdin.write(json.dumps({"arguments": arguments, "environment": variables}) + "\n")
        self.nursery.stdin.flush()
        line = self.nursery.stdout.readline()
        assert line, self.nursery.communicate()[1]
        return json.loads(line)

    def close(self) -> None:
        if self.nursery is not None:
            self.nursery.communicate()
