"""Random programs, as source text: attentions and what is nearly one, and masks.

A program is a function of tensors, so that a failure is a script that anyone can run.
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

FILL = torch.finfo(torch.float32).min / 64


@dataclass(frozen=True)
class Input:
    """A tensor that a program takes: "rand" and "leaf" (takes a gradient), the same with 16 behind
    (bfloat16) or 16/8 (an eighth as large, too), "mask" (every row sees a key) or "documents" (sorted
    numbers)."""

    name: str
    kind: str
    shape: tuple[int, ...]

    def make(self, index: int) -> torch.Tensor:
        """Values that depend on the position of the input alone."""
        generator = torch.Generator().manual_seed(index)
        values = torch.randn(self.shape, generator=generator)
        if self.kind == "mask":
            mask = values < 0.4
            mask[..., 0] = True
            return mask
        if self.kind == "documents":
            return (values > 0.7).long().cumsum(-1)
        if self.kind.endswith(("16", "16/8")):
            values = (values / 8 if self.kind.endswith("/8") else values).bfloat16()
        return values.requires_grad_(self.kind.startswith("leaf"))


_number = itertools.count()


@dataclass(frozen=True)
class Program:
    """A function in source text, with its inputs; `kernel` is what the fusion is to take."""

    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    result: str
    kernel: str = "auto"

    @property
    def source(self) -> str:
        """The text of the function."""
        names = ", ".join(i.name for i in self.inputs)
        return "\n    ".join([f"def program({names}):", *self.lines, f"return {self.result}"]) + "\n"

    def script(self, how: str = "graphs") -> str:
        """A script that runs the program with the fusions and compares it with float64.

        Args:
            how: it was judged: "graphs", run as they are after the passes; "code", what Inductor makes of
                them for the CPU; "products", graphs on what seems to be a GPU.
        """
        made = "\n".join(
            f"    Input({i.name!r}, {i.kind!r}, {i.shape!r}).make({n})," for n, i in enumerate(self.inputs)
        )
        imports, check = {
            "graphs": (
                "from inductor_fusions import testing\nfrom tests.attention.support import flex_everywhere\n",
                f"with flex_everywhere({self.kernel!r}):\n    testing.check(\n        program, inputs, "
                "fused=None, slack=64.0, backend=testing.EAGER_AFTER_PASSES\n    )\n",
            ),
            "code": (
                "from inductor_fusions import config, testing\n",
                f"with config.patch(attention_kernel={self.kernel!r}):\n"
                "    testing.assert_close_to_eager(program, inputs, slack=64.0)\n",
            ),
            "products": (
                "from tests.fuzz import judge\n",
                "judge.check_products(program, inputs)\n",
            ),
        }[how]
        return (
            f"import torch\nimport torch.nn.functional as F\n\n{imports}"
            f"from tests.fuzz.programs import Input\n\n\n{self.source}\n\ninputs = [\n{made}\n]\n{check}"
        )

    def function(self) -> Callable[..., Any]:
        """The function itself; its lines are known to tracebacks."""
        file = f"<program {next(_number)}>"
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(True), file)
        scope: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
        exec(compile(self.source, file, "exec"), scope)
        found: Callable[..., Any] = scope["program"]
        return found

    def tensors(self) -> list[torch.Tensor]:
        """The inputs, always the same."""
        return [i.make(n) for n, i in enumerate(self.inputs)]

    def __repr__(self) -> str:  # what hypothesis prints
        return f"Program ({self.kernel}):\n{self.source}{self.inputs}"


class Writer:
    """Collects inputs and lines while a program is drawn."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self.draw = draw
        self.inputs: list[Input] = []
        self.lines: list[str] = []

    def pick(self, *items: Any) -> Any:
        return self.draw(st.sampled_from(items))

    def maybe(self) -> bool:
        return bool(self.draw(st.booleans()))

    def input(self, kind: str, *shape: int) -> str:
        self.inputs.append(Input(f"x{len(self.inputs)}", kind, shape))
        return self.inputs[-1].name

    def line(self, text: str) -> None:
        self.lines.append(text)

    def program(self, result: str) -> Program:
        kernel = self.pick("auto", "auto", "flex")
        return Program(tuple(self.inputs), tuple(self.lines), result, kernel)


# Masks -------------------------------------------------------------------------------------------------


