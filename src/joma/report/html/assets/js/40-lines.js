/* Lines over steps, drawn by uPlot; every series has steps of its own. */

const SEVERITIES = { critical: "--critical", warning: "--warning", note: "--note", unrated: "--note" };
const straight = uPlot.paths.linear();
const DENSE = 2000;

/** Return about five round numbers between the ends of a logarithmic axis. */
function logTicks(low, high) {
  for (const digits of [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9]]) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      for (const digit of digits) ticks.push(Number(`${digit}e${power}`));
    }
    const inside = ticks.filter((it) => it >= low && it <= high);
    if (inside.length >= 3) return inside.filter((_, k) => k % Math.ceil(inside.length / 7) === 0);
  }
  return [low, Math.sqrt(low * high), high].map((it) => Number(it.toPrecision(3)));
}

class Lines {
  /** Draw what a card shows.
   * @param host the element to draw into
   * @param card its `lines()`, `chart`, `logarithmic`, `findings()`, `references()` */
  constructor(host, card) {
    this.host = host;
    this.card = card;
    this.plot = null;
    this.cursor = el("div", { class: "cursor" });
    interact(host, this);
    new ResizeObserver(() => this.resize()).observe(host);
  }

  ready() {
    return this.plot !== null;
  }

  area() {
    return this.plot.over.getBoundingClientRect();
  }

  steps() {
    const line = this.drawn.find((it) => it.series.steps.length);
    return line ? line.series.steps : [];
  }

  /** Make the plot again, after lines were added, removed, hidden or given another colour. */
  rebuild() {
    if (this.plot) this.plot.destroy();
    this.drawn = this.card.lines().filter((it) => !it.hidden);
    const ink = css("--muted"), grid = css("--grid");
    const axis = {
      stroke: ink, font: "11px system-ui, sans-serif", grid: { stroke: grid, width: 1 },
      ticks: { stroke: grid, width: 1, size: 4 },
    };
    const logarithmic = this.card.logarithmic && this.positive();
    const series = this.drawn.map(({ style, width, series: it }) => ({
      stroke: style.colour, dash: style.dash || undefined, width: width || 1.6, points: { show: false },
      facets: [{ scale: "x", auto: false, sorted: 1 }, { scale: "y", auto: false }],
      paths: (plot, index) => {
        const [low, high] = shownRange();
        const first = Math.max(lowerBound(it.steps, low) - 1, 0);
        const last = Math.min(lowerBound(it.steps, high) + 1, it.steps.length - 1);
        return last > first && last - first <= DENSE ? straight(plot, index, first, last) : null;
      },
    }));
    const data = this.drawn.map(({ series: it }) => [it.steps, it.values]);
    if (!series.length) {
      series.push({ points: { show: false }, paths: () => null });
      data.push([[], []]);
    }
    this.plot = new uPlot(
      {
        mode: 2, ...this.size(), padding: [10, RIGHT, 0, 0], legend: { show: false }, cursor: { show: false },
        scales: {
          x: { time: false, auto: false, range: () => shownRange() },
          y: { distr: logarithmic ? 3 : 1, range: () => this.yRange(logarithmic) },
        },
        axes: [
          { ...axis, size: 26, gap: 3, values: (_, ticks) => ticks.map((it) => (Number.isInteger(it) ? count(it) : "")) },
          { ...axis, size: LEFT, gap: 4, ...(logarithmic ? { splits: (plot) => logTicks(plot.scales.y.min, plot.scales.y.max), filter: (_, ticks) => ticks } : {}), values: (_, ticks) => ticks.map((it) => (it === null ? "" : short(it))) },
        ],
        series: [{}, ...series],
        hooks: { drawAxes: [(plot) => this.drawBelow(plot)], draw: [(plot) => this.drawAbove(plot)] },
      },
      [null, ...data],
      this.host,
    );
    this.plot.over.append(this.cursor);
    this.showCursor();
  }

