"""Masks that flex attention is told as predicates: windows, documents, padding, prefixes, chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inductor_fusions import testing
from tests.attention.support import additive, cases, check, flex_everywhere, qkv, rand

B, H, S = 2, 2, 300  # two blocks and a part of a third
LOWEST = torch.finfo(torch.float32).min


def rows_and_keys(q_len: int = S, kv_len: int = S) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(q_len)[:, None], torch.arange(kv_len)[None, :]


def window(length: int):
    def mask(data: torch.Tensor) -> torch.Tensor:
        i, j = rows_and_keys()
        return (j <= i) & (j > i - length)

    return mask


def documents(segments: torch.Tensor) -> torch.Tensor:
    return segments[:, None, :, None] == segments[:, None, None, :]


def causal(data: Any = None) -> torch.Tensor:
    i, j = rows_and_keys()
    return j <= i


def padding(segments: torch.Tensor) -> torch.Tensor:
    return (segments != 1)[:, None, None, :]


#: Name of the class, and the mask, made of a (batch, length) tensor of sorted integers from 0 to 4.
CLASSES = {
    "causal+window": window(70),
    "causal+pad": lambda s: causal() & padding(s),
    "causal+window+pad": lambda s: window(70)(s) & padding(s),
    "document": documents,
    "causal+document": lambda s: causal() & documents(s),
    "pad+document": lambda s: documents(s) & padding(s),
    "blocks": lambda s: (lambda i, j: (j <= i) | (j < 40))(*rows_and_keys()),  # a prefix
    "causal+blocks": lambda s: (lambda i, j: (j <= i) & ((j < 9) | (j > i - 50)))(*rows_and_keys()),
    "window+blocks": lambda s: (lambda i, j: (j > i - 40) & (j < i + 40))(*rows_and_keys()),
}


def segments(batch: int = B, length: int = S) -> torch.Tensor:
    found = torch.randint(0, 5, (batch, length)).sort(-1).values
    found[:, 0] = 0
    return found


def attention(mask, how: str = "add"):
    def fn(q, k, v, data):
        scores, seen = q @ k.mT * 0.25, mask(data)
        scores = (
            scores + torch.where(seen, 0.0, LOWEST) if how == "add" else scores.masked_fill(~seen, LOWEST)
        )
        return torch.softmax(scores, -1) @ v

    return fn


@pytest.mark.parametrize("how", ["add", "fill"])
@pytest.mark.parametrize("name", list(CLASSES))
def test_class(name: str, how: str) -> None:
    """Forward and gradients are those of the unfused graph, rows that see no key included."""
    with flex_everywhere("flex"):
        seen = check(attention(CLASSES[name], how), (*qkv(S, S, heads=H), segments()), kernel="flex")
    kind = seen.sites[0].kernel.split("block mask: ")[1].split(",")[0]
    assert kind == name


CALLS = {
    "boolean": lambda seen: seen,
    "additive": additive,
}


@pytest.mark.parametrize("form", list(CALLS))
@pytest.mark.parametrize("name", ["causal+window", "causal+document", "causal+pad"])
def test_call_of_sdpa(name: str, form: str) -> None:
    def fn(q, k, v, data):
        seen = CLASSES[name](data)
        mask = seen if form == "boolean" else torch.where(seen, 0.0, LOWEST)
        mask = mask.expand(q.shape[0], 1, q.shape[2], k.shape[2])
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)

    with flex_everywhere("flex"):
        check(fn, (*qkv(S, S, heads=H), segments()), kernel="flex")
    seen = check(fn, (*qkv(S, S, heads=H), segments()), fused=0)
    assert "already an SDPA call" in seen.sites[0].reason


def test_call_of_sdpa_with_rows_that_see_no_key() -> None:
    """An additive mask adds to the scores, so these rows send a gradient into q and k.

    The kernel of SDPA on a CPU gets it wrong, so the reference is spelled out.
    """

    def mask(data: torch.Tensor) -> torch.Tensor:
        return (causal() & (data != 0)[:, None, None, :]).expand(B, 1, S, S)

    def fn(q, k, v, data):
        added = torch.where(mask(data), 0.0, LOWEST)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, added)

    with flex_everywhere("flex"):
        seen = check(fn, (*qkv(S, S, heads=H), segments()), kernel="flex", reference=attention(mask))
    assert all(ours < 2e-6 for ours, _ in seen.errors.values())


#: Documents with numbers whose differences no int32 holds.
FAR_APART = (lambda s: s[:, None, :, None] >= s[:, None, None, :], lambda s: (s.int() - 2) * (2**30 - 1))


@pytest.mark.parametrize(
    ("case", "numbers"),
    [*((case, lambda s: s) for case in CLASSES.values()), FAR_APART],
    ids=[*CLASSES, "far apart"],
)
def test_blocks(case, numbers) -> None:
    """What the intervals say is true: an empty block holds no visible pair, a full one no hidden pair."""
    data = numbers(segments())
    with flex_everywhere("flex"):
        run = testing.capture(
            attention(case), *qkv(S, S, heads=H), data, policy="always",
            backend=testing.EAGER_AFTER_PASSES, train=True,
        )  # fmt: skip
    (call,) = run.calls("flex_attention")
    graph = call.graph
    wanted = [node for node in call.args[4] if isinstance(node, torch.fx.Node)][:8]
    values = evaluate(graph, wanted, data)
    seen = torch.nn.functional.pad(case(data).expand(B, 1, S, S), (0, 84, 0, 84))
    seen = (
        seen.unflatten(2, (3, 128)).unflatten(4, (3, 128)).transpose(3, 4)
    )  # b, 1, blocks, blocks, 128, 128
    some, everything = seen.any(-1).any(-1), seen.all(-1).all(-1)
    for first, transpose in ((0, False), (4, True)):
        partial, full = (ordered(*values[i : i + 2]) for i in (first, first + 2))
        if transpose:
            partial, full = partial.mT, full.mT
        partial, full = (t.expand(B, 1, 3, 3) for t in (partial, full))
        assert not (partial & full).any()
        assert (full <= everything).all()  # a full block hides nothing
        assert (some <= (partial | full)).all()  # an empty block holds nothing
    assert (partial | full).float().mean() < 0.95 or case is CLASSES["blocks"]


def ordered(count: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The blocks listed, as a boolean matrix."""
    listed = torch.arange(order.shape[-1]) < count[..., None]
    return torch.zeros(order.shape, dtype=torch.bool).scatter(-1, order.long(), listed)


