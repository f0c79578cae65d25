// The panels: what the API has said becomes what an operator sees. Called once a second.

import {
  Curve, ago, byId, bytes, count, draw, fillMeter, fit, make, many, meter, part, rows, say, set,
} from "./draw.js";
import { engineLink, requestLink } from "./lookups.js";
import { stateOf, toneOf } from "./services.js";

const NAMES = { device: "G1", host: "G2", disk: "G3", object: "G4" };
const TITLES = { device: "GPU", host: "Host memory", disk: "Disk", object: "Bucket",
  remote: "Other hosts" };
const PLACES = ["host", "disk", "object", "remote", "miss"];
const LABELS = { ...TITLES, host: "host memory", disk: "disk", object: "bucket",
  remote: "other hosts", miss: "nowhere: computed" };
const SPEED = 10_000; // Prefill tokens/s, until somebody says better.

const curves = {
  hits: new Curve(byId("hits-spark"), "Hit rate"),
  tokens: new Curve(byId("tokens-spark"), "Tokens found per second"),
  ttft: new Curve(byId("ttft-spark"), "Estimated TTFT saved per lookup"),
  lookups: new Curve(byId("lookups-spark"), "Lookups per second"),
};
const speed = byId("speed");
speed.value = localStorage.getItem("kvbm-prefill") || SPEED;
speed.addEventListener("change", () => {
  localStorage.setItem("kvbm-prefill", speed.value);
  if (past) showHistory(past);
});

const sum = values => Object.values(values).reduce((all, one) => all + one, 0);

export const showStatus = status => {
  const health = byId("health");
  say(health, status.ready ? "ready" : "not ready");
  set(health, "class", `pill ${status.ready ? "good" : "bad"}`);
  say(byId("about"), `${status.version} · ${many(status.engines, "engine")}`);
  byId("reasons").hidden = !status.reasons.length;
  fit(byId("reasons"), status.reasons, () => make("li"), say);
  byId("passing").hidden = !status.passing_through.length;
  fit(byId("passing"), status.passing_through, () => make("li"), say);
  glance(status);
  where(status.lookups.blocks);
  flow(status);
};

const saved = (tokens, lookups) => lookups && speed.value > 0
  ? 1000 * tokens / lookups / speed.value : 0;

const glance = status => {
  const { lookups, matched_tokens: tokens, blocks, window_s: window, hit_rate: hits } =
    status.lookups;
  const over = `over the last ${Math.round(window)} s`;
  say(byId("hits"), hits === null ? "–" : part(hits));
  say(byId("hits-note"), !window ? "" : hits === null
    ? `no blocks asked for ${over}` : `of the blocks asked for ${over}`);
  say(byId("tokens"), `${count(tokens)}/s`);
  say(byId("tokens-note"), status.host
    ? "tokens" : `tokens; ${count(status.kvbm.kvbm_matched_tokens)} in all`);
  say(byId("ttft"), lookups ? `≤ ${count(saved(tokens, lookups))} ms` : "–");
  say(byId("lookups"), `${count(lookups)}/s`);
  say(byId("lookups-note"),
    `${count(sum(blocks))} blocks/s from ${many(status.workers, "worker")}`);
  say(byId("window"), window ? `per second, ${over}` : "");
};

let past = null;

export const showHistory = history => {
  past = history;
  const points = history.points;
  const curve = (name, value) => curves[name].show(
    points.map(one => ({ ago_s: one.ago_s, value: value(one) })), history.spacing_s);
  curve("hits", one => one.hit_rate);
  curve("tokens", one => one.matched_tokens);
  curve("ttft", one => saved(one.matched_tokens, one.lookups));
  curve("lookups", one => one.lookups);
  const minutes = Math.ceil(Math.max(0, ...points.map(one => one.ago_s)) / 60);
  say(byId("curves-note"), points.length ? `Curves: the last ${many(minutes, "minute")}, at most an `
    + `hour; each point is over ${Math.round(history.window_s)} s.` : "");
};

const where = blocks => {
  const svg = byId("where");
  const asked = sum(blocks);
  set(svg, "viewBox", "0 0 100 10");
  set(svg, "preserveAspectRatio", "none");
  const shown = asked ? PLACES.filter(place => blocks[place] > 0) : [];
  let left = 0;
  fit(svg, shown, () => draw("rect", null, { height: 10 }), (bar, place) => {
    const width = 100 * blocks[place] / asked;
    set(bar, "class", `t-${place}`);
    set(bar, "x", left.toFixed(2));
    set(bar, "width", width.toFixed(2));
    left += width;
  });
  const said = shown.map(place => `${LABELS[place]} ${part(blocks[place] / asked)}`);
  set(svg, "aria-label", said.join(", ") || "no lookups now");
  fit(byId("where-legend"), PLACES, () => make("li"), (item, place) => {
    set(item, "class", `t-${place}`);
    say(item, `${LABELS[place]} ${asked ? part(blocks[place] / asked) : "–"}`);
  });
};

// --- tiers and flows --------------------------------------------------------------------------

const flow = status => {
  const tiers = Object.fromEntries(status.tiers.map(one => [one.tier, one]));
  const chain = ["device", "host", "disk", "object"].filter(
    one => one === "device" || one === "host" || tiers[one]);
  const flows = Object.fromEntries(status.flows.map(one => [`${one.source}>${one.target}`, one]));
  const parts = [];
  chain.forEach((tier, place) => {
    // Every lower tier hands its blocks to host memory, not to its neighbour here.
    if (place) parts.push({ ways: true, upper: place === 1 ? "device" : "host", lower: tier });
    parts.push({ tier });
  });
  const box = byId("flow");
  const shape = chain.join();
  if (box.dataset.shape !== shape) {
    box.dataset.shape = shape;
    box.replaceChildren(...parts.map(one => one.ways ? newWays() : newTier(one.tier)));
  }
  parts.forEach((one, place) => {
    const node = box.children[place];
    if (one.ways) {
      fillWay(node.children[0], flows[`${one.upper}>${one.lower}`], one.lower);
      fillWay(node.children[1], flows[`${one.lower}>${one.upper}`], one.lower);
    } else fillTier(node, one.tier, tiers[one.tier], status, flows["remote>host"]);
  });
};

