// The plots. Each function draws a card of the page, or says why there is nothing to draw.
function history() {
  const c = card("history", "History", D.max ? "The last value of each trial, at the time of its end, and the best completed trial until then." : "The value of each trial, at the time of its end, and the best trial until then.");
  if (!D.frame || !S.order.some(Boolean)) return nothing(c, "No trial has ended yet.");
  const keys = [["order", "trials"], ["seconds", "time"], ["steps", D.max ? D.step + "s" : "steps"]];
  const hold = el("div", "", c.plot), chosen = {key: "order", all: "all"};
  const draw = () => { hold.replaceChildren(); drawHistory(hold, chosen.key, chosen.all === "all"); };
  const switches = el("div", "switches", c.top);
  if (D.trained) chosen.all = choice(switches, "history-trials", [["all", "all"], ["trained", "trained"]], "all", v => { chosen.all = v; draw(); });
  chosen.key = choice(switches, "history-by", keys, "order", v => { chosen.key = v; draw(); });
  draw();
  legend(c.figure, [...shownStates.map(s => [s.toLowerCase(), color(s)]), ["best so far", "var(--best)"]]);
  if (D.frame.beyond) el("p", "note", c.figure, `${plural(D.frame.beyond, "value")} outside of the plot.`);
}

const drawingOrder = () => ["PRUNED", ...shownStates.filter(s => s !== "PRUNED")];

function drawHistory(parent, key, all) {
  const range = all ? D.frame : D.trained;
  const W = 620, H = 320, L = 58, R = W - 14, T = 12, B = H - 40;
  const svg = canvas(parent, W, H, `${GOAL.metric} of each trial by ${key}`);
  let last = Math.max(...S[key]) || 1;
  const names = {order: "trials", seconds: "hours"}, wanted = D.limits.find(l => l.name === names[key]);
  const limit = wanted && wanted.limit ? wanted.limit * (key === "seconds" ? 3600 : 1) : null;
  if (limit && limit < last * 1.6) last = Math.max(last, limit);
  const x = scale(0, last * 1.02, L, R), y = scale(range.low, range.high, B, T, range.log);
  yAxis(svg, y, L, R);
  const [unit, size] = timeUnit(last);
  xAxis(svg, x, B, key === "seconds" ? unit : key === "order" ? "trials that ended" : `${D.max ? D.step : "step"}s of training, all trials`, R, 6, key === "seconds" ? size : 1);
  if (limit && limit <= last) {
    shape("line", {class: "limit", x1: x(limit), x2: x(limit), y1: T, y2: B}, svg);
    shape("text", {x: x(limit) - 5, y: B - 6, "text-anchor": "end"}, svg, "limit");
  }
  const inside = clip(svg, L, T - 4, R - L + 6, B - T + 8), points = [];
  for (const state of all ? drawingOrder() : ["DONE"]) {
    const mine = [];
    S.n.forEach((n, i) => {
      const v = S.values[0][i];
      if (stateOf(i) === state && S[key][i] && v !== null && !(y.log && v <= 0))
        mine.push({x: x(S[key][i]), y: y(v), words: () => wordsOf(i)});
    });
    dots(inside, mine, color(state), state === "PRUNED" ? 0.55 : 0.85, S.n.length > 600 ? 4 : 5.5);
    points.push(...mine);
  }
  const column = {order: 0, seconds: 1, steps: 2}[key], path = [];
  D.incumbents.forEach((row, i) => {
    if (i) path.push([x(row[column]), y(D.incumbents[i - 1][3])]);
    path.push([x(row[column]), y(row[3])]);
  });
  if (path.length) {
    const end = D.incumbents[D.incumbents.length - 1];
    path.push([x(Math.max(...S[key])), y(end[3])]);
    line(inside, path, "incumbent");
    const marks = D.incumbents.map(row => ({x: x(row[column]), y: y(row[3]), words: `Trial ${row[4]}\n${GOAL.metric} ${number(row[3])}`}));
    dots(inside, marks, "var(--best)", 1, 7);
    points.unshift(...marks);
  }
  hover(svg, nearest(points.filter(p => p.y >= T - 4 && p.y <= B + 4)));
}

