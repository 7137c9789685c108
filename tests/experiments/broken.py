"""Every claim's formula with a wrong constant: its check must fail."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from joma.experiments.claims import CLAIMS
from joma.experiments.claims.claim import Formula
from joma.theory import (
    cdag,
    clusters,
    embeddings,
    galore,
    hblt,
    invariants,
    linear,
    marginals,
    memory,
    nonlinear,
    scan_snap,
    spectra,
    stationarity,
)
from joma.theory.block import velocity
from joma.theory.marginals import Ball
from joma.theory.scan_snap import Balanced


def scaled_output(formula: Callable[..., Any], factor: float) -> Callable[..., Any]:
    """The formula times a factor."""
    return lambda *args, **kwargs: factor * formula(*args, **kwargs)


def scaled_argument(formula: Callable[..., Any], factor: float) -> Callable[..., Any]:
    """The formula with its first argument off by a factor."""
    return lambda first, *args, **kwargs: formula(factor * first, *args, **kwargs)


BROKEN: dict[str, Formula] = {}
"""The wrong formulas by the claim's id."""


def _wrong_velocity(block, samples, state):
    rate = velocity(block, samples, state)
    return rate._replace(z=1.01 * rate.z)


def _wrong_pointwise(block, v, z):
    return invariants.conserved_pointwise(block, 1.01 * v, z)


BROKEN |= {
    "eqn2": _wrong_velocity,
    "assumption1-rate": lambda *setting: 1.001 * stationarity.rate(*setting),
    "thm1-linear": lambda block, v, z: z**2 - 1.01 * np.sum(v**2, axis=-1),
    "thm1-exp": lambda block, v, z: z - 0.51 * np.sum(v**2, axis=-1),
    "thm1-rates": _wrong_pointwise,
    "thm1-pointwise": _wrong_pointwise,
    "thm1-queries": _wrong_pointwise,
    "thm1-loss": _wrong_pointwise,
    "thm1-softmax-sum": lambda block, v, z: np.sum(z, axis=-1) + 0.01 * z[..., 0],
    "thm1-softmax": lambda block, v, b: invariants.softmax_logits(block, v, 1.1 * b),
    "thm1-softmax-condition": lambda pull, b, v: True,
    "thm1-embeddings": lambda block, v, z, **groups: invariants.conserved_total(
        block, 1.01 * v, z, **groups
    ),
    "thm1-softmax-rate": lambda *setting: 1.01 * memory.covariance(*setting),
    "thm1-softmax-memory": lambda block, samples, v, z: memory.logits(block, samples, 1.01 * v, z),
    "thm1-softmax-gap": lambda path: 0.97 * memory.gap_bound(path),
    "thm1-descent": lambda v, block: 1.01 * invariants.descent_drift(v, block),
    "thm1-descent-order": lambda: 2.0,
}


BROKEN |= {
    "sec7-coherence": lambda eps, tokens: 2 * np.log(tokens) / eps**2,
    "sec7-overlaps": lambda eps, m, d: embeddings.expected_overlaps(eps, m, d + 1),
    "sec7-drift": lambda *setting: 1.01 * invariants.token_law_rate(*setting),
    "eqn60": lambda w, u, v, q, xi: embeddings.weight(w, u, v, q, 1.01 * xi),
    "superposition": lambda v, u, xi: embeddings.superposed(v, u, 1.01 * xi),
}


def _wrong_stable_ranks(delta, t):
    v = spectra.stable_rank(linear.weights_multi(delta, t))
    return v, v


def _wrong_linear_attention(delta, t, **rates):
    return linear.linear_attention(1.01 * delta, t, **rates)


def _wrong_temperature(delta, t, v0, z0, normalizer, *, eta_w, eta_z, tau):
    problem = linear.unit_rates(delta, eta_w=eta_w, eta_z=eta_z, tau=1.01 * tau)
    start = v0 / problem.scale
    return problem.scale * linear.weights(
        problem.delta, t, initial=start, log_offset=z0 / tau - start**2 / 2, normalizer=normalizer
    )


def _linearised_own_time(delta, *, initial):
    way = np.sqrt(np.pi / 2) - np.sign(delta) * initial
    return np.argmin(way / np.abs(delta))


