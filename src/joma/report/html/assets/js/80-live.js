/* A page that follows runs while they write: events say what changed, and it is fetched again. */

const live = { source: null, waiting: new Set(), busy: false, versions: new Map() };

function showConnection(state) {
  const node = byId("connection");
  if (!node) return;
  node.className = `pill ${state === "live" ? "running" : state === "ended" ? "ended" : "died"}`;
  if (node.textContent !== state) node.textContent = state;
}

const allOver = () => store.runs.every((it) => it.state !== "running" && it.state !== "unknown");

function follow() {
  live.source = new EventSource(`${store.api}/events`);
  live.source.addEventListener("open", () => {
    showConnection(allOver() ? "ended" : "live");
    if (live.lost) store.runs.forEach((it) => live.waiting.add(it.id));
    live.lost = false;
    fetchWaiting();
  });
  live.source.addEventListener("change", (event) => {
    let about;
    try {
      about = JSON.parse(event.data);
    } catch {
      return;
    }
    if (!store.runs.some((it) => it.id === about.run) || live.versions.get(about.run) === about.version) return;
    live.versions.set(about.run, about.version);
    live.waiting.add(about.run);
    fetchWaiting();
  });
  live.source.addEventListener("error", () => {
    live.lost = true;
    showConnection("reconnecting");
    if (live.source.readyState === EventSource.CLOSED) setTimeout(follow, 3000);
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
        showConnection("ended");
        announce("This run was removed.");
        continue;
      }
      if (!answer.ok) throw new Error(String(answer.status));
      const run = unpack(await answer.json());
      const index = store.runs.findIndex((it) => it.id === id);
      if (index >= 0) {
        run.id = id;
        store.runs[index] = run;
        refresh();
      }
      showConnection(allOver() ? "ended" : "live");
      await new Promise((done) => setTimeout(done, 400));
    } catch {
      showConnection("reconnecting");
      live.waiting.add(id);
      await new Promise((done) => setTimeout(done, 2000));
    }
  }
  live.busy = false;
}
