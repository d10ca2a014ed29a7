"""Benchmarks, run as `python -m bench.<name>`; results go to `bench/results/`.

models, models_lora             whole models, plain and with adapters; model_cases has the models
gate, suites, cases, layers     `python -m inductor_fusions bench`, with compare and plots
tune_*                          kernels of one kind over shapes and configurations
tuning, tuning_linears          what the tuners share
attention, flex_cases,          their grids
projections, lora
device_table                    the results of tuning as tables of a device, `configs/devices`
outer_product, dot_interaction  interactions of DLRM; interactions is what they share
loss_head                       a loss and the linear in front of it, alone and in a training step
whole_mlp, distributed          an MLP in one kernel; training steps on two GPUs
docs, docs_*, picture           what the results say, as pages of the documentation
common, pool                    timing, errors and results; worker processes
"""
