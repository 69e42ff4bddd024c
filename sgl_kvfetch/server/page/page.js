"use strict";
const $ = (selector) => document.querySelector(selector);
const EVERY_MS = 5000;
const ROLES = ["read", "write", "admin"];
let folders = new Map();
let latest = null;
let role = "read";

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

function bar(term, value, most, text) {
  const pair = element("div");
  const full = most ? Math.min(1, value / most) : 0;
  const track = drawing("svg", { class: "bar", viewBox: "0 0 100 1", preserveAspectRatio: "none", "aria-hidden": "true" });
  track.append(drawing("rect", { width: 100 * full, height: 1, class: full > 0.9 ? "full" : "" }));
  const share = most ? `${percent(full)}: ` : "";
  pair.append(element("dt", term), element("dd", `${share}${size(value)} ${text}`), track);
  return pair;
}

async function ask(path, options = {}) {
  const token = sessionStorage.getItem("token");
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  if (options.body) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({ message: answer.statusText }));
  throw Object.assign(new Error(body.message), { status: answer.status });
}

const may = (needed) => ROLES.indexOf(role) >= ROLES.indexOf(needed);

const askJson = async (path, options) => (await ask(path, options)).json();

// The children of a <dl>.
function pairs(rows) {
  return rows.map(([term, value]) => {
    const pair = element("div");
    pair.append(element("dt", term), element("dd", value));
    return pair;
  });
}

function say(text, isBad = false) {
  $("#status").textContent = text;
  $("#status").classList.toggle("bad", isBad);
}

// Runs what somebody asked for, and says what went wrong.
async function attempt(work, place = $("#status")) {
  try {
    await work();
  } catch (error) {
    if (place === $("#status")) say(error.message, true);
    else place.textContent = error.message;
  }
}

async function show() {
  try {
    const answer = await ask("v1/summary");
    role = answer.headers.get("KVFetch-Role") ?? "read";
    latest = await answer.json();
    $("#login").hidden = true;
    $("#store").hidden = false;
    draw(latest);
    say(...verdict(latest));
  } catch (error) {
    if (error.status === 401) {
      sessionStorage.removeItem("token");
      $("#store").hidden = true;
      $("#login").hidden = false;
      say("This token is not valid.", true);
      return;
    }
    say(error.status ? error.message : "The store does not answer.", true);
  }
  setTimeout(show, EVERY_MS);
}

// What somebody who was called at night has to know first, and whether it is bad.
function verdict({ history, failures, write_problem, capacity_bytes, now_s }) {
  if (write_problem) return [`Read only: ${write_problem}`, true];
  const recent = failures.filter((each) => each.at_s > now_s - 300);
  if (recent.length) return [`Errors: ${recent.length} in 5 minutes, the last one ${recent.at(-1).cause}`, true];
  const now = history.at(-1).values;
  const first = history.find((sample) => sample.at_s > now_s - 3600).values;
  const evicted = (now["evicted_segments_total"] ?? 0) - (first["evicted_segments_total"] ?? 0);
  const isFull = capacity_bytes !== null && now["stored_bytes"] > 0.9 * capacity_bytes;
  if (isFull && evicted > now["segments"]) {
    return [`Full and thrashing: ${count(evicted)} segments evicted within the hour, ${count(now["segments"])} are left`, true];
  }
  return [isFull ? "Healthy, and full: the least recently used is evicted" : "Healthy", false];
}

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

