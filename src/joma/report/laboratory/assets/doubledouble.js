/* Numbers of about 31 digits as pairs [high, low] of doubles (Dekker 1971, Knuth).

Next to a blow-up and within the sudden growth of Eqn 6 a result depends on digits of its argument
that a double does not have. The Python package uses long double there; JavaScript has none. */

const SPLIT = 134217729; // 2^27 + 1
const LN2 = [0.6931471805599453, 2.3190468138462996e-17];
export const DD_PI = [3.141592653589793, 1.2246467991473532e-16];

/** The exact sum of two doubles. */
function twoSum(a, b) {
  const s = a + b;
  const t = s - a;
  return [s, a - (s - t) + (b - t)];
}

/** The exact product of two doubles below 1e300. */
function twoProduct(a, b) {
  const p = a * b;
  let t = SPLIT * a;
  const ah = t - (t - a);
  const al = a - ah;
  t = SPLIT * b;
  const bh = t - (t - b);
  const bl = b - bh;
  return [p, ah * bh - p + ah * bl + al * bh + al * bl];
}

export const dd = (x) => (typeof x === "number" ? [x, 0] : x);
export const ddNumber = (a) => a[0] + a[1];
export const ddNegative = (a) => [-a[0], -a[1]];

export function ddAdd(a, b) {
  const s = twoSum(a[0], b[0]);
  const t = twoSum(a[1], b[1]);
  const u = twoSum(s[0], s[1] + t[0]);
  return twoSum(u[0], u[1] + t[1]);
}

export const ddSubtract = (a, b) => ddAdd(a, ddNegative(b));

export function ddMultiply(a, b) {
  const p = twoProduct(a[0], b[0]);
  return twoSum(p[0], p[1] + (a[0] * b[1] + a[1] * b[0]));
}

export function ddDivide(a, b) {
  const first = a[0] / b[0];
  let rest = ddSubtract(a, ddMultiply([first, 0], b));
  const second = rest[0] / b[0];
  rest = ddSubtract(rest, ddMultiply([second, 0], b));
  return ddAdd(twoSum(first, second), [rest[0] / b[0], 0]);
}

export function ddSqrt(a) {
  if (a[0] <= 0) return [0, 0];
  const root = Math.sqrt(a[0]);
  const rest = ddSubtract(a, twoProduct(root, root));
  return twoSum(root, rest[0] / (2 * root));
}

/** e^x for |x| < 700. */
export function ddExp(a) {
  const k = Math.round(a[0] / LN2[0]);
  const rest = ddSubtract(a, ddMultiply([k, 0], LN2));
  const r = [rest[0] / 256, rest[1] / 256]; // |r| < 0.0014
  let term = r;
  let sum = r; // e^r - 1, of which no digit is lost
  for (let n = 2; n <= 10; n++) {
    term = ddMultiply(term, ddMultiply(r, RECIPROCALS[n]));
    sum = ddAdd(sum, term);
  }
  // (e^r - 1) to (e^{2r} - 1), eight times.
  for (let n = 0; n < 8; n++) sum = ddAdd([2 * sum[0], 2 * sum[1]], ddMultiply(sum, sum));
  const value = ddAdd([1, 0], sum);
  const half = Math.trunc(k / 2);
  const scale = [2 ** half, 2 ** (k - half)];
  return [value[0] * scale[0] * scale[1], value[1] * scale[0] * scale[1]];
}

const RECIPROCALS = Array.from({ length: 33 }, (_, n) => (n ? ddDivide([1, 0], [n, 0]) : [0, 0]));
export const DD_SQRT_2_OVER_PI = ddSqrt(ddDivide([2, 0], DD_PI));
export const DD_TWO_OVER_SQRT_PI = ddDivide([2, 0], ddSqrt(DD_PI));
