"""Chooses the kernel of an attention: what each supports, and which is measured to be fastest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ... import config, decisions
from ..._inductor import cuda_sdpa_backends, hint, known_true, mask_rows_have_32_bits, sdpa_is_fused
from ...decisions import tables
from ...effects import modes
from ...fusion import LeftToStock
from ...graph import torch_ops
from ...operands import may_use_tf32
from ...reasons import Reason
from . import empty_rows, flex, row_bias
from .decode import plan as decode
from .problem import Problem, is_in_rows
from .short import terms as short

CALL = "already an SDPA call"
CHOSEN = f"{CALL}, and the caller selects its backends"
FORBIDDEN = "no enabled SDPA backend supports this attention (sdpa_kernel, enable_flash_sdp)"


@dataclass(frozen=True)
class KernelChoice:
    """The kernel to emit, and for what.

    Attributes:
        kernel: "sdpa" (its own choice of backend), "efficient", "row_bias", "flex", "short" or "decode".
        problem: as that kernel takes it.
        grouped: whether k and v keep their own heads.
        text: the kernel and what it does, for reports.
    """

    kernel: str
    problem: Problem
    grouped: bool
    text: str


@dataclass(frozen=True)
class Call:
    """A call of SDPA, which may stay as it is.

    Attributes:
        changed: whether its mask or its repeated heads go away, which is never slower.
        short: the problem with its mask as a term, where the kernel for short attention takes it.
    """

    changed: bool
    short: Problem | None


def choose(problem: Problem, call: Call | None = None) -> KernelChoice:
    """The kernel of an attention: the one that is asked for where it takes it, else the fastest.

    Args:
        call: that of SDPA; None for a hand-written attention.

    Raises:
        LeftToStock: no fused kernel takes it, or stock is the fastest that is known.
        Rejected: those that take it would round a bias.
    """
    if call is not None and modes.is_restricted():
        return _restricted(problem, call)
    asked = config.attention_kernel
    _check_copies(problem)
    unable = flex.takes(problem)
    if problem.stages and unable:
        called = problem.stages[-1][0].called
        raise Reason.IN_BETWEEN.left_to_stock(f"the scores pass through {called}, and {unable}")
    is_sparse = _is_sparse(problem)
    flexible = not unable and (problem.structure is not None or not problem.mask_nodes)
    if call is not None:
        small = call.short
    else:
        small = None if short.refused(problem) else problem
    takes = {
        "flex": flexible and (call is None or is_sparse),
        "row_bias": not row_bias.refused(problem) and row_bias.takes(problem, grouped=False),
        "short": small is not None,
        "decode": not decode.refused(problem),
    }
    if takes.get(asked):
        return _choice(asked, (small or problem) if asked == "short" else problem)
    if asked == "auto" and takes["decode"]:
        query = decisions.Query("decode_attention", decode.shape_of(problem).row)
        verdict = decisions.decide(query, problem.q.value.device, may_measure=False)
        if verdict.kernel is not None:
            return _choice("decode", problem, f", {verdict.note}")
    skipping = [each for each in ("flex", "row_bias") if asked == "auto" and is_sparse and takes[each]]
    if call is not None:
        return _of_call(problem, call, skipping if flexible else [])
    fits = ("flex",) if problem.stages else (*available(problem), *skipping)
    return _of_hand_written(problem, (*fits, "short") if takes["short"] and asked == "auto" else fits)


def _check_copies(problem: Problem) -> None:
    """Leave few queries to stock if keys or values would be written to memory once more for them."""
    few_queries = hint(problem.q.shape[2]) < hint(problem.q.shape[3])
    copied = problem.key_scalers or problem.value_scalers or len(problem.results) > 1
    if copied and few_queries and not config.always():
        raise Reason.NOT_FASTER.left_to_stock(
            "there are few queries, and all keys or values would be copied for them"
        )


def _of_hand_written(problem: Problem, fits: tuple[str, ...]) -> KernelChoice:
    """The kernel for a hand-written attention if none is configured; `fits` are those that take it."""
    if problem.rounded_bias is not None and not fits:
        raise Reason.NO_KERNEL.rejected(_why_math(problem), "give the bias the dtype of q")
    if config.always():
        kernel = _proved(problem, fits)
        if kernel == "sdpa" and not _may_call(fits):
            raise Reason.NO_KERNEL.left_to_stock(FORBIDDEN)
        return _choice(kernel, problem)
    if not fits:
        raise Reason.NO_KERNEL.left_to_stock(
            f"no fused kernel supports this attention, because of {_why_math(problem)}"
        )
    verdict = _measured(problem, fits, empty_rows.bytes_beside(problem))
    if verdict.kernel is None:
        raise LeftToStock(verdict.reason, "INDUCTOR_FUSIONS_POLICY=always fuses whatever is proved")
    return _choice(verdict.kernel, problem, _note(verdict))


def _of_call(problem: Problem, call: Call, skipping: list[str]) -> KernelChoice:
    """The kernel for an SDPA call if none is configured; `skipping` are those that read a predicate."""
    if skipping and config.always():
        return _choice("flex", problem)
    reason = ""
    for each, kernels in ((problem, skipping), (call.short, ["short"])):
        if each is None or not kernels or config.attention_kernel != "auto":
            continue
        verdict = _measured(each, ("sdpa", *kernels))
        if verdict.kernel in kernels:
            return _choice(verdict.kernel, each, _note(verdict))
        if each is problem and problem.structure is not None:
            kind = problem.structure.kind
            reason = f"{CALL}; flex attention for its mask ({kind}): {verdict.reason}"
            if verdict.kernel == "sdpa":
                reason = f"{CALL}, the fastest kernel measured for its mask ({kind})"
    if not call.changed:
        raise Reason.CHOSEN.left_to_stock(reason or why_as_it_is(problem))
    return _choice("sdpa", problem)


def _restricted(problem: Problem, call: Call) -> KernelChoice:
    """A call that stays one, because the caller has chosen among the backends of SDPA."""
    if not call.changed:
        raise Reason.CHOSEN.left_to_stock(CHOSEN)
    choice = _choice("sdpa", problem)
    if not _may_call(available(problem, choice.grouped)):
        raise Reason.NO_KERNEL.left_to_stock(f"{CHOSEN}; none of them supports the rewritten call")
    return choice


def _may_call(fits: tuple[str, ...]) -> bool:
    """Whether SDPA has a backend that the caller allows; `fits` are the kernels that support the problem."""
    return "sdpa" in fits or torch.backends.cuda.math_sdp_enabled()


def why_as_it_is(problem: Problem) -> str:
    """Why a call of SDPA is left as it is, from what was proved of its mask."""
    if problem.attn_mask is None:
        return f"{CALL} without a mask"
    structure = problem.structure
    if structure is None:
        return f"{CALL}, and nothing is proved about its mask"
    unable = flex.takes(problem)
    if not unable:
        asked = config.attention_kernel
        unable = f"flex attention is not selected (INDUCTOR_FUSIONS_ATTENTION_KERNEL={asked})"
    return f"{CALL}; its mask is {structure.kind}, and {unable}"


def _proved(problem: Problem, fits: tuple[str, ...]) -> str:
    """The kernel where nothing is measured: SDPA is math where no fused kernel of it fits."""
    if "flex" in fits:
        return "flex"
    if problem.rounded_bias is not None:
        return fits[0]  # none of them is SDPA
    return "short" if fits == ("short",) else "sdpa"


def _choice(kernel: str, problem: Problem, note: str = "") -> KernelChoice:
    grouped = not known_true(problem.k.shape[1] == problem.q.shape[1])
    if grouped and kernel == "row_bias":
        grouped = row_bias.takes(problem, grouped=True)
    elif grouped and kernel not in ("flex", "decode"):
        grouped = kernel == "sdpa" and bool(available(problem, grouped=True))
    return KernelChoice(kernel, problem, grouped, _text(problem, grouped, kernel) + note)


def _measured(problem: Problem, candidates: tuple[str, ...], beside: int = 0) -> decisions.Decision:
    """The decision by measurements, for the class of the mask, else for its shape.

    Args:
        beside: as in `decisions.attention`; nothing for a call of SDPA, which keeps SDPA's rows.
    """
    suffix = "_grad" if problem.mask_learns else ""
    biased = problem.structure is not None and bool(problem.structure.biases)
    names = [problem.flex_kind] if _is_sparse(problem) else []
    if biased and names == ["causal"]:
        names = []  # its rows are of SDPA that is told so, and takes no bias then
    if "row_bias" in candidates and biased:
        names.insert(0, f"alibi {problem.flex_kind}")
    for name in dict.fromkeys([*names, problem.mask_kind]):
        verdict = decisions.attention(
            device=problem.q.value.device,
            dtype=problem.dtype,
            mask=name + suffix,
            train=problem.train,
            batch_heads=hint(problem.q.shape[0] * problem.q.shape[1]),
            q_len=hint(problem.q.shape[2]),
            kv_len=hint(problem.k.shape[2]),
            head_dim=max(hint(problem.q.shape[3]), hint(problem.v.shape[3])),
            candidates=candidates,
            tf32=problem.q.value.device.type == "cuda" and may_use_tf32(),
            heads=hint(problem.q.shape[1]),
            beside=beside,
        )
        if verdict.known:
            break
    return verdict


def _note(decision: decisions.Decision) -> str:
    by = "" if decision.kernel == "sdpa" else f" ({decision.kernel})"
    return f"{by}, {decision.note}"


def _is_sparse(problem: Problem) -> bool:
    """Whether the mask is a structure of which whole blocks may be hidden, and SDPA has no name for it."""
    return problem.structure is not None and problem.structure.visible is not True and not problem.causal


def available(problem: Problem, grouped: bool = False) -> tuple[str, ...]:
    """The kernels ("sdpa", "efficient") that compute the problem without writing out the scores."""
    device = problem.q.value.device.type
    if problem.rounded_bias is not None:
        return ()
    if device == "cuda":
        return _on_cuda(problem, grouped)
    return ("sdpa",) if _sdpa_is_fused_on_cpu(problem, grouped) else ()


def _sdpa_is_fused_on_cpu(problem: Problem, grouped: bool) -> bool:
    """Ask SDPA itself, with small tensors of the same kind: sizes do not matter to its choice."""
    if problem.q.value.device.type != "cpu" or problem.dropout > 0:
        return False
    heads, shared = (2, 1) if grouped else (2, 2)

    def small(operand: Any, count: int) -> torch.Tensor:
        dim = hint(operand.shape[-1])
        return torch.empty(1, count, 2, dim, dtype=problem.dtype, requires_grad=False)

    mask = None
    if problem.mask_nodes:
        mask = torch.zeros(1, 1, 2, 2, dtype=problem.dtype, requires_grad=problem.mask_learns)
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        return sdpa_is_fused(
            small(problem.q, heads), small(problem.k, shared), small(problem.v, shared),
            mask, problem.dropout, problem.causal, grouped,
        )  # fmt: skip


def _on_cuda(problem: Problem, grouped: bool) -> tuple[str, ...]:
    if problem.mask_learns and not any(t.value.requires_grad for t in (problem.q, problem.k, problem.v)):
        return ()  # SDPA keeps no logsumexp for its backward then, and that reads one (pytorch#148476)
    if not _copies_pay(problem, grouped):
        return ()
    k, v = (problem.k, problem.v) if grouped else (problem.full_k, problem.full_v)
    q = _in_rows(problem.q.value.to(problem.dtype))
    mask = None
    if problem.mask_nodes:
        full = (*problem.q.shape[:3], problem.k.shape[2])
        given = [operand.value for _, operand in problem.terms]
        if problem.attn_mask is not None:
            given.append(torch_ops.value(problem.attn_mask))
        own = torch.broadcast_shapes(*(t.shape for t in given))
        # A mask is expanded, as SDPA does it; one that takes a gradient is whole.
        mask = q.new_empty(full if problem.mask_learns else own, dtype=problem.dtype).expand(full)
        if problem.mask_learns:
            mask.requires_grad_()
        # What is given may be a part of a tensor with longer rows.
        rows = [
            hint(t.stride(-2)) for t in (mask, *given) if t.dim() > 1 and not known_true(t.shape[-2] == 1)
        ]
        if mask_rows_have_32_bits() and hint(mask.shape[2]) * max(rows, default=0) > 2**32:
            raise Reason.NO_KERNEL.left_to_stock(
                "SDPA of this torch may read wrong rows of a mask of more than 2^32 pairs of queries and keys"
            )
    params = torch.backends.cuda.SDPAParams(
        q,
        _in_rows(k.value.to(problem.dtype)),
        _in_rows(v.value.to(problem.dtype)),
        mask,
        problem.dropout,
        problem.causal,
        grouped,
    )
    backends = cuda_sdpa_backends(params)
    if backends is None:
        raise Reason.NO_KERNEL.left_to_stock("its SDPA backend is selected by a size that depends on data")
    if not backends:
        return ()
    # Its backward is no deterministic one; SDPA chooses another where that is asked for.
    by_name = "efficient" in backends and not grouped and not torch.are_deterministic_algorithms_enabled()
    return ("sdpa", "efficient") if by_name and torch.backends.cuda.mem_efficient_sdp_enabled() else ("sdpa",)


def _in_rows(value: torch.Tensor) -> torch.Tensor:
    """A fake operand as it is given to SDPA: copied where its last dim is not in order in memory."""
    return value if is_in_rows(value) else value.contiguous()


def _copies_pay(problem: Problem, grouped: bool) -> bool:
    """Whether copies for SDPA, read and written, move less than the scores, written and read."""
    k, v = (problem.k, problem.v) if grouped else (problem.full_k, problem.full_v)
    joined = len(problem.results) > 1
    copied = sum(
        hint(t.value.numel()) for t in (problem.q, k, v) if not is_in_rows(t.value) or (joined and t is v)
    )
    if not copied or config.always():
        return True
    batch, heads, queries, _ = problem.q.shape
    return bool(hint(batch * heads * queries * problem.k.shape[2]) >= copied)


def _why_math(problem: Problem) -> str:
    if problem.rounded_bias is not None:
        wide, narrow = (tables.dtype_name(each) for each in (problem.rounded_bias, problem.dtype))
        return f"a bias of dtype {wide}, which SDPA would round to {narrow}"
    if modes.is_restricted():
        return "its dtype, head dim or strides, or the SDPA backends that are enabled"
    if problem.dropout > 0 and problem.q.value.device.type == "cpu":
        return "dropout on a CPU"
    if problem.mask_learns:
        return "a bias that requires a gradient"
    if not known_true(problem.q.shape[-1] == problem.v.shape[-1]):
        return "the head dims of q and v"
    if problem.q.value.device.type == "cuda" and not _copies_pay(problem, grouped=False):
        return "its head dim, which is not contiguous: copies would move more than the scores"
    return "its dtype, head dim or strides"


def _text(problem: Problem, grouped: bool, kernel: str) -> str:
    parts = [kernel if kernel in ("flex", "short", "row_bias", "decode") else "sdpa"]
    parts += [stage.function for stage, _, _ in problem.stages]
    structure = problem.structure
    if kernel == "flex":
        if structure is not None and structure.visible is not True:
            parts.append(f"block mask: {structure.kind}")
        if structure is None and problem.mask_nodes:
            parts.append("dense mask")
        if structure is not None and structure.biases:
            parts.append("bias in score_mod")
    elif kernel == "row_bias":
        parts.append("is_causal through cuDNN")
    elif problem.causal:
        parts.append("is_causal")
    elif problem.mask_nodes:
        parts.append(f"mask: {problem.mask_kind}")
    if problem.sink is not None:
        parts.append("sink")
    if grouped:
        parts.append("enable_gqa")
    return ", ".join(parts)
