"""GaLore's convergence: contraction with a fixed projection, where it stalls, and beyond."""

from joma.experiments.claims.claim import Claim
from joma.experiments.claims.galore import fixed_projection, noise, stall, varying

CLAIMS: tuple[Claim, ...] = (
    *fixed_projection.CLAIMS,
    *varying.CLAIMS,
    *stall.CLAIMS,
    *noise.CLAIMS,
)
