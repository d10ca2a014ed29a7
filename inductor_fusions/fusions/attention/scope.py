"""Facts about a graph or a nested graph while its attentions are matched, and final fix-ups."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from ... import fusion
from ..._inductor import fake_mode_of, is_body, records_gradients
from ...effects import modes
from ...effects.derivatives import Derivatives, takes_gradient
from ...effects.inplace import arguments, inputs
from ...fusion import Candidate, Rejected
from ...graph import torch_ops
from ...graph.regions import left
from ...layouts.copies import even
from ...layouts.keeping import Keeping
from ...layouts.leaving import settle
from ...reasons import Reason
from ...tags import is_ours
from . import emit
from .aliasing import Mutations
from .mask_builder import MaskMemo
from .masks import Interpreter
from .problem import Problem

#: Higher-order operations whose body sees its operands as placeholders, and where the operands start.
CHECKPOINTS = ("tag_activation_checkpoint", "wrap_activation_checkpoint")
BODIES = {"invoke_subgraph": 2, "wrap": 1, **dict.fromkeys(CHECKPOINTS, 1)}


class Scope(fusion.Scope):
    """Facts of one graph while its candidates are judged.

    Args:
        bindings: what the placeholders of a body stand for.
        outer: the scope of the graph that runs this one, and the nodes that run it.
    """

    def __init__(
        self,
        graph: fx.Graph,
        bindings: Mapping[fx.Node, tuple[Interpreter, Any]] | None = None,
        outer: tuple[Scope, list[fx.Node]] | None = None,
    ) -> None:
        super().__init__(graph)
        self.mutations = Mutations(graph)
        self.interpreter = Interpreter(self.mutations, bindings)
        self.masks: dict[Any, Any] = {}
        self.fake_mode = fake_mode_of(graph)
        self.changed: list[tuple[fx.Node, bool]] = []
        around, calls = outer if outer is not None else (None, [])
        self.around, self.calls = around, calls
        start = around.modes.at(calls[0]) if around is not None and calls else None
        self.modes: modes.Modes = modes.Modes(graph, start)
        refused = [] if around is None else [around.derivatives.refused(call) for call in calls]
        self.root: fx.Graph = graph if around is None else around.root
        recomputed = [call for call in calls if name_of_body(call) in CHECKPOINTS]
        if recomputed and around and around.modes.at(recomputed[0]).gradients and _ends_here(self.root):
            refused.append("recomputed for no backward, where torch takes no operation that may draw numbers")
        self.keeping: Keeping = Keeping(graph, recomputed=bool(recomputed))
        self.derivatives: Derivatives = Derivatives(graph, self.modes, next(filter(None, refused), ""))
        self.read: set[fx.Graph] = set() if around is None else around.read
        self.read.add(graph)
        #: Weights that are candidates: several exponentials may be divided at once.
        self.weights: set[fx.Node] = set()
        #: The call that this body is inlined for.
        self.inlined_for = calls[0] if [*map(name_of_body, calls)] == ["tag_activation_checkpoint"] else None
        #: Of a body that is finished: the outputs that changed, as `settle` has them.
        self.outputs: dict[Any, bool] = {}

    def bodies(self) -> Iterator[Scope]:
        """Checkpointed and nested regions; what was fused in one changes what the graph reads of it."""
        for module, operands, uses in bodies(self.graph):
            if module.graph in self.read:
                continue
            placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
            bindings = {p: (self.interpreter, o) for p, o in zip(placeholders, operands, strict=False)}
            body = Scope(module.graph, bindings, (self, uses))
            yield body
            for user in body.inlined_for.users if body.inlined_for is not None else ():
                if user.target is operator.getitem and user.args[1] in body.outputs:
                    self.changed.append((user, body.outputs[user.args[1]]))

    def outside(self, node: fx.Node) -> list[fx.Node]:
        """What holds a result of this graph, or of one around it, in the graph that runs it."""
        if self.around is None or node.graph is not self.graph:
            return [] if self.around is None else self.around.outside(node)
        return left(node, self.calls)

    def finish(self) -> Iterator[Candidate]:
        """Candidates that restore the strides of what leaves the graph and branches of a `cond`."""
        for call in [node for node in self.graph.nodes if name_of_body(node) == "cond"]:
            yield Branches(call)
        settled = Settled(self, self.inlined_for is not None)
        yield settled
        self.outputs = settled.outputs

    def emitter(self, problem: Problem, output: fx.Node) -> emit.Emitter:
        """The emitter of the fused form of a site."""
        return emit.Emitter(problem, output, MaskMemo(self.masks, self.modes.at(output)), self.changed)

    def keep(self, new: Iterable[fx.Node], by_eager: Callable[[], Collection[object]]) -> None:
        """Copy what the operations among new nodes keep for the backward, where it may change behind them."""
        for node in new:
            called = node.op == "call_function" and "attention" in str(node.target)
            for operand in node.all_input_nodes if called else ():
                if torch_ops.tensor(operand) is not None:
                    node.replace_input_with(operand, self.keeping.kept(operand, node, by_eager))

    def check_modes(self, nodes: Collection[fx.Node]) -> None:
        """Refuse where nodes that become one are in different modes.

        Autocast acts on products; what it does to the operations between them shows in their dtypes.
        """
        first = self.modes.at(min(nodes))
        for node in nodes:
            state, op = self.modes.at(node), torch_ops.read(node)
            if op is None or op.name not in torch_ops.CASTED:
                state = replace(state, autocast=first.autocast)
            if differs := first.differs(state):
                raise Reason.MODE.rejected(f"{differs} between the two products")
            self.modes.check_inference(node)


def scope_of(graph: fx.Graph) -> Scope | None:
    """The facts of a graph; None for a body.

    Inductor passes a body before the graph that runs it, and there its masks are placeholders: a body
    is left for the pass over the whole graph, which knows what they stand for.
    """
    return None if is_body(graph) else Scope(graph)


class Settled(Candidate):
    """Give what leaves a graph with fused attentions the strides that it had."""

    finishes = True

    def __init__(self, scope: Scope, inlined: bool) -> None:
        self.scope, self.inlined, self.outputs = scope, inlined, dict[Any, bool]()

    def guard(self) -> None:
        if not self.scope.changed and not _is_changed(self.scope.graph):
            raise Rejected("nothing was fused in this graph")

    def rewrite(self) -> str:
        graph = self.scope.graph
        self.outputs = settle(graph, self.scope.changed, self.inlined)
        if graph is not self.scope.root and graph.owning_module is not None:
            graph.owning_module.recompile()
        return "the outputs of the graph keep their strides"


class Branches(Candidate):
    """The branches of a `cond`, one of which was changed: torch compares the strides of their gradients."""

    finishes = True

    def __init__(self, call: fx.Node) -> None:
        owner = call.graph.owning_module
        named = [str(x.target) for x in call.all_input_nodes if x.op == "get_attr"]
        self.modules = [m for name in named if isinstance(m := getattr(owner, name, None), fx.GraphModule)]

    def guard(self) -> None:
        if not any(_is_changed(module.graph) for module in self.modules):
            raise Rejected("nothing was fused in this graph")

    def rewrite(self) -> str:
        for module in self.modules:
            even(module.graph)
            module.recompile()
        return "gradients of all branches have the strides of the inputs"


def _is_changed(graph: fx.Graph) -> bool:
    """Whether an attention was fused in a graph."""
    return any(map(is_ours, graph.nodes))


def name_of_body(call: fx.Node) -> str:
    return str(getattr(call.target, "_name", getattr(call.target, "__name__", "")))


def _ends_here(graph: fx.Graph) -> bool:
    """Whether no gradient flows into a graph from behind it, or gradients are taken inside of it."""
    results = next((node for node in graph.nodes if node.op == "output"), None)
    leaves = [] if results is None else inputs(results)
    trained = any(records_gradients(torch_ops.value(node)) for node in leaves)
    return not trained or any(map(takes_gradient, graph.nodes))


def bodies(graph: fx.Graph) -> Iterator[tuple[fx.GraphModule, tuple[Any, ...], list[fx.Node]]]:
    """The graphs that this one runs, with their operands where one known call has them, and their calls."""
    owner = graph.owning_module
    found = {str(n.target): getattr(owner, str(n.target), None) for n in graph.nodes if n.op == "get_attr"}
    for name, module in found.items():
        if not isinstance(module, fx.GraphModule):
            continue
        uses = [u for n in graph.nodes if n.op == "get_attr" and n.target == name for u in n.users]
        operands: tuple[Any, ...] = ()
        if len(uses) == 1:
            start = BODIES.get(name_of_body(uses[0]))
            operands = arguments(uses[0])[0][start:] if start is not None else ()
        yield module, operands, uses
