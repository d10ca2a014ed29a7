"""Reads the tests' files so that what they check can be judged on a device, and looked at no more."""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import types
from collections.abc import Iterator, Sequence
from typing import Any

#: What makes tensors.
FACTORIES = frozenset(
    "arange empty eye full linspace ones rand randint randn randperm scalar_tensor tensor tril_indices "
    "triu_indices zeros".split()
)
#: What an assert may call that checks programs.
CHECKING = frozenset("check capture run verify unfused through_flex fused_on judged".split())


class Finder(importlib.abc.MetaPathFinder):
    """Reads the tests' files for a device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("tests") or name.startswith(("tests.gpu.", "tests.conftest")):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = Loader(name, str(spec.origin), self.device)
        return spec


class Loader(importlib.machinery.SourceFileLoader):
    """Reads a file, with asserts that only call, and with a device in calls that make tensors."""

    def __init__(self, name: str, path: str, device: str) -> None:
        super().__init__(name, path)
        self.device = device

    def get_code(self, fullname: str) -> types.CodeType:
        """From the text: what is kept beside it is another one."""
        return self.source_to_code(self.get_data(self.path), self.path)

    def source_to_code(self, data: Any, path: Any, **_: Any) -> types.CodeType:
        tree = ast.fix_missing_locations(Placed(self.device).visit(ast.parse(data)))
        code: types.CodeType = compile(tree, path, "exec", dont_inherit=True, optimize=1)
        return code


class Placed(ast.NodeTransformer):
    """Writes a device into calls of torch's factories: Dynamo of torch 2.11 knows no default device.

    A number, `torch.tensor(8.0)`, stays on the CPU, as it does where nobody names a device.
    """

    def __init__(self, device: str) -> None:
        self.device = device

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        """What it calls may have programs; what it says is no matter."""
        self.generic_visit(node)
        calls = [n.func for n in ast.walk(node.test) if isinstance(n, ast.Call)]
        names = {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in calls}
        return ast.Expr(node.test) if names & CHECKING else ast.Pass()

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        of_torch = isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
        if not of_torch or node.func.value.id != "torch":
            return node
        name, given = node.func.attr, {keyword.arg for keyword in node.keywords}
        if name == "autocast" and node.args and isinstance(node.args[0], ast.Constant):
            node.args[0] = ast.Constant(self.device.partition(":")[0])
        if name not in FACTORIES or given & {"device", "out", None}:
            return node
        number = name == "tensor" and node.args and isinstance(node.args[0], ast.Constant)
        drawn = "generator" in given
        node.keywords.append(ast.keyword("device", ast.Constant("cpu" if number or drawn else self.device)))
        if not drawn:
            return node
        there = ast.Attribute(node, "to", ast.Load())
        return ast.Call(there, [ast.Constant(self.device)], [])


class Anything:
    """What a helper gives back: the rest of a test, which would look at graphs and sites, finds no fault."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *_: Any, **__: Any) -> Anything:
        return Anything()

    def __getitem__(self, _: Any) -> Anything:
        return Anything()

    def __iter__(self) -> Iterator[Anything]:
        return iter([Anything()])

    def __len__(self) -> int:
        return 1

    def __contains__(self, _: object) -> bool:
        return True

    def __eq__(self, _: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __index__(self) -> int:
        return 1

    def __float__(self) -> float:
        return 1.0

    def __lt__(self, _: object) -> bool:
        return True

    __le__ = __gt__ = __ge__ = __lt__

    def __add__(self, _: object) -> Anything:
        return Anything()

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __and__ = __or__ = __add__
