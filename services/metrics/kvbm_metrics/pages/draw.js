// Small hands for the page: text that changes only when it differs, rows, meters, curves, numbers.

const SVG = "http://www.w3.org/2000/svg";
const SPAN_S = 600; // Of a curve, at least: ten minutes.

export const byId = id => document.getElementById(id);

export const make = (tag, parent, name = "", text = "") => {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text) node.textContent = text;
  if (parent) parent.append(node);
  return node;
};

export const draw = (tag, parent, attributes = {}) => {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (parent) parent.append(node);
  return node;
};

export const say = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};

export const set = (node, name, value) => {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
};

// As many children as there are items; `grow` makes one, `fill` shows an item in it.
export const fit = (parent, items, grow, fill) => {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  while (parent.children.length < items.length) parent.append(grow());
  items.forEach((item, place) => fill(parent.children[place], item));
};

// Cells are texts, or {text, name} for one with a class, or {text, meter, tier} with a meter, or
// {text, go} with a link within the page. A name that is too long is cut, and whole in the title.
export const rows = (body, list) => fit(body, list,
  () => document.createElement("tr"),
  (row, cells) => fit(row, cells, () => document.createElement("td"), (cell, told) => {
    const one = typeof told === "object" ? told : { text: told };
    const name = one.name || "";
    set(cell, "class", name);
    if (name.includes("long")) set(cell, "title", one.text);
    if (one.go !== undefined) {
      if (!cell.querySelector("button")) cell.replaceChildren(make("button", null, "go"));
      cell.firstElementChild.dataset.go = one.go;
      return say(cell.firstElementChild, one.text);
    }
    if (one.meter === undefined) return say(cell, one.text);
    if (!cell.firstElementChild) cell.replaceChildren(meter(), make("span"));
    fillMeter(cell.firstElementChild, one.meter, one.tier, one.text);
    return say(cell.lastElementChild, one.text);
  }));

export const meter = (name = "meter") => {
  const svg = draw("svg", null,
    { class: name, viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img" });
  draw("rect", svg, { width: 0, height: 10 });
  return svg;
};

export const fillMeter = (svg, part, tier, label) => {
  set(svg, "class", `${svg.getAttribute("class").split(" ")[0]} t-${tier}`);
  set(svg, "aria-label", label);
  set(svg.firstElementChild, "width", (100 * Math.min(1, part)).toFixed(1));
};

// The last hour of a figure, as far as it is known. What is not known is a gap, never a zero.
export class Curve {
  constructor(svg, label) {
    this.label = label;
    this.svg = svg;
    set(svg, "viewBox", "0 0 100 30");
    set(svg, "preserveAspectRatio", "none");
    set(svg, "role", "img");
    set(svg, "aria-label", `${label}, no figure yet`);
    this.under = draw("path", svg, { class: "under" });
    this.line = draw("path", svg);
  }

  // Points are {ago_s, value}, oldest first; a value may be null.
  show(points, spacing_s) {
    const known = points.filter(one => one.value !== null);
    const span_s = Math.max(SPAN_S, ...points.map(one => one.ago_s));
    const top = Math.max(...known.map(one => one.value), 1e-9);
    const x = one => 100 * (1 - one.ago_s / span_s);
    const dot = one => `${x(one).toFixed(2)},${(29 - 27 * one.value / top).toFixed(1)}`;
    const parts = [];
    known.forEach((one, at) => {
      const joined = at && known[at - 1].ago_s - one.ago_s < 1.5 * spacing_s;
      if (joined) parts[parts.length - 1].push(one);
      else parts.push([one]);
    });
    // A point alone is a dash.
    const lines = parts.map(part => `M${part.map(dot).join("L")}${part.length > 1 ? "" : "h.5"}`);
    set(this.line, "d", lines.join(""));
    set(this.under, "d", parts.filter(part => part.length > 1).map(part =>
      `M${x(part[0]).toFixed(2)},30L${part.map(dot).join("L")}L${x(part.at(-1)).toFixed(2)},30Z`
    ).join(""));
    const minutes = Math.ceil(Math.max(0, ...points.map(one => one.ago_s)) / 60);
    set(this.svg, "aria-label",
      known.length ? `${this.label}, last ${minutes} min` : `${this.label}, no figure yet`);
    this.svg.dataset.points = known.length;
  }
}

const scaled = (value, units, step) => {
  let place = 0;
  while (value >= step && place < units.length - 1) {
    value /= step;
    place += 1;
  }
  const digits = value >= 100 || (place === 0 && Number.isInteger(value)) ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)}${units[place]}`;
};

export const count = value => scaled(value, ["", " k", " M", " G", " T"], 1000);
export const bytes = value => scaled(value, [" B", " KB", " MB", " GB", " TB"], 1000);
export const many = (number, one) => `${count(number)} ${one}${number === 1 ? "" : "s"}`;
export const part = value => `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
export const ago = ms => ms < 1000 ? "now" : ms < 60_000 ? `${Math.floor(ms / 1000)} s ago`
  : ms < 3_600_000 ? `${Math.floor(ms / 60_000)} min ago` : `${Math.floor(ms / 3_600_000)} h ago`;
