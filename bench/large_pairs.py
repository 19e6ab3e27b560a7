"""How many steps of the AVX2 kernel for 8 bit need an extra one with the weights of a model file (docs/decisions.md)?

    python bench/large_pairs.py NET.apm [NET.apm ...]

A step is four input channels and 16 output channels of one tap. It needs an extra one where two weights side by side
add up to more than 128 one way. Layers above a fifth go by another kernel.
"""

from __future__ import annotations

import argparse

import numpy as np

from anyprec.format import read

LIMIT, BLOCK, GROUP = 32767 // 255, 16, 4


def needs_extra(codes: np.ndarray) -> np.ndarray:
    """8-bit codes (out, kh, kw, in) -> [blocks of outputs, taps, steps]."""
    out, height, width, inside = codes.shape
    weights = np.zeros((-(-out // BLOCK) * BLOCK, height * width, -(-inside // GROUP) * GROUP), np.int64)
    weights[:out, :, :inside] = codes.reshape(out, -1, inside).astype(np.int64) - 128
    pairs = weights.reshape(-1, BLOCK, height * width, weights.shape[2] // GROUP, 2, 2)
    return (np.abs(pairs.sum(-1)) > LIMIT).any((1, 4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="NET.apm")
    for path in parser.parse_args().files:
        graph = read(path)
        codes = [w.codes[8] for w in graph.weights.values() if w.codes and 8 in w.codes]
        if not codes:
            print(f"{path}: no 8-bit weights")
            continue
        layers = [needs_extra(c) for c in codes]
        share = sum(int(x.sum()) for x in layers) / sum(x.size for x in layers)
        few = sum(bool(x.mean() <= 0.2) for x in layers)
        deviation = np.sqrt(np.mean([np.square(c - 128.0).mean() for c in codes]))
        print(f"{path}: {share:.1%} of the steps; {few} of {len(layers)} layers go by vpmaddubsw if not by Winograd; "
              f"deviation {deviation:.0f} of 128")  # fmt: skip


if __name__ == "__main__":
    main()
