"""How many steps the captured iteration of `_graph` takes, emulated on a CPU without its kernels.

    python -m benchmarks.spectrum_steps [--shape 4096x11008] [--tolerance 1e-3]

Same arithmetic as on a GPU: a float16 copy with random rounding, blocks as two float16 parts,
products in float32, Gram matrices in float64, elimination in float32 or, where a block nearly loses
rank, in float64 with a ridge. One line per spectrum of `benchmarks.stable_rank`: after how many
steps the bound is within the tolerance, how far the basis then is from orthonormal, and how many
blocks were eliminated in float64. Times are a GPU's to say.
"""

import argparse
import math

import torch
from torch import Tensor

from benchmarks.stable_rank import listed
from joma.probes.spectrum._krylov import chi_square_floor
from joma.probes.spectrum._pace import STOPS

COLUMNS, FULL, LOW = 32, 16384.0, 2048.0
FAILURE, MARGIN = 4e-7, 1.01
RIDGE, STEEP, RAISED, LARGEST = 1e-4, 1e-3, 1e8, 1e12
EXCESSES = torch.tensor([0.15, *(0.05 * k for k in range(6, 21)), 1.5, 2.5, 5.0, 20.0, 100.0])


def rounded(matrix: Tensor, seed: int) -> tuple[Tensor, float]:
    """Return the float16 copy, times a power of two, and that power."""
    scale = 16384.0 / 2.0 ** math.frexp(float(matrix.abs().max()))[1]
    dice = torch.Generator().manual_seed(seed)
    carry = torch.randint(0, 8192, matrix.shape, generator=dice, dtype=torch.int32)
    bits = ((matrix * scale).view(torch.int32) + carry) & -8192
    return bits.view(torch.float32).half().float(), scale


def in_parts(block: Tensor) -> Tensor:
    """Return what two float16 parts keep of a block."""
    high = (block * FULL).half().float()
    low = ((block * FULL - high) * LOW).half().float()
    return (high + low / LOW) / FULL


