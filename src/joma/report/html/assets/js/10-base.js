/* Elements, numbers, search and colours: what every other part uses. */

/** Make an element; text is always set as text, so that no name can become markup. */
function el(tag, properties, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) node.append(child);
  }
  return node;
}

const byId = (id) => document.getElementById(id);

/** Return a number in at most five characters that matter. */
function short(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) {
    const [mantissa, power] = value.toExponential(2).split("e");
    return `${mantissa.replace(/\.?0+$/, "")}e${Number(power)}`;
  }
  if (size >= 1e4) return Math.round(value).toLocaleString("en");
  const text = value.toPrecision(4);
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

const count = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en"));

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function bytes(size) {
  if (size < 1 << 20) return `${(size / 1024).toFixed(1)} KiB`;
  return size < 1 << 30 ? `${(size / (1 << 20)).toFixed(1)} MiB` : `${(size / (1 << 30)).toFixed(2)} GiB`;
}

const plural = (number, word) => `${count(number)} ${word}${number === 1 || word.endsWith("s") ? "" : "s"}`;

/** Return the first index of a sorted array whose entry is not below a value. */
function lowerBound(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Return the index of the entry nearest to a value, -1 of an empty array. */
function nearest(sorted, value) {
  if (!sorted.length) return -1;
  const above = lowerBound(sorted, value);
  if (above === 0) return 0;
  if (above === sorted.length) return above - 1;
  return value - sorted[above - 1] <= sorted[above] - value ? above - 1 : above;
}

/* Colours that stay apart with every common kind of colour blindness: those of Okabe and Ito,
   darkened on white so that thin lines keep a contrast of three to one. */
const LIGHT = ["#0072b2", "#c65102", "#00805c", "#a6497f", "#2b7fb3", "#8a6a00", "#4d4d4d"];
const DARK = ["#56b4e9", "#e69f00", "#2fc79a", "#e08cbd", "#8fc7f0", "#f0e442", "#c9c9c9"];
const DASHES = [null, [7, 3], [2, 3], [9, 3, 2, 3]];
const CIVIDIS = [
  [0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115],
  [138, 134, 120], [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56],
];

/** Return the colour at a share from 0 to 1 of the map cividis. */
function cividis(share) {
  const place = Math.min(Math.max(share, 0), 1) * (CIVIDIS.length - 1);
  const index = Math.min(Math.floor(place), CIVIDIS.length - 2), rest = place - index;
  const mixed = CIVIDIS[index].map((low, k) => Math.round(low + rest * (CIVIDIS[index + 1][k] - low)));
  return `rgb(${mixed.join(",")})`;
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  if (chosen) return chosen === "dark";
  return window.matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Return colour and dash of one of several lines; many ordered ones get a sequence of colours. */
function lineStyle(index, number, ordered) {
  const palette = isDark() ? DARK : LIGHT;
  if (ordered && number > palette.length) {
    const share = index / (number - 1);
    return { colour: cividis(isDark() ? 0.3 + 0.7 * share : 0.75 * share), dash: null };
  }
  const dash = DASHES[Math.floor(index / palette.length) % DASHES.length];
  return { colour: palette[index % palette.length], dash };
}

const colours = new Map();

/** Return a colour of the style sheet; kept, since asking the browser takes long. */
function css(name) {
  if (!colours.has(name)) {
    colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  }
  return colours.get(name);
}

/** Save text as a file of the reader's. */
function download(name, text) {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** Return rows as CSV; text that a spreadsheet would take as a formula gets a quotation mark. */
function toCsv(rows) {
  const cell = (value) => {
    if (value === null || value === undefined) return "";
    let text = String(value);
    if (typeof value === "string" && /^[=+\-@\t\r]/.test(text) && Number.isNaN(Number(text))) text = `'${text}`;
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

/** Listen to the events of a server while the page is visible: a browser keeps few streams open.
 * `open` is called with whether events may have been missed, `change` with each of them. */
function listen(address, { open, change, lost }) {
  let source = null, missed = document.hidden;
  const begin = () => {
    if (source || document.hidden) return;
    source = new EventSource(address);
    source.addEventListener("open", () => {
      open(missed);
      missed = false;
    });
    source.addEventListener("change", change);
    source.addEventListener("error", () => {
      missed = true;
      lost();
      if (source.readyState !== EventSource.CLOSED) return;
      source = null;
      setTimeout(begin, 3000);
    });
  };
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) begin();
    else if (source) {
      source.close();
      source = null;
      missed = true;
    }
  });
  begin();
}

/** Tell those who do not see the charts what has changed. */
function announce(sentence) {
  byId("say").textContent = sentence;
}
