/* Eqn 6, v' = (μ - v) exp(v²/2) from v(0) = 0, solved by inverting F. With y = ln 1/δ, δ = 1 - v/μ,

     t = F(y) = e^{-μ²/2} y + H(1 - e^{-y}),   H(r) = ∫₀ʳ (e^{-μ²x²/2} - e^{-μ²/2})/(1-x) dx. */

import {
  dd, ddAdd, ddDivide, ddExp, ddMultiply, ddNegative, ddNumber, ddSubtract,
} from "./doubledouble.js";
import { gaussLegendre } from "./special.js";

export const LARGEST_MU = 8;
export const OFFSET_BOUND = 0.8643247772318803; // the supremum of H, at μ = 1.872
const SETTLED = 42; // y from which H(1 - e^{-y}) is H(1) to the last digit of a double

const RULE = gaussLegendre();
const NODES = RULE.nodes.map(ddNumber);
const NODE_WEIGHTS = RULE.weights.map(ddNumber);

/** H(r, μ) of Theorem 4, for μ up to 8, by 32 nodes of Gauss and Legendre on one or two panels. */
export function offset(r, mu) {
  const half = (mu * mu) / 2;
  const panels = Math.abs(mu) > 6 ? 2 : 1;
  const width = r / panels;
  let sum = 0;
  for (let panel = 0; panel < panels; panel++) {
    for (let n = 0; n < NODES.length; n++) {
      const x = width * (panel + NODES[n]);
      const left = 1 - x;
      if (left <= 0) continue;
      sum += (NODE_WEIGHTS[n] * -Math.exp(-half * x * x) * Math.expm1(-half * left * (1 + x))) / left;
    }
  }
  return width * sum;
}

/** H to about 30 digits. */
function ddOffset(r, mu) {
  const half = ddMultiply(dd(mu), [mu / 2, 0]);
  const end = ddExp(ddNegative(half));
  const panels = Math.abs(mu) > 6 ? 2 : 1;
  const width = ddDivide(r, [panels, 0]);
  let sum = [0, 0];
  for (let panel = 0; panel < panels; panel++) {
    for (let n = 0; n < NODES.length; n++) {
      const x = ddMultiply(width, ddAdd([panel, 0], RULE.nodes[n]));
      const left = ddSubtract([1, 0], x);
      const value = ddSubtract(ddExp(ddNegative(ddMultiply(half, ddMultiply(x, x)))), end);
      sum = ddAdd(sum, ddMultiply(RULE.weights[n], ddDivide(value, left)));
    }
  }
  return ddMultiply(width, sum);
}

/** F(r, μ), the time at which v/μ reaches r < 1. */
export const elapsed = (r, mu) => -Math.exp((-mu * mu) / 2) * Math.log1p(-r) + offset(r, mu);

const OFFSETS = new Map();

/** R(μ) = H(1, μ) to about 30 digits, kept for the sliders' next move. */
function ddResidualOffset(mu) {
  if (!OFFSETS.has(mu)) {
    if (OFFSETS.size > 500) OFFSETS.clear();
    OFFSETS.set(mu, ddOffset([1, 0], mu));
  }
  return OFFSETS.get(mu);
}

/** R(μ) = H(1, μ), with which δ → exp(-e^{μ²/2}(t - R(μ))). */
export const residualOffset = (mu) => ddNumber(ddResidualOffset(Math.abs(mu)));

const slopeAt = (y, mu) => Math.exp(-((mu * Math.expm1(-y)) ** 2) / 2);

/** y = ln 1/δ at the time t ≥ 0, from a lower bound of it. */
function solve(mu, t, below) {
  if (t === 0 || mu === 0) return t;
  const growth = Math.exp((mu * mu) / 2);
  const late = growth * ddNumber(ddSubtract([t, 0], ddResidualOffset(mu)));
  if (late > SETTLED) return late;
  let y = Math.max(t, late, below);
  let slope = slopeAt(y, mu);
  for (let n = 0; n < 200; n++) {
    // F is concave: Newton's method from below never overshoots, but for rounding.
    const step = (t - (y / growth + offset(-Math.expm1(-y), mu))) / slope;
    y = Math.max(y + step, t);
    slope = slopeAt(y, mu);
    if (Math.abs(step) <= 1e-8 * y) break;
  }
  if (1e-15 * t <= 1e-12 * y * slope) return y;
  // The error of F would be seen in y: one more step, with F to 30 digits.
  const r = ddSubtract([1, 0], ddExp([-y, 0]));
  const exact = ddAdd(
    ddMultiply(ddExp(ddNegative(ddMultiply(dd(mu), [mu / 2, 0]))), [y, 0]), ddOffset(r, mu));
  return y + ddNumber(ddSubtract([t, 0], exact)) / slope;
}

/** ln δ at increasing times t for one μ, right also where δ is below any double. */
export function logResiduals(mu, times) {
  const size = Math.abs(mu);
  let y = 0;
  let before = 0;
  return times.map((t) => {
    y = solve(size, t, y + (t - before) / slopeAt(y, size) * (1 - 1e-12));
    before = t;
    return -y;
  });
}

/** v(t) at increasing times for one μ. */
export const eqn6Weights = (mu, times) => logResiduals(mu, times).map((y) => -mu * Math.expm1(y));

/** The entropy of softmax(scale · v²) in nats. */
export function attentionEntropy(v, scale = 1) {
  const logits = v.map((x) => scale * x * x);
  const peak = Math.max(...logits);
  const shares = logits.map((a) => Math.exp(a - peak));
  const total = shares.reduce((a, b) => a + b, 0);
  const mean = shares.reduce((sum, p, l) => sum + p * (logits[l] - peak), 0) / total;
  return Math.log(total) - mean;
}

/** Theorem 4's closing line, corrected: the ln δ from which the error of Eqn 7 is below 1. */
export const settledThreshold = (mu) => -OFFSET_BOUND * Math.exp((mu * mu) / 2);

/** The same line as printed. */
export const printedThreshold = (mu) => -(Math.sqrt(2 * Math.PI) + 2) * Math.exp(-mu * mu);
