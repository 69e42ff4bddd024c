"use strict";
// What happened over time: rates between the samples of the summary's history.

// Rates between samples. A counter that falls was started again.
function rates(history, names) {
  const points = [];
  for (let i = 1; i < history.length; i++) {
    const [before, now] = [history[i - 1], history[i]];
    const seconds = now.at_s - before.at_s;
    if (seconds < 0.5) continue;
    const changes = names.map((name) => Math.max(0, (now.values[name] ?? 0) - (before.values[name] ?? 0)) / seconds);
    points.push({ at_s: now.at_s, values: changes });
  }
  return points;
}

// The share of the pages looked up that were found, between samples; null where nobody looked up.
function sharesFound(history) {
  return rates(history, ["lookup_pages_total:hit", "lookup_pages_total:miss"]).map(({ at_s, values: [hit, miss] }) => (
    { at_s, values: [hit + miss ? hit / (hit + miss) : null] }));
}

// The mean seconds of answers of each kind, between samples; null where there were none.
function meanSeconds(history, kinds) {
  const names = kinds.flatMap((kind) => [`request_seconds_sum:${kind}`, `request_seconds_count:${kind}`]);
  return rates(history, names).map(({ at_s, values }) => (
    { at_s, values: kinds.map((_, i) => (values[2 * i + 1] ? values[2 * i] / values[2 * i + 1] : null)) }));
}

// The smallest 1, 2 or 5 times a power of ten that is not below `value`; in units of 1024 if they are bytes.
function scaleTop(value, areBytes, least = 0.1) {
  const shown = Math.max(value, areBytes ? 1024 : least);
  let unit = 1;
  if (areBytes) while (shown > 1000 * unit) unit *= 1024;
  const power = 10 ** Math.floor(Math.log10(shown / unit) + 1e-9);
  return unit * power * [1, 2, 5, 10].find((times) => shown <= unit * power * times * (1 + 1e-9));
}

function drawCharts() {
  const { history } = latest;
  const from_s = history.at(-1).at_s - Number($("#range").value);
  const shown = history.filter((sample) => sample.at_s >= from_s);
  const rate = (value) => (value < 10 ? Number(value.toFixed(2)).toString() : count(Math.round(value)));
  const kinds = ["lookup", "read", "write"];
  $("#charts").replaceChildren(
    chart("Pages found, of those looked up", sharesFound(shown), ["found"], percent),
    chart("Lookups per second", rates(shown, ["request_seconds_count:lookup"]), ["lookups"], rate),
    chart("Bytes per second", rates(shown, ["sent_bytes_total", "received_bytes_total"]), ["sent", "received"], size, true),
    chart("Time to answer, on average", meanSeconds(shown, kinds), kinds, milliseconds),
    chart("Evictions per second", rates(shown, ["evicted_segments_total"]), ["evicted"], rate),
  );
}

// `points`: their values are null where there is nothing to show.
function chart(title, points, words, format, areBytes = false) {
  const most = Math.max(0, ...points.flatMap((point) => point.values));
  const top = format === percent ? 1 : scaleTop(most, areBytes, format === milliseconds ? 0.001 : 0.1);
  const value = (point, index) => (point && point.values[index] !== null ? point.values[index] ?? 0 : null);
  const tell = (point) => words.map((word, index) => `${word} ${value(point, index) === null ? "–" : format(value(point, index))}`);
  const label = `${title}: now ${tell(points.at(-1)).join(", ")}; at most ${format(most)}`;
  const svg = drawing("svg", { viewBox: "0 0 400 140", preserveAspectRatio: "none", role: "img", "aria-label": label });
  const [start, end] = [points[0]?.at_s ?? 0, points.at(-1)?.at_s ?? 0];
  const place = (at_s) => (end > start ? (400 * (at_s - start)) / (end - start) : 400);
  svg.append(drawing("path", { d: "M0,70H400", class: "grid" }));
  words.forEach((_, index) => {
    const there = points.filter((point) => point.values[index] !== null);
    const at = (point) => `${place(point.at_s).toFixed(1)},${(138 - (136 * point.values[index]) / top).toFixed(1)}`;
    svg.append(drawing("path", { d: there.length ? `M${there.map(at).join("L")}` : "", class: `series-${index}` }));
  });
  const cursor = drawing("path", { class: "cursor" });
  svg.append(cursor);

  const scale = element("div", "", { class: "scale", "aria-hidden": "true" });
  scale.append(...[top, top / 2, 0].map((value) => element("span", format(value))));
  const axis = element("p", "", { class: "axis" });
  axis.append(...(points.length ? [start, (start + end) / 2, end] : []).map((at_s) => element("span", end - start > 86400 ? day(at_s) : clock(at_s))));
  const when = element("span", "", { class: "when" });
  const legend = element("p", "", { class: "legend" });
  const keys = words.map((_, index) => [element("span", "", { class: `key key-${index}` }), element("span")]);
  for (const parts of keys) {
    const entry = element("span");
    entry.append(...parts);
    legend.append(entry);
  }
  const say = (time, point) => {
    when.textContent = time;
    tell(point).forEach((text, index) => { keys[index][1].textContent = text; });
  };
  const sayNow = () => say(points.length ? "now" : "no samples yet", points.at(-1));
  sayNow();
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at_s = start + ((end - start) * (event.clientX - box.left)) / box.width;
    const far = (point) => Math.abs(point.at_s - at_s);
    const nearest = points.reduce((best, point) => (best && far(best) <= far(point) ? best : point), null);
    if (!nearest) return;
    cursor.setAttribute("d", `M${place(nearest.at_s)},0V140`);
    const at = new Date(1000 * nearest.at_s);
    say(end - start > 86400 ? at.toLocaleString() : at.toLocaleTimeString(), nearest);
  });
  svg.addEventListener("pointerleave", () => {
    cursor.removeAttribute("d");
    sayNow();
  });
  const caption = element("figcaption", `${title} `);
  caption.append(when);
  const figure = element("figure");
  figure.append(caption, scale, svg, axis, legend);
  return figure;
}

$("#range").addEventListener("change", drawCharts);
