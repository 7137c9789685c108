/* A page that follows runs while they write: events say what changed, and it is fetched again. */

const live = { waiting: new Set(), removed: new Set(), busy: false, versions: new Map() };

/** Show the state of the connection; how a run ended is said by its own state. */
function showConnection(connected) {
  const node = byId("connection");
  if (!node) return;
  const removed = store.runs.every((it) => live.removed.has(it.id));
  const running = store.runs.some((it) => it.state === "running" || it.state === "unknown");
  const [word, kind] = !connected ? ["reconnecting", "died"]
    : removed ? ["removed", "died"] : running ? ["live", "running"] : ["connected", "unknown"];
  node.className = `pill ${kind}`;
  if (node.textContent !== word) node.textContent = word;
}

function showRemoved(id) {
  live.removed.add(id);
  showConnection(true);
  announce("The folder of a run was removed; the page shows what it held last.");
}

function follow() {
  listen(`${store.api}/events`, {
    open: (missed) => {
      showConnection(true);
      if (missed) store.runs.forEach((it) => live.waiting.add(it.id));
      fetchWaiting();
    },
    change: (event) => {
      let about;
      try {
        about = JSON.parse(event.data);
      } catch {
        return;
      }
      if (!store.runs.some((it) => it.id === about.run) || live.versions.get(about.run) === about.version) return;
      live.versions.set(about.run, about.version);
      if (about.version === null) return showRemoved(about.run);
      live.waiting.add(about.run);
      fetchWaiting();
    },
    lost: () => showConnection(false),
  });
}

async function fetchWaiting() {
  if (live.busy) return;
  live.busy = true;
  while (live.waiting.size) {
    const [id] = live.waiting;
    live.waiting.delete(id);
    try {
      const answer = await fetch(`${store.api}/runs/${id.split("/").map(encodeURIComponent).join("/")}`, { cache: "no-store" });
      if (answer.status === 404 || answer.status === 410) {
        showRemoved(id);
        continue;
      }
      if (!answer.ok) throw new Error(String(answer.status));
      const run = unpack(await answer.json());
      const index = store.runs.findIndex((it) => it.id === id);
      live.removed.delete(id);
      if (index >= 0) {
        run.id = id;
        run.title = store.runs[index].title; // of several runs, what tells them apart
        store.runs[index] = run;
        refresh();
      }
      showConnection(true);
      await new Promise((done) => setTimeout(done, 400));
    } catch {
      showConnection(false);
      live.waiting.add(id);
      await new Promise((done) => setTimeout(done, 2000));
    }
  }
  live.busy = false;
}
