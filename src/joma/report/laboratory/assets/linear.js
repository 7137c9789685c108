/* Theorem 2: v' = Δ exp(v²/2 + c)/A in closed form, its blow-up, and many hidden nodes. */

import {
  DD_SQRT_2_OVER_PI, dd, ddAdd, ddDivide, ddExp, ddMultiply, ddNumber, ddSqrt, ddSubtract,
} from "./doubledouble.js";
import { SQRT_2, ddErfcOfScaled, erf, erfcinvOfLog, erfinv } from "./special.js";

/** Any rates and temperature as a problem at unit rates: saliency and scale, v = scale · v'. */
export function unitRates(delta, { etaW = 1, etaZ = 1, tau = 1 } = {}) {
  const root = Math.sqrt(etaZ / etaW) / tau;
  return { delta: delta.map((d) => root * etaW * d), scale: 1 / root };
}

/**
 * One token of Theorem 2.
 * @param delta Δ, a number, or a pair of doubles where it is a length.
 * @param initial v(0), at most 36 in size.
 */
function token(delta, initial, logOffset, normalizer) {
  const sign = ddNumber(dd(delta)) < 0 ? -1 : 1;
  const size = ddMultiply([sign, 0], dd(delta));
  const start = sign * initial; // v(0) in the direction of motion
  const tail = start === 0 ? [1, 0] : ddErfcOfScaled(start); // erfc(|start|/√2)
  const total = start < 0 ? ddSubtract([2, 0], tail) : tail;
  const growth = logOffset === 0 ? [1, 0] : ddExp([logOffset, 0]);
  const rate = ddDivide(ddMultiply(DD_SQRT_2_OVER_PI, growth), dd(normalizer));
  const speed = ddMultiply(size, rate); // of erf(v/√2)
  const time = size[0] === 0 ? [Infinity, 0] : ddDivide(total, speed);
  return { sign, start, tail, total, speed, time, initial };
}

/** The tokens of Theorem 2; `initial`, `logOffset` and `normalizer` are numbers or arrays. */
export function tokens(delta, { initial = 0, logOffset = 0, normalizer = 1 } = {}) {
  const pick = (value, l) => (Array.isArray(value) ? value[l] : value);
  return delta.map((d, l) => token(d, pick(initial, l), pick(logOffset, l), pick(normalizer, l)));
}

/** v of one token at time t, a number or a pair of doubles; ±inf from its own blow-up on. */
export function weightAt(one, t) {
  const when = dd(t);
  if (when[0] === 0 || one.speed[0] === 0) return one.initial;
  const covered = ddMultiply(one.speed, when);
  return one.sign * after(one, covered, ddSubtract(one.total, covered));
}

/** √2 erfinv(erf(start/√2) + covered) in the form in which nothing cancels. */
function after(one, covered, left) {
  if (left[0] <= 0) return Infinity;
  if (left[0] < 0.5) return SQRT_2 * erfcinvOfLog(Math.log(ddNumber(left)));
  if (left[0] < 1.5) return SQRT_2 * erfinv(ddNumber(ddSubtract([1, 0], left)));
  return -SQRT_2 * erfcinvOfLog(Math.log(ddNumber(ddAdd(one.tail, covered))));
}

/** v(t) for every time and token: an array of times of arrays of tokens. */
export function weights(delta, times, options) {
  const all = tokens(delta, options);
  return times.map((t) => all.map((one) => weightAt(one, t)));
}

/** The time at which each token alone reaches infinity. */
export const blowupTimes = (delta, options) =>
  tokens(delta, options).map((one) => ddNumber(one.time));

/** The first blow-up as a pair of doubles, with the token that makes it; null where none moves. */
export function firstBlowup(all) {
  let best = null;
  all.forEach((one, l) => {
    const earlier = best === null || ddNumber(ddSubtract(one.time, best.time)) < 0;
    if (one.speed[0] !== 0 && earlier) best = { time: one.time, token: l };
  });
  return best;
}

/** What the weights converge to as the winner diverges. */
export const limits = (delta, options) => limitsOf(tokens(delta, options));

/** The same of tokens, or of rows. */
export function limitsOf(all) {
  const first = firstBlowup(all);
  return all.map((one) => {
    if (first === null || one.speed[0] === 0) return one.initial;
    const late = ddSubtract(one.time, first.time);
    if (ddNumber(late) <= 1e-19 * first.time[0]) return one.sign * Infinity;
    const covered = ddMultiply(one.speed, first.time);
    return one.sign * after(one, covered, ddMultiply(one.speed, late));
  });
}

