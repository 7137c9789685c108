/* The Python call that computes with joma.theory what the laboratory draws. */

import { blockData, saliencyMatrix } from "./settings.js";

const list = (values) => `[${values.join(", ")}]`;
const matrix = (rows) =>
  rows.length * rows[0].length > 12
    ? `[\n    ${rows.map(list).join(",\n    ")},\n]`
    : `[${rows.map(list).join(", ")}]`;

const RATES = (s) => `eta_w, eta_z, tau = ${s.eta_w}, ${s.eta_z}, ${s.tau}\n`;

function oneNode(s) {
  return `import numpy as np
from joma.theory import linear
from joma.theory.block import Block, Samples, simulate
from joma.theory.functions import exp_attention

delta = np.array(${list(s.delta)})
start = np.array(${list(s.start)})
${RATES(s)}c, normalizer = ${s.c}, ${s.a}

# Theorem 2 in closed form
unit = linear.unit_rates(delta, eta_w=eta_w, eta_z=eta_z, tau=tau)
setting = {"initial": start / unit.scale, "log_offset": c / tau, "normalizer": normalizer}
t_star = linear.blowup_time(unit.delta, **setting).min()
t = t_star * np.linspace(0, 1 - 10**-${s.approach.toFixed(1)}, 9)
v = unit.scale * linear.weights(unit.delta, t, **setting)
limit = unit.scale * linear.limit(unit.delta, **setting)

# The block in full: weights and logits trained together
block = Block(exp_attention(normalizer), eta_w=eta_w, eta_z=eta_z, tau=tau)
samples = Samples(x=np.eye(delta.size), gradient=delta.size * delta)
z = c + eta_z / (2 * eta_w * tau) * start**2
simulated = simulate(block, samples, t, initial=(start, z)${descent(s, `${s.step} * t_star`)})
`;
}

function manyNodes(s) {
  return `import numpy as np
from joma.theory import linear, spectra
from joma.theory.block import Block, Samples, simulate
from joma.theory.functions import exp_attention

delta = np.array(${matrix(saliencyMatrix(s))})
${RATES(s)}c, normalizer = ${s.c}, ${s.a}

# Theorem 2 for many nodes, in closed form
unit = linear.unit_rates(delta, eta_w=eta_w, eta_z=eta_z, tau=tau)
pace = normalizer * np.exp(-c / tau)
t_star = linear.blowup_time(np.linalg.norm(unit.delta, axis=1), normalizer=pace).min()
t = t_star * np.linspace(0, 1 - 10**-${s.approach.toFixed(1)}, 9)
v = unit.scale * linear.weights_multi(unit.delta, t, normalizer=pace)
rank_of_weights = spectra.stable_rank(v[1:])
rank_of_velocity = spectra.stable_rank(linear.velocity_multi(unit.delta, t[1:], normalizer=pace))

# The block in full: weights and logits trained together
block = Block(exp_attention(normalizer), eta_w=eta_w, eta_z=eta_z, tau=tau)
samples = Samples(x=np.eye(len(delta)), gradient=len(delta) * delta)
start = (np.zeros(delta.shape), np.full(len(delta), ${s.c}))
simulated = simulate(block, samples, t, initial=start${descent(s, `${s.step} * t_star`)})
`;
}

const descent = (s, step) => (s.mode === "descent" ? `, descent_step=${step}` : "");

function theorem1(s, reached) {
  const data = blockData(s);
  const softmax = s.attention === "softmax";
  const end = reached !== undefined && reached < s.end ? Number(reached.toPrecision(6)) : s.end;
  return `import numpy as np
from joma.theory import invariants
from joma.theory.block import Block, Samples, simulate

x = np.array(${matrix(data.x)})
gradient = np.array(${matrix(data.gradient)})
v = np.array(${matrix(data.v)})
z = np.array(${list(data.z)})

block = Block("${s.attention}", "${s.activation}", eta_w=${s.eta_w}, eta_z=${s.eta_z}, tau=${s.tau})
samples = Samples(x=x, gradient=gradient)
t = np.linspace(0, ${end}, 9)
trajectory = simulate(block, samples, t, initial=(v, z)${descent(s, s.step)})
law = invariants.conserved(trajectory)${softmax ? "  # the sum of the logits" : ""}
drift = invariants.drift(trajectory)
${softmax ? "b = block.scores(x, z).mean(axis=0)\nestimate = z + invariants.softmax_logits(block, trajectory.v, b)\nestimate -= invariants.softmax_logits(block, v, b)\n" : ""}`;
}

const SHAPES = {
  t3: "StudentT(3)", t5: "StudentT(5)", laplace: "Laplace()", gaussian: "Gaussian()", logistic: "Logistic()",
};

function theorem3(s) {
  return `import numpy as np
from joma.theory import as_printed, clusters, marginals

shape = marginals.${SHAPES[s.family]}
distance, length, bias = ${s.distance}, ${s.length}, ${s.bias}

# Lemma 1: how often the node is active on a cluster at this distance
v, mean = np.array([length, 0.0]), np.array([distance, 0.0])
activity = clusters.expectations(shape, v, mean, bias).activity
printed = as_printed.expectations(shape, v, mean, bias).activity

# Theorem 3: where a node rests between two clusters, and at which a₋/a₊
s = np.linspace(-6, 6, 9)
mean_residual = shape.mean_residual(s)
points = clusters.critical_points(shape, distance)
ratio = [point.ratio for point in points]
`;
}

function eqn6(s) {
  return `import numpy as np
from joma.theory import as_printed, nonlinear

mu = np.array(${list(s.mu)})
t = np.geomspace(0.01, ${s.end}, 9)
v = nonlinear.weights(mu, t)
log_residual = nonlinear.log_residual(mu, t)
entropy = nonlinear.attention_entropy(v, scale=${s.scale})
fate = nonlinear.entropy_fate(mu, scale=${s.scale})

# Theorem 4's closing line: the ln δ from which Eqn 7 holds, derived and printed
threshold = nonlinear.settled_threshold(mu)
printed_threshold = as_printed.settled_threshold(mu)
`;
}

function hierarchies(s) {
  return `import numpy as np
from joma.theory import as_printed, hblt

classes = np.full(${s.classes}, 1 / ${s.classes})
off = np.array([${s.on}] + [${s.off}] * ${s.classes - 1})
height, depth, rho = np.arange(${s.depth}), ${s.depth}, ${s.rho}

rho0 = hblt.root_uncertainty(classes, off)
cooccurrence = hblt.cooccurrence(height, depth, rho, rho0)
printed_rho0 = as_printed.root_uncertainty(classes, off)
printed = hblt.cooccurrence(height, depth, rho, printed_rho0)

# A sampled tree: each token's values, next to those of the first
tree = hblt.Tree.regular(min(depth, 8), 2, rho, classes, off)
labels, levels = tree.sample(${Math.min(s.trees, 20000)}, rng=${s.seed})
measured = levels[-1][levels[-1][:, 0] == 1].mean(axis=0)
`;
}

/** The call for a part and its settings; `reached` is where a simulation of Theorem 1 ended. */
export function pythonCall(section, settings, reached) {
  if (section === "theorem1") return theorem1(settings, reached);
  if (section === "theorem3") return theorem3(settings);
  if (section === "eqn6") return eqn6(settings);
  if (section === "hierarchies") return hierarchies(settings);
  return settings.nodes > 1 ? manyNodes(settings) : oneNode(settings);
}
