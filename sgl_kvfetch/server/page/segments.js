"use strict";
// Segments: those of a folder, and one with its frames. Links name what is shown: #folder=…&prefix=…, #segment=…

const SEGMENT = /^[0-9a-f]{32}\.[0-9]+-[0-9]+\/[0-9]+-[0-9a-f]{64}\.kvm$/;

// Shows what the address names.
function follow() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (latest === null) return;
  const [folder, segment] = [wanted.get("folder"), wanted.get("segment") ?? ""];
  if (wanted.has("cause")) drawFailures(latest);
  else if (SEGMENT.test(segment)) showSegment(segment);
  else if (folder) showSegments(folder, wanted.get("prefix") ?? "");
  else {
    $("#segments").hidden = $("#segment").hidden = true;
    drawFailures(latest);
  }
}

window.addEventListener("hashchange", follow);

function showSegments(folder, prefix) {
  return attempt(async () => {
    const found = await askJson(`v1/segments?${new URLSearchParams({ folder, prefix })}`);
    $("#segments").dataset.folder = folder;
    $("#prefix").value = prefix;
    $("#clear").hidden = !may("write");
    $("#segments-title").textContent = `Segments of ${folders.get(folder)?.model || folder}, last used first`;
    replaceRows($("#segments tbody"), found, (segment) => segment.name, (segment) => [
      link(short(segment.name.split("/")[1]), { segment: segment.name }, segment.name),
      number(count(segment.num_pages)),
      number(size(segment.stored_bytes)),
      ago(Date.now() / 1000 - segment.last_used_s),
      segment.is_pinned ? "yes" : "no",
    ]);
    $("#segment").hidden = true;
    $("#segments").hidden = false;
    $("#segments").scrollIntoView({ block: "nearest" });
    ($("#segments tbody a") ?? $("#prefix")).focus();
  });
}

$("#find").addEventListener("submit", (event) => {
  event.preventDefault();
  const { folder } = $("#segments").dataset;
  const before = location.hash;
  location.hash = new URLSearchParams({ folder, prefix: $("#prefix").value });
  if (location.hash === before) follow();
});

$("#clear").addEventListener("click", () => {
  const { folder } = $("#segments").dataset;
  if (!confirm(`Delete all segments of ${folders.get(folder)?.model || folder} with these heads, pinned ones too?`)) return;
  attempt(async () => {
    while ((await askJson(`v1/objects?prefix=${encodeURIComponent(`${folder}/`)}`, { method: "DELETE" })).more);
    location.hash = "";
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
      ["Raw size", size(found.raw_bytes)],
      ...found.codings.map((coding) => [
        `Variant ${coding.codecs.join(", ")} ${coding.resolution}`,
        `${size(coding.stored_bytes)}, ${(found.raw_bytes / coding.stored_bytes).toFixed(1)} times smaller`,
      ]),
      ["Side pools", found.side_pools.join(", ") || "none"],
      ["Expires", found.expires_s === null ? "never" : new Date(1000 * found.expires_s).toISOString()],
    ];
    $("#segment dl").replaceChildren(...pairs(about));
    $("#siblings").href = `#${new URLSearchParams({ folder: found.name.split("/")[0] })}`;
    $("#segment").hidden = false;
    $("#segment-title").focus();
  });
}
