"""Random programs of linears that share inputs, with and without adapters, and of linears in a chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.programs import Program, Writer

ACTIVATIONS = ["F.silu({})", "F.gelu({})", "F.relu({})", "torch.sigmoid({})", "torch.tanh({})", "({} * 0.5)"]


#: What follows a linear of a chain: most often nothing, or a cast that only belongs to the computation.
CASTS = [
    *["{}"] * 6,
    "{}.float().to(torch.bfloat16)",
    "{}.float()",
    "{}.to(torch.float8_e4m3fn).to(torch.bfloat16)",
    "{}.to(torch.float8_e5m2).float()",
    "{}.float().to(torch.bfloat16).float()",
    "{}.half().to(torch.bfloat16)",
]


class ProductWriter:
    """Writes a few linears, and what reads them."""

    def __init__(self, draw: Callable[[Any], Any], adapters: bool) -> None:
        self.w = w = Writer(draw)
        self.draw, self.adapters = draw, adapters
        self.lead = w.pick((3,), (16,), (70,), (2, 5), (1,))
        self.width = w.pick(32, 64)
        self.equal = w.maybe()  # outputs of one width
        self.out = w.pick(16, 32, 64)
        self.leaf = w.pick("leaf", "leaf", "rand")  # nothing is trained: some fusions are for inference alone
        self.returned: list[str] = []
        self.draws = False
        self.pads = w.pick(None, None, 0, 1, 2)

    def program(self) -> Program:
        w = self.w
        w.line(f"x = {w.input(f'{self.leaf}16', *self.lead, self.width)}")
        outputs = []
        for index in range(w.pick(1, 2, 2, 3)):
            outputs.append(f"y{index}")
            self.linear(outputs[-1])
        result = self.read(outputs)
        named = ", ".join([result, *self.returned])
        result = f"({named},)" if self.returned else result
        return Program(tuple(w.inputs), tuple(w.lines), result, draws=self.draws, pads=self.pads)

    def chain(self) -> Program:
        """Linears, each with an activation, one behind the other, with casts in between.

        Weights keep values near 1: else rounding at one linear decides what the next activation does. So it
        does for the gradient of relu, which is for inference alone.
        """
        w = self.w
        w.line(f"x = {w.input(f'{self.leaf}16', *self.lead, self.width)}")
        for index in range(w.pick(2, 2, 3)):
            out = w.pick(16, 32, 64)
            w.line(f"x = {w.pick(*CASTS).format('x')}.to(torch.bfloat16)" if index and w.maybe() else "pass")
            bias = w.input(f"{self.leaf}16", out)
            weight = self.weight(out, self.width, f"{self.leaf}16/8")
            w.line(f"x = F.linear(x, {weight}{w.pick('', f', {bias}')})")
            w.line(f"x = {w.pick(*CASTS).format('x')}")
            act = w.pick(*ACTIVATIONS, "F.gelu({}, approximate='tanh')", "({} * torch.sigmoid({}))")
            act = act.replace("relu", "silu") if self.leaf == "leaf" else act
            w.line(f"x = {act.replace('{}', 'x')}")
            w.line(f"x = {w.pick(*CASTS).format('x')}.to(torch.bfloat16)")
            if w.pick(True, *[False] * 5):
                self.returned.append(f"kept{index}")
                w.line(f"kept{index} = x * 1.0")
            self.width = out
        tail = w.pick(
            "x", "x", "x.float()", "x.float() * 0.5 + 1", "torch.tanh(x.float())", "F.silu(x.float())",
            "x.to(torch.float8_e4m3fn).float()", "x.half()",
        )  # fmt: skip
        named = ", ".join([tail, *self.returned])
        result = f"({named},)" if self.returned else tail
        return Program(tuple(w.inputs), tuple(w.lines), result, pads=self.pads)

    def source(self) -> str:
        return str(
            self.w.pick(
                "x", "x", "x", "x", "x", "x.clone()", "(x * 1.5)", "F.relu(x)", "x.flip(0)", "(x + x)"
            )
        )

    def weight(self, rows: int, columns: int, kind: str) -> str:
        """A matrix, of its own or part of another one."""
        w = self.w
        form = w.pick("own", "own", "own", "own", "part", "columns", "turned")
        if form == "part":
            return f"{w.input(kind, rows + 8, columns)}[8:]"
        if form == "columns":
            return f"{w.input(kind, rows, columns + 8)}[:, :{columns}]"
        if form == "turned":
            return f"{w.input(kind, columns, rows)}.t()"
        return w.input(kind, rows, columns)

    def linear(self, name: str) -> None:
        w = self.w
        out = self.out if self.equal else w.pick(16, 32, 48)
        kind = "rand16" if self.adapters and w.maybe() else f"{self.leaf}16"
        x, weight = self.source(), self.weight(out, self.width, kind)
        bias = w.input(f"{self.leaf}16", out)
        forms = [
            f"F.linear({x}, {weight})",
            f"F.linear({x}, {weight})",
            f"F.linear({x}, {weight}, {bias})",
            f"{x} @ {weight}.t()",
            f"torch.matmul({x}, {weight}.mT) + {bias}",
            f"torch.einsum('...i,oi->...o', {x}, {weight})",
        ]
        if len(self.lead) == 1:
            forms += [f"torch.addmm({bias}, {x}, {weight}.t())", f"({weight} @ {x}.t()).t()"]
        w.line(f"{name} = {w.pick(*forms)}")
        for _ in range(w.pick(1, 1, 1, 2) if self.adapters else 0):
            self.adapter(name, out)

    def adapter(self, name: str, out: int) -> None:
        w = self.w
        rank, wide = w.pick(4, 8, 16), w.pick(True, False)
        kind = self.leaf if wide else f"{self.leaf}16"
        down, up = self.weight(rank, self.width, kind), self.weight(out, rank, kind)
        x = w.pick("x", "x", "x", "x", "(x * 0.5)", "F.dropout(x, 0.1, training=False)")
        x = f"{x}.{w.pick('float()', 'to(torch.float32)')}" if wide else x
        drawn = [("F.dropout({}, 0.25)", True), ("F.dropout({}, 0.5, True)", True)]
        dropout, draws = w.pick(*[("{}", False)] * 6, *drawn, ("F.dropout({}, 0.0)", False))
        x, self.draws = dropout.format(x), self.draws or draws
        w.line(f"h = F.linear({x}, {down})" if w.maybe() else f"h = {x} @ {down}.t()")
        change = w.pick(*[""] * 6, "h = h * 0.5", "h = F.relu(h)", "h = h.mul_(2.0)", "kept")
        if change == "kept":
            self.returned.append(f"kept{len(self.returned)}")
            w.line(f"{self.returned[-1]} = h * 1.0")
        elif change:
            w.line(change)
        part = w.pick(f"F.linear(h, {up})", f"h @ {up}.t()", f"(h * 0.25) @ {up}.t()")
        part = w.pick(f"{part} * 2.0", f"0.5 * {part}", part, f"{part} / 4.0", f"-{part}")
        form = w.pick(
            "{y} = {y} + {p}", "{y} = {y} + {p}", "{y} = {p} + {y}", "{y} = {y} - {p}",
            "{y} = torch.add({y}, {p}, alpha=3.0)",
        )  # fmt: skip
        if not wide and w.pick(True, False, False, False):
            form = "{y} = {y}.clone(); {y} += {p}"
        w.line(form.format(y=name, p=part))
        if wide:
            w.line(f"{name} = {name}.to(torch.bfloat16)")

    def read(self, outputs: list[str]) -> str:
        """What is made of the linears."""
        w = self.w
        act = w.pick(*ACTIVATIONS)
        kinds = ["returned", "returned", "tail", "residual", "used twice", "in place", "scaled"]
        if self.equal:
            kinds += [*["gated"] * 4, "sum", "difference", "gated and down"]
        kind = w.pick(*kinds)
        first = outputs[0]
        rest = outputs[1:]
        if kind in ("gated", "gated and down"):
            gated = act.format(first) + "".join(f" * {name}" for name in rest)
            if kind == "gated":
                return gated
            w.line(f"z = {gated}")
            return f"F.linear(z, {self.weight(32, self.out, f'{self.leaf}16')})"
        if kind in ("sum", "difference"):
            return (" + " if kind == "sum" else " - ").join(outputs)
        self.returned += rest
        if kind == "tail":
            return act.format(f"({first} * 0.3 + 1)")
        if kind == "residual":
            w.line(f"r = {w.input(f'{self.leaf}16', *self.lead, 1)}")
            return w.pick(f"{first} + r", f"r - {first}", act.format(f"({first} + r)"))
        if kind == "used twice":
            self.returned.append(f"{first}.sum(-1)")
            return act.format(first)
        if kind == "in place":
            w.line(f"{first} = {first}.clone()")
            w.line(f"{first}.{w.pick('mul_(2.0)', 'add_(1.0)', 'neg_()')}")
            return first
        if kind == "scaled":
            return f"{first} * {w.input(f'{self.leaf}16', 1)}"
        return first


@st.composite
def projections(draw: Callable[[Any], Any]) -> Program:
    """Linears, or what is nearly that."""
    return ProductWriter(draw, False).program()


@st.composite
def chains(draw: Callable[[Any], Any]) -> Program:
    """Linears with activations, one behind the other, with casts that keep and casts that round."""
    return ProductWriter(draw, False).chain()


@st.composite
def adapters(draw: Callable[[Any], Any]) -> Program:
    """Linears with adapters, or what is nearly that."""
    return ProductWriter(draw, True).program()
