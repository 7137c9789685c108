/* What the part on Theorem 2 draws. A view is made of plain numbers: it touches no document. */

import { Flow, blockVelocity, packState } from "./block.js";
import { ddMultiply, ddNumber, ddSubtract } from "./doubledouble.js";
import { finiteOnly, sequence, shown } from "./format.js";
import {
  firstBlowup, limitsOf, printedWeight, rows, stableRank, stableRanks, tokens, unitRates,
  weightAt,
} from "./linear.js";
import { saliencyMatrix } from "./settings.js";
import { SQRT_2, erfDifference, erfinv } from "./special.js";

const LARGEST_START = 20; // of √(η_Z/η_W)/τ · v(0); exp(v²/2) is about 1e87 there
const DEEPEST = 15; // 1 - t/t* = 1e-15 at the end of the logarithmic axes

/** Values 1 - t/t*: linear in t at first, then closer and closer. */
function gaps(approach, linear, late) {
  const end = 10 ** -approach;
  const first = sequence(linear, 1, Math.max(0.1, end));
  if (end >= 0.1) return first;
  return [...first, ...sequence(late, -1, -approach).slice(1).map((e) => 10 ** e)];
}

const timeAt = (time, gap) => ddMultiply(time, ddSubtract([1, 0], [gap, 0]));

export function viewTheorem2(s) {
  const many = s.nodes > 1;
  const matrix = many ? saliencyMatrix(s) : s.delta.map((d) => [d]);
  const rates = { etaW: s.eta_w, etaZ: s.eta_z, tau: s.tau };
  const unit = unitRates(matrix.flat(), rates);
  const salient = matrix.map((row, l) => row.map((_, k) => unit.delta[l * row.length + k]));
  const start = s.delta.map((_, l) => (many ? 0 : s.start[l]));
  const initial = start.map((v) => v / unit.scale);
  const options = { initial, logOffset: s.c / s.tau, normalizer: s.a };
  const far = initial.find((v) => Math.abs(v) > LARGEST_START);
  if (far !== undefined) {
    return { problem: `√(η_Z/η_W)/τ · v(0) is ${shown(far)}, and only up to ${LARGEST_START} is drawn: ` +
      "exp(v²/2) would leave the range of numbers. Choose a smaller v(0) or η_Z, or a larger τ." };
  }
  const problem = many ? rows(salient, options) : null;
  const all = many ? problem.tokens : tokens(unit.delta, options);
  const first = firstBlowup(all);
  if (first === null) return { problem: "Every Δ is 0, so no token moves. Give one of them a value." };

  const end = ddNumber(first.time);
  const at = (gap) => all.map((one) => weightAt(one, timeAt(first.time, gap)));
  const lineGaps = s.tokens > 8 ? gaps(s.approach, 40, 50) : gaps(s.approach, 70, 80);
  const line = lineGaps.map(at);
  const lineTimes = lineGaps.map((gap) => ddNumber(timeAt(first.time, gap)));
  const fromZero = start.every((v) => v === 0);
  const names = s.delta.map((_, l) => `token ${l + 1}`);
  const context = { s, matrix, unit, start, first, all, names, many, fromZero, end };

  const weights = {
    key: "weights", title: many ? "Length of each token's weights" : "Weights v of each token",
    x: { label: "time t", min: 0, max: end * 1.04 }, y: { label: many ? "‖v‖" : "v" },
    marks: [{ x: end, label: "t*" }],
    series: s.delta.map((_, l) => ({
      name: names[l], color: l, style: "line", x: lineTimes, y: line.map((v) => v[l] * unit.scale),
    })),
  };
  const limit = limitsOf(all).map((v) => v * unit.scale);
  addLimits(weights, context, limit, line, lineTimes);
  const depth = sequence(s.tokens > 8 ? 61 : 121, 0, DEEPEST).map((e) => 10 ** -e);
  const deep = depth.map(at);
  const plots = [
    weights,
    many ? ranksPlot(problem, salient, depth, deep) : ratioPlot(context, line, lineGaps),
    sharePlot(context, depth, deep),
  ];
  const simulation = simulate(context);
  return {
    problem: null, plots, simulation,
    readouts: readouts(context, limit, plots),
    note: noteOn(context),
    dots: () => dots(context, simulation, plots),
  };
}