BROKEN |= {
    "eqn3": _wrong_temperature,
    "thm2": lambda delta, v: linear.conserved_ratio(delta, 1.01 * v),
    "thm2-closed-form": scaled_output(linear.weights, 1 + 1e-8),
    "thm2-blowup": scaled_output(linear.blowup_time, 1.001),
    "thm2-winner": lambda delta, *, initial: np.argmax(delta),
    "thm2-own-time": _linearised_own_time,
    "thm2-losers": scaled_output(linear.limit, 1.001),
    "thm2-softmax": lambda delta, v: linear.conserved_ratio(delta, 1.01 * v),
    "footnote1": lambda g, x: 1.005 * (g @ x / len(x)),
    "talk-matrix": lambda v, delta: np.exp(0.51 * np.sum(v**2, axis=1, keepdims=True)) * delta,
    "talk-nodes": scaled_argument(linear.weights_multi, 1.01),
    "talk-rank": lambda delta: True,
    "talk-stable-rank": lambda delta: 1.0,
    "talk-gradient-rank": _wrong_stable_ranks,
    "linear-attention": _wrong_linear_attention,
}


def _wrong_expectations(marginal, v, mean, bias, *, basis):
    right = clusters.expectations(marginal, v, mean, bias, basis=basis)
    return right.activity, 1.05 * right.moment


def _wrong_flow(marginal, a, means, v, bias):
    right = clusters.velocity(marginal, a, means, v, bias)
    return clusters.Velocity(right.v, 1.1 * right.bias)


def _wrong_slopes(marginal, s, *, slopes):
    return tuple(1.01 * d for d in clusters.homogeneous_slopes(marginal, s, slopes=slopes))


BROKEN |= {
    "lemma1": _wrong_expectations,
    "lemma2": _wrong_flow,
    "lemma3": lambda marginal, s: marginal.first_integral(s) + 1e-6,
    "eqn53": scaled_output(clusters.radial_velocity, 1.01),
    "lemma5": _wrong_slopes,
    "eqn35": scaled_output(marginals.sphere_constant, 1.01),
    "eqn36": scaled_output(marginals.sphere_constant, 0.99),
    "eqn36-ball": lambda n, u: 1.001 * Ball(n).pdf(u),
    "eqn57": scaled_output(clusters.curve_slope, 1.01),
}


def _wrong_jacobian(marginal, point, **where):
    right = clusters.jacobian(marginal, point, **where)
    return right._replace(longitudinal=1.01 * right.longitudinal)


def _wrong_eigenvalues(marginal, point, **where):
    right = clusters.eigenvalues(marginal, point, **where)
    return right._replace(along=1.01 * right.along)


def _wrong_phase(marginal, distance, ratio, *, negative):
    return clusters.phase(marginal, distance, 1.25 * ratio, negative=negative)


def _wrong_gradients(shapes, means, v, bias, signs):
    right = clusters.resting_gradients(shapes, means, v, bias, signs)
    return None if right is None else right * np.linspace(1, 1.01, len(right))


def _wrong_points(marginal, distance, *, negative):
    return [
        point._replace(ratio=1.5 * point.ratio)
        for point in clusters.critical_points(marginal, distance, negative=negative)
    ]


BROKEN |= {
    "lemma4": lambda marginal, a, s, length: clusters.balance(marginal, [a[0], 1.01 * a[1]], s),
    "eqn56": lambda marginal, means, v, bias, ratio: False,
    "eqn58": lambda marginal: clusters.sufficient_condition(marginal) > 0.24,
    "thm3-existence": lambda positive, distance, negative: (
        clusters.sufficient_condition(positive) > 0.2
    ),
    "thm3-gaussian": lambda positive, negative, distance: int(positive > negative),
    "eqn59": lambda: (1.0, 2.1),
    "thm3-laplace": lambda distance, width: 1.01 * np.exp(distance / width),
    "thm3-fixed-bias": scaled_output(clusters.fixed_bias_ratio, 1.01),
    "thm3-line": _wrong_gradients,
    "a4-signs": lambda marginal, distance: True,
    "thm3-jacobian": _wrong_jacobian,
    "thm3-ray": lambda point, length: np.array([1.0, 0, 1.01 * point.s_minus]) * length,
    "thm3-eigenvalues": _wrong_eigenvalues,
    "thm3-stability": lambda marginal, point, negative: True,
    "thm3-full-jacobian": scaled_output(clusters.full_jacobian, 1.01),
    "thm3-potential": scaled_output(clusters.potential, 1.01),
    "thm3-phase": _wrong_phase,
    "thm3-sgd": _wrong_points,
}


_DERIVED = {claim.id: claim.derived for claim in CLAIMS}


def _rebounds_with_weak_components(mu):
    size = np.abs(mu)
    fate = nonlinear.entropy_fate(mu)
    return fate._replace(rebounds=bool(np.any((size > 0) & (size < 0.9 * size.max()))))


def _larger_drop(mu):
    fate = nonlinear.stable_rank_fate(mu)
    return fate._replace(drop=1.02 * fate.drop)


