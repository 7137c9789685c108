"""Random numbers counted, not carried: Philox4x32-10 in torch, one stream for every member.

A number is a pure function of (seed, stream name, step, place), after Salmon, Moraes, Dror and
Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011). So an ensemble member draws the same
numbers alone and among others, and a run resumes from its step alone: there is no state to save.
Everything here can be captured in a CUDA graph with the step as a tensor that counts on the device.
"""

import math
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from joma.errors import JomaError

__all__ = ["integers", "normal", "seed_tensor", "uniform", "words"]

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
# Counter blocks computed at once: on a CPU the temporaries stay in the cache, on a GPU a hundred
# megabytes of them keep it busy.
_BLOCKS_AT_ONCE = {"cpu": 2**15, "cuda": 2**21}


def seed_tensor(seeds: Sequence[int], device: torch.device | str) -> Tensor:
    """Return one seed for each member as the other functions take them, shape (E,)."""
    if len(seeds) == 0:
        raise JomaError("seeds must hold at least one seed, got none")
    for seed in seeds:
        if int(seed) != seed or not -(2**63) <= seed < 2**63:
            raise JomaError(f"seeds must be whole, from -2**63 to 2**63 - 1, got {seed}")
    return torch.tensor([int(seed) for seed in seeds], dtype=torch.int64, device=device)


def words(seeds_E: Tensor, stream: str, step: int | Tensor, n: int) -> Tensor:
    """Philox4x32-10: n random 32-bit words for each member.

    Word j is word j mod 4 of the block with counter (j // 4, CRC-32 of the stream's name, low and
    high half of the step) and key (low and high half of the member's seed).

    Args:
        seeds_E: one seed for each member, int64, shape (E,); its device decides where.
        stream: a name; streams of different names are independent.
        step: which draw of the stream, at least 0; a tensor without axes on the seeds' device
            where a CUDA graph shall replay with another step, or one of shape (E,) with a step
            for each member.
        n: how many words.

    Returns:
        Shape (E, n), int64, values from 0 to 2³² − 1.
    """
    return _converted(seeds_E, stream, step, n, torch.int64, 1, lambda drawn: drawn)


