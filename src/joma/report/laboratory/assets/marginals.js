/* Isotropic clusters seen along a line (Lemma 1) and where a node rests between two (Theorem 3). */

import { erfc } from "./special.js";

/** Student's t with 3 or 5 degrees of freedom, whose θ₁ is elementary. */
function studentT(df) {
  const root = Math.sqrt(df);
  const share = (a) => a / (1 + a * a) * (df === 3 ? 1 : 1 + 2 / (3 * (1 + a * a)));
  const constant = df === 3 ? 2 / (Math.PI * root) : 8 / (3 * Math.PI * root);
  const tail = (a) => (Math.atan2(1, a) - share(a)) / Math.PI; // P[u > a√df] for a ≥ 0
  return {
    theta1: (s) => (s < 0 ? tail(-s / root) : 1 - tail(s / root)),
    theta2: (s) => (df / (df - 1)) * constant * (1 + (s * s) / df) ** (-(df - 1) / 2),
    draw: (next) => {
      let square = 0;
      for (let n = 0; n < df; n++) square += gaussian(next) ** 2;
      return gaussian(next) / Math.sqrt(square / df);
    },
  };
}

const gaussian = (next) => Math.sqrt(-2 * Math.log(1 - next())) * Math.cos(2 * Math.PI * next());

/** θ₁(s) = P[u > -s], θ₂(s) = E[u; u > -s], F = θ₂ + s θ₁, and a draw of u. */
export const MARGINALS = {
  t3: studentT(3),
  t5: studentT(5),
  laplace: {
    theta1: (s) => (s < 0 ? Math.exp(s) / 2 : 1 - Math.exp(-s) / 2),
    theta2: (s) => ((1 + Math.abs(s)) * Math.exp(-Math.abs(s))) / 2,
    firstIntegral: (s) => Math.max(s, 0) + Math.exp(-Math.abs(s)) / 2,
    draw: (next) => (next() < 0.5 ? -1 : 1) * -Math.log(1 - next()),
  },
  gaussian: {
    theta1: (s) => erfc(-s / Math.SQRT2) / 2,
    theta2: (s) => Math.exp((-s * s) / 2) / Math.sqrt(2 * Math.PI),
    draw: gaussian,
  },
  logistic: {
    theta1: (s) => (s >= 0 ? 1 / (1 + Math.exp(-s)) : Math.exp(s) / (1 + Math.exp(s))),
    theta2: (s) => MARGINALS.logistic.firstIntegral(s) - s * MARGINALS.logistic.theta1(s),
    firstIntegral: (s) => Math.max(s, 0) + Math.log1p(Math.exp(-Math.abs(s))),
    draw: (next) => {
      const p = next() || 0.5;
      return Math.log(p) - Math.log1p(-p);
    },
  },
};

/** F(s) = E[max(u + s, 0)]. */
export function firstIntegral(name, s) {
  const one = MARGINALS[name];
  return one.firstIntegral ? one.firstIntegral(s) : one.theta2(s) + s * one.theta1(s);
}

/** F/θ₁ = E[u + s | u > -s]. */
export const meanResidual = (name, s) => firstIntegral(name, s) / MARGINALS[name].theta1(s);

/** Lemma 1: E[ψ(v·x + ξ)] for a cluster at distance x̄ along v. */
export const activity = (name, length, mean, bias) =>
  MARGINALS[name].theta1(mean + bias / length);

/** Lemma 1 as printed: θ₁(r)/‖v‖, r = v·x̄ + ξ. */
export const printedActivity = (name, length, mean, bias) =>
  MARGINALS[name].theta1(length * mean + bias) / length;

/** Theorem 3: where a node rests between equal clusters at this distance; null where nowhere. */
export function restPoint(name, distance) {
  if (name === "gaussian" || name === "logistic") return null; // F/θ₁ rises throughout
  if (name === "laplace") return { minus: -distance, plus: 0, ratio: Math.exp(distance) };
  let [low, high] = [-(20 + 4 * distance), 1];
  const gap = (s) => Math.log(meanResidual(name, s + distance) / meanResidual(name, s));
  for (let n = 0; n < 80; n++) {
    const middle = (low + high) / 2;
    if (gap(middle) < 0) low = middle;
    else high = middle;
  }
  const { theta1 } = MARGINALS[name];
  return { minus: low, plus: low + distance, ratio: theta1(low + distance) / theta1(low) };
}
