"""The hash of 64 bits in torch's operators: mixed64 of csrc/params/random.h."""

from torch import Tensor


def shifted(bits: Tensor, count: int) -> Tensor:
    """A shift to the right that fills up with zeros, as of unsigned numbers."""
    return (bits >> count) & (2 ** (64 - count) - 1)


def mix64_(bits: Tensor) -> Tensor:
    """Hashes int64 numbers in place (SplitMix64, https://doi.org/10.1145/2714064.2660195)."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        bits ^= shifted(bits, shift)
        bits *= factor
    bits ^= shifted(bits, 31)
    return bits
