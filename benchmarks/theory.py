"""Closed forms against time stepping: 10⁶ components of Theorem 2 and of Eqn 6 at one time.

    python -m benchmarks.theory [--components 1000000] [--json]

The peer is `scipy.integrate.solve_ivp` at rtol 1e-8, in the fastest of its methods that applies:
called for each component (timed on a sample, scaled) and once for all of them. Errors are against
mpmath at the same float t.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import scipy
from scipy import integrate

from joma.theory import linear, nonlinear

SCALAR_SAMPLE = 200
ERROR_SAMPLE = 100


def best_of(repeats: int, call: Callable[[], Any]) -> tuple[float, Any]:
    """The shortest of several times, and the last result."""
    times, result = [], None
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - start)
    return min(times), result


def step(right_side: Any, t: float, size: int, method: Any) -> np.ndarray:
    """The state at t by time stepping from zero."""
    solution: Any = integrate.solve_ivp(
        right_side, (0, t), np.zeros(size), method, rtol=1e-8, atol=1e-10, t_eval=[t]
    )
    return solution.y[:, -1]


def theorem2(components: int, rng: np.random.Generator) -> dict[str, Any]:
    delta = rng.uniform(-1, 1, size=components)
    t = float(0.9 * linear.blowup_time(delta).min())

    def right_side(parameters: np.ndarray) -> Any:
        return lambda _, v: parameters * np.exp(v**2 / 2)

    def exact(parameter: float) -> float:
        goal = mpmath.sqrt(2 / mpmath.pi) * mpmath.mpf(parameter) * mpmath.mpf(t)
        return float(mpmath.sqrt(2) * mpmath.erfinv(goal))

    return compare("Theorem 2", delta, t, linear.weights, right_side, exact)


def equation6(components: int, rng: np.random.Generator) -> dict[str, Any]:
    mu = rng.uniform(-3, 3, size=components)
    t = 1.0

    def right_side(parameters: np.ndarray) -> Any:
        # A trial step too long may overflow; the solver then shortens it.
        return lambda _, v: (parameters - v) * np.exp(np.minimum(v**2 / 2, 50.0))

    def exact(parameter: float) -> float:
        half = mpmath.mpf(parameter) ** 2 / 2

        def elapsed(y: Any) -> Any:
            return mpmath.quad(
                lambda x: mpmath.exp(-half * (1 - mpmath.exp(-x)) ** 2),
                mpmath.linspace(0, y, 4 + int(y / 10)),
            )

        y = mpmath.mpf(-float(nonlinear.log_residual([parameter], t)[0]))
        for _ in range(2):
            slope = mpmath.exp(-half * (1 - mpmath.exp(-y)) ** 2)
            y += (mpmath.mpf(t) - elapsed(y)) / slope
        return float(mpmath.mpf(parameter) * (1 - mpmath.exp(-y)))

    return compare("Eqn 6", mu, t, nonlinear.weights, right_side, exact)


def compare(
    name: str, parameters: np.ndarray, t: float, ours: Any, right_side: Any, exact: Any
) -> dict[str, Any]:
    """Times the closed form, scalar solves and one vectorised solve, and measures their errors."""
    seconds, closed = best_of(5, lambda: ours(parameters, t))
    sample = parameters[:SCALAR_SAMPLE]
    scalar = {
        method: best_of(
            1, lambda m=method: [step(right_side(sample[i : i + 1]), t, 1, m) for i in range(200)]
        )
        for method in ("RK45", "DOP853", "LSODA")
    }
    fastest = min(scalar, key=lambda method: scalar[method][0])
    per_component = scalar[fastest][0] / SCALAR_SAMPLE
    vectorised = {
        method: best_of(3, lambda m=method: step(right_side(parameters), t, parameters.size, m))
        for method in ("RK45", "DOP853")
    }
    quickest = min(vectorised, key=lambda method: vectorised[method][0])
    with mpmath.workdps(30):
        truth = np.array([exact(float(p)) for p in parameters[:ERROR_SAMPLE]])

    def error(values: Any) -> float:
        return float(np.max(np.abs(np.ravel(values)[:ERROR_SAMPLE] / truth - 1)))

    return {
        "what": name,
        "components": parameters.size,
        "t": t,
        "closed_form_s": seconds,
        "closed_form_error": error(closed),
        "scalar_method": fastest,
        "scalar_s": per_component * parameters.size,
        "scalar_error": error(scalar[fastest][1]),
        "vectorised_method": quickest,
        "vectorised_s": vectorised[quickest][0],
        "vectorised_error": error(vectorised[quickest][1]),
        "ratio_scalar": per_component * parameters.size / seconds,
        "ratio_vectorised": vectorised[quickest][0] / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="closed forms against time stepping")
    parser.add_argument("--components", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    results = [theorem2(arguments.components, rng), equation6(arguments.components, rng)]
    if arguments.json:
        print(json.dumps(results, indent=1))
        return
    print(
        f"Python {platform.python_version()}, numpy {np.__version__}, scipy {scipy.__version__}, "
        f"{platform.machine()}, {platform.system()}"
    )
    print("| what | closed form | scalar solves | one vectorised solve | ratios | largest errors |")
    print("|---|---|---|---|---|---|")
    for r in results:
        print(
            f"| {r['what']}, {r['components']:,} components, t = {r['t']:.4g} "
            f"| {r['closed_form_s']:.3f} s "
            f"| {r['scalar_s']:,.0f} s ({r['scalar_method']}) "
            f"| {r['vectorised_s']:.1f} s ({r['vectorised_method']}) "
            f"| {r['ratio_scalar']:,.0f}×, {r['ratio_vectorised']:.0f}× "
            f"| {r['closed_form_error']:.0e}, {r['scalar_error']:.0e}, "
            f"{r['vectorised_error']:.0e} |"
        )


if __name__ == "__main__":
    main()
