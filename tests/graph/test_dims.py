"""What is read of an operation that takes some elements of a tensor is what it takes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from inductor_fusions.graph.dims import Selection, selection

X = torch.arange(4 * 6 * 5).view(4, 6, 5)
FORMS: dict[str, Callable[[Any], Any]] = {
    "first": lambda x: x[0],
    "last": lambda x: x[-1],
    "last columns": lambda x: x[..., -2:],
    "all but the last columns": lambda x: x[..., :-2],
    "more than there are": lambda x: x[:, -20:4],
    "every other one": lambda x: x[:, 1::2],
    "a number, new dims": lambda x: x[:, None, 3, :, None],
    "numbers at both ends": lambda x: x[2, ..., 4],
    "select": lambda x: x.select(-1, 3),
    "narrow": lambda x: torch.narrow(x, 1, 2, 3),
    "narrow from behind": lambda x: x.narrow(-2, -2, 2),
    "split": lambda x: x.split(4, dim=1)[1],
    "split by sizes": lambda x: x.split([1, 3, 1], -1)[-2],
    "split into one part": lambda x: x.split(6, dim=1)[0],
    "chunk": lambda x: torch.chunk(x, 3, 1)[2],
    "unbind": lambda x: x.unbind(1)[-2],
    "sizes": lambda x: x[:, x.shape[0] - 1 : x.shape[0] + 1],
    "up to a size": lambda x: x[:, : x.shape[0] - 1],
    "slice of aten": lambda x: torch.ops.aten.slice(x, 1, 2, 9),
}
OTHERS: dict[str, Callable[[Any], Any]] = {
    "mask": lambda x: x[torch.tensor([True, False, True, False])],
    "two tensors": lambda x: x[torch.tensor([0, 1]), torch.tensor([2, 3])],
    "a tensor and a number": lambda x: x[torch.tensor([0, 1]), 2],
    "parts that overlap": lambda x: x.tensor_split((3, 1), 1)[2],
    "no part": lambda x: x.max(1)[0],
    "added": lambda x: x + 1,
}


def read(fn: Callable[[Any], Any], dynamic: bool = False) -> Selection | None:
    """What a function takes of its input, as its graph says."""
    found: list[Selection | None] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        (output,) = graph.graph.find_nodes(op="output")
        found.append(selection(output.args[0][0], adds=True))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(lambda x: fn(x), backend=keep, dynamic=dynamic)(X)
    return found[0]


@pytest.mark.parametrize("name", FORMS)
def test_elements(name: str) -> None:
    taken, result = read(FORMS[name]), FORMS[name](X)
    assert taken is not None and taken.source.op == "placeholder"
    assert torch.equal(X[taken.index].flatten(), result.flatten())
    sizes = X[tuple(slice(p, p + 1) if isinstance(p, int) else p for p in taken.index)].shape
    for size, part, place in zip(sizes, taken.index, taken.places, strict=True):
        assert (place is None) == isinstance(part, int) and (place is None or result.shape[place] == size)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_read(name: str) -> None:
    assert read(OTHERS[name]) is None


@pytest.mark.parametrize("dynamic", [False, True])
def test_apart(dynamic: bool) -> None:
    """Selections that are apart share no element; those of constants without steps are all found."""
    taken = {name: each for name, fn in FORMS.items() if (each := read(fn, dynamic)) is not None}
    elements = {name: set(FORMS[name](X).flatten().tolist()) for name in taken}
    for one, two in itertools.permutations(taken, 2):
        (own, first), (others, second) = ((taken[name], elements[name]) for name in (one, two))
        apart = own.is_apart_from(replace(others, source=own.source))  # each was read in a graph of its own
        assert not (apart and first & second), (one, two)
        assert dynamic or "every other one" in (one, two) or apart == (not first & second), (one, two)
