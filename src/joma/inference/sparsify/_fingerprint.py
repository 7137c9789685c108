"""The fingerprint of a model in memory: which weights a file of predictors belongs to."""

import hashlib

import torch
from torch import Tensor, nn

_AT_ONCE = 2**22
_PRIME = 65521


def model_fingerprint(model: nn.Module) -> str:
    """Return a SHA-256 over the model's class and its parameters: names, shapes, types, checksums.

    The checksums are exact sums of whole numbers, so that they agree on a CPU and a GPU, and every
    byte counts in them: a weight that is changed changes one. They tell models apart that are
    confused by mistake; they are no protection against somebody who builds a collision.
    """
    digest = hashlib.sha256(f"{type(model).__name__}\n".encode())
    for name, parameter in sorted(model.named_parameters(), key=lambda pair: pair[0]):
        shape, dtype = tuple(parameter.shape), str(parameter.dtype)
        plain, weighted = _sums(parameter.detach())
        digest.update(f"{name}\0{shape}\0{dtype}\0{plain}\0{weighted}\n".encode())
    return digest.hexdigest()


def _sums(tensor: Tensor) -> tuple[int, int]:
    """Return the sum of a tensor's bits as whole numbers, and one weighted by their places."""
    if tensor.is_meta or tensor.numel() == 0:
        return 0, 0
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.contiguous().view(-1).view(kinds[tensor.element_size()])
    plain = weighted = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(bits), _AT_ONCE):
        part = bits[start : start + _AT_ONCE].long()
        places = torch.arange(start, start + len(part), device=tensor.device) % _PRIME + 1
        plain, weighted = plain + part.sum(), weighted + (part * places).sum()
    return int(plain), int(weighted)
