"use strict";
// Elements, and values in words.
const $ = (selector) => document.querySelector(selector);

function withAttributes(made, attributes) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// Everything that a store says is put into text, never into markup: names of models are whatever a writer chose.
function element(tag, text = "", attributes = {}) {
  const made = withAttributes(document.createElement(tag), attributes);
  made.textContent = text;
  return made;
}

const drawing = (tag, attributes) => withAttributes(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes);

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let step = 0;
  for (; bytes >= 1024 && step < units.length - 1; step++) bytes /= 1024;
  return `${step && bytes < 100 ? bytes.toFixed(1) : Math.round(bytes)} ${units[step]}`;
}

const count = (number) => number.toLocaleString("en");
const percent = (share) => (Number.isFinite(share) ? `${(100 * share).toFixed(share > 0.1 ? 0 : 1)}%` : "–");

function span(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

const ago = (seconds) => `${span(seconds)} ago`;
const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });

const day = (seconds) => new Date(1000 * seconds).toLocaleDateString([], { weekday: "short", day: "numeric" });
const milliseconds = (seconds) => (seconds < 1 ? `${Number((1000 * seconds).toPrecision(2))} ms` : `${Number(seconds.toPrecision(2))} s`);

// The children of a <dl>.
function pairs(rows) {
  return rows.map(([term, value, note]) => {
    const pair = element("div");
    pair.append(element("dt", term), element("dd", value));
    if (note !== undefined) pair.append(element("dd", note, { class: "note" }));
    return pair;
  });
}

const number = (text) => element("td", text, { class: "number" });

const short = (text) => (text.length > 26 ? `${text.slice(0, 25)}…` : text);

function link(text, hash, title = text) {
  return element("a", text, { href: `#${new URLSearchParams(hash)}`, title });
}

// A name that a writer chose, whole.
const named = (content, title) => {
  const cell = element("td", "", { class: "name", title });
  cell.append(content);
  return cell;
};

function inCell(content) {
  if (content instanceof HTMLTableCellElement) return content;
  const cell = element("td");
  cell.append(content);
  return cell;
}

// Keeps the keyboard's place: a row that has the focus is focused again after it was replaced.
function replaceRows(body, rows, keyOf, cellsOf) {
  const focused = document.activeElement?.closest("tr")?.dataset.key;
  const heads = [...body.parentElement.tHead.rows[0].cells].map((cell) => cell.textContent);  // shown on narrow screens
  body.replaceChildren(
    ...rows.map((row) => {
      const line = element("tr");
      line.dataset.key = keyOf(row);
      line.append(...cellsOf(row).map(inCell));
      [...line.cells].forEach((cell, index) => { cell.dataset.head = heads[index]; });
      return line;
    }),
  );
  if (focused !== undefined) {
    [...body.rows].find((line) => line.dataset.key === focused)?.querySelector("a, button")?.focus();
  }
}
