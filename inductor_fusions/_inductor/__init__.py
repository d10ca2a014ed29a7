"""The only modules that import private torch names; differences between torch versions live here.

| torch | a config hook holds | a pre-grad pass is in the cache key by |
|---|---|---|
| 2.11, 2.12 | one callable | its pickled value (2.11), its uuid (2.12) |
| 2.13 to 2.15 | a callable or a list of them | its uuid |

| torch | what differs besides |
|---|---|
| 2.11 | pre-grad passes run before the caches are asked; patterns take any divisor for sqrt(head_dim) |
| 2.11 | a fake product has numbers for a symbolic batch, outside of the Python dispatcher |
| 2.11, 2.12 | the key of AOTAutograd's cache lacks the dtype of autocast |
| 2.11, 2.12 | a nested compile region is differentiated only where AOTAutograd traces it |
| 2.13 | attention patterns misread SDPA that is decomposed |
| before 2.15 | attention patterns raise where scores are divided by a tensor |
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch.utils._config_module import Config, install_config_module

from .absent import AbsentDevice, absent_device, device_guard, is_absent, on_absent_device
from .bisector import bisected_away, bisecting, join_bisector
from .compiling import compile_apart, compile_each_anew, fresh_compile, inductor, passes_only
from .flex import flex_attention_op, flex_backward_op, flex_block_mask, flex_on_cpu
from .graphs import (
    copied_graph,
    is_body_of_dynamo,
    only_traced_autograd_runs,
    rename,
    trace_decomposed,
    was_erased,
    watching_nodes,
)
from .hooks import (
    HOOKS,
    after_each_compile,
    get_hook,
    hooks_hold_lists,
    missing_hook,
    passes_installed,
    update_hook,
)
from .loading import (
    deferred,
    draws_as_eager,
    eager_bits_are_wanted,
    inductor_loaded,
    is_deterministic,
    run_deferred,
    when_inductor_loads,
)
from .lowering import (
    beside,
    call_eagerly,
    call_lowering,
    cast,
    decompose_in_graphs,
    in_memory,
    lower_attention_backward,
    realize,
    register_lowering_when_loaded,
    sizes,
    static,
    strides,
    value_key,
)
from .matcher import Found, Patterns, count_match, difference, pattern_size, roots, undeclared
from .net import (
    as_function,
    cache_key,
    calls_with_fakes,
    devices_work,
    forget_cached,
    is_flat,
    is_for_the_caller,
    is_out_of_memory,
    let_go,
    like,
    put_around_compiles,
    take_from_compiles,
    with_inner_compile,
)
from .operations import GROUPED_MM, assert_on_device, sdpa_is_fused
from .probing import probe, without_modes
from .ranks import communicates, compiles_together, first_to_say, has_peers
from .reports import artifact_log, cache_folder, compile_counters, trace_artifact, trace_id
from .shapes import (
    computing_fakes,
    expression,
    fake_mode_of,
    hint,
    holds_now,
    is_batched,
    is_dense,
    is_wrapper,
    known_true,
    parts_of,
    range_of,
    records_gradients,
    suppress_guards,
    symbol_parts,
    with_memory,
)
from .state import Context, GlobalState, donated, random_state
from .templates import (
    Output,
    Variant,
    captures_graphs,
    interprets_triton,
    lower_to_kernel,
    lower_to_template,
    max_autotune,
)
from .versions import (
    ATTRIBUTES,
    NEWEST_TESTED,
    autocast_beside_the_key,
    beyond_tested,
    counts_in_32_bits,
    drops_narrow_casts,
    fails_on_broadcast_numbers,
    patterns_ignore_the_scale,
    patterns_match_decomposed_sdpa,
    patterns_take_tensors_for_numbers,
    torch_version,
    version_problem,
)

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.pattern_matcher import Match, PatternExpr

__all__ = [
    "ATTRIBUTES",
    "GROUPED_MM",
    "HOOKS",
    "NEWEST_TESTED",
    "AbsentDevice",
    "Config",
    "Context",
    "CustomGraphPass",
    "Found",
    "GlobalState",
    "Match",
    "Output",
    "PatternExpr",
    "Patterns",
    "Variant",
    "absent_device",
    "after_each_compile",
    "artifact_log",
    "as_function",
    "assert_on_device",
    "autocast_beside_the_key",
    "beside",
    "beyond_tested",
    "bisected_away",
    "bisecting",
    "cache_folder",
    "cache_key",
    "call_eagerly",
    "call_lowering",
    "calls_with_fakes",
    "captures_graphs",
    "cast",
    "communicates",
    "compile_apart",
    "compile_counters",
    "compile_each_anew",
    "compiles_together",
    "computing_fakes",
    "copied_graph",
    "count_match",
    "counts_in_32_bits",
    "decompose_in_graphs",
    "deferred",
    "device_guard",
    "devices_work",
    "difference",
    "donated",
    "draws_as_eager",
    "drops_narrow_casts",
    "eager_bits_are_wanted",
    "expression",
    "fails_on_broadcast_numbers",
    "fake_mode_of",
    "first_to_say",
    "flex_attention_op",
    "flex_backward_op",
    "flex_block_mask",
    "flex_on_cpu",
    "forget_cached",
    "fresh_compile",
    "get_hook",
    "has_peers",
    "hint",
    "holds_now",
    "hooks_hold_lists",
    "in_memory",
    "inductor",
    "inductor_loaded",
    "install_config_module",
    "interprets_triton",
    "is_absent",
    "is_batched",
    "is_body_of_dynamo",
    "is_dense",
    "is_deterministic",
    "is_flat",
    "is_for_the_caller",
    "is_out_of_memory",
    "is_wrapper",
    "join_bisector",
    "known_true",
    "let_go",
    "like",
    "lower_attention_backward",
    "lower_to_kernel",
    "lower_to_template",
    "max_autotune",
    "missing_hook",
    "on_absent_device",
    "only_traced_autograd_runs",
    "parts_of",
    "passes_installed",
    "passes_only",
    "pattern_size",
    "patterns_ignore_the_scale",
    "patterns_match_decomposed_sdpa",
    "patterns_take_tensors_for_numbers",
    "probe",
    "put_around_compiles",
    "random_state",
    "range_of",
    "realize",
    "records_gradients",
    "register_lowering_when_loaded",
    "rename",
    "roots",
    "run_deferred",
    "sdpa_is_fused",
    "sizes",
    "static",
    "strides",
    "suppress_guards",
    "symbol_parts",
    "take_from_compiles",
    "torch_version",
    "trace_artifact",
    "trace_decomposed",
    "trace_id",
    "undeclared",
    "update_hook",
    "value_key",
    "version_problem",
    "was_erased",
    "watching_nodes",
    "when_inductor_loads",
    "with_inner_compile",
    "with_memory",
    "without_modes",
]


def __getattr__(name: str) -> Any:
    # Importing any module of torch._inductor imports Dynamo: a second that `import
    # inductor_fusions` does not spend.
    if name == "CustomGraphPass":
        return importlib.import_module("torch._inductor.custom_graph_pass").CustomGraphPass
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
