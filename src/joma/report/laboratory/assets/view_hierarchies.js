/* What the part on hierarchies draws: how often two tokens occur together, and Eqn 8. */

import {
  TreeSampler, cooccurrence, cooccurrenceNearOne, printedRootUncertainty, rootUncertainty,
} from "./hblt.js";
import { treeClasses } from "./settings.js";
import { finiteOnly, sequence, shown } from "./format.js";

/** Sampling in pieces, as a simulation. */
class Sampling {
  constructor(sampler, trees) {
    Object.assign(this, { sampler, trees, ended: null });
  }

  get done() {
    return this.sampler.draws >= this.trees;
  }

  advance(milliseconds, now = () => performance.now()) {
    const until = now() + milliseconds;
    while (!this.done && now() < until) {
      this.sampler.draw(Math.min(500, Math.round(this.trees) - this.sampler.draws));
      if (this.trees - this.sampler.draws < 1) break;
    }
    if (this.trees - this.sampler.draws < 1) this.trees = this.sampler.draws;
    return this.done;
  }
}

export function viewHierarchies(s) {
  const { classProbs, offProbs } = treeClasses(s);
  const rho0 = rootUncertainty(classProbs, offProbs);
  const printed0 = printedRootUncertainty(classProbs, offProbs);
  const heights = Array.from({ length: s.depth }, (_, h) => h);
  const height = s.distance / 2;
  const derived = heights.map((h) => cooccurrence(h, s.depth, s.rho, rho0));
  if (Number.isNaN(derived[0])) {
    return { problem: "With these values the tokens never occur (ρᴸ⁻¹ρ₀ = 1), so nothing can be " +
      "conditioned on them. Choose a smaller ρ or a smaller P[top latent off]." };
  }
  const printed = heights.map((h) => cooccurrence(h, s.depth, s.rho, printed0));
  const simulation = new Sampling(
    new TreeSampler({ depth: s.depth, rho: s.rho, classProbs, offProbs, seed: s.seed }), s.trees);
  const plots = [levels(s, heights, derived, printed, height), edges(s, height, rho0, printed0), nearOne(s, height)];
  return {
    problem: null, plots, simulation,
    readouts: [
      ["H of the common ancestor", String(height)],
      ["P[both | one], derived", shown(derived[height])],
      ["… with ρ₀ as printed", shown(printed[height])],
      ["ρ₀ derived, printed", `${shown(rho0)}, ${shown(printed0)}`],
    ],
    note: Number.isNaN(printed[0])
      ? "With ρ₀ as printed the tokens would never occur, so there is no dashed line." : "",
    dots: () => [measured(simulation.sampler, heights), atRho(simulation.sampler, s, height), []],
  };
}

function levels(s, heights, derived, printed, height) {
  return {
    key: "levels", title: "P[one token occurs | the other does]", legend: true,
    x: { label: "height H of the common ancestor", min: -0.3, max: Math.max(s.depth - 0.7, 0.7), whole: true },
    y: { label: "probability", include: [0, 1] },
    marks: [{ x: height, label: "H" }],
    series: [
      { name: "ρ₀ as printed", color: 1, style: "dashed", x: heights, y: printed },
      { name: "derived", color: 0, style: "line", x: heights, y: derived },
    ].map(finiteOnly),
  };
}

/** The same probability at one height, for every ρ. */
function edges(s, height, rho0, printed0) {
  const rho = sequence(161, 0, 1);
  const of = (root) => rho.map((one) => cooccurrence(height, s.depth, one, root));
  return {
    key: "edges", title: `The same for every ρ, H = ${height}, L = ${s.depth}`, legend: true,
    x: { label: "ρ of every edge", min: 0, max: 1 }, y: { label: "probability", include: [0, 1] },
    marks: [{ x: s.rho, label: "ρ" }],
    series: [
      { name: "ρ₀ as printed", color: 1, style: "dashed", x: rho, y: of(printed0) },
      { name: "derived", color: 0, style: "line", x: rho, y: of(rho0) },
    ].map(finiteOnly), // at ρ = ρ₀ = 1 tokens never occur
  };
}

function nearOne(s, height) {
  const epsilon = sequence(140, -4, 0).map((e) => 10 ** e);
  const exact = epsilon.map((e) => cooccurrence(height, s.depth, 1 - e, 1 - e));
  return {
    key: "eqn8", title: `Eqn 8: ρ = ρ₀ = 1 − ε, H = ${height}, L = ${s.depth}`, legend: true,
    x: { label: "ε", log: true, min: 1e-4, max: 1 }, y: { label: "probability", include: [0, 1] },
    marks: s.rho < 1 - 1e-4 && s.rho > 0 ? [{ x: 1 - s.rho, label: "ε" }] : [],
    series: [
      { name: "1 − H/L, as printed with O(ε²)", color: 1, style: "dashed", x: epsilon,
        y: epsilon.map(() => 1 - height / s.depth) },
      finiteOnly({ name: "with the term in ε", color: 2, style: "line", x: epsilon,
        y: epsilon.map((e) => cooccurrenceNearOne(height, s.depth, e)).map((p) => (p > 1.2 ? NaN : p)) }),
      { name: "exact", color: 0, style: "line", x: epsilon, y: exact },
    ],
  };
}

function measured(sampler, heights) {
  const found = heights.map((h) => [h, sampler.measured(h)]).filter(([, one]) => one !== null);
  return [{ name: "sampled trees", color: 0, style: "dots", x: found.map(([h]) => h),
    y: found.map(([, one]) => one.p), error: found.map(([, one]) => 2 * one.error) }];
}

function atRho(sampler, s, height) {
  const found = sampler.measured(height);
  return found === null ? [] : [{ name: "sampled trees", color: 0, style: "dots", x: [s.rho], y: [found.p],
    error: [2 * found.error] }];
}