function noteOn({ fromZero, many }) {
  if (many) return "The paper states its law for one node, so that nothing printed is drawn.";
  return fromZero ? "" : "The printed law is for v(0) = 0, so it is not drawn.";
}

function addLimits(plot, { s, unit, first, names, many, fromZero, end }, limit, line, times) {
  const finite = s.delta.map((_, l) => l).filter((l) => Number.isFinite(limit[l]));
  for (const l of finite) {
    plot.series.push({ name: `${names[l]}, limit`, color: l, style: "square", x: [end], y: [limit[l]] });
  }
  if (many || !fromZero) return;
  const winner = unit.delta[first.token];
  for (const l of finite.filter((one) => unit.delta[one] !== 0)) {
    const ratio = unit.delta[l] / winner;
    plot.series.push(
      { name: `${names[l]}, as printed`, color: l, style: "dashed", x: times,
        y: line.map((v) => unit.scale * printedWeight(unit.delta[l], winner, v[first.token])) },
      { name: `${names[l]}, limit as printed`, color: l, style: "open", x: [end],
        y: [2 * unit.scale * erfinv(ratio)] });
  }
}

/** erf(v/√2) - erf(v(0)/√2) over Δ, in units of the winner's: 1 for every token. */
function ratios({ unit, first, all }, v, scale) {
  const rate = (l) => (Math.abs(v[l] - all[l].initial) > 1e-7 || all[l].initial === 0
    ? erfDifference(all[l].initial / scale, v[l] / scale) / unit.delta[l] : NaN); // no digits are left
  return v.map((_, l) => rate(l) / rate(first.token));
}

function ratioPlot(context, line, lineGaps) {
  const { s, names, end } = context;
  const kept = lineGaps.map((gap, n) => n).filter((n) => lineGaps[n] < 0.99);
  const x = kept.map((n) => end * (1 - lineGaps[n]));
  const derived = kept.map((n) => ratios(context, line[n], SQRT_2));
  const printed = kept.map((n) => ratios(context, line[n], 2));
  const moving = s.delta.map((_, l) => l).filter((l) => context.unit.delta[l] !== 0);
  return {
    key: "ratio", title: "erf(v/√2)/Δ, in units of the winner's",
    x: { label: "time t", min: 0, max: end * 1.04 }, y: { label: "ratio", about: 1 },
    marks: [{ x: end, label: "t*" }],
    series: moving.flatMap((l) => [
      ...(context.fromZero ? [{ name: `${names[l]}, erf(v/2)/Δ as printed`, color: l, style: "dashed", x,
        y: printed.map((one) => one[l]) }] : []),
      { name: names[l], color: l, style: "line", x, y: derived.map((one) => one[l]) },
    ].map(finiteOnly)),
  };
}

function ranksPlot(problem, salient, depth, deep) {
  const found = deep.map((lengths) => stableRanks(problem, salient, 0, lengths));
  return {
    key: "ranks", title: "Stable rank of the weights and of their gradient",
    x: { label: "1 − t/t*", log: true, reverse: true, min: 10 ** -DEEPEST, max: 1 },
    y: { label: "stable rank", about: 1 }, legend: true,
    series: [
      { name: "weights V", color: 0, style: "line", x: depth, y: found.map((one) => one.weights) },
      { name: "gradient V̇", color: 1, style: "line", x: depth, y: found.map((one) => one.velocity) },
    ],
  };
}

/** Shares of attention exp(v²/2) of tokens whose logits have one constant c. */
function shares(v) {
  const logits = v.map((x) => (x * x) / 2);
  const peak = Math.max(...logits);
  const each = logits.map((a) => Math.exp(a - peak));
  const total = each.reduce((a, b) => a + b, 0);
  return each.map((a) => a / total);
}

