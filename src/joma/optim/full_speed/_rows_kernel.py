"""Adam over a few rows of a table, for the GPU (Triton); see `joma.optim.full_speed.lazy_adam`."""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch's CUDA builds alone; this module is imported where there is a GPU.

from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor


class RowTable(Protocol):
    """A table (E, V, D) whose rows Adam moves one by one; `LazyRows`."""

    table: Tensor
    first: Tensor
    second: Tensor
    made: Tensor
    corrections: Tensor
    settings: Any
    replayed: int


def summed(gradient_END: Tensor, words_N: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of equal words added up at the first of them, and their ‖g‖², (E, N), else 0.

    Args:
        gradient_END: of each place, in the order of the words.
        words_N: sorted.
    """
    E, N, D = gradient_END.shape
    out_END = torch.empty(E, N, D, dtype=torch.float32, device=gradient_END.device)
    squares_EN = torch.empty(E, N, dtype=torch.float32, device=gradient_END.device)
    block = triton.next_power_of_2(D)
    _summed[(N, E)](gradient_END, words_N, out_END, squares_EN, N, D=D, BLOCK=block)
    return out_END, squares_EN


def settled(lazy: RowTable, rows_N: Tensor, steps: Tensor) -> None:
    """Makes the steps that rows have missed; equal rows stand side by side."""
    E, V, D = lazy.table.shape
    shape = {"D": D, "BLOCK": triton.next_power_of_2(D), "COUNTED": lazy.corrections.shape[1]}
    settings = _settings(lazy)
    _settled[(len(rows_N), E)](
        lazy.table,
        lazy.first,
        lazy.second,
        lazy.made,
        rows_N,
        steps,
        V,
        *settings,
        lazy.replayed,
        **shape,
    )
    _stamped[(triton.cdiv(len(rows_N), 256),)](lazy.made, rows_N, steps, len(rows_N), BLOCK=256)


def moved(
    lazy: RowTable, words_N: Tensor, gradient_END: Tensor, steps: Tensor, scales_E: Tensor
) -> None:
    """One step of the rows at the first of equal words."""
    E, V, D = lazy.table.shape
    settings = _settings(lazy)
    _moved[(len(words_N), E)](
        lazy.table, lazy.first, lazy.second, words_N, gradient_END, steps, scales_E.float(), V,
        *settings, D=D, BLOCK=triton.next_power_of_2(D), COUNTED=lazy.corrections.shape[1],
    )  # fmt: skip
    _stamped[(triton.cdiv(len(words_N), 256),)](lazy.made, words_N, steps, len(words_N), BLOCK=256)


def _settings(lazy: RowTable) -> tuple[Any, ...]:
    settings = lazy.settings
    return lazy.corrections, settings.learning_rates, *settings.betas, settings.epsilon


@triton.jit
def _is_first(words, place):
    """Whether no equal word stands before this one."""
    before = tl.load(words + tl.maximum(place - 1, 0))
    return (place == 0) | (before != tl.load(words + place))


@triton.jit
def _summed(gradient, words, out, squares, count, D: tl.constexpr, BLOCK: tl.constexpr):
    place, member, column = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    base = member.to(tl.int64) * count
    total = tl.zeros([BLOCK], tl.float32)
    if _is_first(words, place):
        word, at = tl.load(words + place), place
        more = True
        while more:
            row = gradient + (base + at) * D
            total += tl.load(row + column, mask=column < D, other=0.0).to(tl.float32)
            at += 1
            more = (at < count) & (tl.load(words + tl.minimum(at, count - 1)) == word)
        tl.store(out + (base + place) * D + column, total, mask=column < D)
    tl.store(squares + base + place, tl.sum(total * total, 0))


@triton.jit
def _way(m, v, step, rate, corrections, epsilon, COUNTED: tl.constexpr):
    """How far Adam goes at a step with these moments."""
    step = tl.minimum(step, COUNTED - 1)
    one, two = tl.load(corrections + step), tl.load(corrections + COUNTED + step)
    return rate * one * m / (tl.sqrt(v) * two + epsilon)


@triton.jit
def _settled(
    table, first, second, made, rows, steps, height, corrections, rates, keep_one, keep_two,
    epsilon, replayed, D: tl.constexpr, BLOCK: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    place, member, column = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    if _is_first(rows, place):
        row = tl.load(rows + place)
        done, now = tl.load(made + row), tl.load(steps)
        at = (member.to(tl.int64) * height + row) * D + column
        m = tl.load(first + at, mask=column < D, other=0.0)
        if (now > done) & (tl.max(tl.abs(m), 0) > 0):
            v = tl.load(second + at, mask=column < D, other=0.0)
            p = tl.load(table + at, mask=column < D, other=0.0)
            rate = tl.load(rates + member).to(tl.float32)
            last = tl.minimum(now, done + replayed)
            step = done
            while step < last:
                step += 1
                m *= keep_one
                v *= keep_two
                p -= _way(m, v, step, rate, corrections, epsilon, COUNTED)
            left = (now - last).to(tl.float32)
            tl.store(table + at, p, mask=column < D)
            tl.store(first + at, m * tl.exp2(left * tl.log2(keep_one)), mask=column < D)
            tl.store(second + at, v * tl.exp2(left * tl.log2(keep_two)), mask=column < D)


@triton.jit
def _stamped(made, rows, steps, count, BLOCK: tl.constexpr):
    """Notes the step to which rows have come, once all members have."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + place, mask=place < count, other=0)
    tl.store(made + row, tl.load(steps) + row * 0, mask=place < count)


@triton.jit
def _moved(
    table, first, second, words, gradient, steps, scales, height, corrections, rates, keep_one,
    keep_two, epsilon, D: tl.constexpr, BLOCK: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    place, member, column = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    if _is_first(words, place):
        row = tl.load(words + place)
        at = (member.to(tl.int64) * height + row) * D + column
        own = (member.to(tl.int64) * tl.num_programs(0) + place) * D + column
        g = tl.load(gradient + own, mask=column < D, other=0.0) * tl.load(scales + member)
        m = tl.load(first + at, mask=column < D, other=0.0)
        v = tl.load(second + at, mask=column < D, other=0.0)
        p = tl.load(table + at, mask=column < D, other=0.0)
        m += (1.0 - keep_one) * (g - m)
        v = keep_two * v + (1.0 - keep_two) * g * g
        rate = tl.load(rates + member).to(tl.float32)
        p -= _way(m, v, tl.load(steps), rate, corrections, epsilon, COUNTED)
        tl.store(table + at, p, mask=column < D)
        tl.store(first + at, m, mask=column < D)
        tl.store(second + at, v, mask=column < D)
