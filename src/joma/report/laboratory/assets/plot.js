/* Lines, dots and dashes on a canvas: crisp on any screen, light or dark, with a readout. */

import { raised } from "./format.js";

const PALETTES = {
  light: ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B87900", "#3A8FC2", "#222222"],
  dark: ["#56B4E9", "#FF8C42", "#2FD0A0", "#E79AC8", "#F0B93A", "#9AD0F5", "#EEEEEE"],
};
const RAMPS = { light: [[0, 50, 120], [0, 140, 130], [180, 130, 0]], dark: [[90, 160, 255], [60, 210, 180], [255, 215, 90]] };
const MARGIN = { left: 58, right: 22, top: 10, bottom: 40 };

export const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;

/** The colour of a token among `count`: of a palette for few, along a ramp for many. */
export function colorOf(index, count = 1) {
  const theme = isDark() ? "dark" : "light";
  if (count <= 7) return PALETTES[theme][index % 7];
  const at = (2 * index) / (count - 1);
  const low = Math.min(Math.floor(at), 1);
  const [a, b] = [RAMPS[theme][low], RAMPS[theme][low + 1]];
  return `rgb(${a.map((x, i) => Math.round(x + (b[i] - x) * (at - low))).join(",")})`;
}

/** Round numbers for the ticks of an axis. */
export function ticks({ min, max, log, whole, reverse }, most) {
  if (log) {
    const [low, high] = [Math.ceil(Math.log10(min) - 1e-9), Math.floor(Math.log10(max) + 1e-9)];
    const every = Math.max(1, Math.ceil((high - low + 1) / most));
    const found = [];
    const within = (x) => x >= min * 0.999 && x <= max * 1.001;
    for (let e = low - 1; e <= high; e++) {
      if (every === 1 && high - low < 2) found.push(...[2, 5].map((m) => m * 10 ** e).filter(within));
      if (e >= low && (reverse ? high - e : e - low) % every === 0) found.push(10 ** e);
    }
    return found;
  }
  const rough = (max - min) / most;
  const unit = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map((m) => m * unit).find((one) => one >= rough) ?? unit * 10;
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let n = Math.ceil(min / step - 1e-9); n * step <= max + 1e-9 * step; n++) found.push(n * step);
  return found;
}

/** The text of a tick or readout. */
export function tickText(x, log) {
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 0.001 && size < 1e5) return String(Number(x.toPrecision(4))).replace("-", "−");
  const [digits, power] = x.toExponential(log ? 0 : 2).split("e");
  const up = raised(Number(power));
  return digits === "1" ? `10${up}` : `${digits.replace("-", "−")}·10${up}`;
}

/** The range of an axis: given ends, else those of the values with some room. */
function range(axis, values) {
  let [min, max] = [Infinity, -Infinity];
  for (const list of values) {
    for (const x of list) {
      if (Number.isFinite(x) && (!axis.log || x > 0)) [min, max] = [Math.min(min, x), Math.max(max, x)];
    }
  }
  for (const x of axis.include ?? []) [min, max] = [Math.min(min, x), Math.max(max, x)];
  if (min > max) [min, max] = axis.log ? [0.1, 10] : [0, 1];
  if (axis.log) [min, max] = [min / 1.5, max * 1.5];
  else {
    const room = max - min > 1e-9 * Math.max(Math.abs(max), Math.abs(min)) ? 0.06 * (max - min)
      : 0.2 * Math.abs(axis.about ?? max) || 1;
    [min, max] = [min - room, max + room];
  }
  return { ...axis, min: axis.min ?? min, max: axis.max ?? max };
}

export class Plot {
  constructor(canvas, readout) {
    Object.assign(this, { canvas, readout, plot: null, series: [], pointer: null, count: 1 });
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  /** Show a plot: its axes, marks and series; `count` is the number of tokens, for the colours. */
  show(plot, extra, count) {
    Object.assign(this, { plot, series: [...plot.series, ...extra], count });
    this.canvas.setAttribute("aria-label", `${plot.title}. Horizontal: ${plot.x.label}. Vertical: ` +
      `${plot.y.label}. ${plot.series.filter((one) => one.style === "line").length} lines.`);
    this.draw();
  }

  draw() {
    const { canvas, plot } = this;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!plot || width === 0) return;
    const ratio = devicePixelRatio || 1;
    const size = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    this.area = { left: MARGIN.left, top: MARGIN.top, right: width - MARGIN.right, bottom: height - MARGIN.bottom };
    this.x = range(plot.x, this.series.map((one) => one.x));
    this.y = range(plot.y, this.series.map((one) => one.y));
    this.axes(pen);
    pen.save();
    pen.beginPath();
    pen.rect(this.area.left, this.area.top - 1, this.area.right - this.area.left, this.area.bottom - this.area.top + 2);
    pen.clip();
    for (const one of this.series) this.one(pen, one);
    pen.restore();
    if (this.pointer) this.mark(pen);
  }

  place(axis, from, to, x) {
    const f = axis.log ? (v) => Math.log10(Math.max(v, 1e-320)) : (v) => v;
    const share = (f(x) - f(axis.min)) / (f(axis.max) - f(axis.min));
    return from + (to - from) * (axis.reverse ? 1 - share : share);
  }

