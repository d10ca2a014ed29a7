"""The layers of the package: who may import what. Also what an import of it may cost."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import start

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "inductor_fusions"
SOURCES = sorted((ROOT / PACKAGE).rglob("*.py"))

# torch.fx.experimental is not public either, but stable enough to be used anywhere.
PRIVATE_TORCH = tuple(
    f"torch.{name}" for name in ("_inductor", "_dynamo", "_functorch", "_higher_order_ops", "_subclasses")
)
PRIVATE_TORCH_USERS = {"_inductor"}
#: Names with an underscore that torch documents, or that custom operations are made of.
PUBLIC_TORCH = {"torch.__version__", "torch._check", "torch._ops", "torch._C"}

# Each top-level module (or sub-package) and those it may import. "public" is the package itself,
# `from inductor_fusions import explain`. A new module at the top needs a row;
# a module of a sub-package has one where it may import more than the others.
BASE = {"config", "reasons", "reporting", "sites", "tags", "decisions", "_inductor"}
LAYERS = {
    "_inductor": set(),
    "variables": set(),
    "config": {"variables", "_inductor"},
    "sites": set(),
    "tags": {"sites"},
    "reasons": set(),
    "records": {"sites", "_inductor"},
    "reporting": {"config", "records", "sites", "tags", "_inductor"},
    "decisions": {"config", "reasons", "_inductor"},
    "worker": {"block_mm", "checking", "driver", "fusions", "ops"} | BASE,
    "fusion": BASE,
    "operands": {"config", "decisions", "fusion", "reasons", "_inductor"},
    "lowering": {"config", "decisions", "fusion", "_inductor"},
    "effects": {"fusion", "operands", "reasons", "_inductor"},
    "graph": {"effects", "fusion", "operands", "reasons", "_inductor"},
    "layouts": {"effects", "graph", "lowering", "operands", "reporting", "tags", "_inductor"},
    "block_mm": {"fusion", "graph", "operands", "lowering"} | BASE,
    "fusions": {"block_mm", "effects", "fusion", "graph", "layouts", "lowering", "operands"} | BASE,
    "ops": {"block_mm", "fusions"},
    "driver": {"driver.unfusing", "effects", "fusion", "graph", "layouts", "operands"} | BASE,
    # The only module of the driver that needs fusions.
    "driver.unfusing": {"fusions", "graph", "tags", "_inductor"},
    "registry": {"fusion", "fusions", "config", "sites"},
    "registration": {"driver", "registry", "fusions"} | BASE,
    "__init__": {"registration", "testing", "explaining", "checking", "fusion", "fusions"} | BASE,
    "explaining": {"checking", "driver", "effects"} | BASE,
    "checking": BASE,
    "testing": {"public", "checking", "registration", "fusion", "fusions"} | BASE,
    "cli": {
        "public",
        "variables",
        "checking",
        "demo",
        "driver",
        "explaining",
        "registry",
        "testing",
        "fusion",
        "fusions",
    }
    | BASE,
    "demo": {"public", "checking", "testing", "fusion", "worker"} | BASE,
    "__main__": {"cli"},
}
# The same inside _inductor/. Its __init__ imports them all; the rest of the package imports that alone.
PRIVATE_LAYERS = {
    "absent": set(),
    "absent_tensors": {"loading", "shapes"},
    "moving": {"absent", "shapes"},
    "loading": set(),
    "versions": set(),
    "shapes": set(),
    "flex": set(),
    "operations": set(),
    "ranks": {"shapes"},
    "bisector": set(),
    "net": {"graphs", "loading"},
    "state": set(),
    "hooks": {"loading", "versions"},
    "graphs": {"shapes", "versions"},
    "reports": {"loading"},
    "compiling": {"loading", "moving", "shapes"},
    "lowering": {"graphs", "loading"},
    "matcher": {"versions"},
    "reuse": {"loading"},
    "templates": {"loading", "reuse"},
    "probing": {"bisector", "hooks", "reports", "templates"},
}


def module_name(path: Path) -> str:
    """inductor_fusions/fusions/qkv.py -> inductor_fusions.fusions.qkv"""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path) for path in SOURCES}


def imports(tree: ast.AST, module: str, is_package: bool, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Line and full name of each module imported: at the top, in functions and by import_module.

    `from p import x` names p.x where that is a module of ours or a private part of torch, else p.
    """
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield node.lineno, full if full in modules or full.startswith(PRIVATE_TORCH) else base
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def attributes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each dotted use of torch: torch._dynamo.reset needs no import of its own."""
    torch_names = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            torch_names |= {a.asname for a in node.names if a.name == "torch" and a.asname}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name in torch_names:
                yield node.lineno, f"torch.{attr}"


def is_private(name: str) -> bool:
    return any(name == p or name.startswith(p + ".") for p in PRIVATE_TORCH)


def layer(module: str) -> str:
    """The row of LAYERS that a module of ours belongs to, by its name as an importer."""
    parts = module.split(".")
    single = ".".join(parts[1:3])
    return single if single in LAYERS else parts[1] if len(parts) > 1 else "__init__"


def violations(
    source: str, module: str, is_package: bool = False, modules: set[str] = MODULES
) -> list[tuple[int, str]]:
    """Line and reason of each import in `source` that breaks the layers."""
    tree = ast.parse(source)
    own = layer(module)
    if own not in LAYERS:
        return [(1, f"no row for {own} in LAYERS of tests/package/test_layering.py")]
    inner = module.split(".")[2:]
    if own == "_inductor" and inner and inner[0] not in PRIVATE_LAYERS:
        return [(1, f"no row for {inner[0]} in PRIVATE_LAYERS of tests/package/test_layering.py")]
    found = []
    names = list(imports(tree, module, is_package, modules))
    if own not in PRIVATE_TORCH_USERS:
        used = {(line, name) for line, name in attributes(tree) if name.startswith("torch._")}
        private = {(line, name) for line, name in [*names, *used] if is_private(name)}
        private |= {(line, name) for line, name in used if name not in PUBLIC_TORCH}
        found += [(line, f"{name} is private to torch: use _inductor") for line, name in sorted(private)]

    for line, name in names:
        if name != PACKAGE and not name.startswith(PACKAGE + "."):
            continue
        target = "public" if name == PACKAGE else layer(name)
        if target == own == "fusions":
            if not _same_fusion(module, name):
                found.append((line, f"a fusion imports another fusion: {name}"))
        elif target == "_inductor" and not _own_private_layer(module, name):
            found.append((line, f"{module} imports {name}"))
        elif target not in LAYERS[own] | {own}:
            found.append((line, f"{own} imports {name}"))
    return found


def _own_private_layer(module: str, name: str) -> bool:
    parts, target = module.split("."), name.split(".")
    if parts[1:2] != ["_inductor"]:
        return len(target) == 2
    return len(parts) == 2 or (len(target) == 3 and target[2] in PRIVATE_LAYERS[parts[2]])


def _same_fusion(module: str, name: str) -> bool:
    parts, target = module.split("."), name.split(".")
    if len(parts) == 2:  # fusions/__init__.py lists them all
        return True
    return len(target) > 2 and target[2] == parts[2]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_layers(path: Path) -> None:
    found = violations(path.read_text("utf-8"), module_name(path), path.name == "__init__.py")
    assert not found, "\n".join(f"{path.relative_to(ROOT)}:{line}: {why}" for line, why in found)


FAKE_MODULES = {
    PACKAGE,
    *(f"{PACKAGE}.{name}" for name in LAYERS if not name.startswith("__")),
    *(f"{PACKAGE}._inductor.{name}" for name in PRIVATE_LAYERS),
    *(f"{PACKAGE}.fusions.{name}" for name in ("qkv", "lora", "attention", "attention.masks")),
}


@pytest.mark.parametrize(("module", "source"), [
    ("driver", "import torch._inductor.config"),
    ("driver", "import torch._dynamo as d"),
    ("driver", "from torch import _inductor"),
    ("driver", "from torch._subclasses.fake_tensor import FakeTensorMode"),
    ("driver", "import torch\ndef f(): torch._dynamo.reset()"),
    ("driver", "import torch as t\nt._functorch"),
    ("driver", "import torch\ntorch._grouped_mm"),
    ("driver", "import importlib\nimportlib.import_module('torch._higher_order_ops')"),
    ("driver", "from . import fusions"),
    ("driver", "from .registration import enable"),
    ("driver", "def f():\n    from inductor_fusions import registration"),
    ("driver", "from inductor_fusions import explain"),
    ("config", "from . import reporting"),
    ("cli", "from .registration import enable"),
    ("fusions.qkv", "from . import lora"),
    ("fusions.qkv", "from inductor_fusions.fusions.lora import FUSION"),
    ("fusions.qkv", "from .. import driver"),
    ("fusions.qkv", "from inductor_fusions.fusions import FUSIONS"),
    ("fusions.attention.masks", "from ..qkv import FUSION"),
    ("surprise", ""),
    ("driver", "from ._inductor.shapes import hint"),
    ("driver", "from ._inductor import shapes"),
    ("_inductor.shapes", "from ..config import patch"),
    ("_inductor.loading", "from .versions import torch_version"),
    ("_inductor.hooks", "from . import torch_version"),
    ("_inductor.surprise", ""),
])  # fmt: skip
def test_layers_are_enforced(module: str, source: str) -> None:
    assert violations(source, f"{PACKAGE}.{module}", modules=FAKE_MODULES)


@pytest.mark.parametrize(("module", "source"), [
    ("_inductor", "import torch._inductor.config\nfrom torch._dynamo import utils"),
    ("_inductor", "from .shapes import hint\nfrom . import probing"),
    ("_inductor.hooks", "from torch._inductor import config\nfrom . import loading, versions"),
    ("driver", "import torch\nfrom torch.fx.experimental import symbolic_shapes\ntorch.ops.aten.mm"),
    ("driver", "import torch\ntorch._check(True)\ntorch.__version__"),
    ("driver", "from . import _inductor\nfrom ._inductor import hint"),
    ("driver", "from . import fusion, reporting"),
    ("registration", "from . import driver\nfrom .fusions import FUSIONS"),
    ("fusions", "from .attention import FUSION\nfrom . import qkv"),
    ("fusions.qkv", "from ..block_mm import op\nfrom .. import decisions, fusion"),
    ("fusions.attention.masks", "from . import masks\nfrom ...reporting import Site"),
    ("testing", "from .registration import enable\nimport inductor_fusions"),
    ("cli", "import inductor_fusions\nfrom inductor_fusions import explain\nfrom .demo import run"),
])  # fmt: skip
def test_layers_allow(module: str, source: str) -> None:
    is_package = module in ("fusions", "_inductor")
    assert violations(source, f"{PACKAGE}.{module}", is_package, FAKE_MODULES) == []


def run_python(code: str) -> str:
    """Run code in a fresh process without a GPU and return what it printed."""
    done = start("-c", code, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    return done.stdout


IMPORT_COST = f"""
import time
import torch
start = time.process_time()
import {PACKAGE}
print(time.process_time() - start)
"""


def test_import_is_cheap() -> None:
    """Under 0.3 s on top of `import torch`.

    CPU time, because waiting for a busy machine is no cost of ours; and three rounds at most,
    because a shared core is slower as well.
    """
    run_python(IMPORT_COST)  # writes the byte code
    medians = []
    for _ in range(3):
        medians.append(statistics.median(float(run_python(IMPORT_COST)) for _ in range(3)))
        if medians[-1] < 0.3:
            return
    pytest.fail(f"import {PACKAGE} took {min(medians):.2f} s")


def test_import_brings_no_models() -> None:
    code = f"import sys, {PACKAGE}; print(*({{'transformers', 'peft'}} & sys.modules.keys()))"
    assert run_python(code).split() == []


def test_import_and_compile_without_gpu() -> None:
    run_python(
        f"""
import torch
import {PACKAGE}

def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) / 4, dim=-1) @ v

q, k, v = torch.randn(3, 2, 4, 32, 16).unbind()
torch.testing.assert_close(torch.compile(attention)(q, k, v), attention(q, k, v))
"""
    )


def test_lowerings_are_all_registered() -> None:
    """Several operations wait for the same module of Inductor."""
    run_python(
        f"""
import torch
import {PACKAGE}

assert "torch._inductor" not in __import__("sys").modules
from torch._inductor import lowering

own = torch.ops.{PACKAGE}
assert own.block_mm.default in lowering.lowerings and own.stored.default in lowering.lowerings
"""
    )
