/* What a smaller cache would cost: sentences, a chart of cost over bytes, and the table. */

const CACHE_TITLE = "What a smaller cache would cost";
const CACHE_CHART = { widest: 760, height: 300, left: 62, right: 18, top: 14, bottom: 46 };
const COST_TICKS = [-3, -1, -0.3, -0.1, -0.03, 0, 0.03, 0.1, 0.3, 1, 3, 10];
const SHARE_TICKS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2];
const LINEAR_COST = 0.03;

/** Costs on a scale that is linear around zero and logarithmic beyond, so that 0.05 and 5 show. */
const costScale = (cost) => Math.asinh(cost / LINEAR_COST);

function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

/** Return which text the costs are of: the prompt's own where it was long enough. */
const costText = (rows) => (rows.some((it) => it.text_tokens > 0) ? "text" : "reply");

function percent(share) {
  return share === null ? "–" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`;
}

const signed = (value, digits) => (value === null ? "–" : `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(digits)}`);

function withError(value, error, digits = 3) {
  return value === null ? "–" : `${signed(value, digits)}${error === null ? "" : ` ± ${error.toFixed(digits)}`}`;
}

/** The caches of one run as points: bytes against cost, with standard errors, a line for a policy. */
function cacheChart(rows, of) {
  const points = rows.filter((it) => it.policy !== "full" && it[`${of}_cost`] !== null && it.share > 0)
    .map((it) => ({ ...it, cost: it[`${of}_cost`], error: it[`${of}_error`] || 0 }));
  if (points.length < 2) return null;
  const { widest, height, left, right, top, bottom } = CACHE_CHART;
  const width = Math.min(widest, Math.max(300, byId("main").clientWidth - 64)); // letters keep their size on a phone
  const ends = points.flatMap((it) => [it.cost - it.error, it.cost + it.error]);
  const low = costScale(Math.min(0, ...ends)) - 0.3, high = costScale(Math.max(LINEAR_COST, ...ends)) + 0.3;
  const shares = points.map((it) => it.share), first = Math.log(Math.min(...shares, 0.5)) - 0.15, last = Math.log(Math.max(...shares, 1)) + 0.05;
  const x = (share) => left + ((Math.log(share) - first) / (last - first)) * (width - left - right);
  const y = (cost) => height - bottom - ((costScale(cost) - low) / (high - low)) * (height - top - bottom);
  const text = (at, words, anchor) => svg("text", { ...at, "text-anchor": anchor, class: "tick" }, words);
  const nodes = [];
  for (const tick of COST_TICKS.filter((it) => costScale(it) >= low && costScale(it) <= high)) {
    nodes.push(svg("line", { x1: left, x2: width - right, y1: y(tick), y2: y(tick), class: tick === 0 ? "zero" : "rule" }));
    nodes.push(text({ x: left - 8, y: y(tick) + 4 }, tick === 0 ? "0" : signed(tick, Math.abs(tick) < 0.1 ? 2 : Math.abs(tick) < 1 ? 1 : 0), "end"));
  }
  for (const tick of SHARE_TICKS.filter((it) => Math.log(it) >= first && Math.log(it) <= last)) {
    nodes.push(svg("line", { x1: x(tick), x2: x(tick), y1: top, y2: height - bottom, class: "rule" }), text({ x: x(tick), y: height - bottom + 18 }, `${100 * tick}%`, "middle"));
  }
  nodes.push(text({ x: (left + width - right) / 2, y: height - 8 }, "bytes, as a share of the full cache's", "middle"));
  nodes.push(svg("text", { transform: `translate(14 ${(top + height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle", class: "tick" }, "more nats per token"));
  const policies = [...new Set(points.map((it) => it.policy))], legend = [];
  policies.forEach((policy, index) => {
    const { colour } = lineStyle(index, policies.length, false), own = points.filter((it) => it.policy === policy).sort((one, two) => one.share - two.share);
    nodes.push(svg("path", { d: own.map((it, k) => `${k ? "L" : "M"}${x(it.share)} ${y(it.cost)}`).join(""), stroke: colour, class: "path" }));
    for (const it of own) {
      nodes.push(svg("line", { x1: x(it.share), x2: x(it.share), y1: y(it.cost - it.error), y2: y(it.cost + it.error), stroke: colour, "stroke-width": 1.6 }));
      nodes.push(cacheMark(index, x(it.share), y(it.cost), colour, `${it.cache}: ${withError(it.cost, it.error)} nats per token, ${percent(it.share)} of the bytes`));
    }
    legend.push(el("li", null, svg("svg", { width: 14, height: 14, viewBox: "0 0 14 14", "aria-hidden": "true" }, cacheMark(index, 7, 7, colour)), ` ${policy}`));
  });
  const label = `Cost in nats per token over bytes of the cache, ${plural(points.length, "cache")}; the table below has the numbers`;
  return el("figure", { class: "cache-figure" }, svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, ...nodes), el("ul", { class: "cache-legend" }, legend));
}

/** A mark of one of several policies: colours and shapes both tell them apart. */
function cacheMark(index, x, y, colour, words) {
  const shape = [
    () => svg("circle", { cx: x, cy: y, r: 4.5 }),
    () => svg("rect", { x: x - 4, y: y - 4, width: 8, height: 8 }),
    () => svg("path", { d: `M${x} ${y - 5.5}L${x + 5} ${y + 4}L${x - 5} ${y + 4}Z` }),
    () => svg("path", { d: `M${x} ${y - 6}L${x + 6} ${y}L${x} ${y + 6}L${x - 6} ${y}Z` }),
  ][index % 4]();
  shape.setAttribute("fill", index < 4 ? colour : css("--paper"));
  shape.setAttribute("stroke", colour);
  if (words) shape.append(svg("title", {}, words));
  return shape;
}

/** A cache's name, which may be broken after a comma or colon. */
const breakable = (name) => name.split(/(?<=[:,])/).flatMap((piece) => [piece, el("wbr")]);

function cacheTable(rows, caption) {
  const heads = ["cache", "keys per head", "bytes", "of full", "cost on own text", "cost on reply", "same first choice", "ms per token", "speed (95%)"];
  const cells = (it) => [
    short(it.keys), bytes(it.bytes), percent(it.share),
    it.policy === "full" || !it.text_tokens ? "–" : withError(it.text_cost, it.text_error),
    it.policy === "full" || !it.reply_tokens ? "–" : withError(it.reply_cost, it.reply_error),
    it.policy === "full" || it.agreement === null ? "–" : `${percent(it.agreement)}${it.agreement_error === null ? "" : ` ± ${(100 * it.agreement_error).toFixed(1)}`}`,
    it.ms === null ? "–" : it.ms.toPrecision(3),
    it.policy === "full" || it.speed === null ? "–" : `${it.speed.toFixed(2)} (${it.speed_low.toFixed(2)} to ${it.speed_high.toFixed(2)})`,
  ];
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    el("table", null,
      el("thead", null, el("tr", null, heads.map((it, k) => el("th", { scope: "col", class: k ? "number" : null, text: it })))),
      el("tbody", null, rows.map((it) => el("tr", null, el("th", { scope: "row", class: "cache-name" }, breakable(it.cache)), cells(it).map((text) => el("td", { class: "number", text })))))));
}

/** The section of all runs that compared caches. */
function cacheSection() {
  return store.runs.filter((it) => it.cache).flatMap((run) => {
    const { rows, sentences, caveat } = run.cache, of = costText(rows), nodes = [];
    if (several()) nodes.push(el("h3", { text: run.title }));
    const few = sentences.slice(0, 3), more = sentences.slice(3);
    nodes.push(...few.map((text) => el("p", { class: "plain", text })));
    if (more.length) nodes.push(el("details", null, el("summary", { text: `${plural(more.length, "more cache")} in words` }), more.map((text) => el("p", { class: "plain", text }))));
    const chart = cacheChart(rows, of);
    if (chart) nodes.push(chart, el("p", { class: "quiet", text: `Cost on ${of === "text" ? "the prompt's own last tokens" : "the full cache's greedy continuation"}, with one standard error. The scale is linear up to ${LINEAR_COST} and logarithmic beyond.` }));
    nodes.push(cacheTable(rows, `Caches of ${run.title}`), el("p", { class: "quiet", text: caveat }));
    return nodes;
  });
}
