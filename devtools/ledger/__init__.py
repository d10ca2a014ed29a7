"""What torch.compile makes of each model, counted without a GPU: the ledger `devtools/ledger.json`.

A row stands for a model of `configs/models` with its layers, heads and widths cut down, plain or with PEFT's
adapters on every linear, or for a model of recommendation; in inference or in training, in one dtype,
compiled by one version of torch for one device. It holds

    sites     fused sites by fusion
    kernels   kernels that Inductor wrote and launches
    extern    calls of other libraries, by name: matrix products, attention
    bytes     read and written by all of them, as Inductor counts them

`INDUCTOR_FUSIONS_POLICY=always`, and no table is read: what is proved is fused, whatever was measured, with
the configurations of the code's own rules, so that a row changes with the code and with torch alone. CUDA is
a device that does not exist (`devtools.cuda_codegen`): attention is decided as on a CPU, because that is
settled before the graph is moved there, and attention calls are counted under one name, since which kernel
SDPA takes is not known without a GPU. Fusions before autograd that have kernels for CUDA alone are decided as
if there were some for the CPU (`on_a_gpu`).

A row is worse where a fusion has fewer sites, or where there are more kernels, extern calls or bytes.
Rewriting the file accepts that, and the diff is what is reviewed.

    python -m devtools.ledger                  # rewrite the rows of this torch: make ledger
    python -m devtools.ledger --missing        # only add those of new models
    python -m devtools.ledger --check          # exit 1, with the rows named, where one is worse
    python -m devtools.ledger --check --quick  # one dtype, the models of QUICK: what the tests run

`entries` has the models, `compiling` compiles and counts, and `rows` reads, writes and compares the file.
"""
