// Lookups: why a request missed, block by block, and what an engine has asked for lately.

import { ago, fit, make, many } from "./draw.js";
import { openDialog } from "./story.js";

const LISTED = 50;
const PLACES = { host: "host memory", disk: "the disk", object: "the bucket",
  remote: "another host" };

const since = ms => ago(Math.max(0, Date.now() - ms));
const words = reason => reason.replaceAll("_", " ");

const goTo = (parent, target, text) => {
  make("button", parent, "go", text).dataset.go = target;
};

export const requestLink = id => `request=${encodeURIComponent(id)}`;
export const engineLink = name => `engine=${encodeURIComponent(name)}`;

const segment = (item, one) => {
  if (one.hit) item.append(`${many(one.blocks, "block")} found in ${PLACES[one.tier] || one.tier}`);
  else {
    make("b", item, "", `${many(one.blocks, "block")} missed: ${words(one.reason)}`);
    make("p", item, "small", [one.meaning, one.detail].filter(Boolean).join(" · "));
  }
  if (one.hash) {
    make("br", item);
    make("button", item, "block", one.hash).dataset.block = one.hash;
  }
};

const showRequest = (body, told) => {
  for (const one of told.lookups) {
    const title = make("h3", body, "", `${since(one.ts_ms)}, `);
    goTo(title, engineLink(one.engine), one.engine);
    title.append(` on ${one.host}: ${one.hit_blocks} of ${many(one.blocks, "block")} found`);
    if (one.outcome) make("p", body, "", `Not used: ${one.outcome_meaning}`);
    fit(make("ul", body, "timeline"), one.segments, () => make("li"), segment);
  }
  if (told.silent.length) make("p", body, "small", `Not asked: ${told.silent.join(", ")}`);
};

const showEngine = (body, told) => {
  if (!told.requests.length) make("p", body, "", "No lookup of it is kept.");
  fit(make("ul", body, "timeline"), told.requests, () => make("li"), (item, one) => {
    make("time", item, "", since(one.ts_ms));
    goTo(item, requestLink(one.request_id), one.request_id);
    const missed = one.missed_blocks ? `, ${one.missed_blocks} missed: ${words(one.reason)}` : "";
    item.append(` ${many(one.blocks, "block")}${missed}`);
  });
  if (told.silent.length) make("p", body, "small", `Not asked: ${told.silent.join(", ")}`);
};

export const openRequest = (ask, id) => openDialog("Lookups of a request", id, async () => {
  const told = await ask(`v1/explanation?request=${encodeURIComponent(id)}`);
  return body => showRequest(body, told);
});

export const openEngine = (ask, name) => openDialog("Lookups of a worker's engine", name, async () => {
  const told = await ask(`v1/explain?engine=${encodeURIComponent(name)}&limit=${LISTED}`);
  return body => showEngine(body, told);
});
