/* A chart with its controls, legend, notes, table and download. */

const TABLE_ROWS = 300;
const HELP = "Arrow keys move along the steps, Shift with them pans, plus and minus zoom, 0 shows all steps.";

class Card {
  constructor(chart) {
    this.chart = chart;
    this.logarithmic = chart.logarithmic;
    this.role = null;
    this.heads = false;
    this.member = 0;
    this.visible = false;
    this.tableOpen = false;
    this.hadHeads = null;
    const id = `chart-${chart.key}`;
    this.controls = el("div", { class: "controls" });
    this.linesHost = el("div", { class: "plot lines", tabindex: 0, role: "group" });
    this.legend = el("ul", { class: "legend" });
    this.heatHost = el("div", { class: "plot heat", tabindex: 0, role: "group" });
    this.bar = el("div", { class: "bar" });
    this.notes = el("p", { class: "notes" });
    this.tableHost = el("div", { class: "numbers", hidden: true });
    this.tableButton = el("button", { type: "button", "aria-expanded": "false", text: "Table", onclick: () => this.toggleTable() });
    this.logButton = el("button", { type: "button", "aria-pressed": String(this.logarithmic), text: "Log", onclick: () => this.toggleLog() });
    this.node = el("section", { class: `card${chart.key === "loss" ? " wide" : ""}`, id, "aria-labelledby": `${id}-title` },
      el("header", null,
        el("h3", { id: `${id}-title` }, chart.title, chart.unit ? el("span", { class: "unit", text: chart.unit }) : null),
        el("div", { class: "tools" }, this.logButton, this.tableButton,
          el("button", { type: "button", text: "CSV", "aria-label": `Download ${chart.title} as CSV`, onclick: () => this.save() })),
        el("p", { class: "sentence", text: chart.sentence })),
      this.controls, this.linesHost, this.legend, this.heatHost, this.bar, this.notes, this.tableHost);
    this.lines_ = new Lines(this.linesHost, this);
    this.heat = new Heat(this.heatHost, this);
    view.drawn.push((changes) => this.draw(changes));
    new IntersectionObserver((entries) => {
      this.visible = entries[entries.length - 1].isIntersecting;
      if (this.visible) this.show();
    }, { rootMargin: "300px" }).observe(this.node);
  }

  height() {
    return this.chart.key === "loss" ? 240 : 190;
  }

  /** Take new numbers; zoom and choices stay. */
  update(chart) {
    this.chart = chart;
    this.stale = true;
    if (this.visible) this.show();
  }

  show() {
    if (this.stale === false) return;
    this.stale = false;
    this.fillControls();
    this.rebuild();
  }

  draw(changes) {
    if (changes.has("lines")) this.stale = true;
    if (!this.visible) {
      if (changes.has("range")) this.stale = true;
      return;
    }
    if (this.stale) return this.show();
    if (changes.has("range")) {
      if (this.shown.length) this.lines_.range();
      if (this.rows().length > 1) this.heat.range();
      if (this.tableOpen) this.fillTable();
    }
    if (changes.has("cursor")) {
      this.lines_.showCursor();
      this.heat.showCursor();
      this.showValues();
    }
  }

  rebuild() {
    this.shown = this.lines();
    this.lines_.rebuild();
    const rows = this.rows();
    this.heatHost.hidden = this.bar.hidden = rows.length < 2;
    if (rows.length > 1) {
      this.heat.rebuild();
      this.fillBar();
    }
    this.fillLegend();
    this.fillNotes();
    if (this.tableOpen) this.fillTable();
    this.linesHost.setAttribute("aria-label", `${this.summary()} ${HELP}`);
    this.heatHost.setAttribute("aria-label", `${this.chart.title} as a heat map of ${rows.length} rows. ${HELP} Up and down choose a row.`);
  }