class MaskWriter:
    """Boolean expressions over the index of the query and that of the key.

    Args:
        writer: takes inputs.
        q, k: the lengths.
        batch: the number of samples, of masks that depend on the sample.
    """

    def __init__(self, writer: Writer, q: int, k: int, batch: int) -> None:
        self.w, self.q, self.k, self.batch = writer, q, k, batch
        self.names = 0

    def overwritten(self, one: str, two: str) -> str:
        """A condition in memory that is written to: all of it, a part, or through a view."""
        w = self.w
        name, self.names = f"m{self.names}", self.names + 1
        w.line(f"{name} = torch.zeros({self.batch}, 1, {self.q}, {self.k}, dtype=torch.bool) | {one}")
        old = w.pick(None, None, f"{name}.clone()", f"(~{name})", name)
        if old is not None:
            w.line(f"o{name} = {old}")
        write = w.pick(
            "{m} &= {x}", "{m} |= {x}", "{m}.logical_or_({x})", "{m}[:] = {x}", "{m}[..., :, :] = {x}",
            "{m}[...] = {x}", "{m}.masked_fill_({x}, True)", "{m}[:, :, 1:] = False", "{m}[..., 0] = True",
            "{m}[:, 0, 0].fill_(True)", "{m}.view(-1).logical_not_()", "{m}.copy_({m} & {x})", "{m} ^= {x}",
            "{m}[:] = {m} & {x}", "{m}.mul_({x})", "{m}.fill_(True)",
        )  # fmt: skip
        w.line(write.format(m=name, x=two))
        return name if old is None else f"({name} {w.pick('&', '|', '^')} o{name})"

    def index(self, length: int, shape: str) -> str:
        """`arange(length)`, or what equals it or nearly does; indexed by `shape` to stand in its place."""
        n = length
        forms = [
            f"torch.arange({n})",
            f"torch.arange({n})",
            f"torch.arange(1, {n + 1}) - 1",
            f"(torch.arange({n}) + 2 - 2)",
            f"torch.ones({n}, dtype=torch.long).cumsum(0) - 1",
            f"torch.arange(0, {2 * n}, 2) // 2",
            f"torch.arange({n}).flip(0)",
            f"torch.arange({n}).roll(1)",
            f"torch.arange({n - 1}, -1, -1)",
            f"torch.arange({n}).float()",
            f"(-torch.arange({n})).neg()",
            f"torch.arange({n}).clamp(max={n - 2})",
            f"torch.arange({n + 2})[2:] - 2",
            f"torch.arange({n + 1})[:{n}]",
            f"torch.arange({n}).repeat(2)[:{n}]",
            f"torch.arange({n}) % 3",
        ]
        return f"({self.w.pick(*forms)}){shape}"

    def row(self) -> str:
        return self.index(self.q, "[:, None]")

    def column(self) -> str:
        return self.index(self.k, "[None, :]")

    def compared(self) -> str:
        sign = self.w.pick("<=", "<=", ">=", "<", ">", "==", "!=")
        offset = self.w.pick("", "", "", " + 1", " - 1", " - 2", f" + {self.k}", f" - {self.q}")
        sides = [self.column(), self.row() + offset]
        if self.w.maybe():
            sides.reverse()
        return f"({sides[0]} {sign} {sides[1]})"

    def leaf(self) -> str:
        w, q, k = self.w, self.q, self.k
        kind = w.pick(
            "compared",
            "compared",
            "compared",
            "compared",
            "difference",
            "triangle",
            "constant",
            "padding",
            "documents",
            "same document",
            "input",
            "packed",
            "scalar",
        )
        if kind == "difference":
            return f"(({self.row()} - {self.column()}) {w.pick('<', '>=', '>')} {w.pick(-1, 0, 1, 3, k)})"
        if kind == "triangle":
            return (
                f"torch.ones({q}, {k}, dtype=torch.bool).{w.pick('tril', 'triu')}({w.pick(-1, 0, 0, 1, 2)})"
            )
        if kind == "constant":
            return w.pick(f"torch.ones({q}, {k}, dtype=torch.bool)", f"torch.zeros(1, {k}).bool()")
        if kind == "padding":
            return f"{w.input('mask', self.batch, k)}[:, None, None, :]"
        if kind == "documents" and q == k:
            ids = w.input("documents", self.batch, k)
            return f"({ids}[:, None, :, None] == {ids}[:, None, None, :])"
        if kind == "same document" and q == k:
            size = w.pick(1, 2, k, 2 * k)
            return f"({self.row()} // {size} == {self.column()} // {size})"
        if kind == "input":
            return w.input("mask", w.pick(1, self.batch), 1, q, k)
        if kind == "packed" and q == k:
            # As Hugging Face finds the sequences of a packed batch.
            place = f"torch.arange({k})[None].expand({self.batch}, -1)"
            step = f"torch.diff({place}, prepend={place}[:, :1] - {w.pick(1, 1, 2)}, dim=-1)"
            packed = f"({step} != 1).cumsum(-1)"
            return f"({packed}[:, None, :, None] == {packed}[:, None, None, :])"
        if kind == "scalar":
            return f"torch.tensor({w.pick(True, True, False)})"
        return self.compared()

    def boolean(self, depth: int) -> str:
        w = self.w
        if depth == 0:
            return self.leaf()
        kind = w.pick("and", "and", "and", "or", "not", "leaf", "where", "numbers", "equal", "exclusive",
            "overwritten", "overwritten", "added",
        )  # fmt: skip
        one = self.boolean(depth - 1)
        if kind == "not":
            return w.pick(f"(~{one})", f"torch.logical_not({one})")
        if kind == "numbers":
            return w.pick(
                f"({one}.float() > 0.5)",
                f"({one}.to(torch.long) != 0)",
                f"((1.0 - {one}.float()) == 0)",
                f"(torch.zeros({self.q}, {self.k}).masked_fill(~{one}, -1.0) == 0)",
                f"(torch.where({one}, 0.0, {FILL}) > -1)",
            )
        if kind == "leaf":
            return one
        two = self.boolean(depth - 1)
        if kind == "overwritten":
            return self.overwritten(one, two)
        if kind == "added":
            return w.pick(f"({one} + {two})", f"(({one}.float() + {two}.float()) > 1)", f"({one} * {two})")
        if kind == "where":
            return f"torch.where({one}, {two}, {w.pick('torch.tensor(False)', self.leaf())})"
        sign = {"and": "&", "or": "|", "equal": "==", "exclusive": "^"}[kind]
        return f"({one} {sign} {two})"


