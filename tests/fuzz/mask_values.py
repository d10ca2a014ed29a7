"""Random computations of masks, each of whose values in the mask algebra is compared with the tensor itself.

Few wrong values change what is concluded of an attention, which is all that `masks` judges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import reject
from hypothesis import strategies as st
from torch import fx

from inductor_fusions import _inductor
from inductor_fusions.effects import inplace
from inductor_fusions.fusions.attention.aliasing import Mutations
from inductor_fusions.fusions.attention.masks import Interpreter
from inductor_fusions.fusions.attention.masks.values import (
    BOOL,
    Affine,
    And,
    Atom,
    Bool,
    Data,
    Element,
    NonNegative,
    Not,
    Or,
    Select,
    Value,
    is_known,
)
from tests.fuzz.judge import Judged
from tests.fuzz.programs import Program, Writer, judging_script

#: Numbers that are filled in, added and multiplied by.
NUMBERS = ("0", "1", "-1", "2", "0.5", "-1e4", "float('-inf')", "torch.finfo(torch.float32).min", "True")
DTYPES = tuple(f"torch.{name}" for name in "bool float32 float16 bfloat16 int64 int8".split())
#: Lines that make a value: {q} and {k} are lengths, {a} a small number, {n} one of NUMBERS, {d} a dtype.
MADE = (
    "torch.arange({k})", "torch.arange({q})[:, None]", "torch.arange({a}, {k} + {a})",
    "torch.arange({a}, end={k} + {a})", "torch.arange(start={a}, end={a} + 2 * {k}, step=2)",
    "torch.arange({k} - 1, -1, -1)", "torch.full(({q}, {k}), {n})", "torch.full((1, {k}), {n}, dtype={d})",
    "torch.ones({q}, {k}, dtype={d})", "torch.zeros({q}, 1, dtype={d})", "torch.ones({k}, dtype={d})",
    "torch.eye({q}, {k}, dtype={d})", "torch.tensor({n})", "torch.empty({q}, {k}).fill_({n})",
    "torch.meshgrid(torch.arange({q}), torch.arange({k}), indexing='ij')[{a} % 2]",
    "torch.meshgrid(torch.arange({k}), torch.arange({q}), indexing='xy')[{a} % 2]",
)  # fmt: skip
#: Of values {x} and {y}, and {c}, a condition.
COMPUTED = (
    "{x} + {y}", "{x} - {y}", "{x} * {y}", "{x} * {n}", "{x} + {n}", "-{x}", "~{x}", "{x} <= {y}",
    "{x} < {y}", "{x} == {y}", "{x} != {n}", "{x} > {n}", "{x} & {y}", "{x} | {y}", "{x} ^ {y}",
    "{x}.logical_and({y})", "{x}.logical_xor({y})", "{x}.logical_not()", "torch.where({c}, {x}, {y})",
    "torch.where({c}, {n}, {x})", "{x}.masked_fill({c}, {n})", "{x}.tril({a} - 1)", "{x}.triu({a} - 1)",
    "{x}.abs()", "{x}.log()", "{x}.mT", "{x}.expand({q}, {k})", "{x}[None]", "{x}[:1]", "{x}[..., 1:]",
    "{x}.view(-1)", "{x}.clone()", "{x}.to({d})", "{x}.bool()", "{x}.cumsum(-1)",
    "torch.cat([{x}, {y}], -1)[..., :{k}]", "torch.cat([{x}, {y}])", "{x}.transpose(0, -1)", "{x}[:, :1]",
    "{x}.unsqueeze(-1)",
)  # fmt: skip
WRITTEN = (
    "{x}.fill_({n})", "{x}.zero_()", "{x}.neg_()", "{x}.abs_()", "{x}.log_()", "{x}.tril_({a} - 1)",
    "{x}.triu_({a})", "{x}.logical_not_()", "{x}.fill_diagonal_({n})", "{x}.masked_fill_({c}, {n})",
    "{x}.mul_({y})", "{x} += {y}", "{x} *= {n}", "{x} &= {y}", "{x} |= {y}", "{x} ^= {y}",
    "{x}.logical_and_({y})", "{x}[{c}] = {n}", "{x}[1:] = {n}", "{x}[..., 1:] = {n}", "{x}[0, 1:] = {n}",
    "{x}[:] = {y}", "{x}[...] = {n}", "{x}.view(-1)[1:].fill_({n})", "{x}.mT.triu_({a})",
    "torch.logical_not({x}, out={x})",
)  # fmt: skip


class Computation(Program):
    """A program that returns all that it computes."""

    def script(self, how: str = "graphs") -> str:
        return judging_script(self, (), "judge_values", how)


@st.composite
def mask_values(draw: Callable[[Any], Any]) -> Computation:
    """Up to 14 lines, without those that eager mode refuses."""
    w = Writer(draw)
    q, k = w.pick(1, 2, 3, 5), w.pick(1, 3, 5)
    known: dict[str, Any] = {"torch": torch}
    for kind, shape in (("mask", (k,)), ("documents", (q, 1)), ("rand", (q, k))):
        name = w.input(kind, *shape)
        known[name] = w.inputs[-1].make(len(w.inputs) - 1)
    for number in range(w.pick(4, 8, 14)):
        names = sorted(name for name, value in known.items() if isinstance(value, torch.Tensor))
        forms = w.pick(MADE, COMPUTED, WRITTEN) if number > 1 else MADE
        conditions = [name for name in names if known[name].dtype == torch.bool]
        text = w.pick(*forms).format(
            q=q, k=k, a=w.pick(0, 1, 2), n=w.pick(*NUMBERS), d=w.pick(*DTYPES), x=w.pick(*names),
            y=w.pick(*names), c=w.pick(*conditions),
        )  # fmt: skip
        line = text if forms is WRITTEN else f"y{number} = {text}"
        try:
            exec(line, known)
        except (RuntimeError, IndexError, TypeError, ValueError):
            continue
        w.line(line)
    computed = [name for name in known if name.startswith("y")]
    return Computation(tuple(w.inputs), tuple(w.lines), f"({', '.join(computed)},)")


def judge_values(program: Program, code: bool = False) -> Judged:
    """What the interpreter says of each node is what the node holds: when it is made, and when it is read.

    Raises:
        AssertionError: another value.
    """
    inputs = program.tensors()
    torch._dynamo.reset()
    for dynamic in (None, True):
        compiled = torch.compile(program.function(), backend=compared, dynamic=dynamic, fullgraph=True)
        try:
            compiled(*(x.detach().clone() for x in inputs))
        except torch._dynamo.exc.TorchRuntimeError:  # fake tensors refuse what eager mode allows
            reject()
    return Judged(())


def compared(model: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """A backend that runs a graph node by node, beside the values of the interpreter."""
    made: dict[fx.Node, Value] = {}
    read: dict[tuple[fx.Node, fx.Node], Value] = {}
    with _inductor.passes_over(model):
        interpreter = Interpreter(Mutations(model.graph))
        tensors = {node for node in model.graph.nodes if isinstance(_inductor.value_of(node), torch.Tensor)}
        for node in model.graph.nodes:
            if node in tensors:
                with interpreter.reading(node.next):
                    made[node] = interpreter.read(node)
            with interpreter.reading(node):
                read.update(
                    {(node, each): interpreter.read(each) for each in inplace.inputs(node) if each in tensors}
                )
    return _Run(model, made, read).run


class _Run(fx.Interpreter):
    """Runs a graph, and compares."""

    def __init__(self, model: fx.GraphModule, made: Any, read: Any) -> None:
        super().__init__(model, garbage_collect_values=False)
        self.made, self.read = made, read
        self.before: dict[fx.Node, torch.Tensor] = {}  # values as they were made

    def run_node(self, node: fx.Node) -> Any:
        for each in inplace.inputs(node):
            if (node, each) in self.read:
                self._compare(self.read[node, each], each, self.env[each], node)
        result = super().run_node(node)
        if isinstance(result, torch.Tensor):
            self.before[node] = result.clone()
            self._compare(self.made.get(node), node, result, node)
        return result

    def _compare(self, value: Value, node: fx.Node, actual: torch.Tensor, reader: fx.Node) -> None:
        if not is_known(value):
            return
        found = _Evaluated(tuple(actual.shape), self.before).of(value).expand(actual.shape)
        said = (
            f"{node.format_node()}, read by {reader.name}: {value} is {found.tolist()}, not {actual.tolist()}"
        )
        assert isinstance(value, BOOL) == (actual.dtype == torch.bool), said
        torch.testing.assert_close(found.double(), actual.double(), rtol=0, atol=0, equal_nan=True, msg=said)


class _Evaluated:
    """Values at all indices of a shape.

    Args:
        shape: of a tensor.
        made: the tensors whose elements values may hold.
    """

    def __init__(self, shape: tuple[int, ...], made: dict[fx.Node, torch.Tensor]) -> None:
        self.shape, self.made = shape, made

    def of(self, value: Value) -> torch.Tensor:
        match value:
            case Affine():
                return self._affine(value)
            case Select():
                branches = self._affine(value.then), self._affine(value.otherwise)
                return torch.where(self._condition(value.condition), *branches)
            case Data():
                return self._element(value.element)
        assert isinstance(value, BOOL), value
        return self._condition(value)

    def _affine(self, value: Affine) -> torch.Tensor:
        total = torch.tensor(float(_number(value.const)), dtype=torch.float64)
        for atom, slope in value.coeffs:
            total = total + _number(slope) * self._atom(atom)
        return total

    def _atom(self, atom: Atom) -> torch.Tensor:
        if isinstance(atom, Element):
            return self._element(atom).double()
        assert 0 < -atom <= len(self.shape), f"dim {atom} of {self.shape}"
        return torch.arange(self.shape[atom], dtype=torch.float64)[(...,) + (None,) * (-atom - 1)]

    def _element(self, element: Element) -> torch.Tensor:
        index = [self._affine(each).long() for each in element.index]
        return (
            self.made[element.node][tuple(torch.broadcast_tensors(*index))]
            if index
            else self.made[element.node]
        )

    def _condition(self, part: Bool) -> torch.Tensor:
        match part:
            case bool():
                return torch.tensor(part)
            case NonNegative():
                return self._affine(part.value) >= 0
            case Not():
                return ~self._condition(part.operand)
            case And() | Or():
                join = torch.logical_and if isinstance(part, And) else torch.logical_or
                found = self._condition(part.operands[0])
                for each in part.operands[1:]:
                    found = join(found, self._condition(each))
                return found
        assert isinstance(part, Element), part
        return self._element(part)


def _number(value: Any) -> int | float:
    """A number, or what a symbolic one is in this run."""
    found: int | float = value if isinstance(value, (int, float)) else _inductor.hint(value)
    return found
