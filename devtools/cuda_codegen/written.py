"""What Inductor writes for a graph: a wrapper, and the kernels that it launches."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from torch import fx


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel of generated code.

    Attributes:
        name: its function.
        source: the module that Inductor writes for it; `compile_kernel` takes it.
        is_template: it comes from a TritonTemplate rather than from Inductor's own loops.
    """

    name: str
    source: str
    is_template: bool


@dataclass(frozen=True)
class Module:
    """What Inductor wrote for one graph.

    Attributes:
        wrapper: the Python module that launches the kernels.
        graph: the graph it was written for, after the post-grad passes.
        is_backward: whether it is a backward.
        bytes_accessed: read and written by all kernels and extern calls, as Inductor counts them.
    """

    wrapper: str
    graph: fx.Graph
    is_backward: bool
    bytes_accessed: int = 0

    @functools.cached_property
    def kernels(self) -> list[Kernel]:
        """The Triton kernels in it."""
        found = []
        for node in ast.walk(ast.parse(self.wrapper)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr == "triton" and ast.unparse(node.func.value) == "async_compile":
                name, source = (ast.literal_eval(argument) for argument in node.args[:2])
                found.append(Kernel(name, source, "@triton_heuristics.template(" in source))
        return found

    @property
    def extern_calls(self) -> list[str]:
        """Calls that launch no kernel of this code, in order: "extern_kernels.mm", "torch.ops.aten...."."""
        body = self.wrapper.split("def call(", 1)[-1].split("\ndef ")[0]
        return re.findall(r"\b(extern_kernels\.\w+|torch\.ops\.\w+\.\w+(?:\.\w+)?)\(", body)

    @property
    def shapes(self) -> list[tuple[str, ...]]:
        """The shape of each buffer that is allocated, in order: numbers and expressions of symbols."""
        calls = re.findall(r"= (empty_strided_\w+\(.*\))", self.wrapper)
        nodes = [ast.parse(call, mode="eval").body for call in calls]
        return [tuple(ast.unparse(size) for size in node.args[0].elts) for node in nodes]  # type: ignore[attr-defined]

    @property
    def buffers(self) -> list[int]:
        """Elements of each buffer that is allocated, in order; the sizes must be numbers."""
        return [math.prod(int(size) for size in shape) for shape in self.shapes]

    @property
    def launches(self) -> list[str]:
        """Names of the Triton kernels launched, in order."""
        return re.findall(r"^\s*(\w+)\.run\(", self.wrapper, re.MULTILINE)


def write(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Module:
    """What Inductor writes for a graph of aten operations; nothing of it is compiled or loaded.

    Args:
        gm: the graph, which the post-grad passes change.
        inputs: fake tensors and sizes, as Inductor's inner compile gets them.
    """
    from torch._inductor import compile_fx

    kwargs.pop("cudagraphs", None)
    is_backward = bool(kwargs.get("is_backward"))
    found: list[Module] = []

    def keep(lowering: Any, lines: Any) -> None:
        count = sum(node.get_read_write_buffers_sizes() for node in lowering.scheduler.nodes)
        found.append(Module(getattr(lines, "value", lines), lowering.orig_gm.graph, is_backward, int(count)))

    with _stub_module_load(keep), contextlib.suppress(_Done):
        compile_fx.compile_fx_inner(gm, inputs, cudagraphs=None, **kwargs)
    return found[-1]


class _Done(BaseException):
    """The code was written; what would load it is not run. No `except Exception` may catch it."""


@contextlib.contextmanager
def _stub_module_load(keep: Callable[[Any, Any], None]) -> Iterator[None]:
    from torch._inductor.graph import GraphLowering

    def stop(self: Any, lines: Any) -> Any:
        keep(self, lines)
        raise _Done

    with mock.patch.object(GraphLowering, "_compile_to_module_lines", stop):
        yield


_loaded: list[tempfile.TemporaryDirectory[str]] = []


def load(source: str) -> Any:
    """The autotuner that the module of a kernel defines."""
    folder = tempfile.TemporaryDirectory(prefix="cuda_codegen_")
    _loaded.append(folder)  # Triton reads the file again
    path = Path(folder.name) / "kernel.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"cuda_codegen_{len(_loaded)}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return next(value for value in vars(module).values() if hasattr(value, "_create_compile_meta"))
