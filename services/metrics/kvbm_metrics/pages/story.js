// A block's story: who has it, who holds it there, and what has happened to it.

import { ago, byId, bytes, fit, make, say } from "./draw.js";

export const NAME = /^[0-9a-f]{32}$/;

const list = (parent, title, items, name = "") => {
  if (!items.length) return;
  make("h3", parent, "", title);
  const node = make("ul", parent, name);
  fit(node, items, () => make("li"), (item, text) => item.append(text));
};

const entry = (tier, told) => {
  const item = make("span");
  make("time", item, "", ago(told.ago_ms));
  item.append(`${tier.tier} ${tier.instance}: ${told.what}`);
  return item;
};

const show = (body, block) => {
  list(body, "Holders", block.holders.map(
    one => `${one.tier} · ${one.source} on ${one.host}, rank ${one.rank}`));
  if (!block.holders.length) make("p", body, "", "Nobody has it now.");
  const held = block.tiers.filter(one => one.held);
  list(body, "In the tiers", held.map(one =>
    `${one.tier} ${one.instance} on ${one.host}: slot ${one.slot}, ${bytes(one.bytes)}, `
    + `${one.pins} pins, checksum ${one.checksum}`));
  list(body, "Leases", held.flatMap(one => one.leases.map(lease =>
    `${one.tier} ${one.instance}: ${lease.owner} (${lease.reason}), `
    + `${Math.ceil(lease.left_ms / 1000)} s left`)));
  const parent = held.find(one => !/^0*$/.test(one.parent));
  if (parent) {
    make("h3", body, "", "Parent");
    const link = make("button", body, "block", parent.parent);
    link.dataset.block = parent.parent;
  }
  const story = block.tiers.flatMap(tier => tier.story.map(one => [tier, one]));
  story.sort((a, b) => b[1].ago_ms - a[1].ago_ms);
  list(body, "Story", story.map(([tier, one]) => entry(tier, one)), "timeline");
  list(body, "Not asked", block.silent);
};

let opened = 0;

// `load` answers with what fills the body; what was opened since then is not overwritten.
export const openDialog = async (title, name, load) => {
  opened += 1;
  const mine = opened;
  const dialog = byId("story");
  const body = byId("story-body");
  say(byId("story-title"), title);
  say(byId("story-name"), name);
  body.replaceChildren(make("p", null, "", "…"));
  if (!dialog.open) dialog.showModal();
  let fill;
  try {
    fill = await load();
  } catch (error) {
    fill = () => make("p", body, "", String(error.message || error));
  }
  if (mine !== opened) return;
  body.replaceChildren();
  fill(body);
};

// `ask(path)` answers what the API says; it throws what the API refuses.
export const openStory = (ask, hash) => openDialog("Block", hash, async () => {
  const block = await ask(`v1/blocks/${hash}`);
  return body => show(body, block);
});
