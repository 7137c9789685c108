/* Numbers in words and in sequences. */

/** A number for people: four digits, or an infinity in words. */
export function shown(x) {
  if (Number.isNaN(x)) return "not defined";
  if (!Number.isFinite(x)) return x > 0 ? "+∞" : "−∞";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size < 1e5 && size >= 1e-3) return String(Number(x.toPrecision(4))).replace("-", "−");
  const [digits, power] = x.toExponential(2).split("e");
  return `${digits.replace("-", "−")}·10${raised(Number(power))}`;
}

/** A whole number as an exponent. */
export const raised = (n) => [...String(n)].map((sign) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(sign)]).join("");

/** Numbers at equal distances, both ends included. */
export const sequence = (count, from, to) =>
  Array.from({ length: count }, (_, n) => from + ((to - from) * n) / (count - 1));

/** A curve without the points that are no numbers, so that nothing undefined is drawn. */
export function finiteOnly(series) {
  const kept = series.x.map((_, n) => n)
    .filter((n) => Number.isFinite(series.x[n]) && Number.isFinite(series.y[n]));
  if (kept.length === series.x.length) return series;
  return { ...series, x: kept.map((n) => series.x[n]), y: kept.map((n) => series.y[n]) };
}
