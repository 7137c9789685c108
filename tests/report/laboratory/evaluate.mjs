/* Evaluates functions of the laboratory: a JSON list of [name, arguments] in, of results out. */
import { readFileSync } from "node:fs";

const [assets] = process.argv.slice(2);
const modules = await Promise.all(
  ["dynamics.js", "settings.js", "python.js", "views.js"].map((name) => import(`${assets}/${name}`)));
const known = Object.assign({}, ...modules);
const { view } = known;
Object.assign(known, {
  weightsOfRows: (delta, times, options) => times.map((t) => known.weightsMulti(delta, t, options)),
  stableRankPairs: (delta, times, options) => {
    const problem = known.rows(delta, options);
    return times.map((t) => Object.values(known.stableRanks(problem, delta, t)));
  },
  theta1s: (name, s) => s.map(known.MARGINALS[name].theta1),
  meanResiduals: (name, s) => s.map((one) => known.meanResidual(name, one)),
  restRatio: (name, distance) => known.restPoint(name, distance).ratio,
  cooccurrences: (depth, rho, rho0) =>
    Array.from({ length: depth }, (_, h) => known.cooccurrence(h, depth, rho, rho0)),
  entropies: (rows, scale) => rows.map((v) => known.attentionEntropy(v, scale)),
  simulated: (problem, v, z, times, options) => {
    const flow = new known.Flow(
      known.blockVelocity(problem), known.packState(v, z), times, options);
    flow.advance(1e9);
    return { ended: flow.ended, t: flow.kept.map((one) => one.t), y: flow.kept.map((one) => [...one.y]) };
  },
});
const linspace = (from, to, n) => Array.from({ length: n }, (_, i) => from + ((to - from) * i) / (n - 1));

/* What the Python call of a setting computes, by the names of its variables. */
const numbersOf = {
  theorem2: (s) => {
    const many = s.nodes > 1;
    const matrix = many ? known.saliencyMatrix(s) : s.delta.map((d) => [d]);
    const unit = known.unitRates(matrix.flat(), { etaW: s.eta_w, etaZ: s.eta_z, tau: s.tau });
    const rows = matrix.map((row, l) => row.map((_, k) => unit.delta[l * row.length + k]));
    const start = many ? 0 : s.start.map((v) => v / unit.scale);
    const options = { initial: start, logOffset: s.c / s.tau, normalizer: s.a };
    const problem = known.rows(rows, options);
    const all = many ? problem.tokens : known.tokens(unit.delta, options);
    const end = known.ddNumber(known.firstBlowup(all).time);
    const t = linspace(0, 1 - 10 ** -s.approach, 9).map((f) => f * end);
    const shown = view("theorem2", s).simulation;
    shown.times = t;
    shown.tolerance = 1e-11;
    shown.advance(1e9);
    const simulated = shown.kept.map(({ y }) => [...y.subarray(0, matrix.length * s.nodes)]);
    if (!many) {
      return { t_star: end, t, simulated,
        v: t.map((at) => all.map((one) => unit.scale * known.weightAt(one, at))),
        limit: known.limitsOf(all).map((v) => unit.scale * v) };
    }
    const ranks = t.slice(1).map((at) => known.stableRanks(problem, rows, at));
    return { t_star: end, t, simulated,
      v: t.map((at) => known.weightsMulti(rows, at, options).map((row) => row.map((x) => x * unit.scale))),
      rank_of_weights: ranks.map((one) => one.weights), rank_of_velocity: ranks.map((one) => one.velocity) };
  },
  theorem1: (s) => {
    const shown = view("theorem1", s);
    shown.simulation.times = linspace(0, s.end, 9);
    shown.simulation.tolerance = 1e-12;
    shown.simulation.advance(1e9);
    const n = s.tokens * s.nodes;
    return { simulated: shown.simulation.kept.map(({ y }) => [...y.subarray(0, n)]),
      logits: shown.simulation.kept.map(({ y }) => [...y.subarray(n, n + s.tokens)]) };
  },
  theorem3: (s) => {
    const rest = known.restPoint(s.family, s.distance);
    return { activity: known.activity(s.family, s.length, s.distance, s.bias),
      printed: known.printedActivity(s.family, s.length, s.distance, s.bias),
      mean_residual: linspace(-6, 6, 9).map((x) => known.meanResidual(s.family, x)),
      ratio: rest ? [rest.ratio] : [] };
  },
  eqn6: (s) => {
    const t = linspace(Math.log(0.01), Math.log(s.end), 9).map(Math.exp);
    const v = s.mu.map((mu) => known.eqn6Weights(mu, t));
    const turned = (rows) => t.map((_, n) => rows.map((row) => row[n]));
    return { v: turned(v), log_residual: turned(s.mu.map((mu) => known.logResiduals(mu, t))),
      entropy: turned(v).map((one) => known.attentionEntropy(one, s.scale)),
      threshold: s.mu.map(known.settledThreshold), printed_threshold: s.mu.map(known.printedThreshold) };
  },
  hierarchies: (s) => {
    const { classProbs, offProbs } = known.treeClasses(s);
    const [rho0, printed_rho0] = [known.rootUncertainty(classProbs, offProbs),
      known.printedRootUncertainty(classProbs, offProbs)];
    const at = (root) => linspace(0, s.depth - 1, s.depth).map((h) =>
      known.cooccurrence(Math.round(h || 0), s.depth, s.rho, root));
    return { rho0, printed_rho0, cooccurrence: at(rho0), printed: at(printed_rho0) };
  },
};
known.pythonAndNumbers = (hash) => {
  const { section, settings, notes } = known.fromLink(hash);
  return { section, notes, python: known.pythonCall(section, settings), numbers: numbersOf[section](settings) };
};
const plain = (_, value) =>
  typeof value === "number" && !Number.isFinite(value) ? String(value) : value;
const calls = JSON.parse(readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(calls.map(([name, args]) => known[name](...args)), plain));
