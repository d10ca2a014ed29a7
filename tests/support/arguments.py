"""Arguments of calls in a graph, by the names in the schema of the operation."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx


def named(call: fx.Node) -> SimpleNamespace:
    """Every argument of a call of an operation or of a Python function, those left out with their default.

    Raises:
        TypeError: the target has neither schema nor signature, or does not take these arguments.
    """
    target: Any = call.target
    if isinstance(target, torch._ops.OpOverload):
        parameters = [
            inspect.Parameter(
                argument.name,
                inspect.Parameter.KEYWORD_ONLY
                if argument.kwarg_only
                else inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=argument.default_value if argument.has_default_value() else inspect.Parameter.empty,
            )
            for argument in target._schema.arguments
        ]
        signature = inspect.Signature(parameters)
    else:
        signature = inspect.signature(target)
    bound = signature.bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    return SimpleNamespace(**bound.arguments)
