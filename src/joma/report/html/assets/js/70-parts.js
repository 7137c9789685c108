/* Everything around the charts: summary, findings, comparison, theory, GaLore, settings. */

const SHOWN_FINDINGS = 10;
const RANK = { critical: 0, warning: 1, note: 2, unrated: 3 };
const STATES = {
  running: "running", ended: "ended", stopped: "stopped", died: "died", diverged: "diverged", damaged: "damaged", unknown: "unknown",
};

const badge = (kind, text) => el("span", { class: `badge ${kind}`, text: text || kind });
const pill = (state) => el("span", { class: `pill ${STATES[state] || "unknown"}`, text: STATES[state] || "unknown" });

function lossWord(loss) {
  if (!loss) return "–";
  return loss.last === null ? loss.last_text : short(loss.last);
}

function tile(label, ...content) {
  return el("div", { class: "tile" }, el("dt", { text: label }), el("dd", null, ...content));
}

/** The strip at the top of a page of one run. */
function summaryStrip(run) {
  const { summary } = run, worst = worstOf(run);
  const loss = summary.loss, low = loss && loss.lowest !== undefined ? `lowest ${short(loss.lowest)} at step ${count(loss.lowest_step)}` : "";
  return el("dl", { class: "strip" },
    tile("state", pill(run.state), run.reason && !["diverged", "damaged"].includes(run.state) ? el("small", { text: run.reason }) : null),
    tile("worst finding", worst ? badge(worst) : el("span", { text: run.judged ? "none" : "not judged" })),
    tile("steps", count(summary.last_step)),
    tile("last loss", lossWord(loss), low ? el("small", { text: low }) : null),
    summary.validation_loss ? tile("validation loss", lossWord(summary.validation_loss)) : null,
    summary.learning_rate === undefined ? null : tile("learning rate", short(summary.learning_rate)),
    tile("wall time", duration(summary.seconds)),
    tile("device", summary.device || "–"),
    tile("began", el("span", { class: "nowrap", text: (summary.date || "–").slice(0, 10) }), summary.date ? el("small", { text: `${summary.date.slice(11, 16)} UTC` }) : null));
}

function worstOf(run) {
  return run.findings.map((it) => it.severity).sort((a, b) => RANK[a] - RANK[b])[0] || null;
}

/** The table at the top of a page of several runs. */
function runsTable() {
  const heads = ["run", "state", "worst finding", "steps", "last loss", "lowest loss", "validation loss", "learning rate", "wall time", "device"];
  const rows = store.runs.map((run, index) => {
    const { loss, validation_loss: validation } = run.summary, worst = worstOf(run);
    const swatch = el("span", { class: "swatch" });
    swatch.style.background = lineStyle(index, store.runs.length, false).colour;
    const about = run.reason && run.state !== "diverged" ? el("small", { class: "reason", text: run.reason }) : null;
    return el("tr", null,
      el("th", { scope: "row" }, swatch, run.title, about),
      el("td", null, pill(run.state)),
      el("td", null, worst ? badge(worst) : run.judged ? "none" : "–"),
      ...[count(run.summary.last_step), lossWord(loss), short(loss ? loss.lowest : null), lossWord(validation), short(run.summary.learning_rate), duration(run.summary.seconds)].map((text) => el("td", { class: "number", text })),
      el("td", { text: run.summary.device || "–" }));
  });
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Runs" },
    el("table", { class: "runs" }, el("thead", null, el("tr", null, heads.map((it) => el("th", { scope: "col", text: it })))), el("tbody", null, rows)));
}

