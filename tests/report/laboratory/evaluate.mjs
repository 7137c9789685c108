/* Evaluates functions of the laboratory: a JSON list of [name, arguments] in, of results out. */
import { readFileSync } from "node:fs";

const [assets] = process.argv.slice(2);
const modules = await Promise.all(
  ["dynamics.js", "settings.js", "python.js"].map((name) => import(`${assets}/${name}`)));
const known = Object.assign({}, ...modules, {
  weightsOfRows: (delta, times, options) => times.map((t) => known.weightsMulti(delta, t, options)),
  stableRankPairs: (delta, times, options) => {
    const problem = known.rows(delta, options);
    return times.map((t) => Object.values(known.stableRanks(problem, delta, t)));
  },
  entropies: (rows, scale) => rows.map((v) => known.attentionEntropy(v, scale)),
  simulated: (problem, v, z, times, options) => {
    const flow = new known.Flow(
      known.blockVelocity(problem), known.packState(v, z), times, options);
    flow.advance(1e9);
    return { ended: flow.ended, t: flow.kept.map((one) => one.t), y: flow.kept.map((one) => [...one.y]) };
  },
});
const plain = (_, value) =>
  typeof value === "number" && !Number.isFinite(value) ? String(value) : value;
const calls = JSON.parse(readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(calls.map(([name, args]) => known[name](...args)), plain));
