"""Fuses a loss with the linear that computes its logits, without materialising all logits.

The head of a language model: logits of every token and every entry of the vocabulary, of which a loss reads
one and the logsumexp of each token, or the entropy. It becomes `inductor_fusions::linear_cross_entropy`,
which makes a chunk of logits at a time, and their gradients with them; or `linear_softmax_rows`, where each
token has a result of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import torch
from torch import fx

from ... import config
from ..._inductor import Match, hint, is_body, known_true
from ...decisions import Query, decide_for_all, tables
from ...effects.derivatives import check_operation
from ...effects.liveness import readers, replace
from ...effects.scope import DynamoScope
from ...effects.writes import check_between, check_kept, check_writes, may_alias, storage
from ...fusion import Candidate, Fusion, Reported
from ...graph.torch_ops import CASTS, VIEWS, forms, read, reads_metadata
from ...layouts.keeping import Keeping
from ...operands import check_kind, profitable, requires_grad, tensor, text, tokens_of, value
from ...reasons import Reason
from . import emit, other_losses, recognise, statistics
from .recognise import LossSite, Unsupported

__all__ = ["FUSION"]

#: Bytes of logits that are never too many.
SMALL = 128 * 2**20


class LossHead(Candidate):
    """A loss, and the linear that makes its logits."""

    def __init__(self, scope: DynamoScope, site: LossSite) -> None:
        self.scope, self.site, self.anchor = scope, site, site.loss
        self.statistics = statistics.of(site)
        self.note = ""
        self.returns = False

    def describe(self) -> dict[str, str]:
        given = {name: tensor(getattr(self.site, name)) for name in ("h", "w", "labels")}
        return {name: text(held) for name, held in given.items() if held is not None}

    def savings(self) -> dict[str, int]:
        logits = value(self.site.linear)
        if not all(isinstance(size, int) for size in logits.shape):
            return {}
        # Written and read once at the least, and in training again as gradients.
        return {"bytes": (4 if self.trains else 2) * logits.numel() * logits.itemsize, "flops": 0}

    @property
    def trains(self) -> bool:
        """Whether the loss is differentiated."""
        return requires_grad(self.anchor)

    @property
    def wants(self) -> list[bool]:
        """Whether gradients of h, of w and of the bias are wanted."""
        site = self.site
        return [self.trains and requires_grad(node) for node in (site.h, site.w, site.bias)]

    @property
    def in_one_pass(self) -> bool:
        """Whether the forward makes the gradients: of one number, up to a factor.

        float16 would not hold gradients that are not scaled yet, and a body may be run again for its
        backward.
        """
        out = tensor(self.anchor)
        return (
            not self.site.gathers
            and not self.statistics
            and self.site.reduction != "none"
            and not (self.trains and is_body(self.scope.graph))
            and not (self.trains and out is not None and self._logits.dtype == torch.float16)
        )

    @property
    def _before(self) -> fx.Node:
        """Where the operation stands: in front of the loss, and of what reads a statistic."""
        before = min([self.site.loss, *(user for each in self.statistics for user in each.node.users)])
        modes = self.scope.modes
        while self._constants and modes.at(before).gradients != modes.at(self.site.loss).gradients:
            before = before.prev  # in front of what is computed without gradients
        return before

    @property
    def _constants(self) -> list[statistics.Statistic]:
        """The statistics that no gradient is taken of, in any mode."""
        return [each for each in self.statistics if not requires_grad(each.node)]

    @property
    def _logits(self) -> torch.Tensor:
        found = value(self.site.linear)
        return found

    def guard(self) -> None:
        self._prove()
        others = [LossHead(self.scope, site) for site in self._losses_of_other_parts()]
        # Else stock would compute the logits of all parts, and this part would be computed twice.
        for other in others:
            other._prove()
        if not config.always():
            for other in others:
                other._measured()
            self.note = self._measured()

    def _prove(self) -> None:
        """Refuse what is not proved, but for other readers of the logits."""
        site, modes = self.site, self.scope.modes
        operands = [node for node in (site.h, site.w, site.bias, site.labels, site.weights) if node]
        values = [tensor(node) for node in operands]
        if any(value is None for value in values):
            raise Reason.NOT_A_TENSOR.rejected("an operand of the loss is not a tensor")
        check_kind(tensor(site.loss), *values)
        logits = self._logits
        if len({value.device for value in values if value is not None}) > 1:
            raise Reason.DEVICE.rejected("the operands of the loss are on different devices")
        weight = tensor(site.w)
        if weight is None or not all(isinstance(size, int) for size in weight.shape):
            raise Reason.SYMBOLIC.rejected("the number of classes or the width of the linear is symbolic")
        if not known_true(logits.shape[-1] > 0):
            raise Reason.EMPTY.rejected("the number of classes is 0, or may be")
        mixed = len({value.dtype for value in values[:2] if value is not None}) > 1
        if mixed and dict(modes.at(site.linear).autocast).get(logits.device.type) is None:
            raise Reason.MIXED_DTYPES.rejected("the operands have different dtypes")
        if site.smoothing and not self.in_one_pass and site.reduction == "none" and site.weights is not None:
            raise Reason.LOSS.rejected(
                'reduction="none" with both class weights and label smoothing is not supported'
            )
        replayed = [x for node in site.replayed for x in node.all_input_nodes]
        beside = [node for each in self.statistics for node in each.path]
        held = [x for x in (site.h, site.w, *site.path, *replayed, *beside) if tensor(x) is not None]
        known = [node for node in self.scope.effects if node not in site.path]  # scales are written in place
        constants = self._constants
        others = [each for each in self.statistics if each not in constants]
        results = [site.loss, *(each.node for each in others)]
        path = [*site.path, *(node for each in others for node in each.path), *results]
        check_between(path, max(results), "the linear and the loss", modes, known, held)
        for result, nodes in ((site.loss, site.path), *((each.node, each.path) for each in others)):
            if requires_grad(result) and any(map(_detaches, nodes)):
                raise Reason.LOSS.rejected(
                    f"the logits are detached, and {result.name} is differentiated by what is added to them"
                )
        for each in constants:
            check_writes(
                [site.linear], each.node, "the linear and what is computed of its result", known, held
            )
        before = self._before
        for later in (site.bias, site.labels, site.weights):  # the graph may make them behind the linear
            if later is None:
                continue
            if not later < before:
                raise Reason.ORDER.rejected(
                    f"a logsumexp or an entropy is read in front of {later.name}, an operand of the loss",
                    "compute the loss before the penalty or the entropy",
                )
            since = [each for each in (*site.path, site.loss) if each >= _first_reader(site, later)]
            check_between([*since, before], site.loss, "the linear and the loss", modes, known, [later])
        if not self.in_one_pass and self.trains:
            check_kept(operands, before, self.scope.effects)
        check_operation([*path, *(each.node for each in constants)], self.scope.derivatives)

    def _losses_of_other_parts(self) -> list[LossSite]:
        """The losses that read other parts of the logits: other classes, or other rows.

        Raises:
            Rejected: something else reads the logits, or a loss that reads the same ones.
        """
        may_detach = config.returned_logits == "detached" and self.trains and self.in_one_pass
        replayed = map(read, self.site.replayed)
        may_detach = may_detach and all(op is not None and op.name in VIEWS for op in replayed)
        may_detach = may_detach and not self.site.overwrites
        sites, nodes, waiting = [self.site], {*self.site.path, self.site.loss}, list(self.site.path)
        both = {each.node for each in self.statistics}  # which others may read as well
        for one in self.statistics:
            nodes |= {*one.path, one.node}
            waiting += one.path
        for node in waiting:
            if node in both:
                continue
            others = [user for user in readers(node) if user not in nodes and not reads_metadata(user, node)]
            others = [_behind_a_cast(user) for user in others]
            if may_detach and others and all(user.op == "output" for user in others):
                self.returns = True
                continue
            if any(user.op == "output" for user in others):
                raise Reason.USED_ELSEWHERE.rejected(
                    f"the graph returns the {_said(node)}, which may be differentiated outside",
                    "return only the loss: torch.compile(lambda *args: model(*args).loss). If the logits "
                    "need no gradient: INDUCTOR_FUSIONS_RETURNED_LOGITS=detached",
                )
            for other in others:
                found = [] if other in nodes else recognise.behind(other)[0]
                for each in found:
                    if isinstance(each, LossSite) and each.loss not in nodes:
                        sites.append(each)
                        nodes |= {*each.path, each.loss}
                        waiting += each.path
                        for one in statistics.of(each):
                            both.add(one.node)
                            nodes |= {*one.path, one.node}
                            waiting += one.path
                if other not in nodes:
                    what = _said(node)
                    raise Reason.USED_ELSEWHERE.rejected(
                        f"the {what} are also read by {other.name}", f"let only the loss read the {what}"
                    )
        pairs = itertools.combinations(sites, 2)
        if not all(recognise.are_apart(*pair) for pair in pairs):
            raise Reason.USED_ELSEWHERE.rejected(
                f"some logits are also read by another loss, {sites[1].loss.name}",
                "let one loss alone read each logit",
            )
        if len(sites) > 1 and any(each.overwrites for each in sites):
            raise Reason.OVERWRITTEN.rejected("the logits of several losses are written in place")
        return sites[1:]

    def _measured(self) -> str:
        """A note from the table of the device.

        Raises:
            LeftToStock: it is not measured, not faster, or would need more memory.
        """
        site, logits, (wants_h, wants_w, _) = self.site, self._logits, self.wants
        h, w = value(site.h), value(site.w)
        classes = int(site.classes)
        rows = math.prod(value(site.labels).shape if site.labels else value(site.path[-1]).shape[:-1])
        if hint(logits.numel()) * logits.itemsize < SMALL:
            raise Reason.NOT_FASTER.left_to_stock("the logits are small, so fusing would save little memory")
        if self.trains and is_body(self.scope.graph):
            raise Reason.NOT_FASTER.left_to_stock(
                "the loss is in a nested graph, such as a checkpoint, which may run again for the backward"
            )
        own = classes * w.numel() // logits.shape[-1]
        kept = (hint(rows) * h.shape[-1] if wants_h else 0) + (own if wants_w else 0)
        if self.trains and self.in_one_pass and kept > hint(rows) * classes:
            raise Reason.MEMORY.left_to_stock(
                "the gradients that the fused forward saves are larger than the logits",
                "compute one loss of all tokens instead of several losses",
            )
        wanted = {
            "dtype": tables.dtype_name(logits.dtype), "train": self.trains, "frozen": not wants_w,
            "reduced": self.in_one_pass, "width": int(h.shape[-1]), "classes": classes,
        }  # fmt: skip
        tokens = tokens_of(rows)
        if tokens is None:
            raise Reason.SYMBOLIC.left_to_stock("the number of tokens is symbolic and has no hint")
        query = Query("linear_cross_entropy", wanted)
        return f", {profitable(decide_for_all(query, tokens, logits.device)).note}"

    def rewrite(self) -> str:
        site = self.site
        if self.returns:
            new = emit.loss(site, self.wants, emit.detached(site))
        elif self.in_one_pass:
            new = emit.loss(site, self.wants)
        else:
            before = self._before
            kept = self._kept(before) if self.trains else site
            results = emit.rows(kept, before, self.statistics)
            new = results[site.loss]
            for each in self.statistics:
                each.node.replace_all_uses_with(results[each.node])
        beside = [node for each in self.statistics for node in (*each.path, each.node)]
        replace(site.loss, new, [*site.path, *beside])
        name = "linear_cross_entropy" if self.in_one_pass else "linear_softmax_rows"
        return f"{name}{self.note}"

    def _kept(self, before: fx.Node) -> LossSite:
        """The site with operands that may be saved for the backward, in front of a node."""
        site, (wants_h, wants_w, _) = self.site, self.wants
        keeping = Keeping(self.scope.graph, recomputed=is_body(self.scope.graph))
        # The product keeps an operand where the other one takes a gradient, and an addition keeps none.
        by_eager = {storage(x) for x, other in ((site.h, wants_w), (site.w, wants_h)) if other}
        h, w = (keeping.kept(x, before, lambda: by_eager) for x in (site.h, site.w))
        bias = None if site.bias is None else keeping.kept(site.bias, before, lambda: by_eager)
        return dataclasses.replace(site, h=h, w=w, bias=bias)


def _said(node: fx.Node) -> str:
    """What a node on the way from the logits to the loss holds."""
    while (op := read(node)) is not None and op.name in VIEWS | CASTS and isinstance(op.input, fx.Node):
        node = op.input
    return "logits" if op is None or op.name != "log_softmax" else "log-probabilities"


def _first_reader(site: LossSite, operand: fx.Node) -> fx.Node:
    """The first node of a site that reads an operand, or a view of it."""
    for node in site.path:
        if any(may_alias(storage(each), storage(operand)) for each in node.all_input_nodes):
            return node
    return site.loss


def _behind_a_cast(reader: fx.Node) -> fx.Node:
    """The output of the graph if the reader is a cast that only the output reads, as accelerate casts what a
    model returns under autocast; else the reader itself."""
    op = read(reader)
    users = list(reader.users)
    return users[0] if op is not None and op.name in CASTS and [u.op for u in users] == ["output"] else reader


FUSION = Fusion(
    name="linear_cross_entropy",
    stage="pre_grad",
    summary="a loss and the linear that computes its logits, in chunks of rows",
    scope=DynamoScope,
)


@FUSION.anchor(recognise.targets)
def look(scope: DynamoScope, match: Match) -> Candidate | None:
    """A loss behind a linear."""
    found: Any = recognise.site(match.output_node())
    if isinstance(found, Unsupported):
        return Reported(found.loss, found.why)
    return None if found is None else LossHead(scope, found)


def _detaches(node: fx.Node) -> bool:
    op = read(node)
    return op is not None and op.name == "detach"


@FUSION.anchor(lambda: forms("sum", "sub"))
def look_for_an_entropy(scope: DynamoScope, match: Match) -> Candidate | None:
    """An entropy of logits that no loss reads."""
    op = read(match.output_node())
    found = None if op is None else statistics.alone(op)
    if found is None and op is not None and statistics.of_an_operand(op):
        outside = Reason.LOSS.rejected(
            "a nested graph, such as a checkpoint, computes the entropy of logits that it is given, and no "
            "linear outside of it is read",
            "compute the linear in the same region",
        )
        return Reported(op.node, outside)
    return None if found is None else LossHead(scope, found)


@FUSION.anchor(lambda: forms(*statistics.PICKS))
def look_for_logits_of_labels(scope: DynamoScope, match: Match) -> Candidate | None:
    """Logits of labels, beside the logsumexp of all rows."""
    op = read(match.output_node())
    found = None if op is None else statistics.picked(op)
    return None if found is None else LossHead(scope, found)


@FUSION.anchor(other_losses.targets)
def look_out(scope: DynamoScope, match: Match) -> Candidate | None:
    """A softmax of logits that no supported loss reads."""
    found = other_losses.unsupported(match.output_node())
    if found is None or statistics.is_reported(found.loss):
        return None
    return Reported(found.loss, found.why)