function sharePlot({ s, names }, depth, deep) {
  const found = deep.map(shares);
  return {
    key: "share", title: "Share of attention",
    x: { label: "1 − t/t*", log: true, reverse: true, min: 10 ** -DEEPEST, max: 1 },
    y: { label: "share", min: 0, max: 1 },
    series: s.delta.map((_, l) => (
      { name: names[l], color: l, style: "line", x: depth, y: found.map((one) => one[l]) })),
  };
}

function simulate({ s, matrix, start, end }) {
  const count = matrix.length;
  const problem = {
    x: matrix.map((_, l) => matrix.map((__, j) => (j === l ? 1 : 0))),
    gradient: matrix.map((row) => row.map((d) => count * d)),
    attention: "exp", activation: "linear",
    etaW: s.eta_w, etaZ: s.eta_z, tau: s.tau, normalizer: s.a,
  };
  const logits = start.map((v) => s.c + (s.eta_z / (2 * s.eta_w * s.tau)) * v * v);
  const flow = s.mode === "flow";
  const fractions = flow
    ? gaps(s.approach, 16, 16).slice(1).map((gap) => 1 - gap)
    : sequence(25, 0, 1 - 10 ** -s.approach).slice(1);
  const begin = packState(matrix.map((row, l) => row.map(() => start[l])), logits);
  const times = fractions.map((f) => f * end);
  return new Flow(blockVelocity(problem), begin, times,
    { descentStep: flow ? null : s.step * end, tolerance: 1e-8 });
}

function dots(context, simulation, plots) {
  const { s, unit, names, many, end, matrix } = context;
  const states = simulation.kept.map(({ t, y }) => {
    const v = matrix.map((row, l) => row.map((_, k) => y[l * row.length + k]));
    const length = v.map((row) => (many ? Math.hypot(...row) : row[0]));
    return { t, v, length, unit: length.map((x) => x / unit.scale) };
  });
  const x = states.map((one) => one.t);
  const gap = states.map((one) => Math.max(1 - one.t / end, 10 ** -DEEPEST));
  const dotted = (values, l, at, name) =>
    finiteOnly({ name: `${name}, simulated`, color: l, style: "dots", x: at, y: values });
  const found = {
    weights: s.delta.map((_, l) => dotted(states.map((one) => one.length[l]), l, x, names[l])),
    share: s.delta.map((_, l) => dotted(states.map((one) => shares(one.unit)[l]), l, gap, names[l])),
  };
  if (many) found.ranks = [dotted(states.map((one) => stableRank(one.v)), 0, gap, "weights V")];
  else {
    const each = states.map((one) => ratios(context, one.unit, SQRT_2));
    found.ratio = s.delta.map((_, l) => l).filter((l) => unit.delta[l] !== 0)
      .map((l) => dotted(each.map((one) => one[l]), l, x, names[l]));
  }
  return plots.map((plot) => found[plot.key] ?? []);
}

function readouts({ s, unit, first, names, many, fromZero, end }, limit, plots) {
  const others = s.delta.map((_, l) => l).filter((l) => l !== first.token);
  const rowsOut = [
    ["Blow-up time t*", shown(end)],
    ["Winner", limit.filter((v) => !Number.isFinite(v)).length > 1
      ? `a tie: ${s.delta.map((_, l) => l).filter((l) => !Number.isFinite(limit[l])).map((l) => l + 1).join(", ")}`
      : names[first.token]],
  ];
  if (many) {
    const last = plots[1].series.map((one) => one.y.at(-1));
    rowsOut.push(["Stable rank at 1 − t/t* = 10⁻¹⁵", `${shown(last[0])} (V), ${shown(last[1])} (V̇)`]);
  }
  for (const l of others.slice(0, 3)) {
    const printed = 2 * unit.scale * erfinv(unit.delta[l] / unit.delta[first.token]);
    const apart = !many && fromZero && Number.isFinite(limit[l]) && limit[l] !== 0;
    rowsOut.push([`Limit of ${names[l]}`, shown(limit[l]) + (apart ? ` (as printed: ${shown(printed)})` : "")]);
  }
  return rowsOut;
}
