"""Random numbers as pure functions of what they are for.

Dropout masks and initial weights come from Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as
easy as 1, 2, 3"), a counter-based generator: word w of block c under key k is a function of (k, c, w) alone.
So a mask does not depend on how the model is laid out, recomputed or resumed, and no generator state is ever
captured or restored.

This file holds what needs no tensor library: keys and a reference of the generator in plain integers. The
tensor version stands in model/random.py, the kernels have their own; all three give the same words.

Layout of a dropout draw
    key      stream_key(seed, "dropout", layer, site): 2 x 32 bits
    counter  c0 = low 32 bits of block, c1 = high 32 bits of block, c2 = sample index, c3 = iteration
    lanes    a block's 128 bits, word 0 and low bits first, in lanes of 16 bits (hidden dropout: 8 elements a
             block) or of 32 (attention dropout: 4)
    block    element index inside the sample // lanes of a block; lane = element index % lanes of a block
An element is kept when its lane >= Lanes.threshold(p), and is then multiplied by Lanes.scale(p).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

MASK32 = 0xFFFFFFFF
PHILOX_M0, PHILOX_M1 = 0xD2511F53, 0xCD9E8D57
PHILOX_W0, PHILOX_W1 = 0x9E3779B9, 0xBB67AE85
PHILOX_ROUNDS = 10


def stream_key(seed: int, *names: str | int) -> tuple[int, int]:
    """Two 32-bit key words for the stream named by `names` under `seed`.

    Different names give independent streams; the same names give the same stream on every machine.
    """
    text = "\x1f".join([str(seed), *(str(name) for name in names)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


@dataclass(frozen=True, slots=True)
class Lanes:
    """How a kind of dropout reads the 128 bits of a block: `bits` of them an element.

    A probability is applied as the nearest multiple of 2^-bits, never as 0 or 1 where it is neither. The
    factor of survivors follows what is applied, so that expectations stay exact.
    """

    bits: int

    @property
    def in_block(self) -> int:
        """How many elements one call of Philox serves."""
        return 128 // self.bits

    def threshold(self, probability: float) -> int:
        """The lane from which on an element survives: the applied probability in steps of 2^-bits."""
        if probability == 0.0:
            return 0
        return min(max(round(probability * (1 << self.bits)), 1), (1 << self.bits) - 1)

    def scale(self, probability: float) -> float:
        """What survivors are multiplied by: 1 / (1 - the applied probability)."""
        return (1 << self.bits) / ((1 << self.bits) - self.threshold(probability))


# A kernel at the rate of memory has no time for a call an element: half as many bits are half as many calls.
HIDDEN_LANES, ATTENTION_LANES = Lanes(16), Lanes(32)


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox 4x32-10 in plain integers: the reference the tensor and kernel versions are held against."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(PHILOX_ROUNDS):
        product0, product1 = PHILOX_M0 * c0, PHILOX_M1 * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & MASK32,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & MASK32,
        )
        k0, k1 = (k0 + PHILOX_W0) & MASK32, (k1 + PHILOX_W1) & MASK32
    return c0, c1, c2, c3
