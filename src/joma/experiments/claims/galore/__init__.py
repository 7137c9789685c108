"""GaLore's convergence: contraction with a fixed projection, where it stalls, and beyond."""

from joma.experiments.claims.galore import fixed_projection, noise, stall, varying

CLAIMS = (*fixed_projection.CLAIMS, *varying.CLAIMS, *stall.CLAIMS, *noise.CLAIMS)
