/* What can be set in each part of the laboratory, and how a link spells it. */

import { randomNumbers } from "./hblt.js";

const RATES = [
  { key: "tau", label: "τ, temperature", min: 0.1, max: 10, log: true, value: 1 },
  { key: "eta_w", label: "η_W, rate of the weights", min: 0.01, max: 10, log: true, value: 1 },
  { key: "eta_z", label: "η_Z, rate of the logits", min: 0.01, max: 10, log: true, value: 1 },
];
const mode = (label, min, max, value) => [
  {
    key: "mode", label: "Simulation", value: "flow",
    options: { flow: "gradient flow", descent: "gradient steps" },
  },
  { key: "step", label, min, max, log: true, value, when: (s) => s.mode === "descent" },
];
const seed = (label, value, when) => ({ key: "seed", label, min: 0, max: 99, step: 1, value, when });
const width = (key, label, min, max, value) => ({ key, label, min, max, step: 1, value });

/** Controls by part. `list` controls hold one number for each token; `tokens` is their length. */
export const SECTIONS = {
  theorem2: [
    { key: "delta", label: "Δ, saliency of each token", min: -2, max: 2, step: 0.01, list: true,
      value: [1, 0.7, 0.4, -0.3], more: (l) => Math.round(100 * 0.95 * 0.85 ** l) / 100 },
    width("tokens", "M, tokens", 1, 20, 4),
    width("nodes", "K, hidden nodes", 1, 8, 1),
    seed("Directions of Δ's rows (0: along the axes)", 0, (s) => s.nodes > 1),
    { key: "approach", label: "Nearness a: up to 1 − t/t* = 10⁻ᵃ", min: 0.3, max: 6, step: 0.1, value: 2 },
    ...RATES,
    { key: "start", label: "v(0), start of each token", min: -3, max: 3, step: 0.01, list: true,
      value: [0, 0, 0, 0], more: () => 0, advanced: true, when: (s) => s.nodes === 1 },
    { key: "c", label: "c, constant of Theorem 1", min: -3, max: 3, step: 0.01, value: 0,
      advanced: true },
    { key: "a", label: "A, normalizer", min: 0.1, max: 10, log: true, value: 1,
      advanced: true },
    ...mode("Length of a step, as a share of t*", 0.0001, 0.05, 0.01),
  ],
  theorem1: [
    { key: "attention", label: "Attention σ", value: "exp",
      options: { exp: "exp", linear: "linear", sigmoid: "sigmoid", softmax: "softmax" } },
    { key: "activation", label: "Activation φ", value: "tanh",
      options: { tanh: "tanh", softplus: "softplus", linear: "linear" } },
    ...RATES,
    width("tokens", "M, tokens", 2, 20, 5),
    width("nodes", "K, hidden nodes", 1, 8, 3),
    width("samples", "N, samples", 2, 12, 6),
    seed("Seed of data and start", 1),
    { key: "z", label: "z(0), logits at the start", min: -2, max: 2, step: 0.01, value: 0.5 },
    { key: "size", label: "Size of v(0)", min: 0, max: 1, step: 0.01, value: 0.3 },
    { key: "end", label: "Last time", min: 0.1, max: 20, log: true, value: 3 },
    ...mode("Length of a step", 0.001, 0.5, 0.05),
  ],
  theorem3: [
    { key: "distance", label: "D, distance of the two clusters", min: 0.1, max: 8, step: 0.01, value: 2 },
    { key: "family", label: "Shape of a cluster", value: "t3",
      options: { t3: "Student t₃", t5: "Student t₅", laplace: "Laplace", gaussian: "Gaussian", logistic: "logistic" } },
    { key: "length", label: "‖v‖, length of the weights", min: 0.1, max: 5, log: true, value: 0.5 },
    { key: "bias", label: "ξ, implicit bias", min: -4, max: 4, step: 0.01, value: -1 },
    { key: "draws", label: "Sampled points", min: 1000, max: 1e6, log: true, value: 50000 },
    seed("Seed of the samples", 1),
  ],
  eqn6: [
    { key: "mu", label: "μ, target of each token", min: -6, max: 6, step: 0.01, list: true,
      value: [3, 2.5, 0.5, 0.3], more: (l) => Math.round(100 * 2.2 * 0.8 ** l) / 100 },
    width("tokens", "M, tokens", 1, 20, 4),
    { key: "scale", label: "Entropy of softmax(s·v²), s", min: 0.1, max: 2, log: true, value: 1 },
    { key: "end", label: "Last time", min: 1, max: 1000, log: true, value: 20 },
    ...mode("Length of a step", 1e-5, 0.5, 0.005),
  ],
  hierarchies: [
    { key: "rho", label: "ρ of every edge", min: 0, max: 1, step: 0.001, value: 0.9 },
    width("depth", "L, levels below the class", 1, 20, 4),
    { key: "distance", label: "Distance of the two tokens, 2H edges", min: 0, max: 38, step: 2, value: 2 },
    width("classes", "Classes", 2, 20, 5),
    { key: "on", label: "P[top latent off] in the class that switches it on", min: 0, max: 1,
      step: 0.01, value: 0.05 },
    { key: "off", label: "P[top latent off] in the other classes", min: 0, max: 1, step: 0.01,
      value: 0.95 },
    { key: "trees", label: "Sampled trees", min: 1000, max: 1e6, log: true, value: 100000 },
    seed("Seed of the samples", 1),
  ],
};

