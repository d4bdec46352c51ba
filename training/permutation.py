"""A seeded shuffle of ``range(n)`` that is computed, not stored: any place of it can be asked for at once, at any size.

A balanced Feistel network permutes the smallest even-bit domain that holds n, and a value that lands beyond n is
sent through again until it lands inside (cycle walking, Black & Rogaway, "Ciphers with Arbitrary Finite Domains",
CT-RSA 2002, section 3). The domain is less than 4n, so the expected number of passes is below 4.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

_ROUNDS = 10  # small domains have halves of one or two bits, which need more rounds than the four that theory asks of a wide network


def permuted(positions: npt.ArrayLike, n: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Where each of ``positions`` (any shape, values in [0, n)) goes in the shuffle of ``range(n)`` for this seed and epoch.

    The same on every platform and numpy version: only wrapping 64-bit integer arithmetic and SHA-256 are used.
    Raises ValueError for n < 1 and for a position outside [0, n).
    """
    if n < 1:
        raise ValueError(f"nothing to shuffle: n = {n}")
    values = np.array(positions, dtype=np.int64)
    if values.size and (values.min() < 0 or values.max() >= n):
        raise ValueError(f"positions must lie in [0, {n})")
    half = np.uint64((max(2, (n - 1).bit_length()) + 1) // 2)
    keys = _keys(n, seed, epoch)
    flat = _network(values.reshape(-1).astype(np.uint64), half, keys)
    outside = np.flatnonzero(flat >= n)
    while outside.size:
        flat[outside] = _network(flat[outside], half, keys)
        outside = outside[flat[outside] >= n]
    return flat.astype(np.int64).reshape(values.shape)


def _keys(n: int, seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    digest = hashlib.shake_256(f"{n} {seed} {epoch}".encode()).digest(8 * _ROUNDS)
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _network(values: npt.NDArray[np.uint64], half: np.uint64, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right + key) & mask)
    return (left << half) | right


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    # SplitMix64's finaliser (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