function curves() {
  const some = D.curves.length < D.head.trials ? `${plural(D.curves.length, "trial")} of ${count(D.head.trials)}, the best among them. ` : "";
  const c = card("curves", "Learning curves", some + (D.rung_steps.length ? "Dashed lines: rungs, at which trials are compared." : ""));
  if (!D.curves.length || !D.curve_frame) return nothing(c, "No trial has reported yet.");
  if (D.curves.every(k => k.p.length === 2)) return nothing(c, "Each trial has reported one value only, so there are no curves.");
  const W = 620, H = 320, L = 58, R = W - 14, T = 12, B = H - 40;
  const svg = canvas(c.plot, W, H, `${GOAL.metric} by ${D.step}`);
  const last = Math.max(D.max, ...D.curves.map(k => k.p[k.p.length - 2]));
  const x = scale(D.curves.every(k => k.p[0] >= 1) ? Math.min(1, last - 1) : 0, last, L, R);
  const y = scale(D.curve_frame.low, D.curve_frame.high, B, T, D.curve_frame.log);
  yAxis(svg, y, L, R);
  xAxis(svg, x, B, D.step, R);
  for (const rung of D.rung_steps) {
    shape("line", {class: "rung", x1: r1(x(rung)), x2: r1(x(rung)), y1: T, y2: B}, svg);
  }
  const inside = clip(svg, L - 3, T - 4, R - L + 6, B - T + 8), points = [];
  const best = D.best.n, many = D.curves.length > 120;
  for (const k of D.curves) {
    const mine = [];
    for (let i = 0; i < k.p.length; i += 2) if (k.p[i + 1] !== null && !(y.log && k.p[i + 1] <= 0)) mine.push([x(k.p[i]), y(k.p[i + 1])]);
    if (!mine.length) continue;
    const top = k.n === best;
    const path = line(inside, mine, "curve", `stroke:${top ? "var(--best)" : color(k.s)};stroke-width:${top ? 2.6 : mine.length === 1 ? 4 : 1.3};opacity:${top ? 1 : many ? 0.42 : 0.65}`);
    mine.forEach(([px, py], i) => points.push({x: px, y: py, path, words: `Trial ${k.n} \u00b7 ${k.s}\n${D.step} ${k.p[2 * i]}: ${number(k.p[2 * i + 1])}`}));
  }
  let lit = null;
  hover(svg, (px, py) => {
    let found = null, least = 400;
    for (const p of points) { const d = (p.x - px) ** 2 + (p.y - py) ** 2; if (d < least) { least = d; found = p; } }
    if (lit && (!found || lit !== found.path)) lit.classList.remove("lit");
    lit = found && found.path;
    if (lit) lit.classList.add("lit");
    return found;
  });
  const states = S.states.filter(s => D.curves.some(k => k.s === s));
  legend(c.figure, [...states.map(s => [s.toLowerCase(), color(s)]), ["the best", "var(--best)"]]);
}

function rungs() {
  const [saved, full] = D.saved;
  const c = card("rungs", "Rungs");
  if (D.stop === "none" || !D.max) return nothing(c, "No early stopping: every trial trains to its own end.");
  if (full) {
    const p = el("p", "big", c.plot, `${Math.round(100 * saved / full)}% `);
    el("small", "", p, `of the ${D.step}s saved`);
    el("p", "note", c.plot, `${count(saved)} of the ${count(full)} that the same trials would have trained in full were not run.`);
  }
  const table = el("table", "", el("div", "scroll", c.plot)), head = el("tr", "", table);
  for (const [words, right] of [[D.step, 1], ["in", 1], ["went on", 1], ["stopped", 1], ["", 0], ["cut-off", 1], ["saved", 1]])
    el("th", right ? "r" : "", head, words);
  const most = Math.max(1, ...D.rungs.map(r => r.in));
  for (const r of D.rungs) {
    const row = el("tr", "", table);
    for (const v of [r.step, r.in, r.on, r.out]) el("td", "r", row, count(v));
    const cell = el("td", "", row);
    bar(cell, [[color("DONE"), r.on], [color("PRUNED"), r.out], [color("FAILED"), r.ended], [color("RUNNING"), r.now]], most);
    el("td", "r", row, number(r.cutoff));
    el("td", "r", row, count(r.saved));
  }
  if (!D.rungs.length) nothing(c, "No rung has been reached yet.");
  else legend(c.plot, [["went on", color("DONE")], ["stopped there", color("PRUNED")], ["ended otherwise", color("FAILED")], ["still there", color("RUNNING")]]);
}

