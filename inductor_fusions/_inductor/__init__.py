"""All uses of private torch names, and all differences between torch versions.

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
| 2.13, 2.14 | attention patterns misread SDPA that is decomposed |
| before 2.15 | attention patterns ignore dims, permutations and `alpha`, and raise at a tensor as divisor |
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch.utils._config_module import Config, install_config_module

from .absent import AbsentDevice, absent_device, device_guard, is_absent
from .absent_tensors import on_absent_device
from .bisector import bisected_away, bisecting, join_bisector
from .compiling import (
    compile_each_anew,
    fresh_compile,
    inductor,
    isolated_compile,
    passes_only,
    without_attention_patterns,
)
from .flex import flex_attention_op, flex_backward_op, flex_block_mask
from .graphs import (
    changes,
    computed_by_function,
    copied_graph,
    is_backward,
    is_backward_of_function,
    is_body,
    is_forward_of_function,
    module_path,
    numpy_name,
    only_traced_autograd_runs,
    passes_over,
    remembered,
    remembering,
    rename,
    replace_result,
    results_of,
    source_line,
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
    with_passes_in_options,
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
    call_eagerly,
    call_lowering,
    cast,
    decompose_in_graphs,
    in_memory,
    lower_as,
    lower_attention_backward,
    makes_a_package,
    needs_python,
    realize,
    register_lowering_when_loaded,
    sizes,
    static,
    strides,
    value_key,
)
from .matcher import Found, Patterns, count_match, difference, pattern_size, roots, undeclared
from .moving import copied, gradients_without_device, on_cuda
from .net import (
    as_function,
    cache_key,
    calls_with_fakes,
    clear_frames,
    devices_work,
    forget_cached,
    in_place_of,
    is_flat,
    is_for_the_caller,
    is_out_of_memory,
    put_around_compiles,
    take_from_compiles,
    with_inner_compile,
)
from .operations import (
    GROUPED_MM,
    assert_on_device,
    cuda_sdpa_backends,
    gradients_in_modes,
    sdpa_is_fused,
)
from .probing import probe, without_modes
from .ranks import communicates, compiles_together, first_to_say, has_peers
from .reports import artifact_log, cache_folder, compile_counters, trace_artifact, trace_id
from .shapes import (
    Fakes,
    computing_fakes,
    expression,
    fake_mode_of,
    fake_result,
    hint,
    holds_now,
    is_batched,
    is_dense,
    is_wrapper,
    known_true,
    parts_of,
    range_of,
    records_gradients,
    share_fake_mode,
    subclass_given,
    subclass_of,
    suppress_guards,
    symbol_parts,
    value_of,
    with_memory,
)
from .state import Context, GlobalState, donated, random_state
from .templates import (
    NoKernel,
    Output,
    Variant,
    captures_graphs,
    freezes_weights,
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
    mask_rows_have_32_bits,
    patterns_ignore_constants,
    patterns_ignore_the_scale,
    patterns_match_decomposed_sdpa,
    torch_version,
    version_problem,
)

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.pattern_matcher import Match, PatternExpr
else:
    Match = PatternExpr = Any  # of annotations: importing the matcher takes seconds


def __getattr__(name: str) -> Any:
    # Importing any module of torch._inductor imports Dynamo: a second that `import
    # inductor_fusions` does not spend.
    if name == "CustomGraphPass":
        return importlib.import_module("torch._inductor.custom_graph_pass").CustomGraphPass
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