function draw(summary) {
  const { history } = summary;
  const now = history.at(-1).values;
  const total = (pick) => summary.folders.reduce((sum, row) => sum + pick(row), 0);
  const stored = now["stored_bytes"] ?? 0;
  const capacity = summary.capacity_bytes;
  const [hit, missed] = [now["lookup_pages_total:hit"] ?? 0, now["lookup_pages_total:miss"] ?? 0];
  const recent = rates(history.slice(-7), ["sent_bytes_total", "received_bytes_total"]);
  const mean = (index) => (recent.length ? recent.reduce((sum, p) => sum + p.values[index], 0) / recent.length : 0);
  const disk = summary.disk_bytes;
  $("#bars").replaceChildren(
    bar("Stored", stored, capacity, capacity === null ? "no limit" : `of ${size(capacity)}`),
    bar("Disk used", disk - summary.disk_free_bytes, disk, `of ${size(disk)}, ${size(summary.disk_free_bytes)} free`),
  );
  $("#about").textContent = `Version ${summary.version}, up for ${span(summary.now_s - summary.started_s)}`;
  const tiles = [
    ["K and V before coding", size(total((row) => row.raw_bytes))],
    ["Segments", count(now["segments"] ?? 0)],
    ["Pages found", percent(hit / (hit + missed))],
    ["Sent", `${size(mean(0))}/s`],
    ["Received", `${size(mean(1))}/s`],
    ["Evicted segments", count(now["evicted_segments_total"] ?? 0)],
    ...(now["dropped_levels_total"] ? [["Dropped levels", count(now["dropped_levels_total"])]] : []),
    ["Requests in flight", count(now["requests_in_flight"] ?? 0)],
  ];
  $("#tiles").replaceChildren(...pairs(tiles));
  if (!$("#charts").matches(":hover")) drawCharts();
  const statuses = Object.entries(now).filter(([name, value]) => name.startsWith("requests_total:") && value);
  const errors = statuses.map(([name, n]) => [name.split(":")[1], n]).filter(([status]) => status !== "404");
  $("#errors").textContent = errors.length
    ? `Refused or failed since the start: ${errors.map(([status, n]) => `${count(n)} × ${status}`).join(", ")}`
    : "";
  $("#failures").hidden = !summary.failures.length;
  replaceRows($("#failures tbody"), summary.failures.toReversed(), (failure) => failure.at_s, (failure) => [
    element("td", new Date(1000 * failure.at_s).toLocaleTimeString(), { title: ago(summary.now_s - failure.at_s) }),
    failure.client || "–",
    failure.cause,
    element("td", `${failure.what}: ${failure.message}`, { class: "long" }),
  ]);
  folders = new Map(summary.folders.map((row) => [row.folder, row]));
  const rows = [...summary.folders].sort((a, b) => b.stored_bytes - a.stored_bytes);
  replaceRows($("#folders tbody"), rows, (row) => row.folder, (row) => [
    button(`${short(row.model || row.folder)}, ${row.folder.split(".")[1]}`, () => showSegments(row.folder),
      row.model_identity || row.folder),
    element("td", short(row.quantiser), { title: row.quantiser_identity }),
    number(count(row.num_segments)),
    number(count(row.num_tokens)),
    number(size(row.raw_bytes)),
    number(size(row.stored_bytes)),
    number(row.raw_bytes ? `${(row.raw_bytes / row.stored_bytes).toFixed(1)}x` : "–"),
    ago(summary.now_s - row.last_used_s),
    ago(summary.now_s - row.first_used_s),
  ]);
  const storedBy = (profile) => summary.folders
    .filter((row) => row.quantiser_identity.startsWith(`klt(profile=${profile.digest};`))
    .reduce((sum, row) => sum + row.stored_bytes, 0);
  $("#profiles").hidden = !summary.profiles.length;
  replaceRows($("#profiles tbody"), summary.profiles, (profile) => `${profile.weights}/${profile.digest}`, (profile) => [
    element("td", short(profile.model || "–"), { title: `weights ${profile.weights}` }),
    element("td", profile.digest.slice(0, 12), { title: profile.digest }),
    ago(summary.now_s - profile.put_s),
    element("td", profile.is_newest ? "take it" : profile.problem ? "cannot use it" : "take a newer one", { title: profile.problem }),
    number(size(profile.num_bytes)),
    number(size(storedBy(profile))),
  ]);
  $("#text-help").textContent = summary.takes_text
    ? "A text as SGLang gets it after its chat template, or token numbers such as [1, 2, 3]."
    : "Token numbers such as [1, 2, 3]. For texts, the store needs kvfetch serve --tokenizer.";
}

const number = (text) => element("td", text, { class: "number" });

const short = (text) => (text.length > 26 ? `${text.slice(0, 25)}…` : text);

function button(text, action, title = text) {
  const made = element("button", text, { type: "button", class: "link", title });
  made.addEventListener("click", action);
  return made;
}

function inCell(content) {
  if (content instanceof HTMLTableCellElement) return content;
  const cell = element("td");
  cell.append(content);
  return cell;
}

// Keeps the keyboard's place: a row that has the focus is focused again after it was replaced.
function replaceRows(body, rows, keyOf, cellsOf) {
  const focused = document.activeElement?.closest("tr")?.dataset.key;
  body.replaceChildren(
    ...rows.map((row) => {
      const line = element("tr");
      line.dataset.key = keyOf(row);
      line.append(...cellsOf(row).map(inCell));
      return line;
    }),
  );
  if (focused !== undefined) {
    [...body.rows].find((line) => line.dataset.key === focused)?.querySelector("button")?.focus();
  }
}

