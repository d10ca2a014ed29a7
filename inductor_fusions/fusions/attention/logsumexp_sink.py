"""A sink that comes after the product with v: `out * sigmoid(logsumexp(scores) - sink)`.

The softmax of the scores times this factor is exp(scores) / (sum(exp(scores)) + exp(sink)). So the sink is
equal to a column that is concatenated before the softmax and dropped after it.
"""

from __future__ import annotations

from torch import fx

from ...effects.liveness import readers
from ...graph.dims import appends_dim, is_over_last
from ...graph.torch_ops import CASTS, read, reads_metadata
from ...operands import same_shape, tensor
from ...reasons import Reason
from .normal_form import Attention, Sink, Term


def logsumexp_of(scores: fx.Node) -> fx.Node | None:
    """The logsumexp over the keys, where something reads it."""
    for user in readers(scores):
        op = read(user)
        if op is not None and op.name == "logsumexp" and op.input is scores and is_over_last(op):
            return user
    return None


def read_sink(site: Attention, logsumexp: fx.Node) -> None:
    """Read the factor into the sink of a site that ends at the product; it ends behind the factor then.

    Raises:
        Rejected: the logsumexp serves for something else.
    """
    output, op = site.output, read(logsumexp)
    assert op is not None
    elsewhere = Reason.USED_ELSEWHERE.rejected(f"the scores are also used by {logsumexp.name}")
    if site.sink is not None or site.zeroed is not None or len(site.results) > 1:
        raise elsewhere
    node, has_column, gated = logsumexp, bool(op["keepdim"]), False
    sink: Sink | None = None
    chain = [logsumexp]
    while True:
        user = _only_user(site, node)
        op, before, after = read(user), tensor(node), tensor(user)
        if user is None or op is None or op.inplace or before is None or after is None:
            raise elsewhere
        if op.name == "mul" and gated and has_column and {op.input, op["other"]} == {node, output}:
            break
        if not has_column and appends_dim(op):
            has_column = True
        elif not same_shape(before.shape, after.shape) or not after.is_floating_point():
            raise elsewhere
        elif op.name == "sub" and sink is None and op.input is node and op["alpha"] is None:
            if not isinstance(op["other"], fx.Node) or tensor(op["other"]) is None:
                raise elsewhere
            lead = site.softmax_lead
            sink = Sink(Term(op["other"], lead), first=False, has_column=has_column)
        elif op.name == "sigmoid" and sink is not None and not gated:
            gated = True
        elif op.name not in CASTS:
            raise elsewhere
        chain.append(user)
        node = user
    product = tensor(output)
    if _only_user(site, output) is not user or product is None or after.dtype != product.dtype:
        raise elsewhere
    if not same_shape(product.shape, after.shape):
        raise elsewhere
    site.sink, site.below_sink = sink, len(site.terms)
    site.chain += [*chain, output]
    site.ends_behind(user)


def _only_user(site: Attention, node: fx.Node) -> fx.Node | None:
    """The only node that reads the values of `node`, or None."""
    users = [user for user in readers(node) if not reads_metadata(user, node)]
    site.readers.extend(user for user in readers(node) if user not in users)
    return users[0] if len(users) == 1 else None
