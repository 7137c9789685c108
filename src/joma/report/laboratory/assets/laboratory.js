/* The laboratory's page: settings, link, pictures, numbers and Python call of one part at a time. */

import { Controls, element } from "./controls.js";
import { Plot, colorOf } from "./plot.js";
import { pythonCall } from "./python.js";
import { SECTIONS, consistent, defaults, fromLink, toLink } from "./settings.js";
import { view } from "./views.js";

const FIRST_MS = 3; // of simulation within the update that a slider causes
const FRAME_MS = 8; // of simulation in each frame after it

const find = (selector) => document.querySelector(selector);
const figures = [...document.querySelectorAll("figure")].map((figure) => ({
  figure,
  title: figure.querySelector("figcaption"),
  legend: figure.querySelector(".legend"),
  plot: new Plot(figure.querySelector("canvas"), figure.querySelector(".readout")),
}));

const state = { section: "theorem2", settings: defaults("theorem2"), kept: {}, notes: [] };
let current = null; // the view that is shown
let dirty = false;
let linkTimer = 0;
const timing = { closed: 0, last: 0, largest: 0, updates: 0 };

const controls = new Controls(find("#controls"), (key, value) => {
  const settings = { ...state.settings, [key]: value };
  if (Array.isArray(value)) settings.tokens = value.length;
  state.settings = consistent(state.section, settings);
  state.notes = [];
  schedule();
});

function schedule() {
  if (!dirty) requestAnimationFrame(update);
  dirty = true;
}

/** Compute and draw the settings, then let the simulation go on in later frames. */
function update() {
  dirty = false;
  const begin = performance.now();
  controls.show(state.section, state.settings);
  current = view(state.section, state.settings);
  timing.closed = performance.now() - begin;
  current.simulation?.advance(FIRST_MS);
  drawView();
  find("#python").textContent = pythonCall(state.section, state.settings, reached());
  timing.last = performance.now() - begin;
  timing.largest = Math.max(timing.largest, timing.last);
  timing.updates++;
  clearTimeout(linkTimer);
  linkTimer = setTimeout(writeLink, 200);
  if (current.simulation && !current.simulation.done) requestAnimationFrame(() => goOn(current));
}

const reached = () => (current.simulation?.ended ? current.simulation.kept.at(-1)?.t ?? 0 : undefined);

function goOn(shown) {
  if (shown !== current) return;
  if (shown.simulation.advance(FRAME_MS)) {
    find("#python").textContent = pythonCall(state.section, state.settings, reached());
  } else requestAnimationFrame(() => goOn(shown));
  drawView();
}

/** What is drawn of the current view. */
function frame() {
  if (current.problem) return { plots: [], extra: [], readouts: [], note: "" };
  if (current.draw) return { extra: [], ...current.draw() };
  return { ...current, extra: current.dots() };
}

function drawView() {
  const { plots, extra, readouts, note } = frame();
  figures.forEach(({ figure, title, legend, plot }, n) => {
    figure.hidden = n >= plots.length;
    if (figure.hidden) return;
    title.textContent = plots[n].title;
    plot.show(plots[n], extra[n] ?? [], state.settings.tokens ?? 1);
    legend.replaceChildren(...(plots[n].legend ? legendOf([...plots[n].series, ...(extra[n] ?? [])]) : []));
  });
  find("#problem").textContent = current.problem ?? "";
  const ended = current.simulation?.ended ?? "";
  find("#note").textContent = [...new Set([...state.notes, note, ended])].filter(Boolean).join(" ");
  find("#readouts").replaceChildren(...readouts.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

function legendOf(series) {
  return series.map((one) => {
    const key = element("span", { class: `key ${one.style}`, "aria-hidden": "true" });
    key.style.color = colorOf(one.color);
    return element("span", {}, key, one.name);
  });
}

function writeLink() {
  const link = toLink(state.section, state.settings);
  if (link !== location.hash) history.replaceState(null, "", link);
}

function open(section, settings, notes = []) {
  state.kept[state.section] = state.settings;
  Object.assign(state, { section, settings, notes });
  for (const one of document.querySelectorAll("[data-part]")) one.hidden = one.dataset.part !== section;
  for (const one of document.querySelectorAll("nav a")) {
    if (one.dataset.to === section) one.setAttribute("aria-current", "page");
    else one.removeAttribute("aria-current");
  }
  schedule();
}

function openLink() {
  const { section, settings, notes } = fromLink(location.hash);
  open(section, settings, notes);
}

async function copyText(text, button) {
  const before = button.dataset.label ?? button.textContent;
  button.dataset.label = before;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    const area = element("textarea", { class: "aside" });
    area.value = text;
    document.body.append(area);
    area.select();
    button.textContent = document.execCommand("copy") ? "Copied" : "Select and copy the text";
    area.remove();
  }
  setTimeout(() => (button.textContent = before), 1500);
}

for (const link of document.querySelectorAll("nav a[data-to]")) {
  link.addEventListener("click", (event) => {
    event.preventDefault();
    const to = link.dataset.to;
    open(to, state.kept[to] ?? consistent(to, defaults(to)));
  });
}
find("#reset").addEventListener("click", () => open(state.section, consistent(state.section, defaults(state.section))));
find("#copy-python").addEventListener("click", (event) => copyText(find("#python").textContent, event.target));
find("#copy-link").addEventListener("click", (event) => {
  writeLink();
  copyText(location.href, event.target);
});
addEventListener("hashchange", openLink);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  controls.shape = "";
  schedule();
});
openLink();

/** For tests and the curious: settings, what is drawn, and how long updates took. */
globalThis.jomaLaboratory = {
  sections: Object.keys(SECTIONS),
  timing,
  get section() { return state.section; },
  get settings() { return structuredClone(state.settings); },
  get done() { return !dirty && (current?.simulation?.done ?? true); },
  get drawn() {
    return figures.filter(({ figure }) => !figure.hidden)
      .map(({ plot }) => ({ title: plot.plot.title, series: structuredClone(plot.series) }));
  },
};
