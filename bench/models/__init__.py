"""Whole Hugging Face models: stock `torch.compile` and the same with inductor_fusions, side by side.

The cases are in `bench/model_cases.py`. Each is measured in one process, in interleaved steps whose order
rotates:

    stock            inductor_fusions switched off
    fused            inductor_fusions switched on, under its policy in force
    limit            where someone can write it by hand: for Llama, an attention function that calls
                     F.scaled_dot_product_attention(is_causal=True, enable_gqa=True), and no mask built; with
                     padding that is another function, the time of the unpadded one; for windows, documents,
                     softcap and sinks, Hugging Face's attn_implementation="flex_attention"
    sdpa             stock, on the same model with attn_implementation="sdpa", for cases with eager attention
    without          stock, on the same model with each attention replaced by the sum of its queries, keys
                     and values: no fusion of attention can gain more than stock / without. Only cases that
                     ask for it have it (`Case.bounded`)
    autotuned        stock under max-autotune-no-cudagraphs; under max-autotune where the case has CUDA graphs
    fused_autotuned  fused, under the same mode: the fusions' templates compete with stock's own

The last two take minutes to compile: of themselves, only some cases have them (`Case.autotuned`), and
`--variants` names them for others. With `--jobs` several processes compile side by side, each with first
steps on the device, and wait while one of them checks and times. What is autotuned is measured after the
others, by one process: what Inductor times while it compiles, and chooses by, must have the device to itself.

Times are those of the wall clock and, on a GPU, also of the device alone, with the launches queued
beforehand: models of many short kernels wait for the host.

Correct before fast: each variant's output, and in training each parameter's gradient under a random
cotangent, is compared with a float64 copy of the model, eager and uncompiled, on the first sample (for
causal models on its first 1024 tokens or two windows, which do not depend on the rest; with padding among
them where the case has any). The check runs the very code that is timed. A fused result is correct if its
error is at most 1.5 times that of stock in the same mode, plus eps; the ratios of a wrong one are left out.
Where stock is not there, because it ran out of memory or was not asked for, the uncompiled model takes its
place.

Compile times are those of the first step less one step, from empty caches; stock and fused take turns at
going first. With `--compiles 3` both are compiled three times, and the median of the last two counts.

    python -m bench.models --out bench/results/models_h200.json --budget 580
    python -m bench.models --out bench/results/models_h200.json --only 'llama.*train'
    python -m bench.models --out /tmp/tuned.json --only gpt2 --variants stock,fused,autotuned,fused_autotuned
    INDUCTOR_FUSIONS_ATTENTION_KERNEL=flex python -m bench.models --out /tmp/flex.json --only gemma2
    python -m bench.models --quick --device cpu --out /tmp/try.json

`variants` compiles, `correctness` compares with float64, `measure` makes a row, `report` shows rows.
"""
