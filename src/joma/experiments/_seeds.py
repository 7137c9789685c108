"""Seeds of an experiment's networks, from what they are and the one seed that was asked for."""

import zlib


def member_seeds(name: str, seed: int, count: int) -> tuple[int, ...]:
    """Seeds of the networks called `name`: others for every name, seed and network."""
    return tuple(zlib.crc32(f"{name}/{seed}/{k}".encode()) for k in range(count))
