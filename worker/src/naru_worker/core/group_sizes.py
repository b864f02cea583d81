"""Over how many of a worker's accelerators a model may be cut. Pure."""

from __future__ import annotations


def group_sizes(num_accelerators: int) -> tuple[int, ...]:
    """The powers of two below the number of accelerators, and all of them; ascending from 1.

    The first so many accelerators are one group.
    """
    powers = (1 << exponent for exponent in range(num_accelerators.bit_length()))
    return (*(size for size in powers if size < num_accelerators), num_accelerators)
