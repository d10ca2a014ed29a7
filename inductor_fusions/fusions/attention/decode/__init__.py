"""Attention of a few queries to a cache that is only partly full, as decoding has it.

`op` has the operations and `kernels` their Triton kernels; `plan` says which attentions become them, and with
which tiles.
"""