/** erf(v/√2)/Δ, equal for all tokens that start at zero; NaN where Δ is 0. */
export const conservedRatio = (delta, v) => (delta === 0 ? NaN : erf(v / SQRT_2) / delta);

/** erf(v/2)/Δ, as printed. */
export const printedRatio = (delta, v) => (delta === 0 ? NaN : erf(v / 2) / delta);

/** What the printed law makes of a token's weight, given that of the winner. */
export function printedWeight(delta, winnerDelta, winnerV) {
  return 2 * erfinv(Math.min(Math.max((delta / winnerDelta) * erf(winnerV / 2), -1), 1));
}

/** The length of a row to more digits than a double has: near a blow-up they decide. */
function rowLength(row) {
  let sum = [0, 0];
  for (const x of row) sum = ddAdd(sum, ddMultiply(dd(x), dd(x)));
  return ddSqrt(sum);
}

/** Theorem 2 for K nodes from zero: directions of the rows and the tokens of their lengths. */
export function rows(delta, { normalizer = 1, logOffset = 0 } = {}) {
  const lengths = delta.map(rowLength);
  const directions = delta.map((row, l) => {
    const length = ddNumber(lengths[l]);
    return row.map((x) => (length === 0 ? 0 : x / length));
  });
  return { directions, tokens: tokens(lengths, { normalizer, logOffset }) };
}

/** Lengths of the rows of V(t). */
export const rowLengths = (problem, t) => problem.tokens.map((one) => weightAt(one, t));

/** V(t), an array of rows. */
export function weightsMulti(delta, t, options) {
  const problem = rows(delta, options);
  const s = rowLengths(problem, t);
  return problem.directions.map((row, l) => row.map((x) => x * s[l]));
}

/** The stable ranks of V and of its velocity at time t. */
export function stableRanks(problem, delta, t, s = rowLengths(problem, t)) {
  if (!s.every(Number.isFinite)) return { weights: NaN, velocity: NaN };
  const largest = Math.max(...s.map((x) => (x * x) / 2));
  const v = problem.directions.map((row, l) => row.map((x) => x * s[l]));
  const velocity = delta.map((row, l) => row.map((x) => x * Math.exp((s[l] * s[l]) / 2 - largest)));
  const still = s.every((x) => x === 0);
  return { weights: stableRank(still ? delta : v), velocity: stableRank(velocity) };
}

/** ‖V‖²_F / ‖V‖²: squared singular values by Jacobi's method on the smaller Gram matrix. */
export function stableRank(matrix) {
  let peak = 0;
  for (const row of matrix) for (const x of row) peak = Math.max(peak, Math.abs(x));
  if (!(peak > 0)) return NaN;
  const scaled = matrix.map((row) => row.map((x) => x / peak));
  const columns = scaled[0].length;
  const gram = Array.from({ length: columns }, (_, i) =>
    Array.from({ length: columns }, (_, j) => scaled.reduce((sum, row) => sum + row[i] * row[j], 0)));
  const trace = gram.reduce((sum, row, i) => sum + row[i], 0);
  return trace / largestEigenvalue(gram);
}

function largestEigenvalue(a) {
  const n = a.length;
  for (let sweep = 0; sweep < 30; sweep++) {
    let off = 0;
    for (let p = 0; p < n; p++) {
      for (let q = p + 1; q < n; q++) {
        if (a[p][q] === 0) continue;
        off = Math.max(off, Math.abs(a[p][q]));
        const theta = (a[q][q] - a[p][p]) / (2 * a[p][q]);
        const t = Math.sign(theta || 1) / (Math.abs(theta) + Math.hypot(theta, 1));
        const c = 1 / Math.hypot(t, 1);
        const s = t * c;
        for (let k = 0; k < n; k++) {
          [a[k][p], a[k][q]] = [c * a[k][p] - s * a[k][q], s * a[k][p] + c * a[k][q]];
        }
        for (let k = 0; k < n; k++) {
          [a[p][k], a[q][k]] = [c * a[p][k] - s * a[q][k], s * a[p][k] + c * a[q][k]];
        }
      }
    }
    if (off < 1e-17) break;
  }
  return Math.max(...a.map((row, i) => row[i]));
}
