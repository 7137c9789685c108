/* The runs of the page, and what all charts share: zoom, cursor, hidden lines, chosen layer. */

const store = { runs: [], references: [], live: false, api: "api" };

const view = { min: null, max: null, cursor: null, hidden: new Set(), layer: null, changes: new Set(), drawn: [] };

/** Turn a packed run into the form that `payload` has. */
function unpack(run) {
  if (!run.grids) return run;
  const word = (index) => (index === null ? null : run.words[index]);
  for (const chart of run.charts) {
    chart.series = chart.packed.map((row) => {
      const [name, metric, module, kind, layer, head, member, role, grid, values, marks, total, bound] = row;
      return {
        name: word(name), metric: word(metric), module: word(module), kind: word(kind), layer, head,
        member, role: word(role), steps: run.grids[grid], values, marks: marks || {},
        thinned: total !== null, total: total === null ? values.length : total, bound,
      };
    });
  }
  return run;
}

/** Return the first and last step of everything that is drawn. */
function wholeRange() {
  let low = Infinity, high = -Infinity;
  for (const run of store.runs) {
    for (const chart of run.charts) {
      for (const { steps } of chart.series) {
        if (!steps.length) continue;
        low = Math.min(low, steps[0]);
        high = Math.max(high, steps[steps.length - 1]);
      }
    }
  }
  if (low > high) return [0, 1];
  return low === high ? [low - 1, high + 1] : [low, high];
}

let whole = [0, 1];

const shownRange = () => (view.min === null ? whole : [view.min, view.max]);

/** Zoom all charts to these steps; without them to everything. */
function setRange(low, high) {
  if (low === undefined || high - low >= whole[1] - whole[0]) {
    view.min = view.max = null;
  } else {
    const width = Math.max(high - low, 2);
    const begin = Math.min(Math.max(low, whole[0]), Math.max(whole[1] - width, whole[0]));
    view.min = begin;
    view.max = Math.min(begin + width, whole[1]);
  }
  changed("range");
}

/** Zoom by a factor about a step, or about the middle. */
function zoomBy(factor, about) {
  const [low, high] = shownRange();
  const centre = about === undefined || about === null ? (low + high) / 2 : about;
  setRange(centre - (centre - low) * factor, centre + (high - centre) * factor);
}

function panBy(share) {
  const [low, high] = shownRange();
  setRange(low + share * (high - low), high + share * (high - low));
}

function setCursor(step) {
  if (view.cursor === step) return;
  view.cursor = step;
  changed("cursor");
}

/** Draw again, once a frame at most, what has changed: "range", "cursor", "lines" or "data". */
function changed(what) {
  if (!view.changes.size) requestAnimationFrame(drawChanges);
  view.changes.add(what);
}

function drawChanges() {
  const changes = new Set(view.changes);
  view.changes.clear();
  for (const draw of view.drawn) draw(changes);
}

const several = () => store.runs.length > 1;

/** Return all layers that any series has. */
function allLayers() {
  const found = new Set();
  for (const run of store.runs) {
    for (const chart of run.charts) {
      for (const { layer } of chart.series) if (layer !== null) found.add(layer);
    }
  }
  return [...found].sort((one, two) => one - two);
}

/** Return the charts of all runs by key, in the order of the first run that has them. */
function chartsByKey() {
  const found = new Map();
  store.runs.forEach((run, index) => {
    for (const chart of run.charts) {
      if (!found.has(chart.key)) found.set(chart.key, { ...chart, series: [] });
      const joined = found.get(chart.key);
      joined.series = joined.series.concat(chart.series.map((it) => ({ ...it, run: index })));
    }
  });
  return found;
}

/** Return the word for a value that may not be finite. */
function valueWord(series, index) {
  const value = series.values[index];
  if (value !== null && value !== undefined) return short(value);
  for (const [name, word] of [["nan", "NaN"], ["inf", "∞"], ["-inf", "−∞"]]) {
    if (series.marks[name] && series.marks[name].includes(index)) return word;
  }
  return "–";
}

/** Return the whole key of a series, as the run folder has it. */
function keyWords(series) {
  const words = [series.metric];
  if (several()) words.unshift(store.runs[series.run].title);
  if (series.module) words.push(series.module);
  if (series.kind) words.push(`${series.kind} attention`);
  words.push(series.layer === null ? "no layer" : `layer ${series.layer}`);
  if (series.head !== null) words.push(`head ${series.head}`);
  if (series.member) words.push(`member ${series.member}`);
  return words.join(" · ");
}

function boundOf(series, index) {
  if (series.bound === null || series.bound === undefined) return null;
  return Array.isArray(series.bound) ? series.bound[index] : series.bound;
}