  /** Return the series that the controls choose. */
  chosen() {
    const layered = this.chart.series.some((it) => it.layer !== null);
    return this.chart.series.filter((it) =>
      (this.role === null || it.role === this.role)
      && (layered && view.layer !== null ? it.layer === view.layer : true)
      && (this.member === null || it.member === this.member)
      && (this.heads ? it.head !== null : it.head === null));
  }

  /** Return what a line is told apart by: its run, its layer, or itself. */
  entity(series) {
    if (several()) return `run:${series.run}`;
    if (series.layer !== null) return `layer:${series.layer}`;
    return this.chart.series.some((it) => it.member) && this.member === null ? `member:${series.member}` : `${series.metric}:${series.module || ""}`;
  }

  /** Return the lines to draw, with colour and dash, those of references last. */
  lines() {
    const chosen = this.chosen(), found = new Map();
    if (several()) store.runs.forEach((run, index) => found.set(`run:${index}`, { label: run.title }));
    const layers = several() ? [] : allLayers();
    layers.forEach((layer) => found.set(`layer:${layer}`, { label: `layer ${layer}` }));
    for (const series of chosen) {
      const name = this.entity(series);
      if (!found.has(name)) found.set(name, { label: name.startsWith("member:") ? `member ${series.member}` : series.name });
    }
    const used = layers.length && chosen.every((it) => it.layer === null)
      ? [...new Set(chosen.map((it) => this.entity(it)))] : [...found.keys()];
    const many = chosen.length > 40;
    const lines = chosen.map((series) => {
      const entity = this.entity(series);
      const style = { ...lineStyle(Math.max(used.indexOf(entity), 0), used.length, layers.length > 0) };
      if (several() && series.metric === "validation_loss") style.dash = [6, 3];
      return { series, entity, label: found.get(entity).label, style, hidden: view.hidden.has(entity), width: many || this.heads ? 1 : 1.6 };
    });
    return lines.concat(this.references());
  }

  references() {
    const style = { colour: css("--reference"), dash: [5, 4] };
    return store.references.flatMap((reference) => reference.curves
      .filter((it) => (it.metric === this.chart.key || this.chart.series.some((own) => own.metric === it.metric))
        && (view.layer === null || it.layer === null || it.layer === view.layer) && !this.heads)
      .map((it) => ({
        entity: `reference:${reference.name}`, label: `reference ${reference.name}`, style, width: 1,
        hidden: view.hidden.has(`reference:${reference.name}`), reference: true,
        series: { ...it, name: reference.name, module: `${reference.name} ${Object.entries(it.labels).map(([k, v]) => `${k}=${v}`).join(" ")}`, kind: null, head: null, member: 0, run: 0, marks: {}, bound: null, total: it.values.length },
      })));
  }

  rows() {
    return this.chosen().filter((it) => it.layer !== null && !view.hidden.has(this.entity(it)));
  }

  rowName(series) {
    const place = series.head === null ? `${series.layer}` : `${series.layer}.${series.head}`;
    if (several() && view.layer !== null && series.head === null) return store.runs[series.run].title;
    return several() ? `${place} ${store.runs[series.run].title}` : series.head === null ? `layer ${place}` : place;
  }

  levels() {
    return this.heads ? [] : this.chart.lines;
  }

  findings() {
    return store.runs.flatMap((run, index) => (view.hidden.has(`run:${index}`) ? [] : run.findings))
      .filter((it) => it.chart === this.chart.key || this.chart.key === "loss");
  }

