"""Reads the nodes of Dynamo's torch-level graph: which operation, with which arguments.

One operation has many forms there (`torch.add`, `operator.add`, `operator.iadd`, `x.add_`,
`aten.add.Tensor`). `read` gives them one name and binds their arguments by name, so that no other module
depends on the form.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from .._inductor import ATTRIBUTES, numpy_name, remembered, value_of
from ..effects.inplace import arguments
from ..effects.liveness import readers
from ..effects.writes import is_in_place, is_told_to_overwrite
from ..operands import Seen
from ..operands import tensor as tensor
from ..reasons import Reason

#: Every operation that is read, by the names of its arguments in positional order.
_BY_ARGUMENTS = {
    "": "arange ones zeros meshgrid",
    "input": "neg tanh sigmoid log_sigmoid softplus relu abs exp exp2 log sqrt bitwise_not logical_not "
    "zero new_ones new_zeros ones_like zeros_like "
    "view reshape flatten unflatten view_as reshape_as _unsafe_view "
    "expand expand_as broadcast_to permute t contiguous clone detach alias lift_fresh_copy lift_fresh repeat "
    "to type_as type _to_copy convert_element_type float half bfloat16 double bool int long cpu cuda "
    "_transformer_encoder_layer_fwd _native_multi_head_attention topk isnan reciprocal",
    "input other": "add sub rsub mul div min max minimum maximum matmul bmm eq ne lt le gt ge bitwise_and "
    "bitwise_or bitwise_xor logical_and logical_or logical_xor inner",
    "input exponent": "pow",
    "input dim keepdim": "sum amax amin mean logsumexp",
    "input p dim eps": "normalize",
    "input min max": "clamp", "input min": "clamp_min", "input max": "clamp_max",
    "input min_val max_val inplace": "hardtanh",
    "tensors dim": "cat stack", "input pad mode value": "pad",
    # products
    "input batch1 batch2": "baddbmm addbmm", "input mat1 other": "addmm",
    "input weight bias": "linear", "equation": "einsum", "input other dims": "tensordot",
    # attention
    "input dim dtype": "softmax log_softmax softmin", "input dim half_to_float": "_softmax",
    "input p training inplace": "dropout", "input nan posinf neginf": "nan_to_num",
    "query key value attn_mask dropout_p is_causal scale enable_gqa": "scaled_dot_product_attention",
    # losses
    "input target weight size_average ignore_index reduce reduction label_smoothing": "cross_entropy",
    "input target weight size_average ignore_index reduce reduction": "nll_loss",
    "input target weight size_average reduce reduction pos_weight": "binary_cross_entropy_with_logits",
    "input target weight size_average reduce reduction": "binary_cross_entropy multilabel_soft_margin_loss",
    "input dim index": "gather index_select select", "input indices dim": "take_along_dim",
    # masks
    "input mask value": "masked_fill", "input mask": "masked_select", "condition input other": "where",
    "input diagonal": "tril triu", "n m": "eye", "input fill_value wrap": "fill_diagonal",
    "input indices": "index", "input n dim prepend append": "diff",
    # constants
    "size fill_value": "full", "input fill_value": "full_like", "input size fill_value": "new_full",
    "data": "tensor scalar_tensor", "input value": "fill",
    # views
    "input dim": "cumsum squeeze unsqueeze unbind", "input dim0 dim1": "transpose swapaxes swapdims",
    "input source destination": "movedim moveaxis", "input index": "getitem", "input name": "getattr",
    "input repeats dim": "repeat_interleave", "input dim start length": "narrow",
    "input dim start end step": "slice", "input sizes dim": "split split_with_sizes",
    "input chunks dim": "chunk",
}  # fmt: skip
#: Names of the arguments, in positional order, of every operation that is read.
SIGNATURES: dict[str, tuple[str, ...]] = {
    name: tuple(arguments.split()) for arguments, names in _BY_ARGUMENTS.items() for name in names.split()
}

#: Forms whose name is not that of the operation.
_SYNONYMS = {
    "truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub",
    "negative": "neg", "special_softmax": "softmax", "mm": "matmul", "mv": "matmul",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "invert": "bitwise_not", "not": "bitwise_not", "inv": "bitwise_not",
    "__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor", "__invert__": "bitwise_not",
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "not_equal": "ne",
    "_safe_softmax": "safe_softmax", "clip": "clamp",
    "concat": "cat", "concatenate": "cat", "absolute": "abs", "cross_entropy_loss": "cross_entropy",
    "nll_loss_nd": "nll_loss", "_get_data_attr": "detach", "as_tensor": "tensor", "asarray": "tensor",
    "ravel": "flatten",
}  # fmt: skip

VIEWS = frozenset(
    "view reshape flatten unflatten view_as reshape_as _unsafe_view squeeze unsqueeze".split()
)  #: row-major order of elements is kept
TRANSPOSES = frozenset("transpose swapaxes swapdims permute t".split())
#: Give all parts of a tensor.
SPLITS = frozenset("split split_with_sizes chunk unbind".split())
CASTS = frozenset(
    "to type_as type _to_copy convert_element_type float half bfloat16 double bool int long".split()
)
COPIES = frozenset("contiguous clone alias lift_fresh_copy lift_fresh".split())
#: Products that `einsum.equation` reads.
EQUATIONS = frozenset({"einsum", "tensordot", "linear", "inner"})
#: The scores of an attention are one of these, and so is its output.
PRODUCTS = frozenset({"matmul", "bmm"}) | EQUATIONS
#: Products to which a tensor is added.
ADDING = frozenset({"baddbmm", "addmm", "addbmm"})
#: Operations of an attention whose operands autocast rounds.
CASTED = PRODUCTS | ADDING
#: In front of the names of NumPy's operations, which are not read further.
NUMPY = "numpy."
#: Products that are not read: those of NumPy, of more than two matrices, and of vectors.
UNREAD_PRODUCTS = frozenset(NUMPY + name for name in ("matmul", "dot", "einsum", "tensordot")) | {
    "linalg_multi_dot", "chain_matmul", "linalg_vecdot", "addmv", "dot", "vdot",
}  # fmt: skip
#: Operations that read only the shape, dtype and device of their first argument.
_LIKE = frozenset(
    "full_like zeros_like ones_like empty_like new new_empty new_full new_zeros new_ones new_tensor".split()
)


@dataclass(frozen=True)
class Op:
    """One operation of the graph.

    Attributes:
        name: a key of `SIGNATURES`, or the plain name of an operation that is not read further.
        args: arguments by name, as the nodes whose results are read; `rest` holds positional ones beyond the
            signature.
        inplace: whether its first argument is overwritten.
    """

    node: fx.Node
    name: str
    args: Mapping[str, Any]
    rest: tuple[Any, ...] = ()
    inplace: bool = False

    def __getitem__(self, name: str) -> Any:
        return self.args.get(name)

    @property
    def input(self) -> Any:
        """The first tensor argument."""
        return self.args.get("input")

    @property
    def said(self) -> str:
        """The name in a reason: `.T` where the user reads an attribute."""
        return f".{self['name']}" if self.name == "getattr" else self.name

    def only(self, *names: str) -> tuple[Any, ...]:
        """The arguments of these names; None for one that is not given.

        All are None if another argument is given too, or if the operation writes in place.
        """
        plain = not (self.rest or self.inplace or set(self.args) - set(names))
        return tuple(self.args.get(name) if plain else None for name in names)


@cache
def _functions() -> dict[Callable[..., Any], str]:
    """Every function object that Dynamo may put into a graph for a name in `SIGNATURES`."""
    table: dict[Callable[..., Any], str] = {}
    names = [*SIGNATURES, *_SYNONYMS]
    for container in (torch, F, torch.special, torch._C._nn, operator, torch.Tensor, torch._C._autograd):
        for name in names:
            for suffix in ("", "_"):
                function = getattr(container, name + suffix, None)
                if callable(function):
                    table.setdefault(function, name + suffix)
    for name in ("add", "sub", "mul", "truediv", "and", "or", "xor", "matmul"):
        table[getattr(operator, "i" + name)] = name + "_"
    table[operator.and_], table[operator.or_], table[operator.not_] = "and", "or", "logical_not"
    table[getattr], table[torch.linalg.matmul] = "getattr", "matmul"
    return table


@cache
def _out_of_place() -> dict[str, list[Any]]:
    """The functions of each name that do not write in place."""
    found: dict[str, list[Any]] = {}
    for target, name in _functions().items():
        meant, in_place = _canonical(name)
        if not in_place:
            found.setdefault(meant, []).append(target)
    return found


def forms(*names: str) -> list[Any]:
    """All targets that `read` gives one of these names, out of place: functions, methods, operators."""
    found: list[Any] = [target for name in names for target in _out_of_place().get(name, ())]
    for name in (*names, *(each for each, meant in _SYNONYMS.items() if meant in names)):
        if hasattr(torch.Tensor, name):
            found.append(name)
        found += [f"__{name}__"] if hasattr(torch.Tensor, f"__{name}__") else []
        found += [getattr(torch.ops.aten, name)] if hasattr(torch.ops.aten, name) else []
    return found


_METHOD_ARGUMENTS = {"where": ("input", "condition", "other")}
_FUNCTION_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    F.softmax: ("input", "dim", "_stacklevel", "dtype"),
    F.log_softmax: ("input", "dim", "_stacklevel", "dtype"),
    F.softmin: ("input", "dim", "_stacklevel", "dtype"),
    torch.dropout: ("input", "p", "training"),
}
_ARGUMENT_NAMES = {
    "self": "input", "mat2": "other", "tensor": "other", "train": "training", "axis": "dim",
    "vec": "other", "vec2": "other", "obj": "data",
}  # fmt: skip


def read(node: Any) -> Op | None:
    """The operation of a call node, or None for anything else.

    Args:
        node: a node of Dynamo's graph, of a graph of aten operations, or any other value.
    """
    return _read(node) if isinstance(node, fx.Node) else None


@remembered(spreads=is_in_place)
def _read(node: fx.Node) -> Op | None:
    target = node.target
    if node.op not in ("call_method", "call_function"):
        return None
    args, kwargs = arguments(node)
    if node.op == "call_method":
        assert isinstance(target, str)
        name = target
    elif isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        name = _operator_name(target)
        if name in ATTRIBUTES and args:
            return Op(node, "getattr", {"input": args[0], "name": ATTRIBUTES[name]})
    else:
        known = _functions().get(target)  # type: ignore[arg-type]
        if known is None:
            return Op(node, _foreign_name(target), {}, tuple(args))
        name = known
    name, inplace = _canonical(name)
    if name == "view" and any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
        return Op(node, "bitcast", {}, tuple(args))
    return _bind(node, name, inplace or is_told_to_overwrite(node), args, kwargs)


def readers_named(node: fx.Node, names: Collection[str]) -> list[fx.Node]:
    """The operations of some names that read the result of a node."""
    return [user for user in readers(node) if (op := read(user)) is not None and op.name in names]


def _operator_name(target: Any) -> str:
    """The name of an operator of torch; that of another library keeps its namespace."""
    full = target._schema.name if isinstance(target, torch._ops.OpOverload) else target._qualified_op_name
    space, _, name = str(full).partition("::")
    return name if space in ("aten", "prims") else str(full)


def _foreign_name(target: Any) -> str:
    """The name of a function that is not in the table; one that is not torch's keeps its module."""
    if numpy := numpy_name(target):
        return NUMPY + numpy
    module, name = getattr(target, "__module__", None), getattr(target, "__name__", str(target))
    top = str(module or "torch").partition(".")[0]
    return name if top in ("torch", "_operator", "builtins", "math") else f"{module}.{name}"