def uniform(
    seeds_E: Tensor,
    stream: str,
    step: int | Tensor,
    n: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Uniform on [0, 1), never 1: multiples of 2⁻²⁴ in float32, of 2⁻⁵³ in float64.

    Float32 takes one word a number, float64 two; otherwise as `words`.

    Returns:
        Shape (E, n).
    """
    if dtype == torch.float32:
        return _converted(seeds_E, stream, step, n, dtype, 1, _uniform_single)
    if dtype == torch.float64:
        return _converted(seeds_E, stream, step, n, dtype, 2, _uniform_double)
    raise JomaError(f"dtype must be torch.float32 or torch.float64, got {dtype}")


def normal(
    seeds_E: Tensor,
    stream: str,
    step: int | Tensor,
    n: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Standard normal, by Box–Muller in float64, then cast; at most 6.67 in size.

    The words are the same everywhere, but a CPU's and a GPU's logarithm and cosine may differ in
    the last bit, so the numbers agree across devices to rounding only.

    Returns:
        Shape (E, n).
    """
    if not dtype.is_floating_point:
        raise JomaError(f"dtype must be a floating-point type, got {dtype}")
    return _converted(seeds_E, stream, step, n, dtype, 1, _box_muller)


def integers(
    seeds_E: Tensor,
    stream: str,
    step: int | Tensor,
    n: int,
    below: int,
) -> Tensor:
    """Integers from 0 to below − 1, by ⌊word·below / 2³²⌋; no value is off by more than 2⁻³².

    Returns:
        Shape (E, n), int64.
    """
    if not 1 <= below < 2**31:
        raise JomaError(f"below must be from 1 to 2**31 - 1, got {below}")
    return _converted(seeds_E, stream, step, n, torch.int64, 1, lambda drawn: drawn * below >> 32)


def _uniform_single(words: Tensor) -> Tensor:
    words >>= 8
    return words.to(torch.float32).mul_(2.0**-24)


def _uniform_double(words: Tensor) -> Tensor:
    high, low = words[:, 0::2] >> 5, words[:, 1::2] >> 6
    return high.mul_(2**26).add_(low).to(torch.float64).mul_(2.0**-53)


def _box_muller(words: Tensor) -> Tensor:
    # The radius's uniform is moved off zero, whose logarithm is infinite.
    radius = words[:, 0::2].to(torch.float64).add_(1).mul_(2.0**-32).log_().mul_(-2).sqrt_()
    angle = words[:, 1::2].to(torch.float64).mul_(2 * math.pi * 2.0**-32)
    pairs = torch.stack([angle.cos(), angle.sin_()], -1).mul_(radius.unsqueeze(-1))
    return pairs.flatten(-2)


def _converted(
    seeds_E: Tensor,
    stream: str,
    step: int | Tensor,
    n: int,
    dtype: torch.dtype,
    words_each: int,
    convert: Callable[[Tensor], Tensor],
) -> Tensor:
    """Numbers made of words, a part at a time, so that the words never all exist at once."""
    _check(seeds_E, step, n)
    out_En = torch.empty(seeds_E.shape[0], n, dtype=dtype, device=seeds_E.device)
    blocks = -(-n * words_each // 4)
    most = max(1, _BLOCKS_AT_ONCE.get(seeds_E.device.type, 2**21) // seeds_E.shape[0])
    at_once = -(-blocks // -(-blocks // most))  # in parts of about the same size
    for first in range(0, blocks, at_once):
        last = min(first + at_once, blocks)
        part = out_En[:, first * 4 // words_each : last * 4 // words_each]
        part.copy_(convert(_words(seeds_E, stream, step, first, last))[:, : part.shape[1]])
    return out_En


def _words(seeds_E: Tensor, stream: str, step: int | Tensor, first: int, last: int) -> Tensor:
    """The words of the blocks from first to last − 1, shape (E, 4·blocks)."""
    members, blocks, device = seeds_E.shape[0], last - first, seeds_E.device
    keys_r2E1 = _round_keys(seeds_E)
    if isinstance(step, Tensor) and step.ndim:
        step = step.unsqueeze(-1)
    counter = zlib.crc32(stream.encode()), step & _WORD, (step >> 32) & _WORD
    space_32Eb = torch.empty(3, 2, members, blocks, dtype=torch.int64, device=device)
    out_Eb4 = torch.empty(members, blocks, 4, dtype=torch.int64, device=device)
    _philox(keys_r2E1, first, *counter, space_32Eb, out_Eb4)
    return out_Eb4.flatten(1)


def _round_keys(seeds_E: Tensor) -> Tensor:
    """The two keys of every round, shape (rounds, 2, E, 1), in the order that `_philox` needs."""
    rounds_r1 = torch.arange(_ROUNDS, device=seeds_E.device).unsqueeze(1)
    keys = seeds_E + rounds_r1 * _KEY_STEPS[0], (seeds_E >> 32) + rounds_r1 * _KEY_STEPS[1]
    keys_r2E1 = torch.stack(keys, 1).bitwise_and_(_WORD).unsqueeze(-1)
    keys_r2E1[0::2] = keys_r2E1[0::2].flip(1)
    return keys_r2E1


def _philox(
    keys_r2E1: Tensor,
    first: int,
    stream: int,
    low: int | Tensor,
    high: int | Tensor,
    space_32Eb: Tensor,
    out_Eb4: Tensor,
) -> None:
    """Writes the words of the blocks that begin with the first, using space as it needs.

    A round takes (c₀, c₁, c₂, c₃) to (hi(m₁c₂)⊕c₁⊕k₀, lo(m₁c₂), hi(m₀c₀)⊕c₃⊕k₁, lo(m₀c₀)). The
    multiplied words (c₀, c₂) and the others (c₁, c₃) are two tensors of pairs. A product's low half
    stays in its place and the pairs change their order instead, in every round. A 64-bit product
    wraps as an unsigned one would, and its upper half needs no cutting off before it comes to be
    multiplied again: one mask a round.
    """
    (m0, m1), device = _MULTIPLIERS, out_Eb4.device
    # Each tensor with its two halves: to take them again in every round is a tenth of the time.
    (multiplied, c0, c2), others, product = ((pair, *pair) for pair in space_32Eb)
    keys = keys_r2E1.unbind()
    # Two rounds by hand, as most of them is the same for all members or for all blocks: after the
    # first, c₀ is new for every member alone, c₁ for none, c₂ for all, and c₃ for every block.
    of_blocks = torch.arange(first, first + out_Eb4.shape[1], device=device) * m0
    of_step = low * m1
    of_member_E1 = (((of_step >> 32) & _WORD) ^ stream ^ keys[0][1]) * m0
    torch.mul((((of_blocks >> 32) & _WORD) ^ high) ^ keys[0][0], m1, out=others[1])
    others[2].copy_(of_member_E1)
    torch.bitwise_right_shift(others[1], 32, out=c0)
    c0.bitwise_xor_(of_step & _WORD)
    torch.bitwise_xor(of_member_E1 >> 32, of_blocks, out=c2)
    multiplied.bitwise_xor_(keys[1]).bitwise_and_(_WORD)
    # Made by arithmetic on the device: a tensor from a Python list could not be captured.
    straight = torch.arange(2, device=device).view(2, 1, 1) * (m1 - m0) + m0
    crossed = straight.flip(0)
    for number in range(2, _ROUNDS):
        torch.mul(multiplied, crossed if number % 2 else straight, out=product[0])
        torch.bitwise_right_shift(product[0], 32, out=multiplied)
        c0.bitwise_xor_(others[2])
        c2.bitwise_xor_(others[1])
        multiplied.bitwise_xor_(keys[number]).bitwise_and_(_WORD)
        others, product = product, others
    others[0].bitwise_and_(_WORD)
    for place, word_Eb in enumerate((c0, others[1], c2, others[2])):
        out_Eb4[..., place] = word_Eb


def _check(seeds_E: Tensor, step: int | Tensor, n: int) -> None:
    if seeds_E.dtype != torch.int64 or seeds_E.ndim != 1 or seeds_E.shape[0] == 0:
        raise JomaError(
            "seeds_E must be an int64 tensor of one axis with at least one seed, "
            f"got {seeds_E.dtype} of shape {tuple(seeds_E.shape)}"
        )
    if isinstance(step, Tensor):
        fits = step.ndim == 0 or step.shape == seeds_E.shape
        if step.dtype != torch.int64 or not fits or step.device != seeds_E.device:
            raise JomaError(
                "step must be an int64 tensor without axes, or with one step for each of "
                f"{len(seeds_E)} seeds, on {seeds_E.device}, "
                f"got {step.dtype} of shape {tuple(step.shape)} on {step.device}"
            )
    elif not 0 <= step < 2**63:
        raise JomaError(f"step must be from 0 to 2**63 - 1, got {step}")
    if not 1 <= n <= 2**33:
        raise JomaError(f"n must be from 1 to 2**33, got {n}")
