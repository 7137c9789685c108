/* What the part on Theorem 1 draws: a block trained in full, and what its training conserves. */

import {
  Flow, blockVelocity, conserved, lawLogits, lawTerms, meanScores, packState,
  roundToEven,
} from "./block.js";
import { blockData } from "./settings.js";
import { finiteOnly, sequence, shown } from "./format.js";

const POINTS = 61;
const ROUNDING = 1e-17; // where a drift of zero is drawn

export function viewTheorem1(s) {
  const data = blockData(s);
  const base = { x: data.x, gradient: data.gradient, attention: s.attention, activation: s.activation };
  const problem = { ...base, etaW: s.eta_w, etaZ: s.eta_z, tau: s.tau };
  const printed = { ...problem, etaW: 1, etaZ: 1, tau: 1 };
  const softmax = s.attention === "softmax";
  if (s.attention === "linear" && data.z.every((z) => z === 0) && s.size === 0) {
    return { problem: "With linear attention v = 0 and z = 0 is at rest: nothing moves. Choose another start." };
  }
  const unitRates = s.eta_w === 1 && s.eta_z === 1 && s.tau === 1;
  const simulation = new Flow(blockVelocity(problem), packState(data.v, data.z),
    times(s), { descentStep: s.mode === "descent" ? s.step : null, tolerance: 1e-10, most: 4e5 });
  const squares = new Array(s.tokens).fill(0);
  const history = [];
  simulation.squares = (rate, step) => {
    while (history.length < simulation.kept.length) history.push([...squares]);
    for (let i = 0; i < s.tokens * s.nodes; i++) squares[Math.floor(i / s.nodes)] += (step * rate[i]) ** 2;
  };
  const context = { s, data, problem, printed, softmax, unitRates, simulation, squares, history };
  const names = data.z.map((_, l) => `token ${l + 1}`);
  return {
    problem: null, simulation, names,
    draw: () => drawn(context, names),
  };
}

function times(s) {
  const all = sequence(POINTS, 0, s.end);
  if (s.mode === "flow") return all;
  const counts = [...new Set(all.map((t) => roundToEven(t / s.step)))];
  return counts.map((n) => n * s.step);
}

function statesOf({ s, simulation }) {
  return simulation.kept.map(({ t, y }) => ({
    t,
    v: Array.from({ length: s.tokens }, (_, l) => [...y.subarray(l * s.nodes, (l + 1) * s.nodes)]),
    z: [...y.subarray(s.tokens * s.nodes, s.tokens * s.nodes + s.tokens)],
  }));
}

function plotsOf(context, names, states) {
  const { data, problem, printed, softmax, unitRates } = context;
  const b = softmax ? meanScores(problem, data.z) : null;
  const start = { v: data.v, z: data.z };
  const laws = {
    derived: states.map((one) => lawLogits(problem, start, one.v, b)),
    plain: unitRates ? null : states.map((one) => lawLogits(printed, start, one.v, b)),
  };
  return [
    logitsPlot(context, names, states, laws), driftPlot(context, states), planePlot(names, states, laws),
  ];
}

const few = (states, count) => {
  const every = Math.max(1, Math.floor(states.length / count));
  return states.filter((_, n) => n % every === 0);
};

/** Law, law with the factor of unit rates, and simulated logits of every token, over any abscissa. */
function tokensOver(names, states, laws, abscissa) {
  const dotted = few(states, 20);
  return names.flatMap((name, l) => {
    const x = states.map((one) => abscissa(one, l));
    return [
      ...(laws.plain ? [{ name: `${name}, factor of unit rates`, color: l, style: "dashed", x,
        y: laws.plain.map((one) => one[l]) }] : []),
      { name: `${name}, from v`, color: l, style: "line", x, y: laws.derived.map((one) => one[l]) },
      { name: `${name}, simulated`, color: l, style: "dots", x: dotted.map((one) => abscissa(one, l)),
        y: dotted.map((one) => one.z[l]) },
    ].map(finiteOnly);
  });
}

function logitsPlot({ s, softmax }, names, states, laws) {
  return {
    key: "logits", title: softmax ? "Logits z and Eqn 18's estimate of them" : "Logits z, and what the law makes of v",
    x: { label: "time t", min: 0, max: s.end }, y: { label: "z" },
    series: tokensOver(names, states, laws, (one) => one.t),
  };
}