  fillControls() {
    const controls = [];
    const roles = [...new Set(this.chart.series.map((it) => it.role))];
    if (this.chart.key === "loss" || roles.length < 2) this.role = null;
    else {
      if (!roles.includes(this.role)) this.role = roles[0];
      controls.push(this.select("Weight", roles.map((it) => [it, it || "whole model"]), this.role, (it) => { this.role = it; }));
    }
    const mine = this.chart.series.filter((it) => this.role === null || it.role === this.role);
    const heads = mine.some((it) => it.head !== null), whole_ = mine.some((it) => it.head === null);
    if (this.hadHeads === null || !heads || !whole_) this.heads = heads && !whole_;
    this.hadHeads = heads;
    if (heads && whole_) {
      controls.push(this.select("Heads", [["mean", "mean over heads"], ["each", "each head"]], this.heads ? "each" : "mean", (it) => { this.heads = it === "each"; }));
    }
    const members = [...new Set(mine.map((it) => it.member))].sort((one, two) => one - two);
    if (members.length > 1) {
      const options = [["all", "all members"], ...members.map((it) => [String(it), `member ${it}`])];
      controls.push(this.select("Member", options, this.member === null ? "all" : String(this.member), (it) => { this.member = it === "all" ? null : Number(it); }));
    }
    // A list that is open on the screen stays, unless there is something else to choose.
    const before = [...this.controls.querySelectorAll("option")].map((it) => it.value).join("\n");
    const now = controls.flatMap((it) => [...it.querySelectorAll("option")]).map((it) => it.value).join("\n");
    if (before !== now) return this.controls.replaceChildren(...controls);
    const lists = this.controls.querySelectorAll("select");
    controls.forEach((it, k) => { lists[k].value = it.querySelector("select").value; });
  }

  select(label, options, value, choose) {
    const list = el("select", { onchange: (event) => { choose(event.target.value); this.stale = true; this.show(); } },
      options.map(([key, text]) => el("option", { value: key, selected: key === value, text })));
    return el("label", null, el("span", { text: label }), list);
  }

  fillLegend() {
    const found = new Map();
    for (const line of this.shown) if (!found.has(line.entity)) found.set(line.entity, line);
    this.values = [];
    const items = found.size < 2 && ![...found.values()].some((it) => it.hidden) ? [...found.values()].slice(0, 1) : [...found.values()];
    this.legend.replaceChildren(...items.map((line) => {
      const value = el("span", { class: "at" });
      const own = this.shown.filter((it) => it.entity === line.entity && it.series.metric === line.series.metric);
      if (own.length === 1) this.values.push({ line, value });
      const swatch = el("span", { class: "swatch" });
      swatch.style.background = line.style.dash
        ? `repeating-linear-gradient(90deg, ${line.style.colour} 0 5px, transparent 5px 8px)` : line.style.colour;
      return el("li", null, el("button", {
        type: "button", "aria-pressed": String(!line.hidden), title: line.hidden ? "Show" : "Hide",
        onclick: () => {
          if (view.hidden.has(line.entity)) view.hidden.delete(line.entity);
          else view.hidden.add(line.entity);
          changed("lines");
        },
      }, swatch, el("span", { text: line.label }), value));
    }));
    this.showValues();
  }

  /** Write the values at the cursor into the legend. */
  showValues() {
    for (const { line, value } of this.values || []) {
      const { steps } = line.series;
      const index = view.cursor === null ? steps.length - 1 : nearest(steps, view.cursor);
      value.textContent = index < 0 ? "" : valueWord(line.series, index);
    }
  }

  fillBar() {
    const [low, high] = this.heat.ends;
    const unit = this.chart.unit ? ` ${this.chart.unit}` : "";
    const marked = this.rows().some((it) => Object.keys(it.marks).length);
    this.bar.replaceChildren(
      el("span", { text: short(low) }), el("span", { class: "ramp" }), el("span", { text: `${short(high)}${unit}` }),
      marked ? el("span", { class: "not-finite", text: "not finite" }) : "");
  }