/** Values of Δ or μ that are worth a look, by the key of their list. */
export const PRESETS = {
  delta: {
    "four tokens": [1, 0.7, 0.4, -0.3],
    "a tie": [1, 1, 0.5],
    "a close race": [1, 0.99, 0.98, 0.5],
    "opposite signs": [1, -1, 0.6, -0.6],
    "nearly nothing": [0.001, 1e-6, 1e-12],
    "twenty tokens": Array.from({ length: 20 }, (_, l) => Math.round(100 - 5 * l) / 100),
  },
  mu: {
    "drop and rebound": [3, 2.5, 0.5, 0.3],
    "Fig. 4: ten targets": [3.87, 3.44, 3.12, 2.91, 2.46, 2.31, 1.81, 1.64, 1.27, 1.05],
    "falls only": [1, 0.9, 0],
    "equal targets": [2, 2, 2],
    "one salient token": [3, 0, 0],
    "μ = 6": [6, 5, 4, 1],
  },
};

const copy = (value) => (Array.isArray(value) ? [...value] : value);

/** The default settings of a part. */
export const defaults = (section) =>
  Object.fromEntries(SECTIONS[section].map((one) => [one.key, copy(one.value)]));

/** Brings lists to the number of tokens and H below L. */
export function consistent(section, settings) {
  const result = { ...settings };
  for (const control of SECTIONS[section].filter((one) => one.list)) {
    const list = result[control.key].slice(0, result.tokens);
    while (list.length < result.tokens) list.push(control.more(list.length));
    result[control.key] = list;
  }
  if (section === "hierarchies") result.distance = Math.min(result.distance, 2 * (result.depth - 1));
  return result;
}

function readNumber(control, text, notes) {
  const value = text.trim() === "" ? NaN : Number(text);
  if (!Number.isFinite(value)) {
    notes.push(`“${text.slice(0, 20)}” is not a number for ${control.label}; the default is used.`);
    return null;
  }
  const held = Math.min(Math.max(value, control.min), control.max);
  const whole = control.step >= 1 ? control.min + control.step *
    Math.round((held - control.min) / control.step) : held;
  if (whole !== value) notes.push(`${control.label}: ${value} became ${whole}.`);
  return whole;
}

/** The value of a control from its text; null, with a note, where it has none. */
export function readValue(control, text, notes) {
  if (control.options) {
    if (Object.hasOwn(control.options, text)) return text;
    notes.push(`“${text.slice(0, 20)}” is no choice for ${control.label}; the default is used.`);
    return null;
  }
  if (!control.list) return readNumber(control, text, notes);
  const parts = text.split(",").slice(0, 20);
  const values = parts.map((one) => readNumber(control, one, notes));
  return values.includes(null) ? null : values;
}

/** Settings from the part of a link after #; what could not be read is noted. */
export function fromLink(hash) {
  const notes = [];
  const [name, ...pairs] = hash.replace(/^#/, "").split("&");
  const section = Object.hasOwn(SECTIONS, name) ? name : "theorem2";
  if (name && section !== name) notes.push(`There is no part “${name.slice(0, 20)}”.`);
  let settings = defaults(section);
  let tokens = null;
  for (const pair of pairs) {
    const [key, text = ""] = pair.split("=").map(decode);
    const control = SECTIONS[section].find((one) => one.key === key);
    const value = control ? readValue(control, text, notes) : null;
    if (!control) notes.push(`There is no setting “${key.slice(0, 20)}”.`);
    if (value !== null) settings[key] = value;
    if (value !== null && control.list) tokens = Math.max(tokens ?? 0, value.length);
  }
  if (tokens !== null) settings.tokens = tokens;
  settings = consistent(section, settings);
  return { section, settings, notes };
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** The part of a link after #, with all settings. */
export function toLink(section, settings) {
  const pairs = SECTIONS[section].map(({ key }) => `${key}=${String(settings[key])}`);
  return `#${section}&${pairs.join("&")}`;
}

function normal(next) {
  return Math.sqrt(-2 * Math.log(1 - next())) * Math.cos(2 * Math.PI * next());
}

const rounded = (x, digits) => Math.round(x * 10 ** digits) / 10 ** digits;

/** Δ as a matrix (M×K): row l has about the length |Δ_l|, along an axis or a drawn direction. */
export function saliencyMatrix({ delta, nodes, seed: drawn }) {
  const next = randomNumbers(drawn);
  return delta.map((size, l) => {
    if (drawn === 0) return Array.from({ length: nodes }, (_, k) => (k === l % nodes ? size : 0));
    const direction = Array.from({ length: nodes }, () => normal(next));
    const length = Math.hypot(...direction);
    return direction.map((x) => Number(((size * x) / length).toPrecision(4)));
  });
}

/** Data and start of the block of Theorem 1: x (N×M), gradients (N×K), v (M×K), z (M). */
export function blockData({ tokens, nodes, samples, seed: drawn, z, size }) {
  const next = randomNumbers(drawn + 1000);
  const matrix = (rows, columns, one) =>
    Array.from({ length: rows }, () => Array.from({ length: columns }, one));
  const x = matrix(samples, tokens, () => rounded(next(), 2));
  x.forEach((row, n) => (row[n % tokens] = Math.max(row[n % tokens], 0.5)));
  const gradient = matrix(samples, nodes, () => rounded(normal(next), 2));
  const v = matrix(tokens, nodes, () => rounded(size * normal(next), 3));
  return { x, gradient, v, z: Array.from({ length: tokens }, (_, l) => rounded(z + 0.1 * l, 3)) };
}

/** The classes of a tree: equal shares, and P[top latent off] of each. */
export function treeClasses({ classes, on, off }) {
  return {
    classProbs: new Array(classes).fill(1 / classes),
    offProbs: [on, ...new Array(classes - 1).fill(off)],
  };
}
