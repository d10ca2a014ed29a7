"""Random attentions, and what is nearly one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.programs import FILL, Program, Writer

#: Kinds of what is done to the scores; more often drawn are those that are named twice.
STEPS = (
    "scale", "scale", "bias", "bias", "fill", "fill", "mask", "cast", "view", "copy", "in place",
    "tensor scale", "tanh", "clamp", "shift", "used", "returned", "turn", "slice", "cat", "soft fill",
    "alpha", "dropout", "overwritten", "select",
)  # fmt: skip


class AttentionWriter:
    """Writes one attention, or what is nearly one."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self.w = w = Writer(draw)
        self.draw = draw
        self.batch, self.heads = w.pick(1, 2), w.pick(1, 2, 4)
        self.q = w.pick(1, 4, 4, 5)
        self.k = self.q if self.q > 1 and w.maybe() else w.pick(3, 4, 8)
        self.dim = w.pick(4, 8, 16)
        self.outputs: list[str] = []

    def program(self) -> Program:
        w = self.w
        self.operands()
        w.line(self.product())
        for _ in range(self.draw(st.integers(0, 5))):
            self.step()
        sink = w.pick(*[""] * 6, "column", "factor")
        dropped = self.column() if sink == "column" else ""
        if sink == "factor":
            self.factor()
        w.line(self.softmax())
        if dropped:
            w.line(f"weights = weights{dropped}")
        for _ in range(self.draw(st.integers(0, 2))):
            self.after()
        w.line("weights = weights.to(v.dtype)")
        outs = [
            "out = weights @ v",
            "out = torch.matmul(weights, v)",
            "out = torch.einsum('bhqk,bhkd->bqhd', weights, v)",
            "out = torch.bmm(weights.flatten(0, 1), v.flatten(0, 1))",
            "out = (weights @ v).transpose(1, 2).contiguous()",
        ]
        scaled = ["out = (weights @ v) * factor", "out = factor * torch.matmul(weights, v)"]
        w.line(w.pick(*(scaled if sink == "factor" else outs)))
        result = ", ".join(["out", *self.outputs])
        return w.program(f"({result},)" if self.outputs else "out")

    def operands(self) -> None:
        w = self.w
        shared = w.pick(*(n for n in (1, 2, 4) if self.heads % n == 0))
        behind = w.maybe()  # heads behind the length
        for name, heads, length in (("q", self.heads, self.q), ("k", shared, self.k), ("v", shared, self.k)):
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
        w = self.w
        kind = w.pick(*STEPS)
        changes = self.changes()
        if kind in changes:
            w.line(f"scores = {changes[kind]()}")
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

    def changes(self) -> dict[str, Callable[[], str]]:
        """What makes other scores of the scores, by the kind of step."""
        w, b, h = self.w, self.batch, self.heads
        return {
            "scale": lambda: w.pick(
                "scores * 0.7", "scores / 1.5", "0.3 * scores", "scores.div(2.0)", "scores * -0.7",
                "torch.mul(scores, 0.5)", "scores / torch.sqrt(torch.tensor(8.0))", "-scores",
                "2.0 / (scores.abs() + 1.0)",
            ),
            "bias": lambda: self.bias(),
            "fill": lambda: self.fill(FILL),
            "soft fill": lambda: self.fill(-2.0),
            "mask": lambda: f"scores + torch.where({self.mask()}, 0.0, {FILL})",
            "cast": lambda: w.pick("scores.float()", "scores.to(torch.float64).float()", "scores.type_as(q)"),
            "view": lambda: w.pick(
                f"scores.reshape({b * h}, {self.q}, {self.k}).view({b}, {h}, {self.q}, {self.k})",
                "scores[:, :, None].squeeze(2)", f"scores.view({b}, {h}, {self.q}, {self.k})",
            ),
            "copy": lambda: w.pick("scores.clone()", "scores.contiguous()", "scores.mT.contiguous().mT"),
            "in place": lambda: w.pick("scores.mul_(0.8)", "scores.add_(0.5)", "scores.div_(1.5)"),
            "tensor scale": lambda: f"scores * {w.input('leaf', *self.shape())}",
            "tanh": lambda: "torch.tanh(scores / 2) * 2",
            "clamp": lambda: w.pick(
                "scores.clamp(min=-3.0)", f"scores.clamp(min={FILL})", "scores.clamp(-2, 2)"
            ),
            "shift": lambda: w.pick(
                "scores - scores.amax(-1, keepdim=True)", "scores.amax(-1, keepdim=True) - scores",
                "scores + 1.5", "scores - 100.0", "0.5 - scores",
            ),
            "turn": lambda: w.pick(
                "scores.mT.mT", "scores.transpose(0, 1).transpose(0, 1)", "scores.flip(-1)",
                "scores.roll(1, -1)", "scores.mT" if self.q == self.k else "scores",
            ),
            "slice": lambda: w.pick(f"scores[..., :{self.k}]", "scores[:, :, :, :]"),
            "cat": lambda: f"torch.cat([scores, scores[..., :1]], -1)[..., :{self.k}]",
            "alpha": lambda: (
                f"torch.{w.pick('add', 'sub')}({w.pick('scores, {}', '{}, scores')}, alpha=0.3)".format(
                    w.input("leaf", *self.shape())
                )
            ),
            "dropout": lambda: w.pick("F.dropout(scores, 0.0)", "F.dropout(scores, 0.3, training=False)"),
        }  # fmt: skip

    def bias(self) -> str:
        x = self.w.input(self.w.pick("leaf", "rand"), *self.shape())
        return str(
            self.w.pick(
                f"scores + {x}", f"{x} + scores", f"scores - {x}", f"{x} - scores", f"scores.add({x})"
            )
        )

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

    def column(self) -> str:
        """A sink is concatenated to the scores; the slice of the weights that drops it, or nearly that."""
        w = self.w
        w.line(f"sink = {w.input('leaf', 1, self.heads, 1, 1)}.expand({self.batch}, -1, {self.q}, -1)")
        first = w.pick(False, False, True)
        w.line(f"scores = torch.cat({'[sink, scores]' if first else '[scores, sink]'}, -1)")
        right = (
            ["[..., 1:]"]
            if first
            else ["[..., :-1]", f"[..., :{self.k}]", ".narrow(-1, 0, scores.shape[-1] - 1)"]
        )
        return str(w.pick(*right * 3, "[..., 1:]", "[..., :-1]"))

    def factor(self) -> None:
        """What the output is multiplied by, as if there were a sink, or nearly that."""
        w = self.w
        sink = w.input("leaf", self.heads, 1)
        w.line(f"lse = {w.pick('scores.logsumexp(-1)', 'torch.logsumexp(scores.float(), dim=-1)')}")
        right = [
            f"torch.sigmoid(lse - {sink})[..., None]",
            f"torch.sigmoid(lse.unsqueeze(-1) - {sink}[..., None])",
            f"(lse - {sink}).sigmoid().unsqueeze(-1).float()",
        ]
        wrong = [
            f"torch.sigmoid({sink} - lse)[..., None]",
            f"torch.tanh(lse - {sink})[..., None]",
            f"torch.sigmoid(lse * 0.5 - {sink})[..., None]",
            f"torch.sigmoid(lse - {sink}).square()[..., None]",
        ]
        w.line(f"factor = {w.pick(*right * 3, *wrong)}")

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