  fillNotes() {
    const thinned = this.chosen().filter((it) => it.thinned), notes = [];
    if (thinned.length) {
      const before = thinned.map((it) => it.total), after = thinned.map((it) => it.values.length);
      const whom = thinned.length === 1 ? "Thinned" : `${count(thinned.length)} series thinned`;
      const of = (list) => { const [a, b] = [Math.min(...list), Math.max(...list)]; return a === b ? count(a) : `${count(a)}–${count(b)}`; };
      notes.push(`${whom} from ${of(before)} to ${of(after)} points by minimum and maximum.`);
    }
    if (this.chart.left_out) notes.push(`${plural(this.chart.left_out, "series")} of single heads are left out; the run folder has them.`);
    const bad = this.chosen().reduce((sum, it) => sum + Object.values(it.marks).flat().length, 0);
    if (bad) notes.push(`${plural(bad, "value")} not finite, marked ×.`);
    if (!this.shown.length) notes.push("Nothing was measured for this choice.");
    this.notes.textContent = notes.join(" ");
  }

  /** Return what the chart shows in one sentence, for those who do not see it. */
  summary() {
    const lines = this.shown.filter((it) => !it.hidden && !it.reference);
    if (!lines.length) return `${this.chart.title}: nothing is shown.`;
    const ends = lines.slice(0, 6).map(({ series, label }) => {
      const finite = series.values.map((it, k) => (it === null ? -1 : k)).filter((k) => k >= 0);
      if (!finite.length) return `${label} has no finite value`;
      return `${label} goes from ${short(series.values[finite[0]])} to ${short(series.values[finite[finite.length - 1]])}`;
    });
    const more = lines.length > 6 ? `, and ${lines.length - 6} more` : "";
    const [low, high] = shownRange();
    return `${this.chart.title} over steps ${count(Math.round(low))} to ${count(Math.round(high))}: ${ends.join("; ")}${more}.`;
  }

  toggleLog() {
    this.logarithmic = !this.logarithmic;
    this.logButton.setAttribute("aria-pressed", String(this.logarithmic));
    this.rebuild();
  }

  toggleTable() {
    this.tableOpen = !this.tableOpen;
    this.tableHost.hidden = !this.tableOpen;
    this.tableButton.setAttribute("aria-expanded", String(this.tableOpen));
    if (this.tableOpen) this.fillTable();
  }

  /** Return all numbers of some series with their whole keys, those of a step together. */
  records(listed, low, high) {
    const rows = [];
    for (const series of listed) {
      for (let k = lowerBound(series.steps, low); k < series.steps.length && series.steps[k] <= high; k++) {
        const value = series.values[k] === null ? valueWord(series, k) : series.values[k];
        rows.push([store.runs[series.run].title, series.metric, series.module, series.kind, series.layer, series.head, series.member, series.steps[k], value, boundOf(series, k)]);
      }
    }
    return rows;
  }

  fillTable() {
    const [low, high] = shownRange();
    const listed = this.shown.filter((it) => !it.hidden && !it.reference).map((it) => it.series);
    const rows = this.records(listed, low, high);
    this.tableHost.replaceChildren(
      el("p", { class: "notes", text: `${plural(rows.length, "number")} in the steps shown${rows.length > TABLE_ROWS ? `, the first ${TABLE_ROWS} here; the download has all` : ""}. Six digits; the run folder has every digit and every step.` }),
      numberTable(HEADINGS, rows.slice(0, TABLE_ROWS), `Numbers of ${this.chart.title}`));
  }

  save() {
    download(`${this.chart.key}.csv`, toCsv([HEADINGS, ...this.records(this.chart.series, -Infinity, Infinity)]));
    announce(`${this.chart.title} was saved as CSV.`);
  }
}

const HEADINGS = ["run", "metric", "module", "kind", "layer", "head", "member", "step", "value", "bound"];

/** Return a table that scrolls, also by keyboard. */
function numberTable(headings, rows, caption) {
  const cell = (value) => (typeof value === "number"
    ? el("td", { class: "number", text: Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(6))) })
    : el("td", { text: value === null || value === undefined || value === "" ? "–" : String(value) }));
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    el("table", null,
      el("thead", null, el("tr", null, headings.map((it) => el("th", { scope: "col", text: it })))),
      el("tbody", null, rows.map((row) => el("tr", null, row.map(cell))))));
}