function drawCharts() {
  const { history } = latest;
  const from_s = history.at(-1).at_s - Number($("#range").value);
  const shown = history.filter((sample) => sample.at_s >= from_s);
  const rate = (value) => value.toFixed(value < 10 ? 1 : 0);
  $("#charts").replaceChildren(
    chart("Lookups a second", shown, ["lookups_total:hit", "lookups_total:partial", "lookups_total:miss"],
      ["found", "in part", "missed"], rate),
    chart("Bytes a second", shown, ["sent_bytes_total", "received_bytes_total"], ["sent", "received"], size),
    chart("Evicted segments a second", shown, ["evicted_segments_total"], ["evicted"], rate),
  );
}

function chart(title, history, names, words, format) {
  const points = rates(history, names);
  const figure = element("figure");
  const caption = element("figcaption", title);
  words.forEach((word, index) => caption.append(element("span", "", { class: `key key-${index}` }), word));
  const most = Math.max(1e-9, ...points.flatMap((point) => point.values));
  const tell = (point) => words.map((word, index) => `${word} ${format(point?.values[index] ?? 0)}`).join(", ");
  const now = `now ${tell(points.at(-1))}`;
  const label = `${title}: ${now}; at most ${format(points.length ? most : 0)}`;
  const svg = drawing("svg", { viewBox: "0 0 400 140", preserveAspectRatio: "none", role: "img", "aria-label": label });
  const [start, end] = [points[0]?.at_s ?? 0, points.at(-1)?.at_s ?? 0];
  const place = (at_s) => (end > start ? (400 * (at_s - start)) / (end - start) : 400);
  names.forEach((_, index) => {
    const at = (point) => `${place(point.at_s).toFixed(1)},${(135 - (125 * point.values[index]) / most).toFixed(1)}`;
    svg.append(drawing("path", { d: points.length ? `M${points.map(at).join("L")}` : "", class: `series-${index}` }));
  });
  const cursor = drawing("path", { class: "cursor" });
  svg.append(cursor);
  const axis = element("p", "", { class: "axis" });
  axis.append(...(points.length ? [start, (start + end) / 2, end] : []).map((at_s) => element("span", clock(at_s))));
  const said = points.length ? ` · ${now} · at most ${format(most)}` : " · no samples yet";
  const saying = element("span", said);
  caption.append(saying);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at_s = start + ((end - start) * (event.clientX - box.left)) / box.width;
    const far = (point) => Math.abs(point.at_s - at_s);
    const nearest = points.reduce((best, point) => (best && far(best) <= far(point) ? best : point), null);
    if (!nearest) return;
    cursor.setAttribute("d", `M${place(nearest.at_s)},0V140`);
    saying.textContent = ` · ${new Date(1000 * nearest.at_s).toLocaleTimeString()} ${tell(nearest)}`;
  });
  svg.addEventListener("pointerleave", () => {
    cursor.removeAttribute("d");
    saying.textContent = said;
  });
  figure.append(svg, axis, caption);
  return figure;
}

$("#range").addEventListener("change", drawCharts);

function showSegments(folder, prefix = "") {
  return attempt(async () => {
    const found = await askJson(`v1/segments?folder=${encodeURIComponent(folder)}&prefix=${encodeURIComponent(prefix)}`);
    const row = folders.get(folder);
    $("#segments").dataset.folder = folder;
    $("#prefix").value = prefix;
    $("#clear").hidden = !may("write");
    $("#segments-title").textContent = `Segments of ${row?.model || folder}, last used first`;
    replaceRows($("#segments tbody"), found, (segment) => segment.name, (segment) => [
      button(short(segment.name.split("/")[1]), () => showSegment(segment.name), segment.name),
      number(count(segment.num_pages)),
      number(size(segment.stored_bytes)),
      ago(Date.now() / 1000 - segment.last_used_s),
      segment.is_pinned ? "yes" : "no",
    ]);
    $("#segments").hidden = false;
    $("#segments").scrollIntoView({ block: "nearest" });
    ($("#segments tbody button") ?? $("#prefix")).focus();
  });
}

$("#find").addEventListener("submit", (event) => {
  event.preventDefault();
  showSegments($("#segments").dataset.folder, $("#prefix").value);
});