  px(x) {
    return this.place(this.x, this.area.left, this.area.right, x);
  }

  py(y) {
    return this.place(this.y, this.area.bottom, this.area.top, y);
  }

  axes(pen) {
    const { left, right, top, bottom } = this.area;
    const style = getComputedStyle(this.canvas);
    const [ink, grid] = [style.getPropertyValue("--muted"), style.getPropertyValue("--grid")];
    pen.font = "12px system-ui, sans-serif";
    pen.lineWidth = 1;
    pen.fillStyle = ink;
    pen.textAlign = "center";
    pen.textBaseline = "top";
    const stroke = (color, x1, y1, x2, y2) => {
      pen.strokeStyle = color;
      pen.beginPath();
      pen.moveTo(x1, y1);
      pen.lineTo(x2, y2);
      pen.stroke();
    };
    for (const x of ticks(this.x, Math.max(2, Math.floor((right - left) / 70)))) {
      const at = Math.round(this.px(x)) + 0.5;
      if (at < left - 1 || at > right + 1) continue;
      stroke(grid, at, top, at, bottom);
      pen.fillText(tickText(x, this.x.log), at, bottom + 5);
    }
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const y of ticks(this.y, Math.max(2, Math.floor((bottom - top) / 42)))) {
      const at = Math.round(this.py(y)) + 0.5;
      if (at < top - 1 || at > bottom + 1) continue;
      stroke(grid, left, at, right, at);
      pen.fillText(tickText(y, this.y.log), left - 6, at);
    }
    stroke(ink, left, bottom + 0.5, right, bottom + 0.5);
    pen.textAlign = "center";
    pen.fillText(this.plot.x.label, (left + right) / 2, bottom + 30);
    pen.save();
    pen.translate(10, (top + bottom) / 2);
    pen.rotate(-Math.PI / 2);
    pen.fillText(this.plot.y.label, 0, 0);
    pen.restore();
    for (const mark of this.plot.marks ?? []) {
      const at = this.px(mark.x);
      if (!(at >= left && at <= right)) continue;
      pen.setLineDash(mark.dashed ? [5, 4] : [2, 3]);
      stroke(ink, at, top, at, bottom);
      pen.setLineDash([]);
      pen.textAlign = at > (left + right) / 2 ? "right" : "left";
      pen.fillText(mark.label, at + (at > (left + right) / 2 ? -5 : 5), bottom - 10);
    }
  }

  one(pen, series) {
    const color = colorOf(series.color, this.plot.legend ? 1 : this.count);
    const points = series.x.map((x, n) => [this.px(x), this.py(series.y[n])]);
    pen.strokeStyle = pen.fillStyle = color;
    if (series.style === "line" || series.style === "dashed") {
      pen.lineWidth = series.style === "line" ? 2 : 1.5;
      pen.setLineDash(series.style === "dashed" ? [6, 4] : []);
      pen.beginPath();
      let down = false;
      for (const [x, y] of points) {
        const real = Number.isFinite(x) && Number.isFinite(y);
        if (real) pen[down ? "lineTo" : "moveTo"](x, Math.min(Math.max(y, -1e4), 1e4));
        down = real;
      }
      pen.stroke();
      pen.setLineDash([]);
      return;
    }
    points.forEach(([x, y], n) => {
      if (!Number.isFinite(x) || !Number.isFinite(y)) return;
      pen.lineWidth = 1.5;
      if (series.error) {
        pen.beginPath();
        pen.moveTo(x, this.py(series.y[n] - series.error[n]));
        pen.lineTo(x, this.py(series.y[n] + series.error[n]));
        pen.stroke();
      }
      pen.beginPath();
      if (series.style === "dots") pen.arc(x, y, 3.2, 0, 7);
      else pen.rect(x - 4, y - 4, 8, 8);
      if (series.style === "open") pen.stroke();
      else pen.fill();
    });
  }

  /** The point next to the pointer, or null. */
  nearest() {
    let best = null;
    let distance = 40 ** 2;
    for (const series of this.series) {
      series.x.forEach((x, n) => {
        const [dx, dy] = [this.px(x) - this.pointer.x, this.py(series.y[n]) - this.pointer.y];
        const found = dx * dx + dy * dy;
        if (found < distance) [best, distance] = [{ series, n }, found];
      });
    }
    return best;
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    this.pointer = event && { x: event.clientX - box.left, y: event.clientY - box.top };
    this.draw();
    if (!this.pointer) this.readout.textContent = "";
  }

  mark(pen) {
    const best = this.nearest();
    this.readout.textContent = "";
    if (!best) return;
    const [x, y] = [best.series.x[best.n], best.series.y[best.n]];
    pen.strokeStyle = colorOf(best.series.color, this.plot.legend ? 1 : this.count);
    pen.lineWidth = 2;
    pen.beginPath();
    pen.arc(this.px(x), this.py(y), 6, 0, 7);
    pen.stroke();
    this.readout.textContent = `${best.series.name}: ${tickText(y)} at ${this.plot.x.label} ${tickText(x)}`;
  }
}
