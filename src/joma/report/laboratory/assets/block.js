/* The block of Eqns 1-2 trained in full: weights v (M×K) and logits z (M) together, nothing
integrated out, by gradient flow (Dormand and Prince, adaptive) or by gradient steps. */

const softplus = (y) => Math.max(y, 0) + Math.log1p(Math.exp(-Math.abs(y)));
const sigmoid = (y) => (y >= 0 ? 1 / (1 + Math.exp(-y)) : Math.exp(y) / (1 + Math.exp(y)));

/** σ, σ′ and H = ∫ σ/σ′ with its inverse, by the name of the attention. */
export const ATTENTIONS = {
  exp: { score: Math.exp, slope: Math.exp, integral: (y) => y, inverse: (h) => h },
  linear: {
    score: (y) => y,
    slope: () => 1,
    integral: (y) => (y * y) / 2,
    inverse: (h, near) => Math.sign(near || 1) * Math.sqrt(Math.max(2 * h, 0)),
  },
  sigmoid: {
    score: sigmoid,
    slope: (y) => sigmoid(y) * sigmoid(-y),
    integral: (y) => y + Math.exp(y),
    inverse: (h) => {
      // y + e^y = h by Newton's method on a convex function, from above.
      let y = h < 1 ? h : Math.log(h + 1);
      for (let n = 0; n < 50; n++) {
        const step = (y + Math.exp(y) - h) / (1 + Math.exp(y));
        y -= step;
        if (Math.abs(step) < 1e-15 * (1 + Math.abs(y))) break;
      }
      return y;
    },
  },
  softmax: { normalized: true, score: Math.exp, slope: Math.exp },
};

/** φ′ by the name of the activation; φ itself does not enter, as the gradients g are given. */
export const ACTIVATIONS = {
  linear: () => 1,
  tanh: (y) => {
    const small = Math.exp(-2 * Math.abs(y));
    return (4 * small) / (1 + small) ** 2;
  },
  softplus: sigmoid,
};
export const ACTIVATION_VALUES = { linear: (y) => y, tanh: Math.tanh, softplus };

/**
 * The right side of Eqn 2 as a function of one flat array: v row by row, z, then the biases ξ.
 * @param problem x (N×M), gradient (N×K), attention, activation, etaW, etaZ, tau, normalizer.
 */
export function blockVelocity(problem) {
  const { x, gradient, etaW, etaZ, tau, normalizer = 1 } = problem;
  const attention = ATTENTIONS[problem.attention];
  const slope = ACTIVATIONS[problem.activation];
  const [N, M, K] = [x.length, x[0].length, gradient[0].length];
  const b = new Float64Array(M);
  const pulled = new Float64Array(M);
  const scores = new Float64Array(M);
  const slopes = new Float64Array(M);
  return (state, rate) => {
    rate.fill(0);
    const z = M * K;
    const bias = z + M;
    let peak = -Infinity;
    for (let l = 0; l < M; l++) peak = Math.max(peak, state[z + l]);
    for (let l = 0; l < M; l++) {
      const y = (attention.normalized ? state[z + l] - peak : state[z + l]) / tau;
      scores[l] = attention.score(y) / normalizer;
      slopes[l] = attention.slope(y) / (tau * normalizer);
    }
    for (let n = 0; n < N; n++) {
      let total = 0;
      for (let l = 0; l < M; l++) total += b[l] = scores[l] * x[n][l];
      if (attention.normalized) for (let l = 0; l < M; l++) b[l] /= total;
      pulled.fill(0);
      for (let k = 0; k < K; k++) {
        let pre = state[bias + k];
        for (let l = 0; l < M; l++) pre += state[l * K + k] * b[l];
        const g = (gradient[n][k] * slope(pre)) / N;
        for (let l = 0; l < M; l++) {
          rate[l * K + k] += etaW * g * b[l];
          pulled[l] += g * state[l * K + k];
        }
        rate[bias + k] += etaW * g;
      }
      let mean = 0;
      if (attention.normalized) for (let l = 0; l < M; l++) mean += b[l] * pulled[l];
      for (let l = 0; l < M; l++) {
        rate[z + l] += etaZ * (attention.normalized
          ? (b[l] * (pulled[l] - mean)) / tau
          : slopes[l] * x[n][l] * pulled[l]);
      }
    }
  };
}

/** The flat state of given weights (M×K) and logits (M), with biases of zero. */
export const packState = (v, z) =>
  Float64Array.from([...v.flat(), ...z, ...new Array(v[0].length).fill(0)]);

const C = [
  [],
  [1 / 5],
  [3 / 40, 9 / 40],
  [44 / 45, -56 / 15, 32 / 9],
  [19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729],
  [9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656],
  [35 / 384, 0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84],
];
const ERROR = [71 / 57600, 0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40];

/** The nearest whole number, and of two the even one, as NumPy has it. */
export function roundToEven(x) {
  const nearest = Math.round(x);
  return Math.abs(x % 1) === 0.5 && nearest % 2 !== 0 ? nearest - 1 : nearest;
}

/** Integrates y' = f(y) piece by piece, so that a page can draw in between. */
export class Flow {
  /**
   * @param velocity (state, rate) writes the rate.
   * @param start The state at t = 0.
   * @param times Increasing times at which the state is kept.
   * @param descentStep Length of a gradient step; null for the flow.
   */
  constructor(velocity, start, times, { descentStep = null, tolerance = 1e-9, most = 2e6 } = {}) {
    Object.assign(this, { velocity, times, descentStep, tolerance, most });
    this.y = Float64Array.from(start);
    this.stages = Array.from({ length: 7 }, () => new Float64Array(start.length));
    this.trial = new Float64Array(start.length);
    this.squares = null; // a function of the step, added up for the drift of gradient steps
    this.t = 0;
    this.steps = 0;
    this.evaluations = 0;
    this.h = (times[times.length - 1] || 1) * 1e-4;
    this.kept = [];
    this.ended = null; // why it ended early, a sentence
    this.ready = false; // whether the first stage is known
  }

