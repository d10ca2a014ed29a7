"""FX graphs: their kind, names in them, the user's code that made a node, and retracing."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import operator
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx

from .shapes import suppress_guards
from .versions import torch_version


def was_erased(node: fx.Node) -> bool:
    """Whether a node is in no graph any more."""
    return bool(node._erased)


#: What the graphs are that the graph of a model calls: "body" of a higher-order operation, or "forward" or
#: "backward" of an `autograd.Function`.
_roles: ContextVar[dict[Any, str]] = ContextVar("inductor_fusions_roles")


@contextlib.contextmanager
def passes_over(model: fx.GraphModule) -> Iterator[None]:
    """Inside, Inductor's passes before autograd run: on each graph that `model` runs, then on its own."""
    graphs = [each for each in model.modules() if isinstance(each, fx.GraphModule)]
    roles = {each: "body" for each in graphs if each is not model}
    for module in graphs:
        for node in filter(_is_function, module.graph.nodes):
            roles |= zip(_bodies_of(node), ("forward", "backward"), strict=False)
    token = _roles.set(roles)
    try:
        yield
    finally:
        _roles.reset(token)


def _role(graph: fx.Graph) -> str:
    return _roles.get({}).get(getattr(graph, "owning_module", None), "")


def is_body(graph: fx.Graph) -> bool:
    """Whether a graph before autograd is the body of a higher-order operation, inside of `passes_over`."""
    return bool(_role(graph))


def is_forward_of_function(graph: fx.Graph) -> bool:
    """Whether a graph is the forward of an `autograd.Function`, which returns what its backward needs too."""
    return _role(graph) == "forward"


def is_backward_of_function(graph: fx.Graph) -> bool:
    """Whether a graph is the backward of an `autograd.Function`, as its author wrote it."""
    return _role(graph) == "backward"


def computed_by_function(node: fx.Node) -> fx.Node | None:
    """The result of an `autograd.Function`, in the body of its forward; None for another node."""
    arguments: Any = node.args if node.target is operator.getitem else (node, 0)
    call, index = arguments
    bodies = _bodies_of(call) if isinstance(call, fx.Node) and _is_function(call) else []
    found = results_of(bodies[0].graph, of_function=True)[index] if bodies else None
    return found if isinstance(found, fx.Node) else None