function importance() {
  const c = card("importances", "Importances", "How much the parameter's values in the best tenth of the trials differ from its values in all trials. An estimate (PED-ANOVA, corrected for chance).");
  const names = Object.keys(D.importances);
  if (!names.length) return nothing(c, "No estimate: fewer than 20 trials have a result, or no parameter stands out.");
  const shown = names.slice(0, 14), W = 620, row = 25, H = shown.length * row + 8, L = 170;
  const svg = canvas(c.plot, W, H, "Importance of each parameter"), most = D.importances[shown[0]];
  shown.forEach((name, i) => {
    const y = 4 + i * row, share = D.importances[name], width = Math.max(1.5, share / most * (W - L - 62));
    const label = shape("text", {x: L - 9, y: y + 16, "text-anchor": "end", class: "strong"}, svg, name.length > 24 ? name.slice(0, 23) + "\u2026" : name);
    shape("title", {}, label, name);
    shape("rect", {class: "mark", x: L, y: y + 3, width: r1(width), height: row - 8, rx: 3, style: `fill:var(--DONE);opacity:${0.45 + 0.55 * share / most}`}, svg);
    shape("text", {x: L + width + 7, y: y + 16}, svg, share < 0.005 ? "under 1%" : `${Math.round(100 * share)}%`);
  });
  if (names.length > shown.length) el("p", "note", c.figure, `and ${names.length - shown.length} more that matter less`);
}

function axisScale(axis, from, to) {
  if (!axis.names) return scale(axis.low, axis.high, from, to, axis.log);
  const n = axis.names.length;
  const place = v => from + (n === 1 ? 0.5 : v / (n - 1)) * (to - from);
  place.invert = p => n === 1 ? 0 : (p - from) / (to - from) * (n - 1);
  return place;
}