  size() {
    return { width: Math.max(this.host.clientWidth, 200), height: this.card.height() };
  }

  resize() {
    if (this.plot && this.host.clientWidth && this.plot.width !== this.size().width) this.plot.setSize(this.size());
  }

  /** Zoom to the shared range. */
  range() {
    const [min, max] = shownRange();
    this.plot.setScale("x", { min, max });
    this.showCursor();
  }

  showCursor() {
    const [low, high] = shownRange(), step = view.cursor;
    const inside = step !== null && step >= low && step <= high;
    this.cursor.style.display = inside ? "block" : "none";
    if (inside) this.cursor.style.left = `${((step - low) / (high - low)) * this.plot.over.clientWidth}px`;
  }

  positive() {
    return this.drawn.some(({ series }) => series.values.some((it) => it > 0));
  }

  /** Return the ends of the value axis, of what the shared range shows. */
  yRange(logarithmic) {
    const [first, last] = shownRange();
    let low = Infinity, high = -Infinity;
    const take = (value) => {
      if (value === null || value === undefined || (logarithmic && value <= 0)) return;
      if (value < low) low = value;
      if (value > high) high = value;
    };
    for (const { series } of this.drawn) {
      const { steps, values } = series;
      for (let k = Math.max(lowerBound(steps, first) - 1, 0); k < steps.length && steps[k] <= last; k++) take(values[k]);
    }
    for (const { value } of this.card.levels()) take(value);
    if (low > high) return logarithmic ? [0.1, 1] : [0, 1];
    if (logarithmic) return low === high ? [low / 2, low * 2] : [low / 1.15, high * 1.15];
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
  }

  drawBelow(plot) {
    const pen = plot.ctx, x = (step) => plot.valToPos(step, "x", true), y = (value) => plot.valToPos(value, "y", true);
    const { left, top, width, height } = plot.bbox;
    pen.save();
    pen.beginPath();
    pen.rect(left, top, width, height);
    pen.clip();
    pen.strokeStyle = pen.fillStyle = css("--muted");
    pen.lineWidth = devicePixelRatio;
    pen.setLineDash([4, 4]);
    pen.font = `${10 * devicePixelRatio}px system-ui, sans-serif`;
    for (const { name, value } of this.card.levels()) {
      pen.beginPath();
      pen.moveTo(left, y(value));
      pen.lineTo(left + width, y(value));
      pen.stroke();
      pen.textAlign = "right";
      const room = y(value) - top > 16 * devicePixelRatio ? -4 : 12;
      pen.fillText(`${name} ${short(value)}`, left + width - 4 * devicePixelRatio, y(value) + room * devicePixelRatio);
    }
    pen.restore();
  }

  drawAbove(plot) {
    const pen = plot.ctx, ratio = devicePixelRatio, { left, top, width, height } = plot.bbox;
    const x = (step) => plot.valToPos(step, "x", true), [low, high] = shownRange();
    pen.save();
    pen.beginPath();
    pen.rect(left - 4 * ratio, top, width + 8 * ratio, height);
    pen.clip();
    for (const { step, severity } of this.card.findings()) {
      if (step === null || step < low || step > high) continue;
      const place = x(step);
      pen.strokeStyle = pen.fillStyle = css(SEVERITIES[severity]);
      pen.lineWidth = 1.5 * ratio;
      pen.setLineDash([3 * ratio, 3 * ratio]);
      pen.beginPath();
      pen.moveTo(place, top);
      pen.lineTo(place, top + height);
      pen.stroke();
      pen.beginPath();
      pen.moveTo(place - 5 * ratio, top);
      pen.lineTo(place + 5 * ratio, top);
      pen.lineTo(place, top + 8 * ratio);
      pen.fill();
    }
    pen.setLineDash([]);
    for (const { series, style } of this.drawn) {
      this.drawDense(pen, plot, series, style);
      this.drawPoints(pen, plot, series, style);
    }
    pen.restore();
  }

