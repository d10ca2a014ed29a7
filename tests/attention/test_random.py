"""Attentions put together at random from everything that may stand in one; most are fused, all are right."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from tests.attention.support import check

LOWEST = torch.finfo(torch.float32).min


class Program:
    """One attention, drawn from a seed.

    Attributes:
        text: what was drawn, for messages.
        inputs: q, k, v and whatever the drawn steps need.
        readable: whether only forms that are to be fused were drawn.
    """

    def __init__(self, seed: int, readable: bool) -> None:
        self.draw = random.Random(seed)
        self.readable = readable
        self.text: list[str] = []
        self.steps: list[Any] = []
        self.batch, self.heads = self.draw.choice([1, 2]), self.draw.choice([1, 2, 4])
        self.q_len = self.draw.choice([1, 5, 6])
        self.kv_len = self.draw.choice([self.q_len, 3, 8]) if self.q_len > 1 else self.draw.choice([3, 8])
        dim, v_dim = self.draw.choice([(8, 8), (8, 4), (5, 5)])
        self.shared = self.draw.choice([h for h in (1, 2, 4) if self.heads % h == 0])
        generator = torch.Generator().manual_seed(seed)

        def rand(*shape: int, grad: bool = True) -> torch.Tensor:
            return torch.randn(shape, generator=generator).requires_grad_(grad)

        self.rand = rand
        self.inputs = [
            rand(self.batch, self.heads, self.q_len, dim),
            rand(self.batch, self.shared, self.kv_len, dim),
            rand(self.batch, self.shared, self.kv_len, v_dim),
        ]
        self.repeat = self.pick("interleave", "expand", "repeat", "none" if self.shared == 1 else "expand")
        self.product = self.pick("matmul", "einsum", "bmm", "k scaled", "q scaled")
        for _ in range(self.draw.choice([0, 1, 2, 3, 4])):
            self.add_step()
        self.softmax = self.pick("function", "upcast", "method")
        self.after = self.pick("nothing", "dropout off", "contiguous")
        self.output = self.pick("matmul", "einsum", "bmm", "transposed")

    def pick(self, *names: str) -> str:
        name = self.draw.choice(names)
        self.text.append(name)
        return name

    def shape(self) -> tuple[int, ...]:
        """A shape that broadcasts to the scores."""
        full = (self.batch, self.heads, self.q_len, self.kv_len)
        shape = [size if self.draw.random() < 0.6 else 1 for size in full]
        shape[-1] = self.kv_len
        return tuple(shape[self.draw.choice([0, 0, 1, 2]) :])

    def keep(self, tensor: torch.Tensor) -> int:
        self.inputs.append(tensor)
        return len(self.inputs) - 1

    def mask(self) -> torch.Tensor:
        """Random, with some rows that see nothing."""
        mask = torch.rand(self.shape(), generator=torch.Generator().manual_seed(len(self.steps))) < 0.6
        if self.draw.random() < 0.7:
            mask[..., 0] = True
        return mask

    def add_step(self) -> None:
        names = [
            "mul",
            "div",
            "mul_",
            "bias",
            "bias first",
            "mask",
            "fill",
            "where",
            "causal",
            "cast",
            "view",
        ]
        if not self.readable:
            names += ["head scale", "tanh", "soft fill", "row bias", "clamp", "query scale", "used", "neg"]
        name = self.pick(*names)
        fills = [step for step in self.steps if step[0] in ("mask", "fill", "where", "causal", "soft fill")]
        if name in ("mask", "fill", "where", "causal") and fills:
            return  # two finite fills of a row overflow, or compare unequal
        at = -1
        if name in ("bias", "bias first"):
            at = self.keep(self.rand(*self.shape(), grad=self.draw.random() < 0.5))
        elif name == "mask":
            at = self.keep(torch.zeros(()).expand(self.mask().shape).masked_fill(~self.mask(), LOWEST / 64))
        elif name in ("fill", "where", "soft fill"):
            at = self.keep(self.mask())
        elif name == "head scale":
            at = self.keep((self.rand(self.heads, 1, 1, grad=False).abs() + 0.5).requires_grad_())
        elif name == "query scale":
            at = self.keep(self.rand(self.q_len, 1))
        elif name == "row bias":
            at = self.keep(self.rand(self.batch, 1, self.q_len, 1))
        self.steps.append((name, at))

    def __call__(self, *inputs: Any) -> Any:
        q, k, v = inputs[:3]
        times = self.heads // self.shared
        k, v = (self.repeated(t, times) for t in (k, v))
        scores = self.scores(q, k)
        for name, at in self.steps:
            scores = self.step(name, scores, inputs[at])
        if self.softmax == "upcast":
            weights = torch.softmax(scores.float(), dim=-1, dtype=torch.float32).type_as(v)
        elif self.softmax == "method":
            weights = scores.softmax(-1)
        else:
            weights = nn.functional.softmax(scores, dim=-1)
        if self.after == "dropout off":
            weights = nn.functional.dropout(weights, 0.1, training=False)
        elif self.after == "contiguous":
            weights = weights.contiguous()
        weights = weights.to(v.dtype)
        if self.output == "einsum":
            return torch.einsum("bhqk,bhkd->bqhd", weights, v)
        if self.output == "bmm":
            return torch.bmm(weights.reshape(-1, *weights.shape[-2:]), v.reshape(-1, *v.shape[-2:]))
        out = weights @ v
        return (
            out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1)
            if self.output == "transposed"
            else out
        )

    def repeated(self, t: Any, times: int) -> Any:
        if times == 1 or (self.repeat == "none" and self.product in ("matmul", "k scaled", "q scaled")):
            return t.expand(-1, self.heads, -1, -1)
        if self.repeat == "interleave":
            return t.repeat_interleave(times, dim=1)
        if self.repeat == "repeat":
            return t.repeat(1, times, 1, 1)
        b, h, s, d = t.shape
        return t[:, :, None].expand(b, h, times, s, d).reshape(b, h * times, s, d)

    def scores(self, q: Any, k: Any) -> Any:
        if self.product == "einsum":
            return torch.einsum("bhqd,bhkd->bhqk", q, k)
        if self.product == "bmm":
            flat = torch.bmm(q.reshape(-1, *q.shape[-2:]), k.reshape(-1, *k.shape[-2:]).mT)
            return flat.view(self.batch, self.heads, self.q_len, self.kv_len)
        if self.product == "k scaled":
            return q @ (k * 0.5).transpose(-1, -2)
        if self.product == "q scaled":
            return (q / 2.0) @ k.mT
        return torch.matmul(q, k.transpose(2, 3))

    def step(self, name: str, scores: Any, x: Any) -> Any:
        match name:
            case "mul" | "neg":
                return scores * (0.7 if name == "mul" else -0.7)
            case "div":
                return scores / 1.5
            case "mul_":
                return scores.mul_(0.8)
            case "bias" | "mask" | "row bias":
                return scores + x
            case "bias first":
                return x + scores
            case "fill":
                return scores.masked_fill(~x, LOWEST / 64)
            case "soft fill":
                return scores.masked_fill(~x, -2.0)
            case "where":
                return torch.where(x, scores, LOWEST / 64)
            case "causal":
                place = torch.arange(self.q_len)[:, None] >= torch.arange(self.kv_len)
                return scores.masked_fill(~place, float("-inf") if self.readable else -1e9)
            case "cast":
                return scores.to(torch.float32)
            case "view":
                shape = scores.shape
                return scores.view(-1, *shape[-2:]).view(shape)
            case "tanh":
                return torch.tanh(scores)
            case "clamp":
                return scores.clamp(min=-3.0)
            case "used":
                return scores - scores.detach().amax(-1, keepdim=True)
            case _:
                return scores * x


def run(seed: int, readable: bool, **options: Any) -> None:
    program = Program(seed, readable)
    try:
        # With one key nothing but v has a gradient.
        train = program.kv_len > 1 and program.q_len > 1
        options = {"train": train, "slack": 16.0, "fused": 1 if readable else None, **options}
        check(program.__call__, program.inputs, **options)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {', '.join(program.text)}\n{error}") from None


@pytest.mark.parametrize("seed", range(40))
def test_readable(seed: int) -> None:
    run(seed, readable=True)


@pytest.mark.parametrize("seed", range(1000, 1030))
def test_anything(seed: int) -> None:
    run(seed, readable=False)


@pytest.mark.parametrize("seed", range(2000, 2015))
def test_half(seed: int) -> None:
    # A fused backward takes sum(grad * out) from an output that is rounded to bfloat16; and the gradient of
    # a scale is a sum of terms that cancel.
    run(seed, readable=False, dtype=torch.bfloat16, slack=8.0)


@pytest.mark.parametrize("seed", range(3000, 3010))
def test_symbolic(seed: int) -> None:
    run(seed, readable=False, dynamic=True)