function parallel() {
  const lines = S.best.length + S.rest.length;
  const c = card("parallel", "Parallel coordinates", `The best ${count(S.best.length)} trials${S.rest.length ? ` and ${S.rest.length} of the others, faint` : ""}. Drag along an axis, or choose below, to show only the trials in this range; click the axis to show all.`, "wide");
  const axes = D.axes.slice(0, 16);
  if (!axes.length || !lines) return nothing(c, "Nothing to compare yet: fewer than two different trials have a result.");
  const W = 1290, H = 380, L = 70, R = W - 90, T = 42, B = H - 40;
  const svg = canvas(c.plot, W, H, "Parameters and results of the trials");
  const range = D.best_frame || D.frame, goal = {name: GOAL.metric, low: range.low, high: range.high, log: range.log};
  const every = [...axes, goal], at = k => L + (R - L) * k / (every.length - 1);
  const scales = every.map(a => a.names ? axisScale(a, B - 14, T + 14) : axisScale(a, B, T));
  if (SIGN < 0) scales[every.length - 1] = scale(goal.low, goal.high, T, B, goal.log);
  const none = B + 18, ranges = every.map(() => null), brushes = [];
  const value = (k, i) => k < axes.length ? S.params[k][i] : S.values[0][i];
  const place = (k, i) => { const v = value(k, i); return v === null ? none : Math.min(B, Math.max(T, scales[k](v))); };
  const group = shape("g", {}, svg), paths = [];
  const add = (i, style) => {
    const d = every.map((a, k) => `${k ? "L" : "M"}${r1(at(k))} ${r1(place(k, i))}`).join("");
    const path = shape("path", {class: "line mark", d, style}, group);
    paths.push([path, i]);
  };
  for (const i of S.rest) add(i, "stroke:var(--PRUNED);stroke-width:1;opacity:.16");
  const n = S.best.length;
  for (let k = n - 1; k >= 0; k--) {
    const part = n > 1 ? k / (n - 1) : 0, first = k === 0;
    add(S.best[k], `stroke:var(--${first ? "best" : "DONE"});stroke-width:${first ? 3 : 1.3};opacity:${first ? 1 : r1(10 * (0.7 - 0.58 * part)) / 10}`);
  }
  every.forEach((axis, k) => {
    const x = r1(at(k)), s = scales[k], end = k === every.length - 1;
    shape("line", {class: "axis", x1: x, x2: x, y1: T, y2: B}, svg);
    const name = shape("text", {x, y: 16, "text-anchor": "middle", class: "name"}, svg, axis.name.length > 18 ? axis.name.slice(0, 17) + "\u2026" : axis.name);
    shape("title", {}, name, axis.name);
    if (end) shape("text", {x, y: 31, "text-anchor": "middle"}, svg, GOAL.direction === "max" ? "more is better" : "less is better");
    else if (axis.log) shape("text", {x, y: 31, "text-anchor": "middle"}, svg, "log");
    const labels = axis.names ? thin(axis.names.map((t, j) => [j, t.length > 14 ? t.slice(0, 13) + "\u2026" : t]), 18) : ticks(s, 6).map(v => [v, number(v)]);
    for (const [v, words] of labels) {
      const text = shape("text", {x: x + (end ? 8 : -7), y: r1(s(v)) + 4, class: "on", "text-anchor": end ? "start" : "end"}, svg, words);
      text.style.pointerEvents = "none";
    }
    if (!end && S.params[k].some((v, i) => v === null)) shape("text", {x, y: none + 4, class: "on", "text-anchor": "middle"}, svg, "not active");
    brushes.push(brush(svg, x, T, B, range => limit(k, range)));
  });
  const said = el("span", "note", null);
  const limit = (k, range) => {
    ranges[k] = range;
    let left = 0;
    for (const [path, i] of paths) {
      const off = ranges.some((r, j) => r && (place(j, i) < r[0] || place(j, i) > r[1]));
      path.classList.toggle("off", off);
      left += off ? 0 : 1;
    }
    const words = every.map((axis, j) => [axis, ranges[j], scales[j]]).filter(each => each[1]).map(([axis, r, s]) => {
      const ends = r.map(s.invert).sort((p, q) => p - q);
      if (!axis.names) return `${axis.name} from ${number(ends[0])} to ${number(ends[1])}`;
      return `${axis.name} ${axis.names.filter((name, at) => at >= ends[0] && at <= ends[1]).join(", ") || "none"}`;
    });
    said.textContent = words.length ? `${count(left)} of ${count(paths.length)} trials: ${words.join("; ")}` : "";
    KEPT.set("ranges", new Map(every.map((axis, j) => [axis.name, ranges[j] && ranges[j].map(scales[j].invert)])));
  };
  for (const [name, ends] of KEPT.get("ranges") || []) {
    const k = every.findIndex(axis => axis.name === name);
    if (k >= 0 && ends) brushes[k](ends.map(scales[k]).sort((p, q) => p - q));
  }
  chooseRange(c.figure, every, said, (k, ends) => brushes[k](ends && ends.map(scales[k]).sort((p, q) => p - q)), () => brushes.forEach(set => set(null)));
  let lit = null;
  group.addEventListener("pointerover", event => {
    const pair = paths.find(([path]) => path === event.target);
    if (lit) lit.classList.remove("lit");
    lit = pair ? pair[0] : null;
    if (lit) lit.classList.add("lit");
    pointAt(svg, pair && wordsOf(pair[1]));
    say(event, pair && wordsOf(pair[1]));
  });
  group.addEventListener("pointerout", event => { if (lit) lit.classList.remove("lit"); pointAt(svg, ""); say(event, ""); });
  legend(c.figure, [["the best", "var(--best)"], [`best ${n}, darker is better`, "var(--DONE)"], ...(S.rest.length ? [["others", "var(--PRUNED)"]] : [])]);
  if (D.axes.length > axes.length) el("p", "note", c.figure, `The first ${axes.length} of ${D.axes.length} parameters.`);
}

