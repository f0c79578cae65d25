// The services: a card for each, which stays where it is when its service goes.

import { ago, byId, fit, make, say, set } from "./draw.js";

const TIERS = { "host-tier": "host", "disk-tier": "disk", "object-tier": "object" };

const place = one => `${one.kind} ${one.host} ${one.instance}`;
const inOrder = (a, b) => place(a) < place(b) ? -1 : 1;

export const stateOf = one => {
  if (one.manner) return `${one.manner} ${ago(one.gone_ms_ago)}`;
  if (!one.up) return "silent";
  if (!one.ready) return "not ready";
  return one.draining ? "draining" : "ready";
};

// A service that has left by itself is not missed.
export const toneOf = one => one.manner === "left" ? "left" : one.ready ? "" : "bad";

const nameOf = one => `${one.kind} ${one.instance}`;

export const showServices = (kinds, services, gone, here) => {
  const lost = new Set(gone.filter(one => one.manner === "lost").map(one => one.kind));
  fit(byId("services"), kinds.filter(one => one.expected || one.instances || lost.has(one.kind)),
    () => make("li"), (item, one) => {
      say(item, `${one.kind} ${one.ready}/${one.instances}`);
      const good = one.ready && one.ready === one.instances && !lost.has(one.kind);
      set(item, "class", good ? "" : "bad");
    });
  fit(byId("cards"), [...services, ...gone].filter(here).sort(inOrder), () => {
    const item = make("li");
    for (const tag of ["b", "span", "span"]) make(tag, item);
    return item;
  }, (item, one) => {
    const [name, host, state] = item.children;
    say(name, nameOf(one));
    say(host, one.host);
    say(state, stateOf(one));
    set(item, "class", toneOf(one));
    set(item, "title", (one.reasons || []).join("; "));
  });
};

// Instances of tiers that are there and that are gone, each in its place.
export const withGone = (tiers, gone) => {
  const left = gone.filter(one => TIERS[one.kind]).map(one => ({ ...one, tier: TIERS[one.kind] }));
  const there = tiers.map(one => ({ ...one, kind: `${one.tier}-tier` }));
  return [...there, ...left].sort(inOrder);
};

// The list keeps what is chosen, also a host that is not known any more.
export const showHosts = (hosts, chosen) => {
  const select = byId("host");
  const wanted = [...new Set([...hosts, chosen])].filter(Boolean).sort();
  const now = [...select.options].slice(1).map(one => one.value);
  if (now.join() !== wanted.join()) {
    select.replaceChildren(select.options[0], ...wanted.map(one => new Option(one, one)));
  }
  select.value = chosen;
};
