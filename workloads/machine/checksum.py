"""CRC-32 of runs of bytes, in any order and by several threads, joined to that of the whole.

ISA-L computes it with the CPU's carry-less multiplication where the package `isal` is installed (27 GB/s on one core
against 1.3 GB/s of zlib 1.2.13). zlib gives the same numbers. Both release the interpreter's lock.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from functools import lru_cache

_POLYNOMIAL = 0xEDB88320  # CRC-32's, the highest power in the lowest bit
_ONE = 1 << 31


def _fastest() -> tuple[str, Callable[..., int]]:
    try:
        isal = importlib.import_module("isal.isal_zlib")
    except ImportError:
        return "zlib", zlib.crc32
    return "isal", isal.crc32


LIBRARY, crc32 = _fastest()


def combine(first: int, second: int, length: int) -> int:
    """The CRC-32 of A followed by B, from those of A and B and the `length` of B in bytes.

    Appending bytes to A multiplies its remainder by x^(8 length) modulo the polynomial (zlib's crc32_combine).
    """
    return _times(_shift(length), first) ^ second


@lru_cache(maxsize=1024)
def _shift(length: int) -> int:
    """x^(8 length) modulo the polynomial."""
    power, square, exponent = _ONE, _ONE >> 1, 8 * length
    while exponent:
        if exponent & 1:
            power = _times(square, power)
        square, exponent = _times(square, square), exponent >> 1
    return power


def _times(first: int, second: int) -> int:
    """The product of two polynomials over GF(2), modulo the polynomial."""
    product, bit = 0, _ONE
    while bit:
        if first & bit:
            product ^= second
        second = (second >> 1) ^ (_POLYNOMIAL if second & 1 else 0)
        bit >>= 1
    return product