def evaluate(graph: torch.fx.Graph, wanted: list[torch.fx.Node], data: torch.Tensor) -> list[torch.Tensor]:
    """Values of some nodes, which depend on `data` alone among the inputs of the graph."""

    copied = torch.fx.Graph()
    mapping: dict[torch.fx.Node, torch.fx.Node] = {}
    needed = set(wanted)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    for node in graph.nodes:
        if node in needed:
            mapping[node] = copied.node_copy(node, lambda n: mapping[n])
    copied.output(tuple(mapping[node] for node in wanted))
    module = torch.fx.GraphModule(graph.owning_module, copied)
    return list(module(*[data for node in copied.nodes if node.op == "placeholder"]))


def test_layers_share_one_block_mask() -> None:
    """The block mask is built once a forward, whatever the number of layers."""

    def fn(q, k, v, data):
        seen = (causal() & documents(data)).expand(B, 1, S, S)
        for _ in range(3):
            q = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen)
        return q

    with flex_everywhere("flex"):
        run = testing.capture(
            fn, *qkv(S, S, heads=H, grad=False), segments(), policy="always",
            backend=testing.EAGER_AFTER_PASSES,
        )  # fmt: skip
    calls = run.calls("flex_attention")
    assert len(calls) == 3
    assert len({tuple(call.args[4][2:6]) for call in calls}) == 1
    assert len(run.calls("floor_divide")) == 2  # an order of the partial blocks, and one of the full ones


def test_no_dense_mask_is_left() -> None:
    """Nothing of the size (queries, keys) is computed where the class is proved and no row can be empty."""

    def fn(q, k, v, data):
        return attention(lambda s: causal() & documents(s), "fill")(q, k, v, data)

    with flex_everywhere("flex"):
        run = testing.capture(
            fn, *qkv(S, S, heads=H, grad=False), segments(), policy="always",
            backend=testing.EAGER_AFTER_PASSES,
        )  # fmt: skip
    (call,) = run.calls("flex_attention")
    call.graph.eliminate_dead_code()
    sizes = [
        n.meta["example_value"].shape
        for n in call.graph.nodes
        if isinstance(n.meta.get("example_value"), torch.Tensor)
    ]
    assert not [s for s in sizes if tuple(s[-2:]) == (S, S)]


