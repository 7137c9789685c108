"""The GaLore claims' formulas with a wrong constant each."""

from joma.experiments.claims._claim import Formula
from joma.theory import galore


def _smaller_radius(kappa, lipschitz_a, lipschitz_b, lipschitz_c, radius, norm_b, norm_c):
    return galore.varying_rate(
        kappa, lipschitz_a, lipschitz_b, lipschitz_c, 0.97 * radius, norm_b, norm_c
    )


def _smaller_lipschitz_a(kappa, lipschitz_a, *rest):
    return galore.varying_rate(kappa, [0.98 * value for value in lipschitz_a], *rest)


BROKEN: dict[str, Formula] = {
    "galore-fixed-projection": lambda *matrices: 1.3 * galore.contraction_rate(*matrices),
    "galore-rate-attained": lambda *matrices: 1.01 * galore.contraction_rate(*matrices),
    "galore-step-limit": lambda *matrices: 1.01 * galore.step_limit(*matrices),
    "galore-varying-coefficients": _smaller_radius,
    "galore-varying-attained": _smaller_lipschitz_a,
    "galore-stall": lambda g, p, q: p.T @ g,
    "galore-stalled-gradient": lambda *arguments: 1.01 * galore.stalled_gradient(*arguments),
    "galore-changing-projection": lambda *problem, step, rank: galore.refreshed_bound(
        *problem, step=1.01 * step, rank=rank
    ),
}
