/* Pointer and keyboard of a chart, the same for lines and heat maps. */

const tip = { node: null };

function showTip(lines, colour, x, y) {
  if (!tip.node) {
    tip.node = el("div", { class: "tip", "aria-hidden": "true" });
    document.body.append(tip.node);
  }
  tip.node.replaceChildren(...lines.map((line, index) => el("div", { class: index ? "key" : "value", text: line })));
  tip.node.style.borderLeftColor = colour || "transparent";
  tip.node.style.display = "block";
  const width = tip.node.offsetWidth, height = tip.node.offsetHeight;
  const left = x + 16 + width > window.innerWidth - 8 ? Math.max(8, x - width - 12) : x + 16;
  tip.node.style.left = `${left}px`;
  tip.node.style.top = `${Math.max(8, Math.min(y + 14, window.innerHeight - height - 8))}px`;
}

function hideTip() {
  if (tip.node) tip.node.style.display = "none";
}

/** Let pointer and keyboard act on a plot.
 *
 * A plot has `ready()`, whether it was drawn; `area()`, the rectangle of its axes on the screen; `inspect(step, y)`, which returns
 * what is there as lines of text with a colour; `steps()`, the steps at which the arrow keys stop;
 * and, for heat maps, `move(rows)`, which chooses another row. */
function interact(host, plot) {
  const selection = el("div", { class: "selection" });
  host.append(selection);
  let from = null;

  const stepAt = (x) => {
    const { left, width } = plot.area();
    const [low, high] = shownRange();
    return low + (Math.min(Math.max(x - left, 0), width) / width) * (high - low);
  };
  const inspect = (event) => {
    if (!plot.ready()) return;
    const step = stepAt(event.clientX);
    setCursor(step);
    const found = plot.inspect(step, event.clientY);
    if (found) showTip(found.lines, found.colour, event.clientX, event.clientY);
    else hideTip();
  };

  host.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse" && event.button === 0 && plot.ready()) {
      from = event.clientX;
      host.setPointerCapture(event.pointerId);
    } else inspect(event);
  });
  host.addEventListener("pointermove", (event) => {
    if (from === null) return inspect(event);
    const { left, width } = plot.area(), box = host.getBoundingClientRect();
    const ends = [from, event.clientX].map((x) => Math.min(Math.max(x, left), left + width)).sort((a, b) => a - b);
    selection.style.display = ends[1] - ends[0] > 6 ? "block" : "none";
    selection.style.left = `${ends[0] - box.left}px`;
    selection.style.width = `${ends[1] - ends[0]}px`;
  });
  host.addEventListener("pointerup", (event) => {
    if (from === null) return;
    const ends = [stepAt(from), stepAt(event.clientX)].sort((a, b) => a - b);
    if (Math.abs(event.clientX - from) > 6) setRange(ends[0], ends[1]);
    from = null;
    selection.style.display = "none";
  });
  host.addEventListener("pointercancel", () => {
    from = null;
    selection.style.display = "none";
  });
  host.addEventListener("pointerleave", () => {
    if (from !== null) return;
    setCursor(null);
    hideTip();
  });
  host.addEventListener("dblclick", () => setRange());
  host.addEventListener("wheel", (event) => {
    if ((!event.ctrlKey && !event.metaKey) || !plot.ready()) return;
    event.preventDefault();
    zoomBy(Math.exp(event.deltaY / 200), stepAt(event.clientX));
  }, { passive: false });
  host.addEventListener("blur", () => {
    setCursor(null);
    hideTip();
  });
  host.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target !== host || !plot.ready()) return;
    if (!act(event.key, event.shiftKey)) return;
    event.preventDefault();
    const { left, width, top, height } = plot.area(), [low, high] = shownRange();
    if (view.cursor === null) return hideTip();
    const found = plot.inspect(view.cursor, null);
    if (!found) return;
    announce(found.lines.join(", "));
    const x = left + ((view.cursor - low) / (high - low)) * width;
    showTip(found.lines, found.colour, x, top + height / 3);
  });

  function act(key, shift) {
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    if (key in moves && shift) panBy(moves[key] / 4);
    else if (key in moves) stepBy(moves[key]);
    else if (key === "Home" || key === "End") stepBy(key === "Home" ? -Infinity : Infinity);
    else if (key === "+" || key === "=") zoomBy(0.5, view.cursor);
    else if (key === "-" || key === "_") zoomBy(2, view.cursor);
    else if (key === "0" || key === "Escape") {
      setRange();
      announce("All steps are shown.");
    } else if ((key === "ArrowUp" || key === "ArrowDown") && plot.move) {
      plot.move(key === "ArrowUp" ? -1 : 1);
      if (view.cursor === null) stepBy(1);
    } else return false;
    return true;
  }

  function stepBy(direction) {
    const [low, high] = shownRange();
    const inside = plot.steps().filter((step) => step >= low && step <= high);
    if (!inside.length) return;
    let index = view.cursor === null ? (direction > 0 ? -1 : inside.length) : nearest(inside, view.cursor);
    index = Math.min(Math.max(index + direction, 0), inside.length - 1);
    setCursor(inside[index]);
  }
}
