"""Each kernel template: repeats bit for bit, two streams, a second device, random cotangents."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.gpu.templates import LARGE, TEMPLATES, Template, compiled, differentiated
from tests.support.errors import relative

pytestmark = pytest.mark.gpu

REPEATS = 250
DEVICES = ["cuda:0", pytest.param("cuda:1", marks=pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="one GPU"
))]  # fmt: skip


@pytest.fixture(params=list(TEMPLATES))
def template(request: pytest.FixtureRequest) -> Template:
    found: Template = TEMPLATES[request.param]
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor < found.least:
        pytest.skip(f"needs compute capability {found.least / 10}")
    return found


def different(found: list[Tensor], expected: list[Tensor]) -> Tensor:
    """How many elements are not bitwise equal, without waiting for the device."""
    kinds = {2: torch.int16, 4: torch.int32}
    counts = [
        (x.view(kinds[x.element_size()]) != y.view(kinds[y.element_size()])).sum()
        for x, y in zip(found, expected, strict=True)
    ]
    return torch.stack(counts).sum()


def cotangents(outputs: list[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(y.shape, generator=generator).to(y.device, y.dtype) for y in outputs]


def check_numbers(template: Template, run: Callable[..., list[Tensor]], device: str, seed: int) -> None:
    """Outputs, and gradients of random cotangents, are about as exact as those of eager mode.

    Eager mode rounds elsewhere, hence a factor of 2. In float32 kernels compute weights anew with exp2, or
    multiply in three products of TF32: hence more eps.
    """
    inputs = template.inputs(device, seed)
    with torch.no_grad():
        shapes = template.function(*inputs)
    given = cotangents(list(shapes) if isinstance(shapes, tuple) else [shapes], seed + 100)
    wide = [
        x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs
    ]
    ours = run(inputs, given)
    eager = differentiated(template, template.function, inputs, given)
    exact = differentiated(template, template.function, wide, [c.double() for c in given])
    for i, (x, y, z) in enumerate(zip(ours, eager, exact, strict=True)):
        assert x.dtype == y.dtype and x.shape == y.shape and x.device == inputs[0].device, i
        slack = 16 if x.dtype == torch.float32 else 2
        allowed = 2 * relative(y, z) + slack * torch.finfo(x.dtype).eps
        assert relative(x, z) <= allowed, f"seed {seed}, {i}: {relative(x, z):.2e}, allowed {allowed:.2e}"


def test_repeats(template: Template) -> None:
    repeat(template, REPEATS)


@pytest.mark.parametrize("name", LARGE)
def test_as_large_as_in_models(name: str) -> None:
    repeat(LARGE[name], 50)
    with LARGE[name].active():
        check_numbers(LARGE[name], compiled(LARGE[name]), "cuda", 0)


def repeat(template: Template, times: int) -> None:
    """The same bits each time: behind a kernel that has just written the input, where NaN was before."""
    kept = template.inputs("cuda")
    inputs = template.inputs("cuda")
    noise = torch.randn(1000, 1000, device="cuda")
    with template.active():
        run = compiled(template)
        expected = [y.clone() for y in run(inputs)]
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(times):
            with torch.no_grad():
                inputs[0].fill_(float("nan"))
                noise.sin_()
                inputs[0].copy_(kept[0])
            wrong += different(run(inputs), expected)
    assert not wrong.item()
    assert all(y.isfinite().all() for y in expected)


def test_two_streams(template: Template) -> None:
    """Two calls at once do not share what they write."""
    given = [template.inputs("cuda", seed) for seed in (1, 2)]
    with template.active():
        run = compiled(template)
        expected = [[y.clone() for y in run(inputs)] for inputs in given]
    streams = [torch.cuda.Stream() for _ in given]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in given]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, inputs, wanted, count in zip(streams, given, expected, wrong, strict=True):
            with torch.cuda.stream(stream):
                count += different(run(inputs), wanted)
    torch.cuda.synchronize()
    assert [count.item() for count in wrong] == [0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_random_cotangents(template: Template, device: str) -> None:
    """Also on a device that is not the current one."""
    with template.active():
        run = compiled(template)
        for seed in range(3):
            check_numbers(template, run, device, seed)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_both_devices_by_turns() -> None:
    """One function, compiled for each."""
    template = TEMPLATES["adapters, few rows"]
    with template.active():
        run = compiled(template)
        for seed, device in enumerate(["cuda:0", "cuda:1", "cuda:0", "cuda:1"]):
            check_numbers(template, run, device, seed)