def _always_falls(mu):
    return nonlinear.stable_rank_fate(mu)._replace(first=-1)


BROKEN |= {
    "eqn6": scaled_output(nonlinear.weights, 1 + 1e-8),
    "eqn6-ode": scaled_output(nonlinear.weights, 1.001),
    "eqn6-log": scaled_output(nonlinear.log_residual, 1 + 1e-8),
    "eqn6-late": lambda mu, t: -np.exp(mu**2 / 2) * (t - 1.001 * nonlinear.residual_offset(mu)),
    "eqn84": scaled_output(_DERIVED["eqn84"], 1.01),
    "fig4-entropy": lambda mu: (True, False),
    "fig4-fate": _rebounds_with_weak_components,
    "eqn6-nodes": scaled_argument(nonlinear.weights_multi, 1.001),
    "sec4-rank": lambda mu: True,
    "sec4-stable-rank": _larger_drop,
    "sec4-rank-turns": _always_falls,
}


BROKEN |= {
    "lemma6": lambda: 0.63,
    "lemma6-sharp": scaled_output(nonlinear.lemma6_bound, 1.01),
    "lemma7": lambda: 0.76,
    "lemma7-sharp": scaled_output(nonlinear.lemma7_bound, 1.01),
    "thm4": lambda: 0.86,
    "thm4-sharp": lambda: 0.8650,
    "thm4-rates": lambda: 0.86,
    "thm4-rates-sharp": scaled_output(nonlinear.offset_bound, 1.01),
    "thm4-leading": lambda log_residual, mu: -np.exp(-0.52 * mu**2) * log_residual,
    "thm4-threshold": scaled_output(nonlinear.settled_threshold, 0.8650 / 0.8643248),
    "thm4-linear": lambda mu, t, *, initial: nonlinear.linear_attention_residual(
        mu, t, initial=1.01 * initial
    ),
}


def _descent(tree: hblt.Tree, descendant: Any, ancestor: Any) -> np.ndarray:
    return hblt.transition(0.99 * tree.path_rho(descendant, ancestor))


def _root_uncertainty(class_probs: Any, child_off_probs: Any) -> np.ndarray:
    return hblt.root_uncertainty(class_probs, child_off_probs) - 0.05


def _cooccurrence(height: Any, depth: Any, rho: Any, class_probs: Any, off: Any) -> np.ndarray:
    rho0 = hblt.root_uncertainty(class_probs, off)
    power = np.asarray(rho, dtype=float) ** depth  # L where L − 1 belongs
    return (1 + rho ** (2 * np.asarray(height)) - 2 * power * rho0) / (1 - power * rho0) / 2


def _cooccurrence_near_one(height: Any, depth: Any, epsilon: Any) -> np.ndarray:
    leading = 1 - height / depth
    return leading + 1.02 * height * (2 * height - depth) / (2 * depth) * epsilon


def _latent_distribution(rho: Any, class_probs: Any, off: Any) -> np.ndarray:
    return hblt.p(0.999 * rho * hblt.root_uncertainty(class_probs, off))


def _joint(tree: hblt.Tree, a: Any, b: Any) -> np.ndarray:
    return 0.99 * tree.joint(a, b) + 0.01 * np.outer(tree.marginal(*a), tree.marginal(*b))


BROKEN |= {
    "lemma8": lambda rhos: hblt.transition(0.999 * np.prod(rhos, axis=-1)),
    "lemma9": _descent,
    "rho0": _root_uncertainty,
    "thm5": _cooccurrence,
    "thm5-exact": _cooccurrence,
    "eqn8": _cooccurrence_near_one,
    "eqn103": _latent_distribution,
    "thm5-remark": lambda: 0.99,
    "thm5-remark-bound": lambda height, depth, epsilon: (
        hblt.dissociation_bound(height, depth, epsilon) + 3 * epsilon**2
    ),
    "hblt-joint": _joint,
}


def _backward(network, activations, output_gradient):
    gradients = network.backward(activations, output_gradient)
    return dataclasses.replace(gradients, weights=1.001 * gradients.weights)


def _small_angle_bound(theta_1, theta_2, theta_3):
    return np.cos(theta_1 + theta_2 + theta_3) * np.cos(theta_1 + 0.98 * theta_3)


def _unequal_classes(w, x_plus, x_minus, z_alpha, g, nonlinearity):
    on = 0.95 * np.mean(np.multiply(g, z_alpha))
    off = np.mean(np.multiply(g, np.subtract(1, z_alpha)))
    rise = nonlinearity.derivative(w @ x_plus) * x_plus
    return on * rise + off * nonlinearity.derivative(w @ x_minus) * x_minus


