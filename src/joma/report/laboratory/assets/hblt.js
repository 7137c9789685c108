/* Hierarchical binary latent trees: how often two tokens occur together, derived and printed. */

const xlogy = (x, y) => (x === 0 ? 0 : x * Math.log(y));

/** ρ₀ = Σ p(k)(2P[y=0|k] - 1). */
export function rootUncertainty(classProbs, offProbs) {
  const sum = classProbs.reduce((total, p, k) => total + p * (2 * offProbs[k] - 1), 0);
  return Math.min(Math.max(sum, -1), 1);
}

/** ρ₀ as printed, Σ p(k)P[y=0|k]. */
export function printedRootUncertainty(classProbs, offProbs) {
  const sum = classProbs.reduce((total, p, k) => total + p * offProbs[k], 0);
  return Math.min(Math.max(sum, 0), 1);
}

/** Theorem 5: P[y_l=1 | y_m=1] for 0 ≤ H ≤ L - 1; NaN where the token never occurs. */
export function cooccurrence(height, depth, rho, rho0) {
  const size = Math.abs(rho);
  const size0 = Math.abs(rho0);
  const logPower = xlogy(depth - 1, size);
  const sameSign = depth % 2 === 1 ? rho0 > 0 : rho * rho0 > 0;
  const twice = sameSign
    ? 1 - size0 - size0 * Math.expm1(logPower)
    : 1 + size0 * Math.exp(logPower);
  return twice === 0 ? NaN : 1 + Math.expm1(xlogy(2 * height, size)) / (2 * twice);
}

/** Eqn 8 to first order in ε, ρ = ρ₀ = 1 - ε. */
export const cooccurrenceNearOne = (height, depth, epsilon) =>
  1 - height / depth + ((height * (2 * height - depth)) / (2 * depth)) * epsilon;

/** Numbers from 0 to 1 from a seed (a linear congruence with mixed output). */
export function randomNumbers(seed) {
  let state = (Math.imul(seed, 2654435761) ^ 0x9e3779b9) >>> 0;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    let x = state ^ (state >>> 16);
    x = Math.imul(x, 0x45d9f3b);
    x ^= x >>> 15;
    x = Math.imul(x, 0x45d9f3b);
    return ((x ^ (x >>> 16)) >>> 0) / 4294967296;
  };
}

/** Draws two tokens of a tree again and again: for every height, how often m was on, and both. */
export class TreeSampler {
  constructor({ depth, rho, classProbs, offProbs, seed }) {
    Object.assign(this, { depth, rho, classProbs, offProbs, draws: 0 });
    this.next = randomNumbers(seed);
    this.on = new Array(depth).fill(0);
    this.both = new Array(depth).fill(0);
  }

  /** Draw `count` trees, each with token m and one token for every height of a common ancestor. */
  draw(count) {
    const { depth, rho, next } = this;
    const same = (1 + rho) / 2;
    const path = new Array(depth);
    for (let n = 0; n < count; n++) {
      let at = next();
      let k = 0;
      while (k < this.classProbs.length - 1 && at >= this.classProbs[k]) at -= this.classProbs[k++];
      path[depth - 1] = next() >= this.offProbs[k] ? 1 : 0;
      for (let h = depth - 2; h >= 0; h--) path[h] = next() < same ? path[h + 1] : 1 - path[h + 1];
      if (path[0] === 1) {
        for (let height = 0; height < depth; height++) {
          let value = path[height];
          for (let h = height; h > 0; h--) if (next() >= same) value = 1 - value;
          this.on[height]++;
          this.both[height] += value;
        }
      }
    }
    this.draws += count;
  }

  /** The measured probability at a height with its standard error; null where m was never on. */
  measured(height) {
    const n = this.on[height];
    if (n === 0) return null;
    const p = this.both[height] / n;
    return { p, error: Math.sqrt(Math.max(p * (1 - p), 0.25 / n) / n) };
  }
}
