/* Heat maps: a row for each layer or head, steps from left to right. */

const LEFT = 54, RIGHT = 26;

class Heat {
  constructor(host, card) {
    this.host = host;
    this.card = card;
    this.row = 0;
    this.rows = [];
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.cursor = el("div", { class: "cursor" });
    this.mark = el("div", { class: "row-mark" });
    host.append(this.canvas, this.cursor, this.mark);
    interact(host, this);
    new ResizeObserver(() => this.ready() && this.draw()).observe(host);
  }

  /** Take the rows again, after lines were added, removed or hidden. */
  rebuild() {
    this.rows = this.card.rows();
    this.row = Math.min(this.row, Math.max(this.rows.length - 1, 0));
    let low = Infinity, high = -Infinity;
    const logarithmic = this.card.logarithmic;
    for (const { values } of this.rows) {
      for (const value of values) {
        if (value === null || (logarithmic && value <= 0)) continue;
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
    this.ends = low > high ? [0, 1] : [low, high];
    this.draw();
  }

  ready() {
    return this.rows.length > 0;
  }

  rowHeight() {
    const number = Math.max(this.rows.length, 1);
    return Math.max(4, Math.min(20, Math.floor(280 / number)));
  }

  area() {
    const box = this.host.getBoundingClientRect();
    const width = Math.max(box.width - LEFT - RIGHT, 50);
    return { left: box.left + LEFT, top: box.top, width, height: this.rowHeight() * this.rows.length };
  }

  steps() {
    return this.rows.length ? this.rows[this.row].steps : [];
  }

  move(rows) {
    this.row = Math.min(Math.max(this.row + rows, 0), this.rows.length - 1);
    this.markRow(true);
  }

  share(value) {
    const [low, high] = this.ends;
    if (low === high) return 0.5;
    if (!this.card.logarithmic) return (value - low) / (high - low);
    return value > 0 ? Math.log(value / low) / Math.log(high / low) : 0;
  }

  draw() {
    const height = this.rowHeight(), ratio = devicePixelRatio, { width } = this.area();
    const tall = height * this.rows.length;
    this.canvas.width = (LEFT + width + RIGHT) * ratio;
    this.canvas.height = (tall + 2) * ratio;
    this.canvas.style.width = `${LEFT + width + RIGHT}px`;
    this.canvas.style.height = `${tall + 2}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    const every = Math.ceil(12 / height);
    this.rows.forEach((series, number) => {
      pen.fillStyle = css("--cell");
      pen.fillRect(LEFT, number * height, width, height - (height > 8 ? 1 : 0));
      this.drawRow(pen, series, number * height, height - (height > 8 ? 1 : 0), width);
      if (number % every) return;
      pen.fillStyle = css("--muted");
      pen.fillText(clip(pen, this.card.rowName(series), LEFT - 8), LEFT - 6, Math.max((number + 0.5) * height, 6));
    });
    this.showCursor();
    this.markRow(false);
  }

  drawRow(pen, series, top, height, width) {
    const { steps, values, marks } = series, [low, high] = shownRange();
    const x = (step) => ((step - low) / (high - low)) * width;
    const from = Math.max(lowerBound(steps, low) - 1, 0);
    let pixel = -1, sum = 0, number = 0, until = 0;
    const put = () => {
      if (!number) return;
      pen.fillStyle = cividis(this.share(sum / number));
      pen.fillRect(LEFT + pixel, top, Math.max(until - pixel, 1), height);
    };
    for (let k = from; k < steps.length; k++) {
      const begin = k ? (steps[k - 1] + steps[k]) / 2 : steps[k];
      const end = k + 1 < steps.length ? (steps[k] + steps[k + 1]) / 2 : steps[k];
      if (begin > high) break;
      const place = Math.max(0, Math.floor(x(begin))), stop = Math.min(width, Math.ceil(x(end)));
      if (values[k] === null || values[k] === undefined || stop < 0) continue;
      if (place !== pixel) {
        put();
        pixel = place;
        sum = number = until = 0;
      }
      sum += values[k];
      number += 1;
      until = Math.max(until, Math.max(stop, place + 1));
    }
    put();
    pen.fillStyle = css("--critical");
    for (const index of Object.values(marks).flat()) {
      const place = x(steps[index]);
      if (place >= 0 && place <= width) pen.fillRect(LEFT + Math.max(place - 1.5, 0), top, 3, height);
    }
  }

  range() {
    this.draw();
  }

  showCursor() {
    const [low, high] = shownRange(), step = view.cursor;
    const inside = step !== null && step >= low && step <= high;
    this.cursor.style.display = inside ? "block" : "none";
    this.cursor.style.height = `${this.rowHeight() * this.rows.length}px`;
    if (inside) this.cursor.style.left = `${LEFT + ((step - low) / (high - low)) * this.area().width}px`;
  }

  markRow(shown) {
    const height = this.rowHeight();
    this.mark.style.display = shown ? "block" : "none";
    this.mark.style.top = `${this.row * height}px`;
    this.mark.style.height = `${height}px`;
    this.mark.style.left = `${LEFT}px`;
    this.mark.style.right = `${RIGHT}px`;
  }

  inspect(step, clientY) {
    if (!this.rows.length) return null;
    if (clientY !== null) {
      const row = Math.floor((clientY - this.area().top) / this.rowHeight());
      if (row < 0 || row >= this.rows.length) return null;
      this.row = row;
    }
    const series = this.rows[this.row], index = nearest(series.steps, step);
    if (index < 0) return null;
    const unit = this.card.chart.unit ? ` ${this.card.chart.unit}` : "", value = series.values[index];
    return {
      colour: value === null ? css("--critical") : cividis(this.share(value)),
      lines: [`${valueWord(series, index)}${unit} at step ${count(series.steps[index])}`, keyWords(series)],
    };
  }
}

/** Return text that fits a width, its end cut. */
function clip(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let end = text;
  while (end.length > 1 && pen.measureText(`${end}…`).width > width) end = end.slice(0, -1);
  return `${end}…`;
}