BROKEN |= {
    "cdag-backward": _backward,
    "cdag-theorem-1": lambda *angles: cdag.correlation_bound(*angles) + 1e-3,
    "cdag-theorem-1-angles": _small_angle_bound,
    "cdag-theorem-1-tight": lambda *angles: 1.01 * cdag.correlation_bound(*angles),
    "cdag-theorem-1-input": lambda z_beta, delta: 1.001 * cdag.corr(z_beta, delta) ** 2,
    "cdag-recursion": lambda z, g, low, high: cdag.recursion_bound(z, g, 1.01 * low, high),
    "cdag-recursion-attained": lambda z, g, low, high: cdag.recursion_bound(z, g, low, 1.01 * high),
    "cdag-eqn-2": lambda *arguments: 1.001 * cdag.two_value_flow(*arguments),
    "cdag-eqn-3": _unequal_classes,
    "cdag-eqn-3-centred": lambda *arguments: 1.001 * cdag.label_flow(*arguments),
    "cdag-trained-network": lambda *angles: cdag.correlation_bound(*angles) + 0.02,
}


def _flow(corpus, z, y, **rates):
    z_rate, y_rate = scan_snap.flow(corpus, z, y, **rates)
    return 1.001 * z_rate, y_rate


def _gain_rate(gain, f_squared, **factors):
    return 1.01 * scan_snap.relative_gain_rate(gain, f_squared, **factors)


def _bounds(b, f_squared):
    low, high = scan_snap.log_gain_bounds(b, f_squared)
    return low, 0.98 * high


def _full_bounds(b, f_squared):
    low, high = scan_snap.full_log_gain_bounds(b, f_squared)
    return low - 5, high + 5


def _late_b(t, balanced, *, anchor, **rates):
    grown = scan_snap.late_b(t, balanced, anchor=anchor, **rates) - anchor[1]
    return anchor[1] + 1.03 * grown


BROKEN |= {
    "scan-snap-gradient": _flow,
    "scan-snap-common-falls": lambda corpus: -scan_snap.initial_fate(corpus),
    "scan-snap-distinct-rise": lambda corpus: 1.02 * scan_snap.initial_pull(corpus),
    "scan-snap-frequent-first": lambda *at: scan_snap.rise_ratio(*at) ** 1.02,
    "scan-snap-relative-gain": _gain_rate,
    "scan-snap-gain-bounds": _bounds,
    "scan-snap-gain-full": _full_bounds,
    "scan-snap-gain-early": lambda corpus, class_, token, other, b: (
        scan_snap.early_log_gain(corpus, class_, token, other, b) * (1 + 0.05 * b)
    ),
    "scan-snap-b-rises": lambda *at, **rates: 1.001 * scan_snap.b_rate(*at, **rates),
    "scan-snap-balanced-law": lambda balanced, separation, decoder, **rates: Balanced.conserved(
        balanced, separation, 1.001 * decoder, **rates
    ),
    "scan-snap-balanced-b": lambda balanced, t, **rates: 1.001 * balanced.b_at(t, **rates),
    "scan-snap-scanning": lambda balanced: 0.98 * balanced.scanning_slope_limit,
    "scan-snap-scanning-limit": lambda balanced: 1.02 * balanced.scanning_slope_limit,
    "scan-snap-margin": lambda *at, **of: 1.02 * scan_snap.margin_time(*at, **of),
    "scan-snap-snapping-time": lambda **of: 1.01 * scan_snap.deciding_time(**of),
    "scan-snap-snapping-order": lambda *at: 100 * scan_snap.snapping_time(*at),
    "scan-snap-snapping": _late_b,
    "scan-snap-both-rates": lambda t, factor: 1.01 * scan_snap.rescaled_time(t, factor),
    "scan-snap-sparser": lambda balanced: balanced.densest + 0.2,
    "scan-snap-decoder-rate": lambda *at, **of: (
        1.006 * scan_snap.late_decoder_rate_effect(*at, **of)
    ),
    "scan-snap-decoder-rate-turn": lambda **of: 1.02 * scan_snap.decoder_rate_turn(**of),
    "scan-snap-finite-length": lambda bias, length, other: bias * (length / other) ** 0.98,
    "scan-snap-sampled": lambda balanced, t, **rates: 1.01 * balanced.b_at(t, **rates),
}


def _smaller_radius(kappa, lipschitz_a, lipschitz_b, lipschitz_c, radius, norm_b, norm_c):
    return galore.varying_rate(
        kappa, lipschitz_a, lipschitz_b, lipschitz_c, 0.97 * radius, norm_b, norm_c
    )


def _far_below(*arguments):
    return galore.varying_rate(*arguments) - 3


BROKEN |= {
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