/** The largest change of each law since the start, relative as in joma.theory.invariants.drift. */
export function drifts({ problem, printed, softmax, data }, states) {
  if (states.length === 0) return { exact: [], plain: [], scale: 1 };
  const sum = (z) => z.reduce((a, b) => a + b, 0);
  if (softmax) {
    const b = meanScores(problem, data.z);
    const start = { v: data.v, z: data.z };
    const scale = Math.max(1, ...states.flatMap((one) => one.z.map(Math.abs)));
    return {
      scale,
      exact: states.map((one) => Math.abs(sum(one.z) - sum(data.z)) / scale),
      plain: states.map((one) => Math.max(...lawLogits(problem, start, one.v, b)
        .map((z, l) => Math.abs(z - one.z[l]))) / scale),
    };
  }
  const scaleOf = (law) => Math.max(1, ...states.flatMap((one) =>
    lawTerms(law, one.v, one.z).flatMap((term) => [Math.abs(term.attention), Math.abs(term.weights)])));
  const change = (law) => {
    const before = conserved(law, data.v, data.z);
    const size = scaleOf(law);
    return states.map((one) =>
      Math.max(...conserved(law, one.v, one.z).map((c, l) => Math.abs(c - before[l]))) / size);
  };
  return { exact: change(problem), plain: change(printed), scale: scaleOf(problem) };
}

function driftPlot(context, states) {
  const { s, softmax, unitRates, history, squares } = context;
  const later = states.slice(1); // at the start nothing has changed
  const found = drifts(context, states);
  const [exact, plain] = [found.exact.slice(1), found.plain.slice(1)];
  const x = later.map((one) => one.t);
  const up = (values) => values.map((d) => Math.max(d, ROUNDING));
  const series = [];
  if (softmax || !unitRates) {
    series.push({ name: softmax ? "Eqn 18 (approximate)" : "factor of unit rates", color: 1, style: "dashed", x,
      y: up(plain) });
  }
  const predicted = s.mode === "descent" && s.attention === "exp";
  if (predicted) {
    const sums = [...history, [...squares]].slice(1, states.length);
    series.push({ name: "predicted: (η_Z/2η_W) Σ (δv)²", color: 0, style: "line", x: x.slice(0, sums.length),
      y: up(sums.map((one) => ((s.eta_z / (2 * s.eta_w)) * Math.max(...one)) / found.scale)) });
  }
  const each = later.map((one, n) => ({ t: one.t, d: exact[n] }));
  const dotted = predicted ? few(each, 24) : each;
  series.push({ name: softmax ? "Σ z, simulated" : "the law, simulated", color: 0, style: "dots",
    x: dotted.map((one) => one.t), y: up(dotted.map((one) => one.d)) });
  return {
    key: "drift", title: "Change of the conserved quantity since t = 0", legend: true,
    x: { label: "time t", min: 0, max: s.end }, y: { label: "largest change", log: true },
    series: series.map(finiteOnly), // the sums of a diverging simulation overflow
  };
}

function planePlot(names, states, laws) {
  return {
    key: "plane", title: "Logits against Σ v²",
    x: { label: "Σ v² over the hidden nodes" }, y: { label: "z" },
    series: tokensOver(names, states, laws, (one, l) => one.v[l].reduce((sum, x) => sum + x * x, 0)),
  };
}

function drawn(context, names) {
  const states = statesOf(context);
  const { exact, plain } = drifts(context, states);
  const { s, softmax, unitRates, simulation } = context;
  const largest = (values) => values.reduce((a, b) => Math.max(a, b), 0);
  const readouts = [
    [softmax ? "Largest change of Σ z" : "Largest change of the law", shown(largest(exact))],
    ["Simulated up to", `t = ${shown(simulation.kept.at(-1)?.t ?? 0)}, ${simulation.steps} steps`],
  ];
  if (softmax) readouts.push(["Largest error of Eqn 18", shown(largest(plain))]);
  else if (!unitRates) readouts.push(["With the factor of unit rates", shown(largest(plain))]);
  if (s.attention === "sigmoid") readouts.push(["H(y) for sigmoid attention", "y + eʸ"]);
  return { plots: plotsOf(context, names, states), readouts, note: softmax ? "Softmax has no law for each token alone: the lines are Eqn 18's estimate." : "" };
}
