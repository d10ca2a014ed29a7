"""Tools of developers, which need no GPU.

cuda_codegen    CUDA code of a compile without a GPU: what is written, machine code, hazards, the interpreter
ledger          what is compiled for each model: `python -m devtools.ledger`, into `devtools/ledger.json`
"""