class Emulated:
    """The iteration of one matrix, with its bound.

    Args:
        matrix: with no more rows than columns.
        seed: of the start and the rounding.
        start: another start, (rows, 32).
    """

    def __init__(self, matrix: Tensor, seed: int = 0, start: Tensor | None = None) -> None:
        self._matrix = matrix
        self._copy, scale = rounded(matrix, seed)
        self._norm = float(matrix.double().norm())
        self._factor = 1 / (self._norm * scale)
        self._most = 16384.0 / scale / 2
        dice = torch.Generator().manual_seed(seed)
        if start is None:
            start = torch.randn(len(matrix), COLUMNS, generator=dice)
        start = start.double()
        inverse = torch.linalg.inv(torch.linalg.cholesky(start.mT @ start, upper=True))
        self.blocks, self.inverses = [(start @ inverse).float()], [inverse.float()]
        self.roots: list[Tensor] = [torch.zeros(COLUMNS, COLUMNS)]
        self.own: list[Tensor] = []
        self._size = 0.0
        self.floor = 0.0
        """A Rayleigh quotient for ‖A‖_F = 1."""
        self.wide = 0
        """Blocks that were eliminated in float64."""

    def step(self) -> None:
        """Apply the Gram matrix once more."""
        now = self.blocks[-1]
        middle = in_parts((self._copy.mT @ in_parts(now)) * self._factor)
        rest = (self._copy @ middle) * self._factor
        if self.own:
            rest = rest - self.blocks[-2] @ self.roots[-1].mT
        wide, basis = rest.double(), now.double()
        inner = basis.mT @ wide
        own = inner.float()
        gram = wide.mT @ wide - own.double().mT @ (2 * inner - basis.mT @ basis @ own.double())
        gram = 0.5 * (gram + gram.mT)
        longest = float(gram.diagonal().amax())
        self._size = max(self._size, float(own.diagonal().amax()), math.sqrt(max(longest, 0.0)))
        ridge = (RIDGE * self._size) ** 2
        root, info = torch.linalg.cholesky_ex(gram.float(), upper=True)
        needed = max(STEEP * longest, 100 * ridge)
        if int(info) or not bool((root.diagonal().square() > needed).all()):
            self.wide += 1
            one = torch.eye(COLUMNS, dtype=torch.float64)
            root, _ = torch.linalg.cholesky_ex(gram + ridge * one, upper=True)
        inverse = torch.linalg.inv(root).float()
        self.own.append(own)
        self.roots.append(root.float())
        self.inverses.append(inverse)
        self.blocks.append((rest - now @ own) @ inverse)

    def bound(self, tolerance: float) -> tuple[float, float]:
        """Return the bound as a share of the value, and an upper bound of ‖Qᵀ·Q‖."""
        count = len(self.own)
        project = torch.block_diag(*self.own)
        for j, root in enumerate(self.roots[1:count]):
            here, there = (slice(k * COLUMNS, (k + 1) * COLUMNS) for k in (j, j + 1))
            project[here, there], project[there, here] = root.mT, root
        value_N, vector_NN = torch.linalg.eigh((0.5 * (project + project.mT)).double())
        x = torch.cat(self.blocks[:count], -1) @ vector_NN[:, -1].float()
        length = float((self._matrix.mT @ (x / x.norm())).double().norm())
        basis = torch.cat(self.blocks, -1).half().float()
        overlap = float((basis.mT @ basis).abs().sum(-1).amax())
        rounding = (1 + 1.05 * 2.0**-11 * math.sqrt(basis.shape[1])) ** 2
        quantile = chi_square_floor(COLUMNS, 0.9 * FAILURE) / (MARGIN * rounding * overlap)
        top = float(value_N[-1])
        out_G = self._excluded(top * (1 + tolerance * EXCESSES.double()), quantile)
        at = len(out_G) - int(out_G.flip(0).int().cumprod(0).sum())
        excess = tolerance * float(EXCESSES[at]) if at < len(out_G) else math.inf
        sway = 2.0**-11 * self._most * math.sqrt(2 * math.log(10 / FAILURE))
        self.floor = floor = (length / self._norm) ** 2
        return top * (1 + excess) / floor - 1 + 3e-5 + 2 * sway / length, overlap

    def _excluded(self, level_G: Tensor, quantile: float) -> Tensor:
        """Return where r·K ≻ 1, as the kernel of that name does."""
        level = level_G.reshape(-1, 1, 1)
        one = torch.eye(COLUMNS, dtype=torch.float64).expand(len(level), -1, -1)
        now, before, factor = self.inverses[0].double().expand_as(one), torch.zeros_like(one), one
        total = now @ now.mT
        for own, root, inverse in zip(self.own, self.roots, self.inverses[1:], strict=False):
            new = level * now - now @ own.double() - before @ root.double().mT
            new = new @ inverse.double()
            gain = new @ new.mT
            most = gain.abs().amax((1, 2), keepdim=True).clamp(min=1e-300)
            total = total + gain * (LARGEST / most).clamp(max=1.0)
            before, now = now, new
            raised = total.abs().amax((1, 2), keepdim=True) > RAISED
            lower = torch.linalg.cholesky_ex(total.where(raised, one)).L
            factor, now, before = (
                torch.linalg.solve_triangular(lower, it, upper=False)
                for it in (factor, now, before)
            )
            total = one.where(raised, total)
        return torch.linalg.cholesky_ex(total * quantile - factor @ factor.mT).info == 0


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--shape", default="1024x2752")
    arguments.add_argument("--tolerance", type=float, default=1e-3)
    given = arguments.parse_args()
    rows, columns = sorted(int(side) for side in given.shape.split("x"))
    for name, matrix in listed(rows, columns, "cpu"):
        run, share, overlap = Emulated(matrix.contiguous()), math.inf, 1.0
        while share > given.tolerance and len(run.own) < STOPS[-1]:
            run.step()
            if len(run.own) >= STOPS[0]:
                share, overlap = run.bound(given.tolerance)
        steps = len(run.own)
        print(
            f"{name:32} steps {steps:2}, bound {share:.1e}, overlap {overlap:.2f}, "
            f"blocks in float64 {run.wide}",
            flush=True,
        )


if __name__ == "__main__":
    main()