function thin(items, most) {
  return items.length <= most ? items : items.filter((item, i) => i % Math.ceil(items.length / most) === 0);
}

function brush(svg, x, top, bottom, tell) {
  const shown = shape("rect", {class: "brushed", x: x - 7, width: 14, y: top, height: 0}, svg);
  const hit = shape("rect", {class: "brush", x: x - 12, width: 24, y: top - 4, height: bottom - top + 8}, svg);
  const where = event => new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).y;
  let from = null;
  hit.addEventListener("pointerdown", event => { from = where(event); hit.setPointerCapture(event.pointerId); event.preventDefault(); });
  hit.addEventListener("pointermove", event => {
    if (from === null) return;
    const to = where(event), a = Math.min(from, to), b = Math.max(from, to);
    shown.setAttribute("y", a); shown.setAttribute("height", b - a);
    tell(b - a > 3 ? [a, b] : null);
  });
  hit.addEventListener("pointerup", event => {
    if (from !== null && Math.abs(where(event) - from) <= 3) { shown.setAttribute("height", 0); tell(null); }
    from = null;
  });
  return range => {
    shown.setAttribute("y", range ? range[0] : 0); shown.setAttribute("height", range ? range[1] - range[0] : 0);
    tell(range);
  };
}

// What a drag along an axis does, by keyboard: an axis, and a range or a choice on it.
function chooseRange(parent, axes, said, set, clear) {
  const box = el("form", "ranges", parent), axis = el("select", "", box), ends = el("span", "", box);
  axis.id = "range-axis";
  axis.setAttribute("aria-label", "Show only the trials by");
  axes.forEach((each, k) => { el("option", "", axis, each.name).value = k; });
  const field = (name, words) => { const made = el(name, "", ends); made.setAttribute("aria-label", words); return made; };
  const offer = () => {
    ends.replaceChildren();
    const each = axes[axis.value];
    if (each.names) each.names.forEach((name, at) => { el("option", "", ends.firstChild || field("select", "Value"), name).value = at; });
    else for (const words of ["from", "to"]) { const input = field("input", words); input.placeholder = words; input.inputMode = "decimal"; input.size = 8; }
  };
  axis.addEventListener("change", offer);
  const apply = el("button", "", box, "Show only these"), all = el("button", "", box, "Show all");
  all.type = "button";
  box.append(said);
  said.setAttribute("role", "status");
  box.addEventListener("submit", event => {
    event.preventDefault();
    const each = axes[axis.value], given = [...ends.children].map(input => input.value.trim());
    if (each.names) return set(axis.value, [Number(given[0]) - 0.3, Number(given[0]) + 0.3]);
    const range = given.map((words, at) => words === "" ? [each.low, each.high][at] : Number(words));
    if (!range.every(Number.isFinite) || range[0] > range[1] || (each.log && range[0] <= 0)) { said.textContent = "Give two numbers, the smaller one first."; return; }
    set(axis.value, range);
  });
  all.addEventListener("click", clear);
  apply.type = "submit";
  offer();
}

function slices() {
  const c = card("slices", "Slices", `${GOAL.metric} over each parameter alone. The axis is logarithmic where the range is.`, "wide");
  if (!D.axes.length || !D.frame) return nothing(c, "Nothing to compare yet.");
  const hold = el("div", "", c.plot);
  const draw = v => { hold.replaceChildren(); drawSlices(hold, v === "all"); };
  draw(D.trained ? choice(c.top, "slices-trials", [["trained", "trained"], ["all", "all"]], "trained", draw) : "all");
  legend(c.figure, [...shownStates.map(s => [s.toLowerCase(), color(s)]), ["the best", "var(--best)"]]);
  if (D.axes.length > 24) el("p", "note", c.figure, `24 of ${D.axes.length} parameters.`);
}

