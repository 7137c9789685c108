"""Searches of the laws of latent trees and of the CDAG note."""

import numpy as np

from joma.errors import JomaError
from joma.experiments.claims import cdag as cdag_checks
from joma.experiments.claims import hblt as checks
from joma.experiments.claims.claim import ClaimMeasurement, Formula, Point, measured
from tests.adversary.domains import Domain, integer, matrix, over, real, simplex, vector

_PAIRS: dict[str, Domain] = {
    "height": real(0.0, 1.0, special=(0.0,)),
    "depth": integer(1, 40),
    "rho": real(-1.0, 1.0, special=(-1.0, 0.0, 1.0)),
    "classes": simplex(integer(1, 8), zeros=True),
    "off": vector(real(0.0, 1.0, special=(0.0, 0.5, 1.0)), integer(1, 8)),
}
"""Two tokens under a latent: H as a share of L, one ρ, the classes and P[y=0|k]."""


@over("lemma8", rhos=vector(real(-1.0, 1.0, special=(-1.0, 0.0, 1.0)), integer(1, 40)))
def _matrix_products_at(formula: Formula, point: Point) -> ClaimMeasurement:
    return checks.matrix_products_of(formula, point["rhos"][None])


def height_of(point: Point) -> int:
    """Return H, given as a share of L."""
    return min(int(point["height"] * point["depth"]), point["depth"] - 1)


@over("thm5-exact", **_PAIRS)
def _exact_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Generation by generation: the ancestor's distribution, then the pair's."""
    height, depth, rho = height_of(point), point["depth"], point["rho"]
    classes, off = point["classes"], np.resize(point["off"], len(point["classes"]))
    top = (classes @ off, classes @ (1 - off))
    pair = checks.by_generations(height, depth, ((1 + rho) / 2, (1 - rho) / 2), top)
    on = float(pair[0, 1] + pair[1, 1])
    if on < 1e-13:
        raise JomaError("rho0 must not leave the token out")
    return measured(
        abs(formula(height, depth, rho, classes, off) - pair[1, 1] / on), 1e-13 + 1e-14 / on
    )


@over(
    "eqn8",
    height=real(0.0, 1.0, special=(0.0, 0.5)),
    depth=integer(1, 1000),
    flips=real(1e-6, 1.0, log=True),
)
def _near_one_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The error of the expansion in units of its second order, (H/L)(Lε)²."""
    height, depth, epsilon = height_of(point), point["depth"], point["flips"] / point["depth"]
    reference = checks.co_occur_by_recursion(height, depth, epsilon, epsilon)
    second_order = height / depth * point["flips"] ** 2
    return measured(abs(formula(height, depth, epsilon) - reference), second_order + 1e-11)


@over(
    "thm5-remark-bound",
    height=real(0.0, 1.0, special=(0.0,)),
    depth=integer(2, 1_000_000),
    epsilon=real(1e-9, 1.0, log=True),
)
def _bounded_dissociation_at(formula: Formula, point: Point) -> ClaimMeasurement:
    height = max(height_of(point), 1)
    error = checks.bounded_dissociation_of(formula, height, point["depth"], point["epsilon"])
    return ClaimMeasurement(error, 1e-8)


@over("cdag-theorem-1", vectors=matrix(real(-1.0, 1.0), integer(4, 4), integer(2, 6)))
def _signals_at(formula: Formula, point: Point) -> ClaimMeasurement:
    vectors = point["vectors"]
    lengths = np.linalg.norm(vectors, axis=1)
    if np.min(lengths) < 1e-6:
        raise JomaError("signals must not vanish")
    z_alpha, z_beta, f, delta = vectors / lengths[:, None]
    first, second, third = (
        float(np.arccos(np.clip(a @ b, -1, 1)))
        for a, b in ((z_alpha, delta), (z_beta, f), (z_alpha, z_beta))
    )
    bound = float(formula(first, second, min(third, np.pi - third)))
    # arccos near 0 and π has half the digits of its argument.
    return ClaimMeasurement(bound - float((f @ delta) * (z_beta @ delta)), 1e-7)


def _least_on_a_line(theta_1: float, theta_2: float, theta_3: float) -> float:
    """The same where f_k is at its worst for each σ′g, in closed form: one azimuth is left."""
    up, aside = cdag_checks.components(theta_1, theta_3, np.linspace(0, np.pi, 4001))
    return float(np.min(np.cos(theta_2) * up**2 - np.sin(theta_2) * np.abs(up) * aside))


@over("cdag-theorem-1-angles", shares=simplex(integer(3, 3), zeros=True), sum=real(0.0, np.pi / 2))
def _small_angles_at(formula: Formula, point: Point) -> ClaimMeasurement:
    angles = point["shares"] * point["sum"]
    # The square root of 1 - cos² has half its digits where the cosine is close to 1.
    return ClaimMeasurement(abs(_least_on_a_line(*angles) - float(formula(*angles))), 1e-7)


@over(
    "cdag-theorem-1-input",
    signal=vector(real(-1.0, 1.0, special=(0.0,)), integer(1, 20)),
    gradient=vector(real(-1.0, 1.0, special=(0.0,)), integer(1, 20)),
)
def _at_an_input_at(formula: Formula, point: Point) -> ClaimMeasurement:
    z_beta = point["signal"]
    g = np.resize(point["gradient"], len(z_beta))
    return cdag_checks.at_an_input_of(formula, z_beta, g, z_beta)


_ANGLE = real(0.0, np.pi, special=(0.0, np.pi / 2, np.pi))


@over(
    "cdag-theorem-1-tight",
    theta_1=_ANGLE,
    theta_2=_ANGLE,
    theta_3=_ANGLE,
)
def _tight_at(formula: Formula, point: Point) -> ClaimMeasurement:
    angles = (point["theta_1"], point["theta_2"], point["theta_3"])
    return ClaimMeasurement(abs(_least_on_a_line(*angles) - float(formula(*angles))), 1e-4)


@over(
    "cdag-recursion",
    z=vector(real(-1.0, 1.0, special=(0.0,)), integer(1, 12)),
    g=vector(real(-1.0, 1.0, special=(0.0,)), integer(1, 12)),
    share=vector(real(0.0, 1.0), integer(1, 12)),
    slope=real(0.0, 2.0, special=(0.0, 1.0)),
    other_slope=real(0.0, 2.0, special=(0.0, 1.0)),
)
def _slopes_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """Any slopes within the range, any signals."""
    z = point["z"]
    g, share = np.resize(point["g"], len(z)), np.resize(point["share"], len(z))
    low, high = sorted((point["slope"], point["other_slope"]))
    slopes = low + share * (high - low)
    bound = float(formula(z, g, low, high))
    size = high * float(np.sum(np.abs(z * g)))
    return ClaimMeasurement(bound - float(z @ (slopes * g)), 1e-12 * size + 1e-300)
