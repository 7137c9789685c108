/* The error function, its complement and their inverses, in doubles and in pairs of doubles. */

import {
  DD_PI, DD_TWO_OVER_SQRT_PI, dd, ddAdd, ddDivide, ddExp, ddMultiply, ddNegative, ddSqrt,
  ddSubtract,
} from "./doubledouble.js";

export const SQRT_2 = Math.SQRT2;
const TWO_OVER_SQRT_PI = 2 / Math.sqrt(Math.PI);

/* erfc by the trapezoidal rule for its Gaussian integral with the term of its pole (Chiarella and
Reichel, 1968): all terms are positive. A step of 1/2 leaves an error of 1e-17, one of 3/8 3e-31. */
const STEP = 0.5;
const SQUARES = Array.from({ length: 13 }, (_, n) => ((n + 1) * STEP) ** 2);
const GAUSSIANS = SQUARES.map((x) => 2 * Math.exp(-x));
const DD_STEP = 0.375;
const DD_SQUARES = Array.from({ length: 23 }, (_, n) => ((n + 1) * DD_STEP) ** 2);
const DD_GAUSSIANS = DD_SQUARES.map((x) => ddMultiply([2, 0], ddExp([-x, 0])));

/** erf for |x| < 1 by its series, exact in relative terms. */
function erfSeries(x) {
  const square = 2 * x * x;
  let term = x;
  let sum = x;
  for (let n = 1; n < 40 && Math.abs(term) > 1e-18 * Math.abs(sum); n++) {
    term *= square / (2 * n + 1);
    sum += term;
  }
  return TWO_OVER_SQRT_PI * Math.exp(-x * x) * sum;
}

/** e^{x²} erfc(x) for x ≥ 0. */
export function erfcx(x) {
  if (x < 0.5) return Math.exp(x * x) * (1 - erfSeries(x));
  const square = x * x;
  let sum = 1 / square;
  for (let n = 0; n < SQUARES.length; n++) sum += GAUSSIANS[n] / (SQUARES[n] + square);
  const value = ((STEP * x) / Math.PI) * sum;
  const turns = (2 * Math.PI * x) / STEP;
  return x > Math.PI / STEP ? value : value - 2 * Math.exp(square - turns) / -Math.expm1(-turns);
}

export function erf(x) {
  if (Math.abs(x) < 0.5) return erfSeries(x);
  return Math.sign(x) * (1 - erfc(Math.abs(x)));
}

export function erfc(x) {
  if (x < 0.5) return x < -0.5 ? 2 - erfc(-x) : 1 - erfSeries(x);
  return Math.exp(-x * x) * erfcx(x);
}

/** erf(b) - erf(a), exact in relative terms also where both are close to 1 or to -1. */
export function erfDifference(a, b) {
  if (a > 0.5 && b > 0.5) return erfc(a) - erfc(b);
  if (a < -0.5 && b < -0.5) return erfc(-b) - erfc(-a);
  return erf(b) - erf(a);
}

/** The x ≥ 0 with ln erfc(x) = logarithm, for erfc(x) at most 0.6 and as small as one likes. */
export function erfcinvOfLog(logarithm) {
  if (logarithm === -Infinity) return Infinity;
  const size = -logarithm;
  let x = Math.sqrt(Math.max(size - 0.5 * Math.log(Math.PI * Math.max(size, 0.4)), 0.05));
  // Halley's method, of third order: the step after a small one is below rounding.
  for (let n = 0; n < 12; n++) {
    const scaled = erfcx(x);
    const slope = TWO_OVER_SQRT_PI / scaled;
    const miss = Math.log(scaled) - x * x - logarithm;
    const step = miss / slope / (1 + (miss * (slope - 2 * x)) / (2 * slope));
    x = Math.max(x + step, 0.2);
    if (Math.abs(step) < 1e-6 * x) break;
  }
  return x;
}

/** The inverse of erf, exact in relative terms also for tiny arguments; ±inf at ±1. */
export function erfinv(y) {
  const size = Math.abs(y);
  if (!(size <= 1)) return NaN;
  if (size > 0.5) return Math.sign(y) * erfcinvOfLog(Math.log1p(-size));
  let x = (size / TWO_OVER_SQRT_PI) * (1 + (Math.PI / 12) * size * size);
  for (let n = 0; n < 8; n++) {
    const step = ((size - erfSeries(x)) * Math.exp(x * x)) / TWO_OVER_SQRT_PI;
    x += step;
    if (Math.abs(step) <= 1e-9 * x) break;
  }
  return Math.sign(y) * x;
}

/** erfc(|u|/√2) to about 30 digits, exact in relative terms, for |u| up to 36. */
export function ddErfcOfScaled(u) {
  const square = ddMultiply(dd(u), [u / 2, 0]); // x² = u²/2
  const x = ddSqrt(square);
  if (x[0] < 0.7) return ddSubtract([1, 0], ddErfSeries(x, square));
  const pole = x[0] > Math.PI / DD_STEP ? [0, 0] : poleTerm(x);
  let sum = ddDivide([1, 0], square);
  for (let n = 0; n < DD_SQUARES.length; n++) {
    sum = ddAdd(sum, ddDivide(DD_GAUSSIANS[n], ddAdd(square, [DD_SQUARES[n], 0])));
  }
  const factor = ddDivide(ddMultiply([DD_STEP, 0], ddMultiply(x, ddExp(ddNegative(square)))), DD_PI);
  return ddSubtract(ddMultiply(factor, sum), pole);
}

function poleTerm(x) {
  const turns = ddDivide(ddMultiply(ddMultiply([2, 0], DD_PI), x), [DD_STEP, 0]);
  return ddDivide([2, 0], ddSubtract(ddExp(turns), [1, 0]));
}

function ddErfSeries(x, square) {
  let term = x;
  let sum = x;
  for (let n = 1; n < 40; n++) {
    term = ddMultiply(term, ddDivide([2 * square[0], 2 * square[1]], [2 * n + 1, 0]));
    sum = ddAdd(sum, term);
  }
  return ddMultiply(ddMultiply(DD_TWO_OVER_SQRT_PI, ddExp(ddNegative(square))), sum);
}

/** 32 nodes and weights of Gauss and Legendre on [0, 1], to about 30 digits. */
export function gaussLegendre() {
  const count = 32;
  const nodes = [];
  const weights = [];
  for (let k = 1; k <= count; k++) {
    let x = [Math.cos((Math.PI * (k - 0.25)) / (count + 0.5)), 0];
    let slope = [1, 0];
    for (let pass = 0; pass < 5; pass++) {
      let before = [1, 0];
      let now = x;
      for (let n = 2; n <= count; n++) {
        const next = ddSubtract(
          ddMultiply([2 * n - 1, 0], ddMultiply(x, now)), ddMultiply([n - 1, 0], before));
        [before, now] = [now, ddDivide(next, [n, 0])];
      }
      const rest = ddSubtract([1, 0], ddMultiply(x, x));
      slope = ddDivide(ddMultiply([count, 0], ddSubtract(before, ddMultiply(x, now))), rest);
      x = ddSubtract(x, ddDivide(now, slope));
    }
    const rest = ddSubtract([1, 0], ddMultiply(x, x));
    nodes.push(ddMultiply([0.5, 0], ddAdd([1, 0], x)));
    weights.push(ddDivide([1, 0], ddMultiply(rest, ddMultiply(slope, slope))));
  }
  return { nodes, weights };
}