def test_bias_beside_a_class() -> None:
    """Its gradient flows through the score_mod."""

    def fn(q, k, v, bias):
        i, j = rows_and_keys()
        return torch.softmax((q @ k.mT * 0.25 + bias).masked_fill((j > i) | (j <= i - 70), LOWEST), -1) @ v

    with flex_everywhere("flex"):
        seen = check(fn, (*qkv(S, S, heads=H), rand(H, S, S)), kernel="flex")
    assert "bias in score_mod" in seen.sites[0].kernel


def test_dynamic_shapes() -> None:
    def fn(q, k, v, data):
        q, k, v = (t.view(*t.shape[:2], H, 16).transpose(1, 2) for t in (q, k, v))
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
        seen = (j <= i) & (j > i - 70) & (data[:, None, :, None] == data[:, None, None, :])
        return torch.softmax((q @ k.mT * 0.25).masked_fill(~seen, LOWEST), -1) @ v

    with flex_everywhere("flex"):
        check(fn, (*(rand(B, S, H * 16) for _ in range(3)), segments()), dynamic=True, kernel="flex")


def test_different_lengths() -> None:
    """Fewer queries than keys, as behind a cache: the causal mask starts at an offset."""

    def fn(q, k, v):
        i, j = torch.arange(40)[:, None] + S - 40, torch.arange(S)[None, :]
        return torch.softmax((q @ k.mT * 0.25).masked_fill((j > i) | (j <= i - 70), LOWEST), -1) @ v

    with flex_everywhere("flex"):
        check(fn, qkv(40, S, heads=H), kernel="flex")


DATA = {
    "a matrix": lambda s, m: m,
    "a matrix and causal": lambda s, m: m & causal(),
    "from floats": lambda s, m: s.float()[:, None, :, None] == s.float()[:, None, None, :],
}


@cases(DATA)
def test_data_stays_a_dense_mask(case) -> None:
    mask = torch.rand(B, 1, S, S) < 0.7
    mask[..., 0] = True

    def fn(q, k, v, data, mask):
        return torch.softmax((q @ k.mT * 0.25).masked_fill(~case(data, mask), LOWEST), -1) @ v

    with flex_everywhere("flex"):
        seen = check(fn, (*qkv(S, S, heads=H), segments(), mask), kernel="sdpa")
    assert "block mask" not in seen.sites[0].kernel


def added(first: str, second: str, fill: float, bias: bool = False):
    """Two masks, each added or filled in, and perhaps a bias behind them; rows may see no key."""

    def fn(q, k, v, data):
        scores = q @ k.mT * 0.25
        for how, seen in ((first, causal()), (second, (data != 0)[:, None, None, :])):
            if how == "fill":
                scores = scores.masked_fill(~seen, fill)
            else:
                scores = scores + torch.where(seen, 0.0, fill)
        scores = scores + 0.01 * torch.arange(S) if bias else scores
        return torch.softmax(scores, -1) @ v

    return fn


@pytest.mark.parametrize(
    ("how", "fill"),
    [(how, fill) for how in ("add add", "fill fill") for fill in (LOWEST, -1e9, -1e4)]
    + [(how, fill) for how in ("add fill", "fill add") for fill in (LOWEST, -1e9)],
)
def test_rows_that_see_no_key_hold_the_right_mean(how: str, fill: float) -> None:
    """Keys that are hidden once win over those hidden twice, and -10000 leaves scores their digits."""
    inputs = (*qkv(S, S, heads=H, grad=False), segments())
    with flex_everywhere("flex"):
        check(added(*how.split(), fill), inputs, kernel="flex" if how == "fill fill" else "sdpa", train=False)


@pytest.mark.parametrize("fill", [LOWEST, -1e4])
def test_bias_on_a_row_of_fills(fill: float) -> None:
    """It drowns in the least number, but not in -10000."""
    inputs, reason = (*qkv(S, S, heads=H), segments()), "not low enough"
    fn = added("fill", "fill", fill, bias=True)
    with flex_everywhere("flex"):
        if fill == LOWEST:
            check(fn, inputs, kernel="flex")
        else:
            check(fn, inputs, fused=0, reason=reason)