  get done() {
    return this.ended !== null || this.kept.length === this.times.length;
  }

  /** Go on for so many milliseconds; returns whether it is done. */
  advance(milliseconds, now = () => performance.now()) {
    const until = now() + milliseconds;
    while (!this.done) {
      for (let n = 0; n < 16 && !this.done; n++) this.step();
      if (now() > until) break;
    }
    return this.done;
  }

  keep() {
    this.kept.push({ t: this.t, y: Float64Array.from(this.y) });
  }

  step() {
    const target = this.times[this.kept.length];
    if (this.steps > this.most) {
      this.ended = `The simulation ends at t = ${this.t.toPrecision(4)} after ${this.most} steps.`;
    } else if (this.descentStep !== null) this.descend(target);
    else if (this.t >= target) this.keep();
    else this.rungeKutta(target);
  }

  descend(target) {
    const step = this.descentStep;
    if (this.steps >= roundToEven(target / step)) return this.keep();
    const [rate] = this.stages;
    this.velocity(this.y, rate);
    if (this.squares) this.squares(rate, step);
    for (let i = 0; i < rate.length; i++) this.y[i] += step * rate[i];
    this.steps++;
    this.t = this.steps * step;
    return this.check(this.y);
  }

  check(y) {
    for (let i = 0; i < y.length; i++) {
      if (!(Math.abs(y[i]) < 1e100)) {
        this.ended = `The simulated weights diverge at t ≈ ${this.t.toPrecision(4)}.`;
        return false;
      }
    }
    return true;
  }

  rungeKutta(target) {
    const { stages, trial, y, tolerance } = this;
    const h = Math.min(this.h, target - this.t);
    if (!this.ready) this.velocity(y, stages[0]);
    for (let s = 1; s < 7; s++) {
      for (let i = 0; i < y.length; i++) {
        let sum = 0;
        for (let r = 0; r < s; r++) sum += C[s][r] * stages[r][i];
        trial[i] = y[i] + h * sum;
      }
      this.velocity(trial, stages[s]);
    }
    this.evaluations += 6;
    this.steps++;
    let error = 0;
    for (let i = 0; i < y.length; i++) {
      let sum = 0;
      for (let r = 0; r < 7; r++) sum += ERROR[r] * stages[r][i];
      const scale = tolerance * (0.1 + Math.max(Math.abs(y[i]), Math.abs(trial[i])));
      error = Math.max(error, Math.abs(h * sum) / scale);
    }
    if (error <= 1) {
      this.t = h < target - this.t ? this.t + h : target;
      y.set(trial);
      [stages[0], stages[6]] = [stages[6], stages[0]];
      this.ready = true;
      this.check(y);
    } else this.ready = true;
    const factor = Number.isFinite(error) ? 0.9 * (error + 1e-12) ** -0.2 : 0.2;
    if (error <= 1 && h < this.h) this.h = Math.max(this.h, h * Math.min(factor, 5));
    else this.h = h * Math.min(Math.max(factor, 0.2), 5);
    if (!(this.h > 1e-15 * Math.max(this.t, 1e-3))) {
      this.ended = `The simulated weights diverge at t ≈ ${this.t.toPrecision(6)}.`;
    }
  }
}

/** Theorem 1's two terms for each token of a pointwise attention: τ²H(z/τ) and (η_Z/2η_W) Σ v². */
export function lawTerms(problem, v, z) {
  const { integral } = ATTENTIONS[problem.attention];
  const { tau, etaW, etaZ } = problem;
  return z.map((one, l) => ({
    attention: tau * tau * integral(one / tau),
    weights: (etaZ / (2 * etaW)) * v[l].reduce((sum, x) => sum + x * x, 0),
  }));
}

/** Theorem 1: what each token conserves. */
export const conserved = (problem, v, z) =>
  lawTerms(problem, v, z).map(({ attention, weights }) => attention - weights);

/** The logits that the law gives for weights v, from the start's constant; softmax by Eqn 18. */
export function lawLogits(problem, start, v, meanScores) {
  const { tau, etaW, etaZ } = problem;
  const own = v.map((row) => row.reduce((sum, x) => sum + x * x, 0));
  const before = start.v.map((row) => row.reduce((sum, x) => sum + x * x, 0));
  if (ATTENTIONS[problem.attention].normalized) {
    const factor = etaZ / (2 * etaW * tau);
    const change = own.map((x, l) => x - before[l]);
    const total = change.reduce((a, b) => a + b, 0);
    return start.z.map((z, l) => z + factor * (change[l] - total * meanScores[l]));
  }
  const { integral, inverse } = ATTENTIONS[problem.attention];
  return start.z.map((z, l) => {
    const h = integral(z / tau) + (etaZ / (2 * etaW * tau * tau)) * (own[l] - before[l]);
    return tau * inverse(h, z);
  });
}

/** b̄ = E[b], the mean attention. */
export function meanScores(problem, z) {
  const { x, tau, normalizer = 1 } = problem;
  const attention = ATTENTIONS[problem.attention];
  const peak = attention.normalized ? Math.max(...z) : 0;
  const mean = new Array(z.length).fill(0);
  for (const sample of x) {
    const b = sample.map((one, l) => (attention.score((z[l] - peak) / tau) * one) / normalizer);
    const total = attention.normalized ? b.reduce((p, q) => p + q, 0) : 1;
    b.forEach((one, l) => (mean[l] += one / total / x.length));
  }
  return mean;
}
