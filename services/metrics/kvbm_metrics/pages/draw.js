// Small hands for the page: text that changes only when it differs, rows, meters, curves, numbers.

const SVG = "http://www.w3.org/2000/svg";
export const POINTS = 60; // A minute of a curve.

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

// Cells are texts, or {text, name} for one with a class, or {text, meter, tier} with a meter.
export const rows = (body, list) => fit(body, list,
  () => document.createElement("tr"),
  (row, cells) => fit(row, cells, () => document.createElement("td"), (cell, told) => {
    const one = typeof told === "object" ? told : { text: told };
    set(cell, "class", one.name || "");
    if (one.meter === undefined) return say(cell, one.text);
    if (!cell.firstElementChild) {
      cell.append(meter(), make("span"));
    }
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

// The last points of a figure. What is not known is a gap at the left, never a zero.
export class Curve {
  constructor(svg, label) {
    this.values = [];
    this.label = label;
    this.svg = svg;
    set(svg, "viewBox", `0 0 ${POINTS - 1} 30`);
    set(svg, "preserveAspectRatio", "none");
    set(svg, "role", "img");
    set(svg, "aria-label", `${label}, no figure yet`);
    this.under = draw("path", svg, { class: "under" });
    this.line = draw("path", svg);
  }

  add(value, shown) {
    this.values.push(value);
    if (this.values.length > POINTS) this.values.shift();
    const top = Math.max(...this.values, 1e-9);
    const first = POINTS - this.values.length;
    const dots = this.values.map((one, at) => `${first + at},${(29 - 27 * one / top).toFixed(1)}`);
    set(this.line, "d", `M${dots.join("L")}`);
    set(this.under, "d", `M${first},30L${dots.join("L")}L${POINTS - 1},30Z`);
    set(this.svg, "aria-label", `${this.label}, last minute; now ${shown}`);
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