function drawSlices(parent, all) {
  const range = all ? D.frame : D.trained;
  const order = Object.keys(D.importances);
  const axes = D.axes.map((a, k) => [a, k]).sort((p, q) => rankOf(order, p[0].name) - rankOf(order, q[0].name)).slice(0, 24);
  const per = Math.min(4, Math.max(2, axes.length)), gap = 20, w = (1290 - gap * (per - 1)) / per, h = 230;
  const svg = canvas(parent, 1290, Math.ceil(axes.length / per) * h, "Results by each parameter");
  const points = [];
  axes.forEach(([axis, k], j) => {
    const left = (j % per) * (w + gap), top = Math.floor(j / per) * h;
    const L = left + 46, R = left + w - 8, T = top + 24, B = top + h - 34;
    shape("text", {x: L, y: top + 15, class: "name"}, svg, axis.name.length > 30 ? axis.name.slice(0, 29) + "\u2026" : axis.name);
    const y = scale(range.low, range.high, B, T, range.log);
    yAxis(svg, y, L, R, 4);
    const pad = axis.names ? (R - L) / (2 * axis.names.length) : 6;
    const x = axisScale(axis, L + pad, R - pad);
    if (axis.names) for (const [v, words] of thin(axis.names.map((t, i) => [i, t]), 7)) shape("text", {x: x(v), y: B + 17, "text-anchor": "middle"}, svg, words.length > 10 ? words.slice(0, 9) + "\u2026" : words);
    else xAxis(svg, x, B, "", R, 5);
    const inside = clip(svg, L, T - 3, R - L, B - T + 6);
    for (const state of all ? drawingOrder() : ["DONE"]) {
      const mine = [];
      S.n.forEach((n, i) => {
        const p = S.params[k][i], v = S.values[0][i];
        if (stateOf(i) !== state || p === null || v === null || (y.log && v <= 0)) return;
        const off = axis.names ? ((n * 0.61803) % 1 - 0.5) * pad * 1.3 : axis.int && !axis.log ? ((n * 0.61803) % 1 - 0.5) * Math.min(10, (R - L) / (axis.high - axis.low + 1) * 0.5) : 0;
        const point = {x: x(p) + off, y: y(v), words: () => `${axis.name} ${valueOf(axis, p)}\n${wordsOf(i)}`};
        mine.push(point);
        if (point.y >= T - 3 && point.y <= B + 3) points.push(point);
      });
      dots(inside, mine, color(state), state === "PRUNED" ? 0.4 : 0.8, S.n.length > 600 ? 3.4 : 4.6);
    }
    const i = S.rank.indexOf(0);
    if (i >= 0 && S.params[k][i] !== null && S.values[0][i] !== null) dots(inside, [{x: x(S.params[k][i]), y: y(S.values[0][i])}], "var(--best)", 1, 9);
  });
  hover(svg, nearest(points, 9));
}

function rankOf(order, name) { const at = order.indexOf(name); return at < 0 ? order.length : at; }

