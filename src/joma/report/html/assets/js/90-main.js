/* Put the page together, and keep it up to date. */

const cards = new Map();

function section(id, title, nodes) {
  const host = byId(id);
  host.hidden = !nodes.length;
  host.replaceChildren(el("h2", { text: title }), ...nodes);
}

/** Fill everything but the charts; they are updated in place, so that zoom and choices stay. */
function fillParts() {
  byId("summary").replaceChildren(several() ? runsTable() : summaryStrip(store.runs[0]));
  section("findings", "Findings", findingsList());
  section("cache", CACHE_TITLE, cacheSection());
  section("galore", "Gradient rank and GaLore", galoreSection());
  section("end-values", "End values", several() ? [el("details", null, el("summary", { text: "Last value of every series, run by run" }), endValues())] : []);
  section("tables", "Tables", tablesSection());
  section("settings", "Settings", settingsSection());
}

function fillCharts() {
  const found = chartsByKey();
  for (const [key, chart] of found) {
    if (cards.has(key)) {
      cards.get(key).update(chart);
      continue;
    }
    const id = `section-${chart.section.toLowerCase()}`;
    let host = byId(id);
    if (!host) {
      host = el("section", { id, class: "group" }, el("h2", { text: chart.section }), el("div", { class: "grid" }));
      byId("charts").append(host);
    }
    const card = new Card(chart);
    cards.set(key, card);
    host.querySelector(".grid").append(card.node);
  }
}

function fillNavigation() {
  const links = [...document.querySelectorAll("main section[id] > h2")]
    .filter((it) => !it.parentElement.hidden)
    .map((it) => el("a", { href: `#${it.parentElement.id}`, text: { "Gradient rank and GaLore": "GaLore", [CACHE_TITLE]: "Cache" }[it.textContent] || it.textContent }));
  byId("links").replaceChildren(...links);
}

function fillLayers() {
  const layers = allLayers(), host = byId("layer-label");
  host.hidden = layers.length < 2;
  const value = view.layer === null ? "all" : String(view.layer);
  const options = [["all", "all layers"], ...layers.map((it) => [String(it), `layer ${it}`])];
  if (byId("layer").options.length !== options.length) {
    byId("layer").replaceChildren(...options.map(([key, text]) => el("option", { value: key, text })));
  }
  byId("layer").value = value;
}

function showRange() {
  const [low, high] = shownRange();
  const at = view.cursor === null ? "" : `step ${count(Math.round(view.cursor))} of `;
  byId("range").textContent = `${at || "steps "}${count(Math.round(low))}–${count(Math.round(high))}`;
  byId("reset").disabled = view.min === null;
}

/** Show the runs again after one of them changed. */
function refresh() {
  const open = [...document.querySelectorAll("details[open] > summary")].map((it) => it.textContent.replace(/[\d,]+/g, ""));
  whole = wholeRange();
  fillParts();
  for (const it of document.querySelectorAll("details > summary")) {
    if (open.includes(it.textContent.replace(/[\d,]+/g, ""))) it.parentElement.open = true;
  }
  fillCharts();
  fillNavigation();
  fillLayers();
  changed("range");
}

/** The layer of the worst finding, with which several runs begin; the first one otherwise. */
function firstLayer() {
  const layers = allLayers();
  if (!several() || layers.length < 2) return null;
  const found = store.runs.flatMap((it) => it.findings).filter((it) => layers.includes(it.layer));
  found.sort((one, two) => RANK[one.severity] - RANK[two.severity]);
  return found.length ? found[0].layer : layers[0];
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  colours.clear();
  byId("theme").setAttribute("aria-pressed", String(isDark()));
  changed("lines");
  if (several()) byId("summary").replaceChildren(runsTable());
  section("cache", CACHE_TITLE, cacheSection());
}

function begin() {
  const data = JSON.parse(byId("data").textContent);
  store.live = data.live;
  store.api = data.api;
  store.references = data.references;
  store.runs = data.runs.map(unpack);
  whole = wholeRange();
  view.layer = firstLayer();
  fillParts();
  fillCharts();
  fillNavigation();
  fillLayers();
  showRange();
  view.drawn.push((changes) => (changes.has("range") || changes.has("cursor")) && showRange());
  byId("zoom-in").addEventListener("click", () => zoomBy(0.5, view.cursor));
  byId("zoom-out").addEventListener("click", () => zoomBy(2, view.cursor));
  byId("reset").addEventListener("click", () => setRange());
  byId("layer").addEventListener("change", (event) => {
    view.layer = event.target.value === "all" ? null : Number(event.target.value);
    changed("lines");
  });
  byId("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
  byId("theme").setAttribute("aria-pressed", String(isDark()));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(document.documentElement.dataset.theme));
  const everything = () => {
    for (const card of cards.values()) {
      card.visible = true;
      card.show();
    }
  };
  window.addEventListener("beforeprint", everything);
  window.matchMedia("print").addEventListener("change", (event) => event.matches && everything());
  if (data.live) {
    byId("connection").hidden = false;
    showConnection(false);
    follow();
  }
  document.documentElement.dataset.ready = "yes";
}

begin();