  /** Draw very many points as one bar for each column of pixels, from the least to the most.
   * A line through all of them looks the same, and a browser strokes it ten times slower. */
  drawDense(pen, plot, series, style) {
    const { steps, values } = series, [low, high] = shownRange(), { left, width } = plot.bbox;
    const first = Math.max(lowerBound(steps, low) - 1, 0), last = Math.min(lowerBound(steps, high) + 1, steps.length - 1);
    if (last - first <= DENSE) return;
    pen.fillStyle = style.colour;
    let column = null, least = 0, most = 0;
    const put = () => {
      const top = plot.valToPos(most, "y", true), bottom = plot.valToPos(least, "y", true);
      if (column !== null) pen.fillRect(column, top - 0.5, 1, Math.max(bottom - top, 0) + 1);
    };
    for (let k = first; k <= last; k++) {
      const value = values[k];
      if (value === null || value === undefined) continue;
      const place = Math.round(left + ((steps[k] - low) / (high - low)) * width);
      if (place !== column) {
        put();
        // The end of the column before belongs to this one, so that steep lines have no gaps.
        const before = column === null ? value : values[k - 1] ?? value;
        column = place;
        least = Math.min(value, before);
        most = Math.max(value, before);
      } else if (value < least) least = value;
      else if (value > most) most = value;
    }
    put();
  }

  /** Draw dots where few points are visible, and crosses where a value is not finite. */
  drawPoints(pen, plot, series, style) {
    const { steps, values, marks } = series, ratio = devicePixelRatio, [low, high] = shownRange();
    const first = lowerBound(steps, low), last = lowerBound(steps, high + 1e-9);
    const { top, width } = plot.bbox;
    pen.fillStyle = style.colour;
    if (last - first <= width / ratio / 14) {
      for (let k = first; k < last; k++) {
        if (values[k] === null || values[k] === undefined) continue;
        pen.beginPath();
        pen.arc(plot.valToPos(steps[k], "x", true), plot.valToPos(values[k], "y", true), 2.2 * ratio, 0, 7);
        pen.fill();
      }
    }
    pen.strokeStyle = css("--critical");
    pen.lineWidth = 1.6 * ratio;
    let before = -Infinity;
    for (const index of Object.values(marks).flat()) {
      if (index < first || index >= last) continue;
      const place = plot.valToPos(steps[index], "x", true), size = 3 * ratio, y = top + 16 * ratio;
      if (Math.abs(place - before) < 7 * ratio) continue;
      before = place;
      pen.beginPath();
      pen.moveTo(place - size, y - size);
      pen.lineTo(place + size, y + size);
      pen.moveTo(place + size, y - size);
      pen.lineTo(place - size, y + size);
      pen.stroke();
    }
  }

  /** Return the point nearest to a step and a place on the screen, with its whole key. */
  inspect(step, clientY) {
    const box = this.area();
    let best = null;
    for (const { series, style } of this.drawn) {
      const index = nearest(series.steps, step);
      if (index < 0) continue;
      const value = series.values[index];
      const place = value === null ? box.top : box.top + this.plot.valToPos(value, "y");
      const away = Math.hypot(
        clientY === null ? 0 : place - clientY,
        this.plot.valToPos(series.steps[index], "x") - this.plot.valToPos(step, "x"),
      );
      if (best === null || away < best.away) best = { away, series, style, index };
    }
    if (best === null) return null;
    const { series, index } = best, bound = boundOf(series, index);
    const unit = this.card.chart.unit ? ` ${this.card.chart.unit}` : "";
    const within = bound === null ? "" : ` ± ${short(bound)}`;
    return {
      colour: best.style.colour,
      lines: [`${valueWord(series, index)}${within}${unit} at step ${count(series.steps[index])}`, keyWords(series)],
    };
  }
}
