/* What the part on Eqn 6 draws: v' = (μ - v) exp(v²/2), its entropy, and when Eqn 7 holds. */

import { Flow, roundToEven } from "./block.js";
import {
  OFFSET_BOUND, attentionEntropy, elapsed, logResiduals, eqn6Weights, printedThreshold,
} from "./eqn6.js";
import { sequence, shown } from "./format.js";

const FIRST = 0.01;

export function viewEqn6(s) {
  const sizes = s.mu.map(Math.abs);
  const names = s.mu.map((_, l) => `token ${l + 1}`);
  const times = timesOf(s, sizes);
  const v = s.mu.map((mu) => eqn6Weights(mu, times));
  const entropy = times.map((_, n) => attentionEntropy(v.map((one) => one[n]), s.scale));
  const x = { label: "time t", log: true, min: FIRST, max: s.end };
  const top = Math.log(s.tokens) || 1;
  const plots = [
    { key: "weights", title: "Weights v of each token", x, y: { label: "v" },
      series: names.map((name, l) => ({ name, color: l, style: "line", x: times, y: v[l] })) },
    { key: "entropy", title: "Entropy of attention, softmax(s·v²)", x,
      y: { label: "nats", min: -0.04 * top, max: 1.06 * top },
      series: [{ name: "entropy", color: 0, style: "line", x: times, y: entropy }] },
  ];
  const pair = pairOf(sizes);
  if (pair) plots.push(ratioPlot(pair));
  const simulation = simulate(s);
  const final = attentionEntropy(s.mu, s.scale);
  const low = Math.min(...entropy, final);
  const limit = 2 * Math.exp(-(Math.max(...sizes) ** 2) / 2);
  const unstable = s.mode === "descent" && s.step > limit;
  return {
    problem: null, plots, simulation,
    readouts: [
      ["Entropy drops by", `${shown(Math.log(s.tokens) - low)} nats`],
      ["Entropy rebounds by", `${shown(final - low < 1e-12 ? 0 : final - low)} nats`],
      ...(pair ? thresholds(pair) : [["Eqn 7", "needs two targets of different size"]]),
    ],
    note: unstable
      ? `Steps above 2·exp(−μ²/2) = ${shown(limit)} overshoot the largest target, so the gradient steps leave the flow.` : "",
    dots: () => dots(s, simulation, names, plots),
  };
}

/** Times at equal logarithmic distances, and more of them where each token arrives. */
function timesOf(s, sizes) {
  const many = s.tokens > 8;
  const base = sequence(many ? 60 : 120, Math.log(FIRST), Math.log(s.end)).map(Math.exp);
  const arrivals = (many ? [0.7, 1.5, 2.5, 4, 7] : [0.5, 0.8, 1.2, 1.7, 2.3, 3, 4, 5.5, 8])
    .flatMap((y) => sizes.map((mu) => elapsed(-Math.expm1(-y), mu)))
    .filter((t) => t > FIRST && t < s.end);
  return [...base, ...arrivals].sort((a, b) => a - b);
}

/** The smallest and the largest target that move, whose rates Eqn 7 compares. */
function pairOf(sizes) {
  const moving = sizes.filter((mu) => mu > 0);
  const j = Math.min(...moving);
  const k = Math.max(...moving);
  return moving.length > 1 && j < k ? { j, k } : null;
}

function thresholds({ k }) {
  return [
    ["Eqn 7 settles from ln(1/δ)", shown(OFFSET_BOUND * Math.exp((k * k) / 2))],
    ["… as printed", shown(-printedThreshold(k))],
  ];
}

/** |ratio/limit - 1| of Eqn 7 against ln 1/δ of the larger target, whose time is F. */
function ratioPlot({ j, k }) {
  const growth = Math.exp((k * k) / 2);
  const y = sequence(120, Math.log(Math.min(1e-3, -printedThreshold(k) / 5)), Math.log(300 * growth)).map(Math.exp);
  const times = y.map((one) => (one > 36 ? 0 : elapsed(-Math.expm1(-one), k)));
  const late = elapsed(1 - 2 ** -52, k) - (52 * Math.LN2) / growth;
  y.forEach((one, n) => (times[n] = one > 36 ? late + one / growth : times[n]));
  const other = logResiduals(j, times).map((one) => -one);
  const limit = Math.exp((j * j - k * k) / 2);
  return {
    key: "eqn7", title: `Eqn 7 for μ = ${shown(j)} next to ${shown(k)}: error of its limit`, legend: true,
    x: { label: "ln(1/δ) of the larger target", log: true, min: y[0], max: y.at(-1) },
    y: { label: "relative error", log: true },
    marks: [
      { x: OFFSET_BOUND * growth, label: "settles" },
      { x: -printedThreshold(k), label: "settles, as printed", dashed: true },
    ],
    series: [
      { name: "error", color: 0, style: "line", x: y,
        y: y.map((one, n) => Math.max(Math.abs(other[n] / one / limit - 1), 1e-16)) },
      { name: "its bound", color: 2, style: "line", x: y,
        y: y.map((one) => (OFFSET_BOUND * growth) / one) },
    ],
  };
}

/** Flow in (ln 1/δ, z), which is not stiff; gradient steps in v itself. */
function simulate(s) {
  const M = s.tokens;
  const all = sequence(33, Math.log(FIRST), Math.log(s.end)).map(Math.exp);
  if (s.mode === "descent") {
    const counts = [...new Set(all.map((t) => roundToEven(t / s.step)))].filter((n) => n > 0);
    const velocity = (v, rate) => {
      for (let l = 0; l < M; l++) rate[l] = (s.mu[l] - v[l]) * Math.exp((v[l] * v[l]) / 2);
    };
    return new Flow(velocity, new Float64Array(M), counts.map((n) => n * s.step),
      { descentStep: s.step, most: 3e6 });
  }
  const velocity = (state, rate) => {
    for (let l = 0; l < M; l++) {
      const pace = Math.exp(state[M + l]);
      rate[l] = pace;
      rate[M + l] = -s.mu[l] * s.mu[l] * Math.expm1(-state[l]) * Math.exp(-state[l]) * pace;
    }
  };
  return new Flow(velocity, new Float64Array(2 * M), all, { tolerance: 1e-8, most: 4e5 });
}

function dots(s, simulation, names, plots) {
  const v = simulation.kept.map(({ y }) =>
    s.mu.map((mu, l) => (s.mode === "descent" ? y[l] : -mu * Math.expm1(-y[l]))));
  const x = simulation.kept.map((one) => one.t);
  const found = {
    weights: names.map((name, l) => (
      { name: `${name}, simulated`, color: l, style: "dots", x, y: v.map((one) => one[l]) })),
    entropy: [{ name: "simulated", color: 0, style: "dots", x,
      y: v.map((one) => attentionEntropy(one, s.scale)) }],
  };
  return plots.map((plot) => found[plot.key] ?? []);
}
