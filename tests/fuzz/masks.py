"""Random masks: boolean expressions over indices, inputs and memory that is written to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.programs import FILL, Program, Writer


class MaskWriter:
    """Boolean expressions over the index of the query and that of the key.

    Args:
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
            "{m}[:] = {m} & {x}", "{m}.mul_({x})", "{m}.fill_(True)", "{m}.tril_(1)", "{m}.triu_(-1)",
            "{m}.logical_xor_({x})", "{m}.logical_not_()", "{m}.bitwise_or_({x}).triu_(-2)",
            "{m}[0, 0].fill_diagonal_(True)", "{m}.mT.tril_(1)",
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
            "compared", "compared", "compared", "compared", "difference", "triangle", "constant", "padding",
            "documents", "same document", "input", "packed", "scalar", "grid", "eye", "blocks",
        )  # fmt: skip
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
        if kind == "grid":
            first, second, order = (q, k, "ij") if w.maybe() else (k, q, "xy")
            grid = f"torch.meshgrid(torch.arange({first}), torch.arange({second}), indexing='{order}')"
            row, column = (0, 1) if order == "ij" else (1, 0)
            return f"({grid}[{column}] {w.pick('<=', '<', '!=')} {grid}[{row}])"
        if kind == "eye":
            return f"torch.eye({q}, {k}, dtype=torch.bool)"
        if kind == "blocks":
            rows = w.pick(1, 2) if q > 2 else 1
            ones = [f"torch.ones({n}, {k}, dtype=torch.bool)" for n in (rows, q - rows)]
            return f"torch.cat([{ones[0]}{w.pick('', '.tril()')}, {ones[1]}.tril({w.pick(0, rows)})])"
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
