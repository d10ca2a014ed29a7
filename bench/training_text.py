"""Text to train on: sources and documents of the packages that are installed, in tokens.

Files come in the order of a digest of their paths, so that each part of them is a mixture; a text that was
there before is left out. The tokens are those of a byte-level BPE trained on the same text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch

from bench.common import Json

#: Kind -> patterns of the names of its files.
KINDS = {
    "sources": ("*.py",),
    "documents": ("*.md", "*.rst", "*.txt", "*LICENSE*", "NOTICE*", "COPYING*", "METADATA"),
}
PAD, END, MASK = range(3)
SPECIAL = ("<pad>", "<end>", "<mask>")
#: Larger files are mostly tables.
LARGEST = 200_000


def texts(kind: str, most: int, root: Path | None = None) -> Iterator[str]:
    """The texts of a kind, as many as `most` bytes hold.

    Args:
        root: where files are looked for; by default where torch is installed.
    """
    root = root or Path(torch.__file__).parents[1]
    paths = {path for pattern in KINDS[kind] for path in root.rglob(pattern) if path.is_file()}
    if kind == "documents":
        paths -= {path for path in paths if path.suffix == ".py"}
    names = {path.relative_to(root).as_posix(): path for path in paths}
    seen: set[bytes] = set()
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        data = names[name].read_bytes()
        known = hashlib.sha256(data).digest()
        if len(data) < 200 or len(data) > LARGEST or known in seen:
            continue
        seen.add(known)
        most -= len(data)
        if most < 0:
            return
        yield data.decode("utf-8", "replace")


def prepare(folder: Path, vocabulary: int, length: int, most: int, root: Path | None = None) -> Json:
    """Write `<kind>.npy` into a folder: the tokens of each kind, documents divided by `END`, as (sequences,
    length) of uint16.

    Args:
        vocabulary: number of tokens, the special ones included.
        most: bytes of text of each kind.

    Returns:
        kind -> its number of tokens, and the beginning of a digest of them.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    found = {kind: list(texts(kind, most, root)) for kind in KINDS}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    # A part of the text tells as much of its words as all of it.
    tokenizer.train_from_iterator([text for part in found.values() for text in part[::2]], trainer)
    told: Json = {}
    for kind, part in found.items():
        encoded = tokenizer.encode_batch(part, add_special_tokens=False)
        tokens = numpy.concatenate([numpy.array([*item.ids, END], numpy.uint16) for item in encoded])
        sequences = tokens[: len(tokens) // length * length].reshape(-1, length)
        numpy.save(folder / f"{kind}.npy", sequences)
        told[kind] = f"{sequences.size} tokens {hashlib.sha256(sequences.tobytes()).hexdigest()[:12]}"
    return told


def batches(
    path: Path, steps: int, batch: int, seed: int, vocabulary: int, padded: bool, masked: bool
) -> dict[str, torch.Tensor]:
    """What a language model is given in all steps: int64 tensors of (steps, batch, length).

    Args:
        steps, batch: how many sequences; they are used again, in another order, where there are too few.
        seed: of the order, and of the tokens that are masked.
        padded: each sequence is cut to half of its length or more, which depends on the sequence alone, and
            padded on the right.
        masked: labels are 15% of the tokens, of which 80% are masked and 10% are others; else all of them,
            which the model shifts.

    Returns:
        "input_ids" and "labels", and "attention_mask" where they are padded.
    """
    sequences = numpy.load(path)
    count, length = sequences.shape
    draw = numpy.random.default_rng(seed)
    epochs = -(-steps * batch // count)
    order = numpy.concatenate([draw.permutation(count) for _ in range(epochs)])[: steps * batch]
    ids = sequences[order].astype(numpy.int64)
    real = numpy.ones(ids.shape, bool)
    if padded:
        lengths = numpy.random.default_rng(0).integers(length // 2, length + 1, count)
        real = numpy.arange(length) < lengths[order, None]
        ids[~real] = PAD
    labels = numpy.where(real, ids, -100)
    if masked:
        chosen, kind = real & (draw.random(ids.shape) < 0.15), draw.random(ids.shape)
        labels[~chosen] = -100
        ids[chosen & (kind < 0.8)] = MASK
        others = chosen & (kind >= 0.9)
        ids[others] = draw.integers(len(SPECIAL), vocabulary, int(others.sum()))
    made = {"input_ids": ids, "labels": labels} | ({"attention_mask": real.astype(int)} if padded else {})
    shape = (steps, batch, length)
    return {name: torch.from_numpy(value.reshape(shape)) for name, value in made.items()}