/** Findings of all runs, the most severe first, each with the way to its chart. */
function findingsList() {
  const found = store.runs.flatMap((run, index) => run.findings.map((it) => ({ ...it, run, index })));
  found.sort((one, two) => RANK[one.severity] - RANK[two.severity] || (one.step || 0) - (two.step || 0));
  const nodes = [];
  const list = (some) => el("ol", { class: "findings" }, some.map(findingItem));
  if (found.length) nodes.push(list(found.slice(0, SHOWN_FINDINGS)));
  if (found.length > SHOWN_FINDINGS) {
    const rest = found.slice(SHOWN_FINDINGS);
    nodes.push(el("details", null, el("summary", { text: `${plural(rest.length, "further finding")}, none more severe` }), list(rest)));
  }
  for (const run of store.runs) {
    const of = several() ? `${run.title}: ` : "", begin = (text) => (of ? of + text : text[0].toUpperCase() + text.slice(1));
    if (run.state === "damaged") nodes.push(el("p", { class: "quiet" }, pill("damaged"), ` ${of}${run.reason}`));
    else if (!run.findings.length && !run.judged) nodes.push(el("p", { class: "quiet", text: begin("no findings were recorded; this run was not judged.") }));
    else if (!run.findings.length) nodes.push(el("p", { class: "quiet" }, badge("good", "none"), ` ${begin(run.not_judged.length ? "nothing was found by the rules that could be judged." : "nothing out of the ordinary was found.")}`));
    if (run.not_judged.length) {
      nodes.push(el("details", { class: "quiet" }, el("summary", { text: `${of}${plural(run.not_judged.length, "rule")} could not be judged` }),
        el("ul", null, run.not_judged.map((it) => el("li", { text: `${it.kind}: needs ${it.needs}` })))));
    }
  }
  return nodes;
}

function findingItem(found) {
  const place = [];
  if (several()) place.push(found.run.title);
  if (found.layer !== null) place.push(`layer ${found.layer}`);
  if (found.module) place.push(found.module);
  const facts = Object.entries(found.evidence).slice(0, 8).map(([name, value]) => `${name} ${short(value)}`).join(", ");
  const button = found.chart === null ? null : el("button", {
    type: "button", class: "jump", text: found.step === null ? "Show" : `Show at step ${count(found.step)}`,
    onclick: () => jump(found),
  });
  return el("li", { class: `finding ${found.severity}` },
    el("div", { class: "head" }, badge(found.severity), el("span", { class: "kind", text: (found.kind || "").replaceAll("_", " ") }), el("span", { class: "place", text: place.join(" · ") }), button),
    el("p", { class: "what", text: found.sentence }),
    found.advice ? el("p", { class: "advice", text: found.advice }) : null,
    facts ? el("p", { class: "evidence", text: `Decided by: ${facts}.` }) : null);
}

/** Show the chart of a finding, with the cursor at its step. */
function jump(found) {
  const card = cards.get(found.chart);
  if (!card) return;
  const series = card.chart.series.find((it) => it.run === found.index && it.module === found.module && it.head === null)
    || card.chart.series.find((it) => it.run === found.index && it.layer === found.layer && it.head === null);
  if (series && card.role !== null) card.role = series.role;
  if (series && view.layer !== null && series.layer !== null) view.layer = series.layer;
  if (byId("layer")) byId("layer").value = view.layer === null ? "all" : String(view.layer);
  const [low, high] = shownRange();
  if (found.step !== null && (found.step < low || found.step > high)) setRange();
  card.stale = true;
  card.show();
  changed("lines");
  const calm = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
  card.node.scrollIntoView({ behavior: calm ? "auto" : "smooth", block: "center" });
  card.node.classList.remove("flash");
  void card.node.offsetWidth;
  card.node.classList.add("flash");
  card.linesHost.focus({ preventScroll: true });
  setCursor(found.step);
  announce(`${card.chart.title}, step ${found.step}. ${found.sentence}`);
}

/** End values of several runs, next to each other. */
function endValues() {
  const keys = new Map();
  store.runs.forEach((run, index) => {
    for (const chart of run.charts) {
      for (const series of chart.series) {
        if (series.head !== null || series.member) continue;
        const key = [series.metric, series.module || "", series.kind || "", series.layer].join("\u0000");
        if (!keys.has(key)) keys.set(key, { series, values: [] });
        const { steps } = series;
        keys.get(key).values[index] = steps.length ? `${valueWord(series, steps.length - 1)}` : "–";
      }
    }
  });
  const rows = [...keys.values()].map(({ series, values }) => [series.metric, series.module, series.layer, ...store.runs.map((_, k) => values[k] || "–")]);
  return numberTable(["metric", "module", "layer", ...store.runs.map((it) => it.title)], rows.slice(0, 400), "End values of all runs");
}

