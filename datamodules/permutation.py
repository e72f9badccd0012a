"""The order of samples: pure functions of (seed, position), with constant memory and constant seek.

The permutation of an epoch is a keyed Feistel network with cycle walking (Black and Rogaway, "Ciphers with Arbitrary
Finite Domains", 2002, method 3), so the sample at any position is computed alone: resuming at position 10^8 costs
what resuming at 0 costs, and nothing is materialised. Random numbers are counter based (SplitMix64, Steele, Lea and
Flood 2014, the finaliser of section 4), keyed by what they belong to: crops by (seed, epoch, sample), masks by
(seed, position).

Legend: N samples of a set, M positions asked for at once; every array argument is vectorised.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
UInt32 = npt.NDArray[np.uint32]
UInt64 = npt.NDArray[np.uint64]
_Number = TypeVar("_Number", bound=np.generic)

# Streams of random numbers that must not coincide: one word each, mixed into the key.
SHUFFLE, CROP, MASK, SUBSTITUTE, BLEND, VALIDATION = range(1, 7)
ROUNDS = 4
_ROUND_KEYS = [np.uint64((turn + 1) * 0x9E3779B97F4A7C15 % 2**64) for turn in range(ROUNDS)]


def mix(value: UInt64) -> UInt64:
    """SplitMix64's finaliser: a bijection of 64-bit words; each input bit flips about half of the output bits."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def hash_words(*words: int | Int64 | UInt64) -> UInt64:
    """Hash integers (scalars or `[M]`) to 64-bit words `[M]`; order matters."""
    state = np.uint64(0x9E3779B97F4A7C15) * np.ones(1, np.uint64)
    for word in words:
        array = np.array([word % 2**64], np.uint64) if isinstance(word, int) else word.astype(np.uint64)
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
        size: N, one for all or `[M]`; at most 2^32.
        key_M: 64-bit keys, `[M]` or `[1]`; each key is another permutation.

    Returns:
        `[M]` int64. For a fixed key and size this is a bijection.
    """
    sizes = np.atleast_1d(np.asarray(size, np.int64))
    bits = np.array([max(int(one) - 1, 1).bit_length() for one in sizes.tolist()], np.uint32)
    keys = [(mix(key_M + _ROUND_KEYS[turn]) >> np.uint64(32)).astype(np.uint32) for turn in range(ROUNDS)]
    result = _feistel(index_M.astype(np.uint32), bits, keys)
    outside = np.flatnonzero(result >= sizes)
    while len(outside):  # cycle walking: the domain is at most 2 N, so half of what is left ends in each round
        walked = _feistel(result[outside], _at(bits, outside), [_at(key, outside) for key in keys])
        result[outside] = walked
        outside = outside[walked >= _at(sizes, outside)]
    return result.astype(np.int64)


def _at(values: npt.NDArray[_Number], places: npt.NDArray[np.intp]) -> npt.NDArray[_Number]:
    """`values[places]`, or the one value that holds everywhere."""
    return values if len(values) == 1 else values[places]


def _feistel(value: UInt32, bits: UInt32, keys: list[UInt32]) -> UInt32:
    """An unbalanced Feistel network on `bits` bits: the halves are changed in turn, each by a hash of the other."""
    one = np.uint32(1)
    low_bits = (bits + one) >> one
    low_mask = (one << low_bits) - one
    high_mask = (one << (bits - low_bits)) - one
    high, low = value >> low_bits, value & low_mask
    for turn in range(0, ROUNDS, 2):
        high = high ^ (_mix32(low ^ keys[turn]) & high_mask)
        low = low ^ (_mix32(high ^ keys[turn + 1]) & low_mask)
    joined: UInt32 = (high << low_bits) | low
    return joined


def _mix32(value: UInt32) -> UInt32:
    """MurmurHash3's 32-bit finaliser (Appleby 2011): a bijection; half the width of `mix` and quicker."""
    value = (value ^ (value >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    value = (value ^ (value >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    mixed: UInt32 = value ^ (value >> np.uint32(16))
    return mixed
