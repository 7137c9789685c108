"""The GaLore claims' formulas with a wrong constant each."""

from joma.experiments.claims.claim import Formula
from joma.theory import galore


def _smaller_radius(kappa, lipschitz_a, lipschitz_b, lipschitz_c, radius, norm_b, norm_c):
    return galore.varying_rate(
        kappa, lipschitz_a, lipschitz_b, lipschitz_c, 0.97 * radius, norm_b, norm_c
    )


def _far_below(*arguments):
    return galore.varying_rate(*arguments) - 3


BROKEN: dict[str, Formula] = {
    "galore-fixed-projection": lambda *matrices: 0.5 * galore.contraction_rate(*matrices),
    "galore-rate-attained": lambda *matrices: 1.01 * galore.contraction_rate(*matrices),
    "galore-step-limit": lambda *matrices: 1.01 * galore.step_limit(*matrices),
    "galore-varying-coefficients": _far_below,
    "galore-varying-attained": _smaller_radius,
    "galore-stall": lambda g, p, q: 0 * galore.project(g, p, q),
    "galore-stalled-gradient": lambda *arguments: 1.01 * galore.stalled_gradient(*arguments),
    "galore-changing-projection": lambda *problem, step, rank: galore.refreshed_bound(
        *problem, step=1.01 * step, rank=rank
    ),
    "galore-noise-floor": lambda noise, **sizes: 0.99 * galore.noise_floor(noise, **sizes),
    "galore-noise-stall": lambda noise, **sizes: 1.2 * galore.noise_stall(noise, **sizes),
}