$("#clear").addEventListener("click", () => {
  const { folder } = $("#segments").dataset;
  if (!confirm(`Delete all segments of ${folders.get(folder)?.model || folder} with these heads, pinned ones too?`)) return;
  attempt(async () => {
    while ((await askJson(`v1/objects?prefix=${encodeURIComponent(`${folder}/`)}`, { method: "DELETE" })).more);
    $("#segments").hidden = true;
    $("#segment").hidden = true;
    say("Deleted. The list of models follows within 30 s.");
  });
});

function showSegment(name) {
  return attempt(async () => {
    const found = await askJson(`v1/segments/${name}`);
    const range = ([first, end]) => (end - first > 1 ? `${first} to ${end - 1}` : `${first}`);
    const about = [
      ["Name", found.name],
      ["Model", found.model],
      ["Model’s identity", found.model_identity],
      ["Quantiser", found.quantiser],
      ["Quantiser’s identity", found.quantiser_identity],
      ["Tokens", `${found.first_token} to ${found.first_token + found.num_tokens - 1}, pages of ${found.page_size}`],
      ["Layers", range(found.layers)],
      ["Heads", range(found.heads)],
      ["Values", found.kv_dtype],
      ["Raw", size(found.raw_bytes)],
      ...found.variants.map((variant) => [
        `Variant ${variant.codecs.join(", ")} ${variant.resolution}`,
        `${size(variant.stored_bytes)}, ${(found.raw_bytes / variant.stored_bytes).toFixed(1)} times smaller`,
      ]),
      ["Side pools", found.side_pools.join(", ") || "none"],
      ["Expires", found.expires_s === null ? "never" : new Date(1000 * found.expires_s).toISOString()],
    ];
    $("#segment dl").replaceChildren(...pairs(about));
    $("#segment").dataset.name = found.name;
    $("#span").max = found.num_spans - 1;
    $("#span").value = 0;
    $("#segment figure").hidden = true;
    $("#draw [role=status]").textContent = "";
    $("#segment").hidden = false;
    $("#segment-title").focus();
    $("#draw").requestSubmit();
  });
}

$("#draw").addEventListener("submit", (event) => {
  event.preventDefault();
  const [name, span, status] = [$("#segment").dataset.name, $("#span").value, $("#draw [role=status]")];
  status.textContent = "Decoding …";
  attempt(async () => {
    const picture = await (await ask(`v1/pictures/${name}?span=${span}`)).blob();
    const image = $("#segment img");
    URL.revokeObjectURL(image.src);
    image.src = URL.createObjectURL(picture);
    image.alt = `Frames of span ${span}: a row for each group of layers, a column for each part`;
    $("#segment figcaption").textContent = `Span ${span}, the first frame of each part, contrast stretched`;
    $("#segment figure").hidden = false;
    status.textContent = "";
  }, status);
});

function lookUp(pin) {
  const output = $("#prompt output");
  return attempt(async () => {
    const text = $("#text").value;
    const query = { prompt: text, page_size: Number($("#page-size").value), cache_salt: $("#salt").value || null, pin };
    if (pin) query.label = text.slice(0, 60);
    if (text.trim().startsWith("[")) {
      try {
        query.prompt = JSON.parse(text);
      } catch {
        // it is a text that begins like a list
      }
    }
    const found = await askJson("v1/prompts", { method: "POST", body: JSON.stringify(query) });
    const models = new Map([...folders.values()].map((row) => [row.folder.split(".")[0], row.model]));
    const lines = Object.entries(found.stored_pages).map(
      ([digest, pages]) => `${models.get(digest) || digest}: ${pages} of ${found.num_pages} pages are stored`,
    );
    output.textContent = [
      `${found.num_tokens} tokens, ${found.num_pages} whole pages${found.pin ? ", pinned" : ""}`, ...lines,
    ].join("\n");
    $("#pin").hidden = !may("admin") || !found.num_pages || found.pin;
    $("#unpin").hidden = !may("admin") || !found.pin;
    $("#unpin").dataset.pin = found.pin;
  }, output);
}

$("#prompt").addEventListener("submit", (event) => {
  event.preventDefault();
  lookUp(false);
});
$("#pin").addEventListener("click", () => lookUp(true));
$("#unpin").addEventListener("click", () => attempt(async () => {
  await ask(`v1/pins/${$("#unpin").dataset.pin}`, { method: "DELETE" });
  await lookUp(false);
}, $("#prompt output")));

$("#login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", $("#token").value);
  $("#token").value = "";
  show();
});

// A store with tokens sends the form unhidden: without a token, it is not asked, which would count as refused.
if ($("#login").hidden || sessionStorage.getItem("token")) show();
else say("This store asks for a token.");