/** Settings as a table; of several runs those that differ come first. */
function settings(part) {
  const keys = [...new Set(store.runs.flatMap((run) => Object.keys(run[part])))];
  const row = (key) => [key, ...store.runs.map((run) => (key in run[part] ? run[part][key] : null))];
  const differs = (key) => new Set(store.runs.filter((it) => it.state !== "damaged").map((run) => run[part][key])).size > 1;
  return { all: keys.map(row), differing: several() ? keys.filter(differs).map(row) : [] };
}

function settingsSection() {
  const heads = several() ? store.runs.map((it) => it.title) : ["value"], nodes = [];
  for (const [part, title] of [["config", "Configuration"], ["environment", "Environment"]]) {
    const { all, differing } = settings(part);
    if (several()) {
      nodes.push(el("h3", { text: `${title}: ${differing.length ? "what differs" : "the same in all runs"}` }));
      if (differing.length) nodes.push(numberTable(["setting", ...heads], differing, `${title} that differs`));
    }
    nodes.push(el("details", { open: !several() && part === "config" }, el("summary", { text: several() ? `${title}, all of it` : title }), numberTable(["setting", ...heads], all, title)));
  }
  for (const run of store.runs) {
    if (!run.facts.length) continue;
    const rows = run.facts.map((it) => [it.metric, it.module, it.layer, it.step, it.value]);
    nodes.push(el("details", null, el("summary", { text: `${several() ? `${run.title}: ` : ""}Recorded facts (${count(rows.length)})` }), numberTable(["fact", "module", "layer", "since step", "value"], rows, "Recorded facts")));
  }
  return nodes;
}

function tablesSection() {
  return store.runs.flatMap((run) => run.tables.map((table) => {
    const left = table.rows_in_all > table.rows.length ? `, the first ${table.rows.length} here` : "";
    return el("details", null,
      el("summary", { text: `${several() ? `${run.title}: ` : ""}${table.name} (${plural(table.rows_in_all, "row")}${left})` }),
      el("button", { type: "button", text: "CSV", "aria-label": `Download table ${table.name} as CSV`, onclick: () => download(`${table.name}.csv`, toCsv([table.columns, ...table.rows])) }),
      numberTable(table.columns, table.rows, `Table ${table.name}`));
  }));
}

/** What low-rank gradients would let GaLore save, in words and as tables. */
function galoreSection() {
  return store.runs.filter((it) => it.galore).flatMap((run) => {
    const { weights, ranks, finite, shapes, adamw_bytes: adamw } = run.galore, nodes = [];
    if (several()) nodes.push(el("h3", { text: run.title }));
    const percent = (share) => (share > 0.99995 ? "> 99.99%" : `${(100 * share).toFixed(share > 0.99 ? 2 : 1)}%`);
    for (const it of ranks) {
      nodes.push(el("p", { class: "plain" },
        el("strong", { text: `Rank ${it.rank} ` }),
        `holds ${percent(it.median)} of the squared gradient of the median weight and ${percent(it.least)} of the least, of ${plural(it.gradients, "gradient")} at their last ${finite ? "" : "finite "}measurement.`,
        it.galore_bytes && adamw ? ` For these weights the optimizer would keep ${bytes(it.galore_bytes)} instead of AdamW's ${bytes(adamw)} in float32${it.galore_bytes < adamw ? `, ${Math.round(100 * (1 - it.galore_bytes / adamw))}% less` : ", so nothing is saved"}.` : ""));
    }
    nodes.push(el("p", { class: "quiet", text: shapes
      ? "Counted are two moments and the basis of each projected matrix; embeddings, biases and norms are not. That a gradient is of low rank at one step was true of every training tried, healthy or not: it does not say that training with GaLore ends as well. `joma reproduce galore` compares them."
      : "The shapes of the weights are not in this run's log, so that memory cannot be computed; `joma memory MODEL --optimizer galore-adamw` does. Low rank at one step does not say that training with GaLore ends as well." }));
    const rows = weights.map((it) => [it.module, it.layer, it.matrix_rows ? `${it.matrix_rows} × ${it.matrix_columns}` : null, it.step, it.stable_rank, ...ranks.map(({ rank }) => (rank in it.energy ? it.energy[rank] : null))]);
    nodes.push(el("details", null, el("summary", { text: `${plural(rows.length, "weight")}` }), numberTable(["weight", "layer", "shape", "step", "stable rank of gradient", ...ranks.map((it) => `energy in ${it.rank}`)], rows, "Gradient ranks by weight")));
    return nodes;
  });
}