function timeline() {
  const t = D.timeline;
  const c = card("timeline", "Timeline", "The number of running trials, and below it each trial in a lane. Start-up: from the container's start until one step before its first report.", "wide");
  if (!t.busy) return nothing(c, "No trial has started yet.");
  const W = 1290, L = 46, R = W - 10, top = 8, mid = 130, lanes = t.bars.length ? t.lanes : 0;
  const lane = lanes ? Math.max(4, Math.min(15, 420 / lanes)) : 0, B = mid + (lanes ? 14 + lanes * lane : 0), H = B + 38;
  const svg = canvas(c.plot, W, H, "When the trials ran");
  const x = scale(0, t.span, L, R), most = Math.max(...t.busy.map(b => b[1] + b[2] + b[3]), 1), y = scale(0, most, mid, top);
  yAxis(svg, y, L, R, 3);
  const width = t.span / t.busy.length, stacks = [["var(--DONE)", 1], ["var(--starting)", 2], ["var(--idle)", 3]];
  const base = t.busy.map(() => 0);
  for (const [fill, k] of stacks) {
    let up = "", down = "";
    t.busy.forEach((b, i) => {
      const x1 = r1(x(b[0])), x2 = r1(x(Math.min(t.span, b[0] + width))), low = y(base[i]);
      base[i] += b[k];
      up += `${i ? "L" : "M"}${x1} ${r1(y(base[i]))}L${x2} ${r1(y(base[i]))}`;
      down = `L${x2} ${r1(low)}L${x1} ${r1(low)}` + down;
    });
    shape("path", {class: "mark", d: up + down + "Z", style: `fill:${fill};opacity:${k === 3 ? 1 : 0.85}`}, svg);
  }
  const [unit, size] = timeUnit(t.span);
  xAxis(svg, x, B, unit, R, 10, size);
  const bars = [], paths = {}, u = (R - L) / (t.span / t.unit);
  for (let i = 0; i < t.bars.length; i += 6) {
    const [k, start, trains, end, n, s] = t.bars.slice(i, i + 6), yy = r1(mid + 14 + k * lane), hh = r1(lane - (lane > 6 ? 2 : 1));
    const rect = (a, b) => `M${r1(L + a * u)} ${yy}h${Math.max(0.6, r1((b - a) * u))}v${hh}h${-Math.max(0.6, r1((b - a) * u))}z`;
    if (trains > start) paths.starting = (paths.starting || "") + rect(start, trains);
    paths[S.states[s]] = (paths[S.states[s]] || "") + rect(trains, end);
    bars.push([k, L + start * u, L + end * u, n, s, start, trains, end]);
  }
  for (const state in paths) shape("path", {class: "mark", d: paths[state], style: `fill:var(--${state})`}, svg);
  hover(svg, (px, py) => {
    if (py > mid + 10) {
      const k = Math.floor((py - mid - 14) / lane), found = bars.find(b => b[0] === k && b[1] <= px + 1 && px - 1 <= b[2]);
      if (!found) return null;
      const [, , , n, s, start, trains, end] = found, began = t.from + start * t.unit;
      return {words: `Trial ${n} \u00b7 ${S.states[s]}\nstart-up ${time((trains - start) * t.unit)}, training ${time((end - trains) * t.unit)}\nfrom ${time(began)} after the beginning`};
    }
    const b = px >= L && px <= R && t.busy[Math.floor((px - L) / (R - L) * t.busy.length)];
    return b ? {words: `${time(t.from + b[0])} after the beginning\ntraining ${number(b[1])}, starting ${number(b[2])}, idle ${number(b[3])}`} : null;
  });
  const share = name => `${Math.round(100 * t.shares[name])}%`;
  legend(c.figure, [["training", "var(--DONE)", share("training")], ["start-up", "var(--starting)", share("starting")], ["idle, of the trials allowed at once", "var(--idle)", share("idle")],
    ...(lanes ? Object.keys(paths).filter(s => s !== "starting" && s !== "DONE").map(s => [s.toLowerCase(), color(s)]) : [])]);
  if (!lanes) el("p", "note", c.figure, `${count(t.lanes)} lanes are too many to draw trials one by one.`);
}

function failures() {
  const all = D.failures.reduce((sum, g) => sum + g.count, 0);
  const c = card("failures", "Failures", all ? `${plural(all, "trial")}, grouped by the last line that they printed, whatever the numbers in it.` : "");
  if (!all) return nothing(c, "No trial failed.");
  const list = D.failures.slice(0, 12);
  for (const g of list) {
    const row = el("div", "group", c.plot);
    el("b", "mark", row, count(g.count)).style.color = color(g.state);
    const words = el("div", "", row);
    el("code", "", words, g.line);
    const more = g.count > g.trials.length ? ", \u2026" : "";
    el("div", "", words).append(el("small", "", null, `${g.state}${g.why && g.why !== g.line ? ", " + g.why : ""}: trial${g.count > 1 ? "s" : ""} ${g.trials.join(", ")}${more}`));
    if (g.tail.length > 1) {
      const details = el("details", "", words);
      el("summary", "", details, `last lines of trial ${g.trials[0]}`);
      el("pre", "", details, g.tail.join("\n"));
    }
  }
  if (D.failures.length > list.length) el("p", "note", c.figure, `and ${D.failures.length - list.length} more kinds`);
}

