/* The list of runs: drawn from JSON, fetched again when the server says that a run changed. */

const data = JSON.parse(byId("data").textContent);
const MOST_COMPARED = 50;
const chosen = new Set();
const HEADS = ["run", "state", "worst finding", "steps", "last loss", "began (UTC)"];
const STATES = ["running", "ended", "stopped", "died", "diverged", "damaged", "unknown"];

function row(run) {
  const state = STATES.includes(run.state) ? run.state : "unknown";
  const worst = run.worst
    ? [el("span", { class: `badge ${run.worst.severity}`, text: run.worst.severity }), el("small", { class: "why", text: run.worst.sentence })]
    : ["–"];
  return el("tr", null,
    data.live ? el("td", null, chooser(run)) : null,
    el("th", { scope: "row" }, el("a", { href: run.href, text: run.title }), run.reason ? el("small", { class: "reason", text: run.reason }) : null),
    el("td", null, el("span", { class: `pill ${state}`, text: state })),
    el("td", { class: "worst" }, worst),
    el("td", { class: "number", text: count(run.last_step) }),
    el("td", { class: "number", text: run.last_loss_text || short(run.last_loss) }),
    el("td", { text: (run.date || "–").slice(0, 16).replace("T", " ") }));
}

/** Return the box that chooses a run to be compared with others. */
function chooser(run) {
  const box = el("input", { type: "checkbox", "aria-label": `Compare ${run.title}`, onchange: () => {
    if (box.checked) chosen.add(run.id);
    else chosen.delete(run.id);
    offer();
  } });
  box.checked = chosen.has(run.id);
  return box;
}

/** Offer to compare the chosen runs, once there are two. */
function offer() {
  const link = byId("compare");
  const ids = [...chosen].slice(0, MOST_COMPARED);
  link.hidden = ids.length < 2;
  link.href = `compare?${ids.map((id) => `run=${encodeURIComponent(id)}`).join("&")}`;
  link.textContent = `Compare ${ids.length} runs`;
}

function show(runs) {
  const there = new Set(runs.map((run) => run.id));
  chosen.forEach((id) => there.has(id) || chosen.delete(id));
  offer();
  const heads = data.live ? ["", ...HEADS] : HEADS;
  const sorted = [...runs].sort((one, two) => (one.date < two.date ? 1 : one.date > two.date ? -1 : 0));
  byId("runs").replaceChildren(sorted.length
    ? el("div", { class: "scroll list", tabindex: 0, role: "region", "aria-label": "Runs" },
      el("table", { class: "runs" }, el("thead", null, el("tr", null, heads.map((it) => el(it ? "th" : "td", { scope: it ? "col" : null, text: it })))), el("tbody", null, sorted.map(row))))
    : el("p", { class: "quiet", text: "There are no runs here yet. `joma train tiny`, or joma.Monitor in a training of your own, makes one." }));
}

function connection(state) {
  const node = byId("connection");
  node.hidden = false;
  node.className = `pill ${state === "live" ? "running" : "died"}`;
  node.textContent = state;
}

let waiting = false;

async function update() {
  if (waiting) return;
  waiting = true;
  await new Promise((done) => setTimeout(done, 300));
  waiting = false;
  try {
    const answer = await fetch(`${data.api}/runs`, { cache: "no-store" });
    if (!answer.ok) throw new Error(String(answer.status));
    const listed = await answer.json();
    show(Array.isArray(listed) ? listed : listed.runs);
    connection("live");
  } catch {
    connection("reconnecting");
    setTimeout(update, 3000);
  }
}

function follow() {
  listen(`${data.api}/events`, {
    open: (missed) => {
      connection("live");
      if (missed) update();
    },
    change: update,
    lost: () => connection("reconnecting"),
  });
}

show(data.runs);
if (data.live) follow();
document.documentElement.dataset.ready = "yes";
