"use strict";
// The page: what the summary says, and tokens.
const EVERY_MS = 5000;
const ROLES = ["read", "write", "admin"];
let folders = new Map();
let latest = null;
let role = "read";

function bar(term, value, most, text) {
  const pair = element("div");
  const full = most ? Math.min(1, value / most) : 0;
  const track = drawing("svg", { class: "bar", viewBox: "0 0 100 1", preserveAspectRatio: "none", "aria-hidden": "true" });
  track.append(drawing("rect", { width: 100 * full, height: 1, class: full > 0.9 ? "full" : "" }));
  const share = most ? `${percent(full)}: ` : "";
  pair.append(element("dt", term), element("dd", `${share}${size(value)}${text}`), track);
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

// kind: "good", "bad", or "" for what is neither.
function say(text, kind = "") {
  $("#status").textContent = text;
  $("#status").className = kind;
}

// Runs what somebody asked for, and says what went wrong.
async function attempt(work) {
  try {
    await work();
  } catch (error) {
    say(error.message, "bad");
  }
}

async function show() {
  try {
    const answer = await ask("v1/summary");
    role = answer.headers.get("KVFetch-Role") ?? "read";
    const isFirst = latest === null;
    latest = await answer.json();
    $("#login").hidden = true;
    $("#store").hidden = false;
    draw(latest);
    say(...verdict(latest));
    if (isFirst) follow();
  } catch (error) {
    if (error.status === 401) {
      sessionStorage.removeItem("token");
      $("#store").hidden = true;
      $("#login").hidden = false;
      say("This token is not valid.", "bad");
      return;
    }
    say(error.status ? error.message : "The store does not answer.", "bad");
  }
  setTimeout(show, EVERY_MS);
}

// What somebody who was called at night has to know first, and whether it is good or bad.
function verdict({ history, failures, write_problem, capacity_bytes, now_s, folders: rows }) {
  if (write_problem) return [`Read only: ${write_problem}`, "bad"];
  const recent = failures.filter((each) => each.at_s > now_s - 300);
  if (recent.length) return [`Errors: ${recent.length} in 5 minutes, the last one ${recent.at(-1).cause}`, "bad"];
  const off = rows.flatMap((row) => row.audits).filter((each) => each.audits.off);
  if (off.length) return [`Audits: not used by ${off.length} ${off.length > 1 ? "servers" : "server"}, where it would be wrong`, "bad"];
  const now = history.at(-1).values;
  const first = history.find((sample) => sample.at_s > now_s - 3600).values;
  const evicted = (now["evicted_segments_total"] ?? 0) - (first["evicted_segments_total"] ?? 0);
  const asked = now["request_seconds_count:lookup"];
  if (!now["segments"]) {
    return [asked ? "Empty: servers look up, and nothing is stored yet" : "Empty: nothing is stored yet, and nobody has asked", ""];
  }
  const isFull = capacity_bytes !== null && now["stored_bytes"] > 0.9 * capacity_bytes;
  if (isFull && evicted > now["segments"]) {
    return [`Full and thrashing: ${count(evicted)} segments evicted within the hour, ${count(now["segments"])} are left`, "bad"];
  }
  return [isFull ? "Healthy, and full: the least recently used is evicted" : "Healthy", "good"];
}

const originUrl = () => (location.origin + location.pathname).replace(/\/+$/, "");

function draw(summary) {
  const { history } = summary;
  const now = history.at(-1).values;
  const place = `${summary.host}:${summary.directory}`;
  document.title = `${place} – kvfetch store`;
  $("#place").textContent = place;
  $("#about").textContent = `Version ${summary.version}, up for ${span(summary.now_s - summary.started_s)}`;
  const capacity = summary.capacity_bytes;
  const disk = summary.disk_bytes;
  $("#bars").replaceChildren(
    bar("Stored", now["stored_bytes"] ?? 0, capacity, capacity === null ? ", no limit" : ` of ${size(capacity)}`),
    bar("Disk used", disk - summary.disk_free_bytes, disk, ` of ${size(disk)}, ${size(summary.disk_free_bytes)} free`),
  );
  $("#tiles").replaceChildren(...pairs(tiles(summary)));
  if (!$("#charts").matches(":hover")) drawCharts();
  const statuses = Object.entries(now).filter(([name, value]) => name.startsWith("requests_total:") && value);
  const errors = statuses.map(([name, n]) => [name.split(":")[1], n]).filter(([status]) => status !== "404");
  $("#errors").textContent = errors.length
    ? `Refused or failed since the start: ${errors.map(([status, n]) => `${count(n)} × ${status}`).join(", ")}`
    : "";
  drawFailures(summary);
  drawEmpty(summary);
  drawClients(summary);
  drawFolders(summary);
  drawProfiles(summary);
  drawAudits(summary);
}

// By namespace: its ranks look up the same tokens, each for its own heads.
function tokensFound(rows) {
  const found = new Map();
  for (const { folder, found_tokens: tokens } of rows) {
    const digest = folder.split(".")[0];
    found.set(digest, Math.max(found.get(digest) ?? 0, tokens));
  }
  return found;
}

// Values of now, and of the last minute and hour: each says of which.
function tiles({ folders: rows, history, answer_times: times }) {
  const now = history.at(-1);
  const [minute, hour] = [history.at(-7) ?? history[0], history[0]];
  const [sent, received] = rates([minute, now], ["sent_bytes_total", "received_bytes_total"])[0]?.values ?? [0, 0];
  const during = (name) => (now.values[name] ?? 0) - (hour.values[name] ?? 0);
  const found = (first) => sharesFound([first, now])[0]?.values[0] ?? NaN;
  const took = (kind) => meanSeconds([hour, now], [kind])[0]?.values[0] ?? null;
  const took_text = (kind) => (took(kind) === null ? "–" : milliseconds(took(kind)));
  const within = (seconds) => (seconds === null ? "over 30 s" : `within ${milliseconds(seconds)}`);  // null is infinite
  const spread = (kind) => (times[kind] ? `; half ${within(times[kind].half_s)}, 95% ${within(times[kind].most_s)}` : "");
  const [mean, last] = [`mean of ${span(now.at_s - minute.at_s)}`, `last ${span(now.at_s - hour.at_s)}`];
  return [
    ["Raw size", size(rows.reduce((sum, row) => sum + row.raw_bytes, 0)), "now"],
    ["Segments", count(now.values["segments"] ?? 0), "now"],
    ["Tokens found", count([...tokensFound(rows).values()].reduce((sum, tokens) => sum + tokens, 0)), "since the start"],
    ["Pages found", percent(found(hour)), last],
    ["A lookup takes", took_text("lookup"), `mean, ${last}${spread("lookup")}`],
    ["A read takes", took_text("read"), `mean, ${last}${spread("read")}`],
    ["Sent", `${size(sent)}/s`, mean],
    ["Received", `${size(received)}/s`, mean],
    ["Evictions", count(during("evicted_segments_total")), last],
    ["Requests in flight", count(now.values["requests_in_flight"] ?? 0), "now"],
  ];
}

// One row a cause; a click on it shows its failures one by one.
function drawFailures({ failures, history, now_s }) {
  const counts = history.at(-1).values;
  const chosen = new URLSearchParams(location.hash.slice(1)).get("cause");
  const groups = new Map();
  for (const failure of failures) groups.set(failure.cause, [...(groups.get(failure.cause) ?? []), failure]);
  const clients = (found) => {
    const names = [...new Set(found.map((failure) => failure.client).filter(Boolean))];
    return names.length > 2 ? `${names.slice(0, 2).join(", ")} and ${names.length - 2} more` : names.join(", ") || "–";
  };
  const happened = (failure) => element("td", `${failure.what}: ${failure.message}`, { class: "long" });
  $("#failures").hidden = !failures.length;
  const rows = [...groups].sort(([, a], [, b]) => b.at(-1).at_s - a.at(-1).at_s);
  replaceRows($("#causes tbody"), rows, ([cause]) => cause, ([cause, found]) => [
    link(cause, cause === chosen ? {} : { cause }, cause === chosen ? "Hide its failures" : "Show its failures"),
    number(count(counts[`failures_total:${cause}`] ?? found.length)),
    ago(now_s - found.at(-1).at_s),
    clients(found),
    happened(found.at(-1)),
  ]);
  const single = groups.get(chosen) ?? [];
  $("#cause").hidden = !single.length;
  $("#cause-title").textContent = `The last ${single.length} of ${chosen}`;
  replaceRows($("#cause tbody"), single.toReversed(), (failure) => failure.at_s, (failure) => [
    element("td", new Date(1000 * failure.at_s).toLocaleTimeString(), { title: ago(now_s - failure.at_s) }),
    failure.client || "–",
    happened(failure),
  ]);
}

function drawEmpty(summary) {
  const isEmpty = !summary.folders.length;
  $("#empty").hidden = !isEmpty;
  $("#models").hidden = isEmpty;
  if (!isEmpty) return;
  const isLocal = ["localhost", "127.0.0.1", "[::1]"].includes(location.hostname);
  const token = sessionStorage.getItem("token") ? "export KVFETCH_TOKEN=TOKEN    # with the role write\n" : "";
  $("#how").textContent = `${token}sglang serve --model-path MODEL --page-size 64 --enable-hierarchical-cache \\
    --hicache-storage-backend kvfetch \\
    --hicache-storage-backend-extra-config '{"store": "${originUrl()}"}'`;
  $("#how-far").textContent = isLocal
    ? `Other machines do not reach ${location.hostname}: start the store with --host 0.0.0.0 and --token-file, and give them its address.`
    : "";
  $("#how-else").textContent = `kvfetch doctor ${originUrl()}`;
}

function drawClients({ clients, now_s }) {
  $("#clients").hidden = !clients.length;
  replaceRows($("#clients tbody"), clients, (each) => each.address, (each) => [
    each.address || "–",
    number(count(each.lookups)),
    number(count(each.reads)),
    number(size(each.read_bytes)),
    number(count(each.writes)),
    number(size(each.written_bytes)),
    ago(now_s - each.last_s),
  ]);
}

function drawFolders(summary) {
  folders = new Map(summary.folders.map((row) => [row.folder, row]));
  const rows = [...summary.folders].sort((a, b) => b.stored_bytes - a.stored_bytes);
  replaceRows($("#folders tbody"), rows, (row) => row.folder, (row) => [
    named(link(`${row.model || row.folder}, ${row.folder.split(".")[1]}`, { folder: row.folder },
      row.model_identity || row.folder), row.model_identity || row.folder),
    named(row.cache ? `${row.quantiser}, ${row.cache}` : "", row.quantiser_identity),
    number(count(row.num_segments)),
    number(count(row.num_tokens)),
    number(count(row.found_tokens)),
    number(size(row.raw_bytes)),
    number(size(row.stored_bytes)),
    number(row.raw_bytes ? `${(row.raw_bytes / row.stored_bytes).toFixed(1)}x` : "–"),
    ago(summary.now_s - row.last_used_s),
    ago(summary.now_s - row.first_used_s),
  ]);
}

function drawProfiles(summary) {
  const storedBy = (profile) => summary.folders
    .filter((row) => row.quantiser_identity.startsWith(`klt(profile=${profile.digest};`))
    .reduce((sum, row) => sum + row.stored_bytes, 0);
  $("#profiles").hidden = !summary.profiles.length;
  replaceRows($("#profiles tbody"), summary.profiles, (profile) => `${profile.weights}/${profile.digest}`, (profile) => [
    named(profile.model || "–", `weights ${profile.weights}`),
    element("td", profile.digest.slice(0, 12), { title: profile.digest }),
    ago(summary.now_s - profile.put_s),
    element("td", profile.is_newest ? "take it" : profile.problem ? "cannot use it" : "take a newer one", { title: profile.problem }),
    number(size(profile.num_bytes)),
    number(size(storedBy(profile))),
  ]);
}

// One row a server and folder; those first that need somebody.
function drawAudits({ folders: all, now_s }) {
  const told = all.flatMap((row) => row.audits.map((each) => ({ ...each, row })));
  told.sort((a, b) => Boolean(b.audits.off) - Boolean(a.audits.off) || b.audits.typical - a.audits.typical);
  $("#audits").hidden = !told.length;
  const name = ({ row }) => `${row.model || row.folder}, ${row.folder.split(".")[1]}`;
  const ratio = (value) => number(value ? `${value.toFixed(2)}x` : "–");
  replaceRows($("#audits tbody"), told, (each) => `${each.row.folder}/${each.client}`, (each) => [
    named(name(each), each.row.model_identity || each.row.folder),
    each.client || "–",
    named(each.row.quantiser, each.row.quantiser_identity),
    ratio(each.audits.typical),
    ratio(each.audits.ratio),
    ago(now_s - each.told_s),
    element("td", each.advice ? `${each.says}. What to do: ${each.advice}` : each.says, { class: "long" }),
  ]);
}

$("#login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", $("#token").value);
  $("#token").value = "";
  show();
});

// A store with tokens sends the form unhidden: without a token, it is not asked, which would count as refused.
if ($("#login").hidden || sessionStorage.getItem("token")) show();
else say("This store asks for a token.");