function cost() {
  const k = D.cost, usd = k.unit === "USD";
  const c = card("cost", usd ? "Cost" : "Running time", usd ? "The running time of all trials, at the hourly price of a trial." : `Of all trials together. ${D.head.env === "local" ? "Free: it ran on this machine, without a usd_per_hour." : "The price of a trial is unknown."}`);
  if (!k.over.length) return nothing(c, "No trial has run yet.");
  const p = el("p", "big", c.plot, money(k.total) + " ");
  if (k.saved) el("small", "", p, `and about ${money(k.saved)} not spent, by stopping early`);
  const W = 620, H = 170, L = 58, R = W - 14, T = 8, B = H - 38;
  const svg = canvas(c.plot, W, H, "Spent over time"), last = Math.max(...k.over.map(o => o[0]), 1e-6);
  const wanted = usd && D.limits.find(l => l.name === "USD"), limit = wanted ? wanted.limit : null;
  const most = limit && limit < k.total * 2.5 ? Math.max(limit, k.total) : k.total;
  const x = scale(0, last, L, R), y = scale(0, (most || 1) * 1.05, B, T);
  const [high, part] = usd ? ["USD", 1] : timeUnit(y.high * 3600), per = usd ? 1 : part / 3600;
  yAxis(svg, y, L, R, 3, per);
  const [unit, size] = timeUnit(last);
  xAxis(svg, x, B, unit, R, 6, size);
  shape("text", {x: L + 4, y: T + 8}, svg, high);
  if (limit && limit <= y.high) {
    shape("line", {class: "limit", x1: L, x2: R, y1: y(limit), y2: y(limit)}, svg);
    shape("text", {x: R - 4, y: y(limit) + 13, "text-anchor": "end"}, svg, "limit");
  }
  const points = k.over.map(o => [x(o[0]), y(o[1])]);
  shape("path", {class: "mark", d: `M${L} ${B}` + points.map(q => `L${r1(q[0])} ${r1(q[1])}`).join("") + `L${r1(points[points.length - 1][0])} ${B}Z`, style: "fill:var(--DONE);opacity:.16"}, svg);
  line(svg, points, "", "stroke:var(--DONE);stroke-width:2");
  hover(svg, nearest(k.over.map(o => ({x: x(o[0]), y: y(o[1]), words: `${time(o[0])}: ${money(o[1])}`})), 30));
  const parts = Object.entries(k.parts);
  bar(c.plot, parts.map(([s, v]) => [color(s), v]), k.total);
  legend(c.plot, parts.map(([s, v]) => [s.toLowerCase(), color(s), money(v)]));
}

function pareto() {
  if (D.goals.length < 2) return;
  const [a, b] = D.goals, on = new Set(D.pareto);
  const c = card("pareto", "Pareto front", `${plural(D.pareto.length, "trial")} that no other beats in every goal.`, "wide");
  const found = [];
  S.n.forEach((n, i) => { if (S.values[0][i] !== null && S.values[1][i] !== null) found.push(i); });
  if (!found.length) return nothing(c, "No trial has ended yet.");
  const W = 1290, H = 400, L = 70, R = W - 20, T = 12, B = H - 44;
  const svg = canvas(c.plot, W, H, `${b.metric} against ${a.metric}`);
  const range = (g) => { const v = found.map(i => S.values[g][i]), lo = Math.min(...v), hi = Math.max(...v), pad = (hi - lo) * 0.05 || 1; return [lo - pad, hi + pad]; };
  const x = scale(...range(0), L, R), y = scale(...range(1), B, T);
  yAxis(svg, y, L, R);
  xAxis(svg, x, B, `${a.metric} (${a.direction === "max" ? "more" : "less"} is better)`, R, 8);
  shape("text", {x: L, y: T + 2}, svg, `${b.metric} (${b.direction === "max" ? "more" : "less"} is better)`);
  const point = i => ({x: x(S.values[0][i]), y: y(S.values[1][i]), words: () => wordsOf(i)});
  dots(svg, found.filter(i => !on.has(S.n[i])).map(point), "var(--PRUNED)", 0.6, 5.5);
  const front = found.filter(i => on.has(S.n[i])).sort((p, q) => S.values[0][p] - S.values[0][q]);
  line(svg, front.map(i => [x(S.values[0][i]), y(S.values[1][i])]), "incumbent");
  dots(svg, front.map(point), "var(--best)", 1, 9);
  hover(svg, nearest(found.map(point)));
}
