// The parts of all plots: elements, scales, axes, legends. Text is inserted as text, never as markup.
// Given are D, the document of data.py; GRID, the element for the cards; KEPT, a Map of what was chosen, for
// a page that draws again.
const GOAL = D.goals[0];
const SIGN = GOAL.direction === "max" ? 1 : -1;

function el(name, cls, parent, text) {
  const node = document.createElement(name);
  if (cls) node.className = cls;
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

function shape(name, attributes, parent, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  // A content security policy may forbid the attribute "style", but not the property.
  for (const key in attributes) if (key === "style") node.style.cssText = attributes[key]; else node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

const color = state => `var(--${state})`;
const r1 = x => Math.round(x * 10) / 10;
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
const count = n => n.toLocaleString("en");

function number(v) {
  if (v === null || v === undefined) return "\u2013";
  if (typeof v !== "number") return String(v);
  const size = Math.abs(v);
  if (size >= 1e6 || (size < 1e-3 && size > 0)) return v.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  return size >= 1e4 ? count(Math.round(v)) : String(Number(v.toPrecision(4)));
}

function time(s) {
  s = Math.round(s);
  const h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60, two = x => String(x).padStart(2, "0");
  return h ? `${h}:${two(m)}:${two(s % 60)}` : `${m}:${two(s % 60)}`;
}

const money = v => v === null ? "\u2013" : D.cost.unit !== "USD" ? time(v * 3600)
  : "$" + (v >= 1 || v === 0 ? v.toFixed(2) : Number(v.toPrecision(2)));

function timeUnit(seconds) {
  return seconds >= 3 * 86400 ? ["days", 86400] : seconds >= 3 * 3600 ? ["hours", 3600]
    : seconds >= 180 ? ["minutes", 60] : ["seconds", 1];
}

// A scale maps values to pixels: linear, or by the logarithm.
function scale(low, high, from, to, log) {
  if (!(high > low)) { const pad = Math.abs(low) * 0.1 || 1; low -= pad; high += pad; log = log && low > 0; }
  const f = log ? Math.log10 : x => x, a = f(low), b = f(high);
  const place = v => from + (f(v) - a) / (b - a) * (to - from);
  place.invert = p => { const x = a + (p - from) / (to - from) * (b - a); return log ? 10 ** x : x; };
  place.low = low; place.high = high; place.log = log;
  return place;
}

function ticks(s, about) {
  if (s.log) {
    const found = [], a = Math.floor(Math.log10(s.low)), b = Math.ceil(Math.log10(s.high));
    const every = Math.max(1, Math.ceil((b - a) / about)), parts = b - a <= 1 ? [1, 2, 3, 5, 7] : b - a <= 2 ? [1, 2, 5] : [1];
    for (let e = a; e <= b; e += every) for (const m of parts) {
      const v = Number((m * 10 ** e).toPrecision(6));
      if (v >= s.low * 0.999 && v <= s.high * 1.001) found.push(v);
    }
    if (found.length > 1) return found;
  }
  const rough = (s.high - s.low) / about, size = 10 ** Math.floor(Math.log10(rough));
  const step = size * [1, 2, 2.5, 5, 10].find(n => size * n >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(s.low / step - 1e-9); i * step <= s.high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

// A card of the page; `plot` is the element for its drawing.
function card(id, title, words, cls) {
  const figure = el("figure", "card " + (cls || ""), GRID);
  figure.id = id;
  const top = el("div", "top", figure);
  el("h2", "", top, title);
  if (words) el("p", "note", figure, words);
  const plot = el("div", "plot", figure);
  if (cls === "wide") { // in a narrow window it scrolls sideways, also by keyboard
    plot.tabIndex = 0;
    plot.setAttribute("role", "group");
    plot.setAttribute("aria-label", title);
  }
  return {figure, top, plot};
}

// A row of buttons, of which one is pressed. Returns the key of this one.
function choice(parent, id, entries, first, tell) {
  const box = el("div", "switch", parent), kept = KEPT.get(id);
  const pressed = entries.some(([key]) => key === kept) ? kept : first;
  for (const [key, words] of entries) {
    const b = el("button", "", box, words);
    b.type = "button";
    b.id = `${id}-${key}`;
    b.setAttribute("aria-pressed", String(key === pressed));
    b.addEventListener("click", () => {
      for (const other of box.children) other.setAttribute("aria-pressed", String(other === b));
      KEPT.set(id, key);
      tell(key);
    });
  }
  return pressed;
}

function nothing(where, words) { el("p", "nothing", where.plot, words); }

function canvas(parent, width, height, label) {
  return shape("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label}, parent);
}

const ids = {next: 0};
function clip(svg, x, y, width, height) {
  const id = `c${ids.next++}`;
  shape("rect", {x, y, width: Math.max(0, width), height: Math.max(0, height)}, shape("clipPath", {id}, svg));
  return shape("g", {"clip-path": `url(#${id})`}, svg);
}

function yAxis(svg, y, left, right, about, divide) {
  const unit = divide || 1, s = scale(y.low / unit, y.high / unit, 0, 1, y.log);
  for (const v of ticks(s, about || 5)) {
    const at = r1(y(v * unit));
    shape("line", {class: "rule", x1: left, x2: right, y1: at, y2: at}, svg);
    shape("text", {x: left - 7, y: at + 4, "text-anchor": "end"}, svg, number(v));
  }
}

function xAxis(svg, x, bottom, words, right, about, divide) {
  const unit = divide || 1, s = scale(x.low / unit, x.high / unit, 0, 1, x.log);
  for (const v of ticks(s, about || 6)) {
    const at = r1(x(v * unit));
    shape("line", {class: "rule", x1: at, x2: at, y1: bottom, y2: bottom + 4}, svg);
    shape("text", {x: at, y: bottom + 17, "text-anchor": "middle"}, svg, number(v));
  }
  if (words) shape("text", {x: right, y: bottom + 32, "text-anchor": "end"}, svg, words);
}

// Thousands of dots as one path: each dot is a line of length 0 with round ends.
function dots(parent, points, stroke, opacity, width) {
  if (!points.length) return null;
  const d = points.map(p => `M${r1(p.x)} ${r1(p.y)}h0`).join("");
  return shape("path", {class: "dots mark", d, style: `stroke:${stroke};opacity:${opacity};stroke-width:${width || 5}`}, parent);
}

function line(parent, points, cls, style) {
  if (!points.length) return null;
  const d = points.map((p, i) => `${i ? "L" : "M"}${r1(p[0])} ${r1(p[1])}`).join("") + (points.length === 1 ? "h0" : "");
  return shape("path", {class: `line mark ${cls || ""}`, d, style: style || ""}, parent);
}

const tip = document.getElementById("tip") || el("div", "", document.body);
tip.id = "tip";
function say(event, words) {
  if (!words) { tip.style.opacity = 0; return; }
  tip.textContent = words;
  tip.style.opacity = 1;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = (event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18) + "px";
}

// Shows what is under the pointer. `find` returns {x, y, words} for a point of the drawing.
function hover(svg, find) {
  const ring = shape("circle", {class: "ring", r: 6, visibility: "hidden"}, svg);
  svg.addEventListener("pointermove", event => {
    const matrix = svg.getScreenCTM();
    if (!matrix) return;
    const p = new DOMPoint(event.clientX, event.clientY).matrixTransform(matrix.inverse());
    const found = find(p.x, p.y);
    ring.setAttribute("visibility", found && found.x !== undefined ? "visible" : "hidden");
    if (found && found.x !== undefined) { ring.setAttribute("cx", found.x); ring.setAttribute("cy", found.y); }
    pointAt(svg, found && found.words);
    say(event, found && found.words);
  });
  svg.addEventListener("pointerleave", event => { ring.setAttribute("visibility", "hidden"); find(-1e9, -1e9); pointAt(svg, ""); say(event, ""); });
}

// The trial that is pointed at, for a page that opens it by a click.
function pointAt(svg, words) {
  const trial = /^Trial (\d+)/.exec(words || "");
  if (trial) svg.dataset.trial = trial[1];
  else delete svg.dataset.trial;
}

function nearest(points, reach) {
  return (x, y) => {
    let best = null, least = (reach || 14) ** 2;
    for (const p of points) {
      const d = (p.x - x) ** 2 + (p.y - y) ** 2;
      if (d < least) { least = d; best = p; }
    }
    return best && {x: best.x, y: best.y, words: typeof best.words === "function" ? best.words() : best.words};
  };
}

function legend(parent, entries) {
  const box = el("div", "legend", parent);
  for (const [words, fill, amount] of entries) {
    const item = el("span", "", box);
    el("i", "", item).style.background = fill;
    item.append(words);
    if (amount !== undefined) { item.append(" "); el("b", "", item, amount); }
  }
  return box;
}

function bar(parent, parts, total) {
  const box = el("div", "stack", parent);
  for (const [fill, amount] of parts) {
    const part = el("i", "mark", box);
    part.style.background = fill;
    part.style.width = `${total ? Math.min(100, 100 * amount / total) : 0}%`;
  }
  return box;
}

// The trials that are drawn one by one.
const S = D.shown;
const stateOf = i => S.states[S.state[i]];
function valueOf(axis, place) {
  if (place === null) return "not active";
  return axis.names ? axis.names[place] : number(place);
}
function wordsOf(i) {
  const head = `Trial ${S.n[i]} \u00b7 ${stateOf(i)}` + (S.step[i] && D.max ? ` at ${D.step} ${S.step[i]}` : "");
  const goals = D.goals.map((goal, g) => `${goal.metric} ${number(S.values[g][i])}`).join("\n");
  const params = D.axes.map((axis, a) => [axis, S.params[a][i]]).filter(pair => pair[1] !== null)
    .slice(0, 12).map(([axis, place]) => `${axis.name} ${valueOf(axis, place)}`).join("\n");
  return `${head}\n${goals}\n${params}`;
}
const shownStates = S.states.filter((state, index) => S.state.includes(index));