def _canonical(name: str) -> tuple[str, bool]:
    inplace = False
    if name.startswith("__i") and name.endswith("__") and name != "__invert__":
        name, inplace = name[3:-2], True
    elif name.startswith("__") and name.endswith("__") and name not in _SYNONYMS:
        name = name[2:-2]
    elif name.endswith("_") and not name.endswith("__"):
        name, inplace = name[:-1], True
    return _SYNONYMS.get(name, name), inplace


def _bind(node: fx.Node, name: str, inplace: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Op:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        order = tuple(
            _ARGUMENT_NAMES.get(a.name, a.name) for a in target._schema.arguments if not a.kwarg_only
        )
    elif node.op == "call_method":
        order = _METHOD_ARGUMENTS.get(name, SIGNATURES.get(name, ()))
    else:
        order = _FUNCTION_ARGUMENTS.get(target, SIGNATURES.get(name, ()))
    bound = dict(zip(order, args, strict=False))
    for key, argument in kwargs.items():
        bound[_ARGUMENT_NAMES.get(key, key)] = argument
    return Op(node, name, bound, tuple(args[len(order) :]), inplace)


def source(node: Any) -> Any:
    """The node of a `Seen`; anything else is returned."""
    return node.node if isinstance(node, Seen) else node


def value(node: Any) -> Any:
    """The fake value of a node (a tensor, a SymInt, ...); anything else is returned."""
    if isinstance(node, Seen):
        return node.value
    if not isinstance(node, fx.Node):
        return node
    return value_of(node)


def linear_of(node: Any) -> tuple[fx.Node, fx.Node, bool, Any] | None:
    """(input, weight, whether the weight is (out, in), bias or None) of a product with a matrix; or None."""
    op = read(node)
    x: Any = None
    w: Any = None
    bias: Any = None
    if op is not None and op.name == "linear":
        x, w, bias = op.only("input", "weight", "bias")
    elif op is not None and op.name == "matmul":
        x, w = op.only("input", "other")
    elif op is not None and op.name == "addmm":
        bias, x, w = op.only("input", "mat1", "other")
    weight = tensor(w)
    if tensor(x) is None or weight is None or weight.dim() != 2:
        return None
    return x, w, op is not None and op.name == "linear", bias


def concrete(argument: Any) -> Any:
    """`argument` with every node whose value is a (symbolic) number replaced by that number."""
    if isinstance(argument, fx.Node):
        found = value(argument)
        return found if isinstance(found, (int, float, bool, torch.SymInt, torch.SymFloat)) else argument
    if isinstance(argument, (list, tuple)):
        return type(argument)(concrete(item) for item in argument)
    if isinstance(argument, slice):
        return slice(concrete(argument.start), concrete(argument.stop), concrete(argument.step))
    return argument


def same_dtype_device(op: Op) -> bool:
    """Whether the result of an operation has the dtype and device of its input."""
    before, after = tensor(op.input), tensor(op.node)
    return (
        before is not None
        and after is not None
        and before.dtype == after.dtype
        and before.device == after.device
    )


#: Operations whose results hold elements of their operand.
_ELEMENTS = CASTS | COPIES | frozenset("getitem narrow slice detach".split())


def reads_metadata(user: fx.Node, node: fx.Node) -> bool:
    """Whether `user` reads the shape or dtype of `node`, but no values.

    Likewise a cast or a slice of which only the shape or dtype is read: `w.type_as(w.float().type_as(w))`,
    `zeros_like(s[..., :1])`.
    """
    op = read(user)
    if op is None:
        return False
    if op.input is node and not op.inplace and op.name in _ELEMENTS:
        read_by = readers(user)
        return bool(read_by) and all(reads_metadata(reader, user) for reader in read_by)
    if op.name in ("type_as", "to", "view_as", "reshape_as", "expand_as"):
        return op.input is not node
    return op.name in _LIKE or op.name in ("size", "dim", "sym_size", "_assert_tensor_metadata")


def scaled_by(op: Op) -> tuple[Any, float] | None:
    """What an operation multiplies by a finite number, perhaps in place, and the number; or None."""
    if op.name == "neg":
        return op.input, -1.0
    x, by = replace(op, inplace=False).only("input", "other")
    if op.name == "mul" and isinstance(x, (int, float)):
        x, by = by, x
    if op.name not in ("mul", "div") or type(by) not in (int, float) or not math.isfinite(by):
        return None
    if op.name == "mul":
        return x, float(by)
    return (x, 1 / by) if by and math.isfinite(1 / by) else None


def dropout_p(op: Op) -> float:
    """The probability of a dropout; 0 in evaluation mode.

    Raises:
        Rejected: it is not a constant.
    """
    training = op["training"] if op["training"] is not None else True
    p = op["p"] if op["p"] is not None else 0.5
    if not training:
        return 0.0
    if not isinstance(p, (int, float)) or not isinstance(training, bool):
        raise Reason.NOT_A_TENSOR.rejected("the probability of a dropout is not a constant")
    return float(p)
