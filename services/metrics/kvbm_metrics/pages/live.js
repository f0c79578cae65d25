// The live page: asks the API once a second, follows a sample of the events, shows both.
//
// Everything is drawn in animation frames, and every list has a size. A page that nobody looks at
// asks nothing.

import { byId, count, fit, make, say } from "./draw.js";
import { openEngine, openRequest } from "./lookups.js";
import { showHistory, showMisses, showStatus, showTiers, showWorkers } from "./panels.js";
import { showHosts, showServices, withGone } from "./services.js";
import { NAME, openStory } from "./story.js";

const POLL_MS = 1000;
const ASK_DEADLINE_MS = 5000;
const EXPLAIN_EVERY = 3; // Polls.
const HISTORY_EVERY = 10;
const EVENTS_SHOWN = 60;
const EVENTS_PER_S = 10; // What an eye can follow; the API says how many it has left out.
const RETRY_MS = 3000;
const TOKEN = "kvbm-token";

class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

const headers = () => {
  const token = sessionStorage.getItem(TOKEN);
  return token ? { authorization: `Bearer ${token}` } : {};
};

const refusal = async response => {
  const problem = await response.json().catch(() => ({}));
  return new Refused(response.status, problem.detail || `HTTP ${response.status}`);
};

const ask = async path => {
  const signal = AbortSignal.timeout(ASK_DEADLINE_MS);
  const response = await fetch(path, { headers: headers(), signal, cache: "no-store" });
  if (!response.ok) throw await refusal(response);
  return response.json();
};

// --- drawing ----------------------------------------------------------------------------------

const waiting = new Map();

const inFrame = (name, work) => {
  if (!waiting.size) requestAnimationFrame(() => {
    const works = [...waiting.values()];
    waiting.clear();
    for (const one of works) one();
  });
  waiting.set(name, work); // The newest of a name only.
};

// --- the figures ------------------------------------------------------------------------------

let polls = 0;
let asked = 0; // Polls since the host was chosen.
let polling = null;
let host = new URLSearchParams(location.search).get("host") || "";

const here = one => !host || one.host === host;
const ofHost = () => host ? `host=${encodeURIComponent(host)}` : "";

const explain = async () => {
  try {
    return await ask("v1/explain?missed=true&limit=50");
  } catch (error) {
    if (error.status === 404) return null;
    throw error;
  }
};

const poll = async () => {
  const chosen = host;
  const [status, services, tiers, workers, misses, past] = await Promise.all([
    ask(`v1/status?${ofHost()}`), ask("v1/services"), ask("v1/tiers"), ask("v1/workers"),
    asked % EXPLAIN_EVERY === 0 ? explain() : undefined,
    asked % HISTORY_EVERY === 0 ? ask(`v1/history?${ofHost()}`) : undefined,
  ]);
  if (chosen !== host) return; // The next poll asks for the host that is chosen now.
  polls += 1;
  asked += 1;
  inFrame("figures", () => {
    showStatus(status);
    showHosts(status.hosts, host);
    showServices(status.services, services, status.gone, here);
    showTiers(withGone(tiers, status.gone).filter(here));
    showWorkers(workers.filter(here));
    document.body.dataset.polls = polls;
    document.body.dataset.host = host;
  });
  if (misses !== undefined) inFrame("misses", () => showMisses(misses, here));
  if (past !== undefined) inFrame("history", () => showHistory(past));
};

const failed = error => inFrame("figures", () => {
  const health = byId("health");
  health.className = "pill bad";
  if (error.status === 401 || error.status === 403) {
    say(health, "token wanted");
    byId("ask").hidden = false;
    say(byId("refused"), sessionStorage.getItem(TOKEN) ? error.message : "");
  } else {
    say(health, error.status ? `error: ${error.message}` : "no answer");
  }
});

let loop = 0;

const pollOn = async () => {
  const begun = performance.now();
  loop += 1;
  const mine = loop; // Another one may begin while this one waits for an answer.
  try {
    await poll();
    if (mine !== loop) return;
    byId("ask").hidden = true;
    follow();
  } catch (error) {
    if (mine !== loop) return;
    failed(error);
    if (error.status === 401 || error.status === 403) {
      polling = null; // Until there is a token.
      return;
    }
  }
  polling = setTimeout(pollOn, Math.max(0, POLL_MS - (performance.now() - begun)));
};

// --- the events -------------------------------------------------------------------------------

