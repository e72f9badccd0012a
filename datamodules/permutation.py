"""The order of samples: pure functions of (seed, position), with constant memory and constant seek.

The permutation of an epoch is a keyed Feistel network with cycle walking (Black and Rogaway, "Ciphers with Arbitrary
Finite Domains", 2002, method 3), so the sample at any position is computed alone: resuming at position 10^8 costs
what resuming at 0 costs, and nothing is materialised. Random numbers are counter based (SplitMix64, Steele, Lea and
Flood 2014, the finaliser of section 4), keyed by what they belong to: crops by (seed, epoch, sample), masks by
(seed, position).

Legend: N samples of a set, M positions asked for at once; every array argument is vectorised.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

# Streams of random numbers that must not coincide: one word each, mixed into the key.
SHUFFLE, CROP, MASK, SUBSTITUTE, BLEND, VALIDATION = range(1, 7)
ROUNDS = 6


def mix(value: UInt64) -> UInt64:
    """SplitMix64's finaliser: a bijection of 64-bit words; each input bit flips about half of the output bits."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def hash_words(*words: int | Int64 | UInt64) -> UInt64:
    """Hash integers (scalars or `[M]`) to 64-bit words `[M]`; order matters."""
    state = np.uint64(0x9E3779B97F4A7C15) * np.ones(1, np.uint64)
    for word in words:
        array = np.atleast_1d(np.asarray(word & 0xFFFFFFFFFFFFFFFF if isinstance(word, int) else word)).astype(
            np.uint64
        )
        state = mix(state ^ array) + np.uint64(0x9E3779B97F4A7C15)
    return state


def below(bits_M: UInt64, bound: int | Int64) -> Int64:
    """Map 64-bit words to `0 <= x < bound` (bound up to 2^32, by the upper 32 bits: bias below bound / 2^32)."""
    upper = bits_M >> np.uint64(32)
    return ((upper * np.asarray(bound).astype(np.uint64)) >> np.uint64(32)).astype(np.int64)


def permute(index_M: Int64, size: int | Int64, key_M: UInt64) -> Int64:
    """The place of `index` in a keyed pseudo-random permutation of `range(size)`.

    Args:
        index_M: `[M]`, each in `0 <= index < size`.
        size: N, one for all or `[M]`; below 2^40.
        key_M: 64-bit keys, `[M]` or `[1]`; each key is another permutation.

    Returns:
        `[M]` int64. For a fixed key and size this is a bijection.
    """
    sizes = np.broadcast_to(np.asarray(size, np.int64), index_M.shape)
    if len(index_M) == 0:
        return index_M.astype(np.int64)
    keys = np.broadcast_to(key_M, index_M.shape)
    half = _half_bits(sizes)
    result = _feistel(index_M.astype(np.uint64), half, keys)
    outside = np.flatnonzero(result >= sizes.astype(np.uint64))
    while len(outside):  # cycle walking: the domain is at most 4 N, so this ends after a few rounds
        result[outside] = _feistel(result[outside], half[outside], keys[outside])
        outside = outside[result[outside] >= sizes[outside].astype(np.uint64)]
    return result.astype(np.int64)


def _half_bits(sizes: Int64) -> UInt64:
    bits = np.ceil(np.log2(np.maximum(sizes, 2))).astype(np.int64)
    bits += (np.int64(1) << bits) < sizes  # a log rounded down would leave samples out
    return ((bits + 1) // 2).astype(np.uint64)


def _feistel(value: UInt64, half: UInt64, key: UInt64) -> UInt64:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = value >> half, value & mask
    for turn in range(ROUNDS):
        round_key = key + np.uint64((turn + 1) * 0x9E3779B97F4A7C15 % 2**64)
        left, right = right, left ^ (mix(right ^ round_key) & mask)
    return (left << half) | right
