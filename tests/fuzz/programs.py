"""Random programs, as source text: functions of tensors, so that a failure is a script that anyone can run.

`attentions`, `masks` and `products` draw them.
"""

from __future__ import annotations

import itertools
import linecache
import re
from collections.abc import Callable, Sequence
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
        """Values that depend on the position of the input alone, on torch's default device."""
        generator = torch.Generator().manual_seed(index)
        device = torch.get_default_device()
        values = torch.randn(self.shape, generator=generator, device="cpu")
        if self.kind == "mask":
            mask = values < 0.4
            mask[..., 0] = True
            return mask.to(device)
        if self.kind == "documents":
            return (values > 0.7).long().cumsum(-1).to(device)
        if self.kind.endswith(("16", "16/8")):
            values = (values / 8 if self.kind.endswith("/8") else values).bfloat16()
        return values.to(device).requires_grad_(self.kind.startswith("leaf"))


#: What makes a tensor with dims. A number may stay on the CPU, as in eager mode.
_MAKERS = re.compile(r"torch\.(?:arange|ones|zeros|eye)\(")


def placed(text: str, device: str) -> str:
    """Code whose tensors are made on a device: Dynamo of torch 2.11 knows no default device for them."""
    for found in reversed(list(_MAKERS.finditer(text))):
        depth, end = 1, found.end()
        while depth:
            depth += (text[end] == "(") - (text[end] == ")")
            end += 1
        text = f"{text[: end - 1]}, device={device!r}{text[end - 1 :]}"
    return text


_number = itertools.count()


@dataclass(frozen=True)
class Program:
    """A function in source text, with its inputs; `kernel` is what the fusion is to take, `draws` says that
    it draws random numbers, and `pads` which products Inductor pads (`tests.support.padding`)."""

    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    result: str
    kernel: str = "auto"
    draws: bool = False
    pads: int | None = None

    @property
    def source(self) -> str:
        """The text of the function."""
        names, device = ", ".join(i.name for i in self.inputs), torch.get_default_device().type
        text = "\n    ".join([f"def program({names}):", *self.lines, f"return {self.result}"]) + "\n"
        return text if device == "cpu" else placed(text, device)

    def script(self, how: str = "graphs") -> str:
        """A script that runs the program with the fusions and compares it with float64, on what is torch's
        default device now.

        Args:
            how: it was judged: "graphs", run as they are after the passes; "code", what Inductor makes of
                them for the device; "products", graphs on what seems to be a GPU.
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
                f"judge.check_products(program, inputs, draws={self.draws}, pads={self.pads})\n",
            ),
        }[how]
        device = torch.get_default_device().type
        chosen = "" if device == "cpu" else f"torch.set_default_device({device!r})\n"
        return (
            f"import torch\nimport torch.nn.functional as F\n\n{imports}"
            f"from tests.fuzz.programs import Input\n\n{chosen}\n{self.source}\n\ninputs = [\n{made}\n]\n"
            f"{check}"
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
        return f"Program ({self.kernel}, pads {self.pads}):\n{self.source}{self.inputs}"


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


def judging_script(program: Program, more: Sequence[str], judge: str, how: str) -> str:
    """A script that judges a program.

    Args:
        more: the fields that its class adds.
        judge: the function of its module that does.
    """
    names = ("inputs", "lines", "result", "kernel", "draws", "pads", *more)
    text = "".join(f"    {name}={getattr(program, name)!r},\n" for name in names)
    return (
        "from tests.fuzz.programs import Input\n"
        f"from {type(program).__module__} import *\n\n"
        f"program = {type(program).__name__}(\n{text})\n"
        f"print(program.source)\n{judge}(program, code={how == 'code'})\n"
    )