def results_of(graph: fx.Graph, of_function: bool) -> tuple[Any, ...]:
    """What a graph returns; of the forward of an `autograd.Function`, without what its backward needs."""
    found: Any = graph.output_node().args[0]
    if of_function and isinstance(found, (tuple, list)):
        found = found[0]
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def _is_function(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "autograd_function_apply"


def _bodies_of(call: fx.Node) -> list[Any]:
    """The graph modules of the forward and the backward of an `autograd.Function`."""
    named = [each for each in call.args[:2] if isinstance(each, fx.Node) and each.op == "get_attr"]
    return [getattr(call.graph.owning_module, str(each.target)) for each in named]


def is_backward(graph: fx.Graph) -> bool:
    """Whether a graph behind autograd is a backward: it takes gradients, which AOTAutograd names."""
    return any(node.name.startswith("tangents") for node in graph.find_nodes(op="placeholder"))


def replace_result(output: fx.Node, node: fx.Node, new: fx.Node) -> None:
    """Replace a result of a graph by one with other strides.

    Inductor keeps the strides of results that AOTAutograd traced. Source: `record_original_output_strides` of
    torch/_inductor/compile_fx.py.
    """
    results: Any = output.args[0] if isinstance(output.args[0], (list, tuple)) else output.args
    noted = output.meta.get("original_output_strides")
    for place, result in enumerate(results):
        if result is node and isinstance(noted, list):
            noted[place] = new.meta["val"].stride()
    output.replace_input_with(node, new)


def numpy_name(target: Any) -> str:
    """The name of the operation of NumPy that Dynamo traces as a call of `target`; "" of another target."""
    utils = importlib.import_module("torch._dynamo.utils")
    kinds = utils.numpy_to_tensor_wrapper, utils.numpy_method_wrapper, utils.numpy_operator_wrapper
    return str(target.__name__).removeprefix("wrapped_") if isinstance(target, kinds) else ""


def only_traced_autograd_runs(graph: fx.Graph) -> bool:
    """Whether a graph calls regions whose backward runs in a trace alone.

    Those are nested compile regions, before torch 2.13, and checkpoints: run as they are, they refuse what
    flex attention traces in the second run.
    """
    regions = [torch.ops.higher_order.tag_activation_checkpoint]
    if torch_version() < (2, 13):
        regions.append(importlib.import_module("torch._higher_order_ops.invoke_subgraph").invoke_subgraph)
    return any(node.target in regions for node in graph.nodes)


def trace_decomposed(
    fn: Callable[..., Any], values: Sequence[torch.Tensor], fake_mode: Any
) -> fx.GraphModule:
    """The operations that a function is made of, as a post-grad graph has them.

    Args:
        fn: a function of tensors that returns a tuple of tensors.
        values: its arguments, fake tensors of `fake_mode`.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    decomposition = importlib.import_module("torch._inductor.decomposition")
    with fake_mode, torch.no_grad(), suppress_guards(fake_mode):
        traced = make_fx(fn, decomposition_table=decomposition.select_decomp_table())(*values)
    traced.graph.eliminate_dead_code()
    return traced


def rename(node: fx.Node, name: str) -> None:
    """Give a node another name, made unique in its graph.

    For torch, each of its readers reads another one then; those that `watching_nodes` tells are not told.
    """
    hooks = getattr(node.graph.owning_module, "_replace_hooks", [])
    told, hooks[:] = list(hooks), [hook for hook in hooks if not isinstance(hook, _Replaced)]
    try:
        node._rename(name)
    finally:
        hooks[:] = told


def copied_graph(graph: fx.Graph) -> fx.Graph:
    """A copy, whose inputs say where they come from as those of Dynamo's graphs do.

    It does not refer to the tensors of the call: Dynamo drops those references of its own graph as well.
    """
    made = copy.deepcopy(graph)
    for old, new in zip(graph.nodes, made.nodes, strict=True):
        new.meta.pop("grapharg", None)
        if old.op == "placeholder" and hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    return made


@dataclass(eq=False)
class _Replaced:
    """A hook of torch that tells who reads another node than before."""

    tell: Callable[[fx.Node, fx.Node], None]

    def __call__(self, old: fx.Node, new: str, user: fx.Node) -> None:
        self.tell(old, user)


@contextlib.contextmanager
def watching_nodes(
    module: Any,
    created: Callable[[fx.Node], None],
    erased: Callable[[fx.Node], None],
    replaced: Callable[[fx.Node, fx.Node], None],
) -> Iterator[None]:
    """Call the given functions for changes of a module's graph inside the block.

    Args:
        created: gets a node that is new, but not in the graph yet.
        erased: gets a node that is about to be erased.
        replaced: gets a node and a user of it that is about to read another one instead.
    """
    hooks: list[tuple[list[Any], Any]] = [
        (module._create_node_hooks, created),
        (module._erase_node_hooks, erased),
        (module._replace_hooks, _Replaced(replaced)),
    ]
    for found, hook in hooks:
        found.append(hook)
    try:
        yield
    finally:
        for found, hook in hooks:
            found.remove(hook)


_T = TypeVar("_T")


class _Remembered:
    """The results of functions of nodes, kept until the nodes change."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.stack = stack
        self.graphs: set[fx.Graph] = set()
        self.results: dict[Any, dict[fx.Node, Any]] = {}
        self.spreading: dict[Any, Callable[[fx.Node], bool]] = {}

    def store(self, read: Any, node: fx.Node, result: Any) -> None:
        """Keep a result, unless nobody tells of changes of the graph."""
        graph = node.graph
        if graph.owning_module is None:
            return
        if graph not in self.graphs:
            self.graphs.add(graph)
            told = watching_nodes(graph.owning_module, self.changes, self.changes, self._replaced)
            self.stack.enter_context(told)
        self.results.setdefault(read, {})[node] = result

    def changes(self, *nodes: fx.Node) -> None:
        """Forget what depends on nodes that are new, about to be erased, or changed."""
        for read, known in self.results.items():
            spreads = self.spreading[read]
            for node in nodes if known else ():
                if spreads(node):
                    known.clear()
                    break
                known.pop(node, None)

    def _replaced(self, old: fx.Node, user: fx.Node) -> None:
        self.changes(user)


_remembered: ContextVar[_Remembered | None] = ContextVar("inductor_fusions_remembered", default=None)


@contextlib.contextmanager
def remembering() -> Iterator[None]:
    """Keep the results of `remembered` functions inside the block, until the nodes change."""
    with contextlib.ExitStack() as stack:
        token = _remembered.set(_Remembered(stack))
        try:
            yield
        finally:
            _remembered.reset(token)


def remembered(
    spreads: Callable[[fx.Node], bool] = lambda node: False,
) -> Callable[[Callable[[fx.Node], _T]], Callable[[fx.Node], _T]]:
    """Decorate a function of a node and its arguments: inside of `remembering`, it is computed once.

    Args:
        spreads: whether a node that is new, erased or changed may change the results of others.
    """

    def decorate(read: Callable[[fx.Node], _T]) -> Callable[[fx.Node], _T]:
        @functools.wraps(read)
        def ask(node: fx.Node) -> _T:
            held = _remembered.get()
            if held is None:
                return read(node)
            known = held.results.get(read)
            if known is not None and node in known:
                found: _T = known[node]
                return found
            result = read(node)
            held.spreading[read] = spreads
            held.store(read, node, result)
            return result

        return ask

    return decorate


def changes(node: fx.Node) -> None:
    """Report a node whose target or arguments changed, for changes that torch has no hook for."""
    held = _remembered.get()
    if held is not None:
        held.changes(node)


_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]+)(?:\n {4}\s*(?P<text>[^\n]*))?'
)


def source_line(node: fx.Node) -> str:
    """The innermost line of user code that made `node`, as "file:line in function: text"; or ""."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    own = os.path.dirname(__file__)
    frames = [frame for frame in frames if os.path.dirname(frame["file"]) != own]
    if not frames:
        return ""
    last = frames[-1]
    where = f"{last['file']}:{last['line']} in {last['function']}"
    return f"{where}: {last['text'].strip()}" if last["text"] else where


def module_path(node: fx.Node) -> str:
    """The path, in the compiled module, of the module that made `node`: "layers.3.attention"; or ""."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    # L['self'].layers[3].attention, L['self']._modules['layers']._modules['3'], L['fn'].layers.3,
    # L['fn'].__dict__._modules.layers.3
    path = re.sub(r"^[LG]\['[^']*'\]", "", path).replace("__dict__._modules.", "")
    path = re.sub(r"\._modules\['([^']*)'\]|\['?([^'\]]*)'?\]", r".\1\2", path)
    return path.strip(".")
