/* Sliders, number fields and choices, made from the settings of a part. */

import { PRESETS, SECTIONS, readValue } from "./settings.js";
import { colorOf } from "./plot.js";

/** A new element with attributes, children and listeners. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/** A label with its indices set low: η_W. */
const withIndices = (text) => text.split(/_(\w)/).map((part, n) => (n % 2 ? element("sub", {}, part) : part));

const onSlider = (control, x) => (control.log ? Math.log10(x) : x);

/** The value of a slider's place: for logarithmic ones to three digits. */
function fromSlider(control, text) {
  if (!control.log) return Number(text);
  const value = Number((10 ** Number(text)).toPrecision(3));
  return Math.min(Math.max(value, control.min), control.max);
}

/** A slider and a number field for one number, as two elements that follow each other. */
function pair(control, id, value, name, change) {
  const slider = element("input", {
    type: "range", "aria-label": `${name}, slider`, "data-key": id,
    min: onSlider(control, control.min), max: onSlider(control, control.max),
    step: control.log ? 0.01 : control.step,
    oninput: () => change(fromSlider(control, slider.value)),
  });
  const field = element("input", {
    type: "number", id, step: control.log ? "any" : control.step < 1 ? "any" : control.step,
    min: control.min, max: control.max, inputmode: "decimal", "aria-label": name,
    onchange: () => {
      const read = readValue({ ...control, list: false }, field.value, []);
      if (read !== null) change(read);
      else field.value = field.dataset.value;
    },
  });
  const set = (x) => {
    slider.value = onSlider(control, x);
    slider.setAttribute("aria-valuetext", String(x));
    if (document.activeElement !== field || Number(field.value) !== x) field.value = x;
    field.dataset.value = x;
  };
  set(value);
  return { slider, field, set };
}

/** The controls of one part; `change(key, value)` is called when one is moved. */
export class Controls {
  constructor(holder, change) {
    Object.assign(this, { holder, change, shape: "", setters: {} });
  }

  /** Show settings: move what is there, or build it where the number of tokens changed. */
  show(section, settings) {
    const visible = SECTIONS[section].filter((one) => !one.when || one.when(settings));
    const shape = [section, settings.tokens, ...visible.map((one) => one.key)].join();
    if (shape !== this.shape) this.build(visible, settings);
    else for (const one of visible) this.setters[one.key](settings[one.key]);
    this.shape = shape;
  }

  build(visible, settings) {
    this.setters = {};
    const open = this.holder.querySelector("details")?.open ?? false;
    const focused = document.activeElement?.id;
    const rows = visible.map((one) => [one.advanced, this.row(one, settings[one.key], settings)]);
    const plain = rows.filter(([advanced]) => !advanced).map(([, row]) => row);
    const more = rows.filter(([advanced]) => advanced).map(([, row]) => row);
    this.holder.replaceChildren(...plain);
    if (more.length > 0) {
      this.holder.append(element("details", { open }, element("summary", {}, "Start and constants"), ...more));
    }
    if (focused) document.getElementById(focused)?.focus();
  }

  row(control, value, settings) {
    if (control.options) return this.choice(control, value);
    if (control.list) return this.list(control, value, settings);
    const id = `set-${control.key}`;
    const { slider, field, set } = pair(control, id, value, control.label,
      (x) => this.change(control.key, x));
    this.setters[control.key] = set;
    return element("div", { class: "row" },
      element("label", { for: id }, ...withIndices(control.label)), slider, field);
  }

  choice(control, value) {
    const id = `set-${control.key}`;
    const select = element("select", { id, onchange: () => this.change(control.key, select.value) },
      ...Object.entries(control.options).map(([key, text]) => element("option", { value: key }, text)));
    select.value = value;
    this.setters[control.key] = (x) => (select.value = x);
    return element("div", { class: "row choice" }, element("label", { for: id }, control.label), select);
  }

  list(control, values, settings) {
    const sets = [];
    let now = [...values];
    const tokens = values.map((x, l) => {
      const name = `${control.label.split(",")[0]} of token ${l + 1}`;
      const { slider, field, set } = pair(control, `set-${control.key}-${l}`, x, name, (to) => {
        now = now.map((old, i) => (i === l ? to : old));
        this.change(control.key, now);
      });
      sets.push(set);
      const chip = element("span", { class: "chip", "aria-hidden": "true" });
      chip.style.background = colorOf(l, settings.tokens);
      return element("div", { class: "token" }, chip, element("span", { class: "index" }, String(l + 1)), slider, field);
    });
    this.setters[control.key] = (to) => {
      now = [...to];
      to.forEach((x, l) => sets[l](x));
    };
    return element("fieldset", {}, element("legend", {}, control.label),
      ...(PRESETS[control.key] ? [this.presets(control.key)] : []),
      element("div", { class: "tokens" }, ...tokens));
  }

  presets(key) {
    const select = element("select", {
      "aria-label": "Examples",
      onchange: () => {
        if (select.value) this.change(key, PRESETS[key][select.value]);
        select.value = "";
      },
    }, element("option", { value: "" }, "Examples …"),
    ...Object.keys(PRESETS[key]).map((name) => element("option", { value: name }, name)));
    return select;
  }
}