const newTier = tier => {
  const node = make("article", null, `tier t-${tier}`);
  const title = make("h3", node, "", `${TITLES[tier]} `);
  make("span", title, "", NAMES[tier]);
  node.append(meter("fill"));
  make("p", node);
  make("p", node);
  return node;
};

const fillTier = (node, tier, told, status, remote) => {
  const [, bar, first, second] = node.children;
  if (tier === "device") {
    bar.setAttribute("hidden", "");
    say(first, many(status.workers, "worker"));
    say(second, many(status.engines, "engine"));
    return;
  }
  const used = told ? told.occupancy : 0;
  const text = told ? `${bytes(told.bytes_used)} of ${bytes(told.bytes_total)}` : "not there";
  fillMeter(bar, used, tier, `${TITLES[tier]} ${part(used)} used`);
  say(first, told ? `${part(used)} · ${text}` : text);
  const guests = tier === "host" && remote && remote.blocks
    ? ` · ${count(remote.blocks)}/s from other hosts` : "";
  const held = told && `${many(told.slots_used, "block")} · ${many(told.leases, "lease")}`;
  say(second, told ? held + guests : "");
};

const newWays = () => {
  const node = make("div", null, "ways");
  for (const down of [true, false]) {
    const way = make("div", node);
    const svg = draw("svg", way, { viewBox: "0 0 100 10", preserveAspectRatio: "none",
      "aria-hidden": "true" });
    // Dashes run from the first point to the second.
    draw("line", svg, down ? { x1: 2, y1: 5, x2: 92, y2: 5 } : { x1: 98, y1: 5, x2: 8, y2: 5 });
    draw("path", svg, { d: down ? "M92 1L100 5L92 9Z" : "M8 1L0 5L8 9Z" });
    make("span", way);
  }
  return node;
};

const fillWay = (way, flow, tier) => {
  const on = Boolean(flow && flow.blocks > 0);
  set(way, "class", on ? `on t-${tier}` : `t-${tier}`);
  say(way.lastElementChild, on ? `${count(flow.blocks)} blocks\n${bytes(flow.bytes)}` : "–");
};

// --- tables -----------------------------------------------------------------------------------

const GONE = ["number", "number", "number wide", "number", "wide"];

export const showTiers = tiers => rows(byId("tiers").tBodies[0], tiers.map(one => one.manner ? [
  `${one.tier} ${one.instance}`,
  { text: one.host, name: "wide long" },
  { text: "–", meter: 0, tier: one.tier },
  ...GONE.map(name => ({ text: "–", name })),
  { text: stateOf(one), name: toneOf(one) },
] : [
  `${one.tier} ${one.instance}`,
  { text: one.host, name: "wide long" },
  { text: part(one.occupancy), meter: one.occupancy, tier: one.tier },
  { text: count(one.rates.blocks_in), name: "number" },
  { text: count(one.rates.blocks_out), name: "number" },
  { text: count(one.rates.blocks_evicted), name: "number wide" },
  { text: String(one.leases), name: "number" },
  { text: one.policy, name: "wide" },
  { text: stateOf(one), name: toneOf(one) },
]));

const attached = workers => workers.filter(one => !one.passes_through);

export const showWorkers = workers => rows(byId("workers").tBodies[0], attached(workers).map(one => [
  { text: one.engine, go: engineLink(one.engine), name: "long" },
  `${one.rank} of ${one.world_size}`,
  { text: one.model, name: "long" },
  { text: one.host, name: "wide long" },
  { text: bytes(one.block_bytes), name: "number wide" },
  { text: ago(one.seen_ms_ago), name: "number" },
]));

export const showMisses = (told, here) => {
  const note = byId("misses-note");
  if (told === null) {
    say(note, "This metrics service does not explain lookups (GET /v1/explain is not there).");
    return;
  }
  const missed = told.requests.filter(one => one.missed_blocks > 0 && here(one));
  say(note, missed.length
    ? `The last ${missed.length} lookups that missed blocks, by the reason of the first miss.`
    : "No lookup has missed a block lately.");
  const why = {};
  for (const one of missed) why[one.reason] = (why[one.reason] || 0) + one.missed_blocks;
  const sorted = Object.entries(why).sort((a, b) => b[1] - a[1]).slice(0, 8);
  const all = sum(why);
  fit(byId("why"), sorted, () => {
    const item = make("li");
    item.append(make("span"), meter(), make("span"));
    return item;
  }, (item, [reason, blocks]) => {
    say(item.children[0], reason.replaceAll("_", " "));
    fillMeter(item.children[1], blocks / all, "miss", part(blocks / all));
    say(item.children[2], part(blocks / all));
  });
  rows(byId("misses").tBodies[0], missed.slice(0, 8).map(one => [
    ago(Math.max(0, Date.now() - one.ts_ms)),
    { text: one.request_id, name: "wide long" },
    { text: one.engine, name: "wide long" },
    { text: String(one.blocks), name: "number" },
    { text: String(one.missed_blocks), name: "number" },
    { text: one.reason.replaceAll("_", " "), go: requestLink(one.request_id) },
  ]));
};
