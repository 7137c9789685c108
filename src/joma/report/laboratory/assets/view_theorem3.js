/* What the part on Theorem 3 draws: how often a node is active, and where it rests. */

import { finiteOnly, sequence, shown } from "./format.js";
import { randomNumbers } from "./hblt.js";
import { MARGINALS, activity, meanResidual, printedActivity, restPoint } from "./marginals.js";

const LENGTHS = [0.15, 0.3, 0.5, 0.8, 1.25, 2, 3.2, 5];

/** Draws of u, and how many of them make a node of each length active. */
class Drawing {
  constructor(s) {
    Object.assign(this, { s, draws: 0, ended: null });
    this.next = randomNumbers(s.seed);
    this.lengths = [...LENGTHS, s.length].sort((a, b) => a - b);
    this.active = this.lengths.map(() => 0);
  }

  get done() {
    return this.draws >= this.s.draws;
  }

  advance(milliseconds, now = () => performance.now()) {
    const until = now() + milliseconds;
    const { draw } = MARGINALS[this.s.family];
    while (!this.done && now() < until) {
      for (let n = 0; n < 500 && !this.done; n++, this.draws++) {
        const x = this.s.distance + draw(this.next);
        for (let i = 0; i < this.lengths.length; i++) {
          if (this.lengths[i] * x + this.s.bias > 0) this.active[i]++;
        }
      }
    }
    return this.done;
  }

  series() {
    const p = this.active.map((count) => count / this.draws);
    return { name: "sampled", color: 0, style: "dots", x: this.lengths, y: p,
      error: p.map((one) => 2 * Math.sqrt(Math.max(one * (1 - one), 1 / this.draws) / this.draws)) };
  }
}

export function viewTheorem3(s) {
  const rest = restPoint(s.family, s.distance);
  const simulation = new Drawing(s);
  const derived = activity(s.family, s.length, s.distance, s.bias);
  const printed = printedActivity(s.family, s.length, s.distance, s.bias);
  return {
    problem: null, simulation,
    plots: [activityPlot(s), lifePlot(s, rest), ...(rest ? [ratioPlot(s, rest)] : [])],
    readouts: [
      ["P[node active], derived", shown(derived)],
      ["… as printed", shown(printed)],
      ["A node rests at s₋, s₊", rest ? `${shown(rest.minus)}, ${shown(rest.plus)}` : "nowhere"],
      ["… and only if a₋/a₊ is", rest ? shown(rest.ratio) : "—"],
    ],
    note: noteOn(s, rest, printed),
    dots: () => (simulation.draws ? [[finiteOnly(simulation.series())], [], []] : [[], [], []]),
  };
}

function noteOn({ family }, rest, printed) {
  const notes = [];
  if (printed > 1) notes.push("The printed probability exceeds 1.");
  if (!rest) notes.push("F/θ₁ rises throughout for this shape, so that no two places have the same value and no node rests.");
  if (family === "laplace") notes.push("For Laplace clusters F/θ₁ is flat up to 0: a node rests at every s₊ ≤ 0; the last is drawn.");
  return notes.join(" ");
}

function activityPlot(s) {
  const lengths = sequence(161, Math.log(0.1), Math.log(5)).map(Math.exp);
  const of = (formula) => lengths.map((length) => formula(s.family, length, s.distance, s.bias));
  return {
    key: "activity", title: "Probability that the node is active on the positive cluster", legend: true,
    x: { label: "length ‖v‖", log: true, min: 0.1, max: 5 }, y: { label: "probability", min: -0.05, max: 1.8 },
    marks: [{ x: s.length, label: "‖v‖" }],
    series: [
      { name: "as printed, θ₁(r)/‖v‖", color: 1, style: "dashed", x: lengths, y: of(printedActivity) },
      { name: "derived, θ₁(r/‖v‖)", color: 0, style: "line", x: lengths, y: of(activity) },
    ],
  };
}

function lifePlot(s, rest) {
  const low = Math.min(-6, rest ? rest.minus - 2 : 0);
  const x = sequence(161, low, Math.max(6, (rest?.plus ?? 0) + 2));
  const chord = rest ? [{ name: "where a node rests", color: 1, style: "line", x: [rest.minus, rest.plus],
    y: [meanResidual(s.family, rest.minus), meanResidual(s.family, rest.plus)] },
  { name: "s₋ and s₊", color: 1, style: "square", x: [rest.minus, rest.plus],
    y: [meanResidual(s.family, rest.minus), meanResidual(s.family, rest.plus)] }] : [];
  return {
    key: "life", title: "F/θ₁ must be equal at s₋ and s₊ = s₋ + D", legend: true,
    x: { label: "signed distance s", min: x[0], max: x.at(-1) }, y: { label: "F/θ₁" },
    series: [{ name: "F/θ₁", color: 0, style: "line", x, y: x.map((one) => meanResidual(s.family, one)) }, ...chord],
  };
}

function ratioPlot(s, rest) {
  const x = sequence(80, 0.1, 8);
  const y = x.map((distance) => restPoint(s.family, distance).ratio);
  return {
    key: "ratio3", title: "The one ratio a₋/a₊ at which a node rests", legend: true,
    x: { label: "distance D of the clusters", min: 0, max: 8 }, y: { label: "a₋/a₊", log: true },
    marks: [{ x: s.distance, label: "D" }],
    series: [
      { name: "a₋/a₊", color: 0, style: "line", x, y },
      { name: "at this distance", color: 1, style: "square", x: [s.distance], y: [rest.ratio] },
    ],
  };
}