@st.composite
def masked(draw: Callable[[Any], Any]) -> tuple[Program, Program]:
    """(a call of SDPA with a random mask, the mask alone)."""
    w = Writer(draw)
    q = w.pick(2, 5, 6)
    k = q if w.pick(True, True, True, False) else w.pick(4, 7)
    batch = w.pick(1, 2)
    for length in (q, k, k):
        w.input("rand", batch, 2, length, 4)
    mask = MaskWriter(w, q, k, batch).boolean(draw(st.integers(0, 3)))
    w.line(f"mask = {mask}")
    lines = tuple(w.lines)
    if w.pick(True, False, False):
        w.line(f"mask = torch.where(mask, 0.0, {FILL})")
        call = w.program("torch.softmax(x0 @ x1.mT * 0.5 + mask, -1) @ x2")
    else:
        call = w.program("F.scaled_dot_product_attention(x0, x1, x2, attn_mask=mask)")
    return call, Program(call.inputs, lines, "mask")


# Attentions --------------------------------------------------------------------------------------------


class AttentionWriter:
    """Writes one attention, or what is nearly one."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self.w = w = Writer(draw)
        self.draw = draw
        self.batch, self.heads = w.pick(1, 2), w.pick(1, 2, 4)
        self.q = w.pick(1, 4, 4, 5)
        self.k = self.q if self.q > 1 and w.maybe() else w.pick(3, 4, 8)
        self.dim = w.pick(4, 8)
        self.outputs: list[str] = []

    def program(self) -> Program:
        w = self.w
        self.operands()
        w.line(self.product())
        for _ in range(self.draw(st.integers(0, 5))):
            self.step()
        w.line(self.softmax())
        for _ in range(self.draw(st.integers(0, 2))):
            self.after()
        w.line("weights = weights.to(v.dtype)")
        w.line(
            w.pick(
                "out = weights @ v",
                "out = torch.matmul(weights, v)",
                "out = torch.einsum('bhqk,bhkd->bqhd', weights, v)",
                "out = torch.bmm(weights.flatten(0, 1), v.flatten(0, 1))",
                "out = (weights @ v).transpose(1, 2).contiguous()",
            )
        )
        result = ", ".join(["out", *self.outputs])
        return w.program(f"({result},)" if self.outputs else "out")

    def operands(self) -> None:
        w = self.w
        shared = w.pick(*(n for n in (1, 2, 4) if self.heads % n == 0))
        behind = w.maybe()  # heads behind the length
        for name, heads, length in (
            ("q", self.heads, self.q),
            ("k", shared, self.k),
            ("v", shared, self.k),
        ):
            shape = (self.batch, length, heads, self.dim) if behind else (self.batch, heads, length, self.dim)
            given = w.input("leaf", *shape)
            w.line(f"{name} = {given}.transpose(1, 2)" if behind else f"{name} = {given}")
        times = self.heads // shared
        if times > 1:
            b, k, d = self.batch, self.k, self.dim
            how = w.pick(
                "{x}.repeat_interleave(" + f"{times}, dim=1)",
                "{x}.repeat(1, " + f"{times}, 1, 1)",
                "{x}[:, :, None].expand(" + f"{b}, {shared}, {times}, {k}, {d}).reshape({b}, -1, {k}, {d})",
                "{x}[:, None].expand(" + f"{b}, {times}, {shared}, {k}, {d}).reshape({b}, -1, {k}, {d})",
            )
            for name in "kv":
                w.line(f"{name} = {how.format(x=name)}")
        if w.pick(True, False, False, False):
            name = w.pick("q", "k", "v")
            change = w.pick("{x} * 0.5", "{x}.clone()", "{x} + 0.1", "F.relu({x})", "{x}.double().float()")
            w.line(f"{name} = {change.format(x=name)}")

    def product(self) -> str:
        b, h = self.batch, self.heads
        forms = [
            "scores = q @ k.transpose(-2, -1)",
            "scores = torch.matmul(q, k.mT)",
            "scores = torch.einsum('bhqd,bhkd->bhqk', q, k)",
            "scores = q.matmul(k.permute(0, 1, 3, 2))",
            f"scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view({b}, {h}, {self.q}, {self.k})",
            f"scores = torch.baddbmm(torch.zeros(1, 1, 1), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0.5, "
            f"alpha=0.3).unflatten(0, ({b}, {h}))",
            "scores = (k @ q.mT).mT",
            "scores = torch.matmul(q * 0.5, k.swapaxes(2, 3))",
        ]
        if self.k == self.dim and self.q == self.k:
            forms.append("scores = q @ k")
        return str(self.w.pick(*forms))

    def shape(self) -> tuple[int, ...]:
        """A shape that broadcasts to the scores."""
        full = (self.batch, self.heads, self.q, self.k)
        shape = tuple(n if self.w.maybe() else 1 for n in full)
        return shape[self.w.pick(0, 0, 0, 1, 2) :]

    def mask(self) -> str:
        if self.w.maybe():
            return self.w.input("mask", *self.shape()[:-1], self.k)
        rows, columns = f"torch.arange({self.q})[:, None]", f"torch.arange({self.k})"
        return f"({rows} {self.w.pick('>=', '>=', '+ 1 >=', '+ 3 >')} {columns})"

    def step(self) -> None:
        w, b, h = self.w, self.batch, self.heads
        kind = w.pick(
            *["scale", "scale", "bias", "bias", "fill", "fill", "mask", "cast", "view", "copy", "in place"],
            *[
                "tensor scale",
                "tanh",
                "clamp",
                "shift",
                "used",
                "returned",
                "turn",
                "slice",
                "cat",
                "soft fill",
            ],
            *["alpha", "dropout", "overwritten", "select"],
        )
        scores = {
            "scale": lambda: w.pick(
                "scores * 0.7",
                "scores / 1.5",
                "0.3 * scores",
                "scores.div(2.0)",
                "scores * -0.7",
                "torch.mul(scores, 0.5)",
                "scores / torch.sqrt(torch.tensor(8.0))",
                "-scores",
                "2.0 / (scores.abs() + 1.0)",
            ),
            "bias": lambda: self.bias(),
            "fill": lambda: self.fill(FILL),
            "soft fill": lambda: self.fill(-2.0),
            "mask": lambda: f"scores + torch.where({self.mask()}, 0.0, {FILL})",
            "cast": lambda: w.pick("scores.float()", "scores.to(torch.float64).float()", "scores.type_as(q)"),
            "view": lambda: w.pick(
                f"scores.reshape({b * h}, {self.q}, {self.k}).view({b}, {h}, {self.q}, {self.k})",
                "scores[:, :, None].squeeze(2)",
                f"scores.view({b}, {h}, {self.q}, {self.k})",
            ),
            "copy": lambda: w.pick("scores.clone()", "scores.contiguous()", "scores.mT.contiguous().mT"),
            "in place": lambda: w.pick("scores.mul_(0.8)", "scores.add_(0.5)", "scores.div_(1.5)"),
            "tensor scale": lambda: f"scores * {w.input('leaf', *self.shape())}",
            "tanh": lambda: "torch.tanh(scores / 2) * 2",
            "clamp": lambda: w.pick(
                "scores.clamp(min=-3.0)", f"scores.clamp(min={FILL})", "scores.clamp(-2, 2)"
            ),
            "shift": lambda: w.pick(
                "scores - scores.amax(-1, keepdim=True)", "scores + 1.5", "scores - 100.0"
            ),
            "turn": lambda: w.pick(
                "scores.mT.mT",
                "scores.transpose(0, 1).transpose(0, 1)",
                "scores.flip(-1)",
                "scores.roll(1, -1)",
                "scores.mT" if self.q == self.k else "scores",
            ),
            "slice": lambda: w.pick(f"scores[..., :{self.k}]", "scores[:, :, :, :]"),
            "cat": lambda: f"torch.cat([scores, scores[..., :1]], -1)[..., :{self.k}]",
            "alpha": lambda: f"torch.add(scores, {w.input('leaf', *self.shape())}, alpha=0.3)",
            "dropout": lambda: w.pick("F.dropout(scores, 0.0)", "F.dropout(scores, 0.3, training=False)"),
        }
        if kind in scores:
            w.line(f"scores = {scores[kind]()}")
        elif kind == "used":
            w.line("scores = scores + scores.detach().mean() * 0.1")
        elif kind == "returned":
            self.outputs.append(f"kept{len(self.outputs)}")
            w.line(f"{self.outputs[-1]} = scores.clone()")
        elif kind == "overwritten":
            name = w.pick("q", "k", "v")
            w.line(f"{name} = {name} * 1.0")
            w.line(f"{name}.mul_(0.5)")
        elif kind == "select":
            w.line(f"scores[..., {w.pick(0, -1)}] = 0.25")

    def bias(self) -> str:
        x = self.w.input(self.w.pick("leaf", "rand"), *self.shape())
        return str(self.w.pick(f"scores + {x}", f"{x} + scores", f"scores - {x}", f"scores.add({x})"))

    def fill(self, value: float) -> str:
        mask = self.mask()
        return str(
            self.w.pick(
                f"scores.masked_fill(~{mask}, {value})",
                f"torch.where({mask}, scores, {value})",
                f"scores.where({mask}, torch.tensor({value}))",
                f"scores.masked_fill_(~{mask}, {value})",
            )
        )

    def softmax(self) -> str:
        return "weights = " + str(
            self.w.pick(
                *["torch.softmax(scores, dim=-1)", "F.softmax(scores, -1)", "scores.softmax(3)"] * 3,
                "F.softmax(scores.float(), dim=-1, dtype=torch.float32)",
                "torch.softmax(scores, dim=-2)",
                "torch.softmax(scores, dim=1)",
                "torch.nn.Softmax(-1)(scores)",
                "F.log_softmax(scores, -1).exp()",
                "torch.special.softmax(scores, -1)",
            )
        )

    def after(self) -> None:
        w = self.w
        kind = w.pick("identity", "identity", "changed", "returned")
        if kind == "returned":
            self.outputs.append("weights")
            return
        identity = [
            "F.dropout(weights, 0.2, training=False)",
            "weights.contiguous()",
            "weights.float()",
            "weights[:, :]",
            "weights.mT.mT",
            "weights.clone()",
        ]
        changed = [
            f"weights * {w.input('leaf', self.heads, 1, 1)}",
            "weights / weights.sum(-1, keepdim=True)",
            "weights * 0.5",
            "weights.flip(-1)",
            "weights.masked_fill(weights < 0.1, 0.0)",
            "weights.mul_(2.0)",
        ]
        w.line(f"weights = {w.pick(*(identity if kind == 'identity' else changed))}")


@st.composite
def attentions(draw: Callable[[Any], Any]) -> Program:
    """An attention, or what is nearly one."""
    return AttentionWriter(draw).program()