let feed = null;
let shown = [];
let seen = 0;
let left = 0;
let unread = 0; // Messages of one event or many.
let counted = performance.now();

const blocksOf = event => event.runs
  ? event.runs.flatMap(run => run.hashes) : event.hashes || [];

const take = (kind, data) => {
  if (kind === "skipped") {
    left += data.skipped;
    unread += data.unread_messages;
    return;
  }
  seen += 1;
  const blocks = blocksOf(data);
  shown.unshift({ at: new Date(data.ts_ms).toLocaleTimeString(), kind, source: data.source,
    count: blocks.length, first: blocks[0] || "", reason: data.reason || "" });
  shown.length = Math.min(shown.length, EVENTS_SHOWN);
  inFrame("events", showEvents);
};

const showEvents = () => fit(byId("events"), shown, () => {
  const item = make("li");
  for (const name of ["", "", "", "number"]) make("span", item, name);
  make("button", item, "block");
  return item;
}, (item, one) => {
  const [at, kind, source, blocks, link] = item.children;
  say(at, one.at);
  say(kind, one.kind);
  say(source, one.source);
  say(blocks, one.count ? String(one.count) : one.reason);
  say(link, one.first);
  link.dataset.block = one.first;
  link.hidden = !one.first;
});

setInterval(() => {
  const now = performance.now();
  const rate = (seen + left + unread) / ((now - counted) / 1000);
  const least = unread ? "at least " : "";
  const sampled = left + unread ? `, ${EVENTS_PER_S}/s of them shown` : "";
  if (!document.hidden) inFrame("rate", () => say(byId("events-note"),
    feed ? `${least}${count(Math.round(rate))}/s${sampled}` : "not followed"));
  [seen, left, unread, counted] = [0, 0, 0, now];
}, 2000);

const parse = text => {
  let kind = "message";
  const data = [];
  for (const line of text.split("\n")) {
    if (line.startsWith("event: ")) kind = line.slice(7);
    else if (line.startsWith("data: ")) data.push(line.slice(6));
  }
  if (data.length) take(kind, JSON.parse(data.join("\n")));
};

const follow = async () => {
  if (feed || document.hidden) return;
  feed = new AbortController();
  const mine = feed;
  try {
    const response = await fetch(`v1/events?per_second=${EVENTS_PER_S}&${ofHost()}`,
      { headers: headers(), signal: mine.signal, cache: "no-store" });
    if (!response.ok) throw await refusal(response);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const events = (rest + part.value).split("\n\n");
      rest = events.pop();
      events.forEach(parse);
    }
  } catch {
    // Told by the note; the next try comes with a poll.
  }
  setTimeout(() => { if (feed === mine) feed = null; }, RETRY_MS);
};

// --- hands ------------------------------------------------------------------------------------

const wake = () => {
  if (document.hidden) {
    clearTimeout(polling);
    polling = null;
    loop += 1;
    if (feed) feed.abort();
    feed = null;
  } else if (polling === null) {
    polling = 0;
    pollOn();
  }
};

const goTo = place => { location.hash = place; };

const arrive = () => {
  const [kind, ...rest] = location.hash.slice(1).split("=");
  const name = decodeURIComponent(rest.join("="));
  if (kind === "block" && NAME.test(name)) openStory(ask, name);
  if (kind === "request" && name) openRequest(ask, name);
  if (kind === "engine" && name) openEngine(ask, name);
};

const choose = name => {
  host = name;
  asked = 0;
  const search = host ? `?${ofHost()}` : "";
  history.replaceState(null, "", location.pathname + search + location.hash);
  shown = [];
  inFrame("events", showEvents);
  if (feed) feed.abort();
  feed = null;
  clearTimeout(polling);
  polling = null;
  wake();
};

document.addEventListener("visibilitychange", wake);
document.addEventListener("click", event => {
  const link = event.target.closest("button.block, button.go");
  if (link) goTo(link.dataset.go || `block=${link.dataset.block}`);
});
byId("story").addEventListener("close", () =>
  history.replaceState(null, "", location.pathname + location.search));
byId("host").addEventListener("change", event => choose(event.target.value));
window.addEventListener("hashchange", arrive);
byId("find").addEventListener("submit", event => {
  event.preventDefault();
  goTo(`block=${byId("hash").value}`);
});
byId("ask").addEventListener("submit", event => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, byId("token").value);
  byId("token").value = "";
  wake();
});
wake();
arrive();
