"use strict";
// Plots of the values of many runs (or trials): parallel coordinates, and a scatter plot of two columns. `data`
// has ids, labels, colours and columns; a column has a name, a direction and a value for each run.
(() => {
  const {make, number} = batchml;
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const isKnown = (value) => value !== null && value !== undefined;
  const cut = (words, most) => (words.length > most ? `${words.slice(0, most - 1)}\u2026` : words);
  const textOf = (value) => (typeof value === "number" ? number(value) : isKnown(value) ? String(value) : "-");

  // A scale maps values to pixels. Texts stand in their order; numbers on a line, or by the logarithm.
  const makeScale = (column, from, to, isLog) => {
    const known = column.values.filter(isKnown);
    if (known.some((value) => typeof value !== "number")) {
      const names = [...new Set(known.map(String))].sort((a, b) => a.localeCompare(b, "en", {numeric: true}));
      const place = (value) => (isKnown(value) ? from + (names.length < 2 ? 0.5 : names.indexOf(String(value)) / (names.length - 1)) * (to - from) : null);
      const every = Math.ceil(names.length / 14);
      return {place, ticks: names.filter((_, i) => i % every === 0).map((name) => [place(name), cut(name, 16)])};
    }
    const good = isLog ? known.filter((value) => value > 0) : known;
    let low = Math.min(...good), high = Math.max(...good);
    if (!good.length) { low = 0; high = 1; }
    if (low === high) { const pad = Math.abs(low) * 0.1 || 1; if (isLog) { low /= 2; high *= 2; } else { low -= pad; high += pad; } }
    const f = isLog ? Math.log10 : (x) => x;
    const place = (value) => (!isKnown(value) || (isLog && value <= 0) ? null : from + (f(value) - f(low)) / (f(high) - f(low)) * (to - from));
    const ticks = [];
    if (isLog) {
      const parts = Math.log10(high / low) <= 2.2 ? [1, 2, 5] : [1];
      for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e += 1) for (const part of parts) {
        const value = Number((part * 10 ** e).toPrecision(6));
        if (value >= low * 0.999 && value <= high * 1.001) ticks.push([place(value), number(value)]);
      }
    }
    if (ticks.length < 2) {
      ticks.length = 0;
      const rough = (high - low) / 5, size = 10 ** Math.floor(Math.log10(rough)), step = size * [1, 2, 2.5, 5, 10].find((n) => size * n >= rough * 0.999);
      for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) { const value = Number((i * step).toPrecision(12)); ticks.push([place(value), number(value)]); }
    }
    return {place, ticks};
  };

  // Whether an axis is better drawn by the logarithm: positive numbers over more than two powers of ten.
  const spans = (column) => {
    const known = column.values.filter(isKnown);
    return known.length > 1 && known.every((value) => typeof value === "number" && value > 0) && Math.max(...known) / Math.min(...known) > 50;
  };

  const mix = (a, b, part) => {
    const read = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    const [one, other] = [read(a), read(b)];
    return `rgb(${one.map((value, i) => Math.round(value + (other[i] - value) * part)).join(",")})`;
  };

  // A canvas, sharp on every screen, below another one for what is pointed at.
  const makeLayers = (place, label) => {
    const base = make("canvas", {role: "img", "aria-label": label}), top = make("canvas", {class: "top", "aria-hidden": "true"});
    const tip = make("div", {class: "tip", hidden: true, "aria-hidden": "true"}), spoken = make("p", {class: "unseen", role: "status"});
    const frame = make("div", {class: "frame layers", tabindex: "0", role: "group", "aria-roledescription": "chart", "aria-label": label}, base, top, tip);
    place.append(frame, spoken);
    const size = (width, height) => {
      const ratio = devicePixelRatio || 1;
      return [base, top].map((canvas) => {
        canvas.width = width * ratio; canvas.height = height * ratio;
        canvas.style.width = `${width}px`; canvas.style.height = `${height}px`;
        const ctx = canvas.getContext("2d");
        ctx.setTransform(ratio, 0, 0, ratio, 0, 0); ctx.clearRect(0, 0, width, height);
        ctx.font = "11px system-ui, sans-serif";
        return ctx;
      });
    };
    const showTip = (x, y, lines) => {
      tip.replaceChildren(...lines.map((line) => make("div", {}, line)));
      tip.hidden = false;
      const isRight = x - frame.scrollLeft > frame.clientWidth / 2;
      tip.style.left = isRight ? "auto" : `${x + 14}px`;
      tip.style.right = isRight ? `${frame.clientWidth - x + 14}px` : "auto";
      tip.style.top = `${Math.max(0, y - 20)}px`;
    };
    return {base, top, tip, frame, spoken, size, showTip};
  };

  // What both plots do with the pointer and the keys: show the nearest run, open it.
  const follow = (plot, layers, nearest) => {
    const {frame, tip, spoken} = layers;
    const where = (event) => { const box = layers.base.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    frame.addEventListener("pointermove", (event) => { if (!plot.isDragging) plot.light(nearest(...where(event))); });
    frame.addEventListener("pointerleave", () => { if (!plot.isDragging) plot.light(null); });
    frame.addEventListener("blur", () => plot.light(null));
    frame.addEventListener("keydown", (event) => {
      const order = plot.order(), now = order.indexOf(plot.lit), last = order.length - 1;
      if (event.key === "Enter" && isKnown(plot.lit)) { plot.open(plot.lit); return; }
      const moves = {ArrowRight: now + 1, ArrowDown: now + 1, ArrowLeft: now < 0 ? last : now - 1, ArrowUp: now < 0 ? last : now - 1, Home: 0, End: last};
      if (!Object.hasOwn(moves, event.key) || event.target !== frame || last < 0) return;
      event.preventDefault();
      plot.light(order[Math.min(last, Math.max(0, moves[event.key]))]);
      clearTimeout(plot.saying);
      plot.saying = setTimeout(() => { spoken.textContent = plot.words(plot.lit).join(", "); }, 250);
    });
    return {where, hide: () => { tip.hidden = true; }};
  };

  // The colour of each run: its own, or by a column from --low to --high.
  const coloursOf = (data, by) => {
    if (by) {
      const scale = makeScale(by, 0, 1, spans(by)), [low, high, none] = ["--low", "--high", "--edge"].map(css);
      return by.values.map((value) => { const at = scale.place(value); return at === null ? none : mix(low, high, at); });
    }
    const own = Array.from({length: 8}, (_, place) => css(`--c${place + 1}`));
    return data.colours.map((place) => own[place ?? 0]);
  };

  const choice = (label, columns, chosen, take) => {
    const select = make("select", {"aria-label": label}, ...columns.map((column) => make("option", {value: column.name, selected: column.name === chosen}, column.name || "by run")));
    select.addEventListener("change", () => take(select.value));
    return make("label", {}, `${label} `, select);
  };

  // --- Parallel coordinates ---------------------------------------------------------------------
  class Parallel {
    constructor(place, data, shared) {
      this.place = place; this.shared = shared; this.ranges = new Map(); this.flipped = new Set(); this.lit = null;
      this.bar = make("div", {class: "bar"});
      this.count = make("span", {role: "status"});
      this.clear = make("button", {type: "button", hidden: true}, "Show all");
      this.clear.addEventListener("click", () => { this.ranges.clear(); this.select(); });
      this.options = make("div", {class: "axes"});
      const chooser = make("details", {}, make("summary", {}, "Axes, ranges"), this.options);
      const hint = make("p", {class: "dim small"}, "Drag along an axis to keep the runs in this range; a click on the axis shows all. By keyboard: arrow keys go from run to run, Enter opens a run.");
      this.holder = make("div", {class: "within plain"});
      place.replaceChildren(this.bar, chooser, hint, this.holder);
      this.bar.append(this.count, this.clear);
      this.layers = makeLayers(this.holder, "Parallel coordinates: a line for each run");
      const {where} = follow(this, this.layers, (x, y) => this.nearest(x, y));
      this.drag(where);
      this.layers.frame.addEventListener("click", (event) => {
        if (this.wasDragged) return;
        const index = this.nearest(...where(event));
        if (isKnown(index) && this.axisAt(where(event)[0]) === null) this.open(index);
      });
      this.take(data);
    }

    take(data) {
      this.data = data;
      if (!this.names) {
        const of = (kind, most) => data.columns.filter((column) => column.kind === kind).slice(0, most).map((column) => column.name);
        this.names = new Set([...of("param", 8), ...of("fact", 20).filter((name) => ["ran", "cost"].includes(name)), ...of("metric", 4)]);
        this.logs = new Set(data.columns.filter(spans).map((column) => column.name));
      }
      this.drawOptions(); this.select();
    }

    get axes() { return this.data.columns.filter((column) => this.names.has(column.name)); }

    drawOptions() {
      const box = (name, set, words) => {
        const input = make("input", {type: "checkbox", checked: set.has(name), "aria-label": `${words}: ${name}`});
        input.addEventListener("change", () => { if (input.checked) set.add(name); else set.delete(name); this.ranges.delete(name); this.select(); });
        return input;
      };
      const bound = (column, end) => {
        const input = make("input", {type: "text", inputmode: "decimal", size: "7", "aria-label": `${end ? "At most" : "At least"}: ${column.name}`, placeholder: end ? "at most" : "at least"});
        input.addEventListener("change", () => {
          const value = input.value.trim() === "" ? null : Number(input.value);
          const range = this.ranges.get(column.name) || [-Infinity, Infinity];
          range[end] = value === null || Number.isNaN(value) ? (end ? Infinity : -Infinity) : value;
          this.ranges.set(column.name, range); this.select();
        });
        return input;
      };
      if (this.options.contains(document.activeElement)) return;
      const rows = this.data.columns.map((column) => {
        const isNumber = column.values.every((value) => !isKnown(value) || typeof value === "number");
        return make("tr", {}, make("th", {scope: "row"}, column.name), make("td", {}, box(column.name, this.names, "Shown")),
          make("td", {}, isNumber ? box(column.name, this.logs, "Logarithmic") : null), make("td", {}, box(column.name, this.flipped, "Flipped")),
          make("td", {}, ...(isNumber ? [bound(column, 0), " ", bound(column, 1)] : [])));
      });
      this.options.replaceChildren(make("div", {class: "within", tabindex: "0", role: "region", "aria-label": "Axes"}, make("table", {}, make("thead", {}, make("tr", {},
        ...["Column", "Shown", "Log", "Flipped", "Range"].map((words) => make("th", {scope: "col"}, words)))), make("tbody", {}, ...rows))));
    }

    isIn(index) {
      for (const [name, [low, high]] of this.ranges) {
        const column = this.data.columns.find((each) => each.name === name);
        if (!column) continue;
        const value = column.values[index];
        if (!isKnown(value)) return false;
        const at = typeof value === "number" ? value : this.scales?.get(name)?.place(value);
        if (at < low || at > high) return false;
      }
      return true;
    }

    select() {
      this.layOut();
      const all = this.data.ids.map((_, index) => index), chosen = all.filter((index) => this.isIn(index));
      this.chosen = new Set(chosen);
      this.count.textContent = this.ranges.size ? `${chosen.length} of ${all.length} runs` : `${all.length} runs`;
      this.clear.hidden = !this.ranges.size;
      this.draw();
      this.shared.selected(this.ranges.size ? this.chosen : null);
    }

    layOut() {
      const axes = this.axes, width = Math.max(this.holder.clientWidth || 600, 110 * axes.length), left = 64, right = 64;
      Object.assign(this, {width, height: 360, T: 44, B: 316});
      this.at = axes.map((_, k) => (axes.length < 2 ? width / 2 : left + (width - left - right) * k / (axes.length - 1)));
      this.scales = new Map(axes.map((axis) => {
        const flip = this.flipped.has(axis.name) !== (axis.direction === "min");
        return [axis.name, flip ? makeScale(axis, this.T, this.B, this.logs.has(axis.name)) : makeScale(axis, this.B, this.T, this.logs.has(axis.name))];
      }));
      const none = this.B + 22;
      this.lines = this.data.ids.map((_, index) => axes.map((axis) => this.scales.get(axis.name).place(axis.values[index]) ?? none));
    }

    draw() {
      const [ctx, top] = this.layers.size(this.width, this.height), axes = this.axes, {T, B} = this;
      this.topCtx = top;
      if (!axes.length) { ctx.fillStyle = css("--dim"); ctx.fillText("The runs have no differing values yet.", 10, 30); return; }
      const by = this.data.colours.every((colour) => colour === null) ? axes[axes.length - 1] : null;
      const many = this.data.ids.length, opacity = many > 1000 ? 0.16 : many > 400 ? 0.3 : many > 60 ? 0.5 : 0.85;
      // The best are drawn last, above all others.
      const sign = by?.direction === "min" ? -1 : 1, rank = (index) => (typeof by?.values[index] === "number" ? sign * by.values[index] : -Infinity);
      const order = this.data.ids.map((_, index) => index).sort((a, b) => this.chosen.has(a) - this.chosen.has(b) || (by ? rank(a) - rank(b) || 0 : 0));
      const colours = coloursOf(this.data, by), faint = css("--edge");
      for (const index of order) {
        const isIn = this.chosen.has(index);
        ctx.globalAlpha = isIn ? opacity : 0.12;
        ctx.strokeStyle = isIn ? colours[index] : faint;
        ctx.lineWidth = many > 60 ? 1 : 1.75;
        this.path(ctx, index); ctx.stroke();
      }
      ctx.globalAlpha = 1;
      axes.forEach((axis, k) => {
        const x = this.at[k], scale = this.scales.get(axis.name);
        ctx.strokeStyle = css("--edge"); ctx.lineWidth = 1;
        ctx.beginPath(); ctx.moveTo(x, T - 4); ctx.lineTo(x, B + 4); ctx.stroke();
        ctx.textAlign = "center"; ctx.fillStyle = css("--fore"); ctx.font = "600 12px system-ui, sans-serif";
        ctx.fillText(cut(axis.name, 16), x, 14);
        ctx.font = "11px system-ui, sans-serif"; ctx.fillStyle = css("--dim");
        const marks = [this.logs.has(axis.name) ? "log" : "", axis.direction ? (axis.direction === "min" ? "less is better" : "more is better") : ""].filter(Boolean);
        ctx.fillText(marks.join(", "), x, 29);
        if (axis.values.some((value, index) => this.lines[index][k] === B + 22)) ctx.fillText("none", x, B + 36);
        ctx.textBaseline = "middle";
        const isLast = k === axes.length - 1;
        ctx.textAlign = isLast ? "left" : "right";
        for (const [y, words] of scale.ticks) {
          const shown = cut(words, 10), wide = ctx.measureText(shown).width, from = isLast ? x + 6 : x - 6 - wide;
          ctx.globalAlpha = 0.75; ctx.fillStyle = css("--card"); ctx.fillRect(from - 1, y - 6, wide + 2, 12);
          ctx.globalAlpha = 1; ctx.fillStyle = css("--dim"); ctx.fillText(shown, isLast ? x + 6 : x - 6, y);
        }
        ctx.textBaseline = "alphabetic";
        const range = this.shownRange(axis);
        if (range) { ctx.globalAlpha = 0.3; ctx.fillStyle = css("--link"); ctx.fillRect(x - 7, range[0], 14, range[1] - range[0]); ctx.globalAlpha = 1; }
      });
    }

    shownRange(axis) {
      const range = this.ranges.get(axis.name);
      if (!range) return null;
      const isNumber = axis.values.every((value) => !isKnown(value) || typeof value === "number"), place = this.scales.get(axis.name).place;
      const clamp = (y) => Math.min(this.B, Math.max(this.T, y));
      const ends = isNumber ? range.map((value) => (Number.isFinite(value) ? place(value) : value < 0 === (place(1) > place(2)) ? this.B : this.T) ?? this.B) : range;
      return [clamp(Math.min(...ends)), clamp(Math.max(...ends))];
    }

    path(ctx, index) {
      ctx.beginPath();
      this.lines[index].forEach((y, k) => { if (k) ctx.lineTo(this.at[k], y); else ctx.moveTo(this.at[k], y); });
    }

    axisAt(x) { const k = this.at.findIndex((at) => Math.abs(at - x) <= 12); return k < 0 ? null : k; }

    nearest(x, y) {
      const k = Math.min(this.at.length - 2, Math.max(0, this.at.findIndex((at) => at > x) - 1));
      if (this.at.length < 2 || x < this.at[0] - 8 || x > this.at[this.at.length - 1] + 8) return null;
      const part = (x - this.at[k]) / (this.at[k + 1] - this.at[k]);
      let found = null, least = 9;
      for (const index of this.chosen) {
        const line = this.lines[index], away = Math.abs(line[k] + (line[k + 1] - line[k]) * part - y);
        if (away < least) { least = away; found = index; }
      }
      return found;
    }

    drag(where) {
      const {frame} = this.layers;
      let axis = null, from = 0;
      frame.addEventListener("pointerdown", (event) => {
        const [x, y] = where(event), k = this.axisAt(x);
        this.wasDragged = false;
        if (k === null) return;
        axis = this.axes[k]; from = y; this.isDragging = true;
        frame.setPointerCapture(event.pointerId);
      });
      frame.addEventListener("pointermove", (event) => {
        if (axis === null) return;
        const y = where(event)[1];
        if (Math.abs(y - from) < 4) return;
        this.wasDragged = true;
        const range = [axis, Math.min(from, y), Math.max(from, y)];
        if (!this.pending) requestAnimationFrame(() => { this.brush(...this.pending); this.pending = null; });
        this.pending = range;
      });
      frame.addEventListener("pointerup", () => {
        if (axis !== null && !this.wasDragged && this.ranges.delete(axis.name)) this.select();
        axis = null; this.isDragging = false;
      });
    }

    // The values whose places are in these pixels; of texts the pixels themselves.
    brush(axis, low, high) {
      const scale = this.scales.get(axis.name), known = axis.values.filter(isKnown);
      if (known.some((value) => typeof value !== "number")) this.ranges.set(axis.name, [low, high]);
      else {
        const inside = known.filter((value) => { const y = scale.place(value); return y !== null && y >= low && y <= high; });
        this.ranges.set(axis.name, inside.length ? [Math.min(...inside), Math.max(...inside)] : [Infinity, -Infinity]);
      }
      this.select();
    }

    order() { return [...this.chosen].sort((a, b) => a - b); }
    words(index) { return [this.data.labels[index], ...this.axes.map((axis) => `${axis.name} ${textOf(axis.values[index])}`)]; }
    open(index) { batchml.go(`/run/${encodeURIComponent(this.data.ids[index])}`); }

    light(index) {
      this.lit = index;
      const ctx = this.topCtx;
      if (!ctx) return;
      ctx.clearRect(0, 0, this.width, this.height);
      if (!isKnown(index)) { this.layers.tip.hidden = true; return; }
      ctx.strokeStyle = css("--card"); ctx.lineWidth = 6; this.path(ctx, index); ctx.stroke();
      ctx.strokeStyle = css("--link"); ctx.lineWidth = 3; this.path(ctx, index); ctx.stroke();
      this.layers.showTip(this.at[0], this.T, this.words(index));
      this.shared.light?.(index);
    }
  }

  // --- A scatter plot ------------------------------------------------------------------------------
  class Scatter {
    constructor(place, data, shared) {
      this.place = place; this.shared = shared; this.lit = null; this.chosen = null;
      this.bar = make("div", {class: "bar"}); this.note = make("p", {class: "dim small", role: "status"});
      this.holder = make("div", {});
      place.replaceChildren(this.bar, this.note, this.holder);
      this.layers = makeLayers(this.holder, "Scatter plot: a point for each run");
      const {where} = follow(this, this.layers, (x, y) => this.nearest(x, y));
      this.layers.frame.addEventListener("click", (event) => { const index = this.nearest(...where(event)); if (isKnown(index)) this.open(index); });
      this.take(data);
    }

    take(data) {
      this.data = data;
      const names = data.columns.map((column) => column.name), of = (kind) => data.columns.filter((column) => column.kind === kind).map((column) => column.name);
      const address = new URLSearchParams(location.search);
      const first = (...choices) => choices.find((name) => names.includes(name));
      this.x = first(this.x, address.get("sx"), of("param")[0], names[0]);
      this.y = first(this.y, address.get("sy"), of("metric")[0], names.find((name) => name !== this.x), names[0]);
      this.by = first(this.by, address.get("sc")) || "";
      const set = (key, name) => (value) => { this[key] = value; this.shared.remember(name, value); this.draw(); };
      const log = (key) => {
        const input = make("input", {type: "checkbox", checked: this[key] ?? false});
        input.addEventListener("change", () => { this[key] = input.checked; this.draw(); });
        return make("label", {}, input, key === "logX" ? " log x" : " log y");
      };
      this.logX ??= this.x ? spans(this.column(this.x)) : false;
      this.logY ??= this.y ? spans(this.column(this.y)) : false;
      if (!this.bar.contains(document.activeElement)) this.bar.replaceChildren(choice("Across", data.columns, this.x, set("x", "sx")), choice("Up", data.columns, this.y, set("y", "sy")),
        choice("Colour", [{name: ""}, ...data.columns], this.by, set("by", "sc")), log("logX"), log("logY"));
      this.draw();
    }

    column(name) { return this.data.columns.find((column) => column.name === name); }

    draw() {
      const width = Math.max(260, this.holder.clientWidth || 600), height = width < 500 ? 300 : 380;
      const [ctx, top] = this.layers.size(width, height);
      Object.assign(this, {topCtx: top, width, height});
      const x = this.column(this.x), y = this.column(this.y), by = this.by ? this.column(this.by) : null;
      this.points = [];
      if (!x || !y) { ctx.fillStyle = css("--dim"); ctx.fillText("The runs have no differing values yet.", 10, 30); return; }
      const L = 66, R = width - 20, T = 14, B = height - 44;
      const across = makeScale(x, L + 12, R - 12, this.logX), up = makeScale(y, B - 10, T + 10, this.logY);
      ctx.strokeStyle = css("--grid"); ctx.fillStyle = css("--dim"); ctx.lineWidth = 1;
      ctx.textAlign = "right"; ctx.textBaseline = "middle";
      for (const [at, words] of up.ticks) { ctx.beginPath(); ctx.moveTo(L, at); ctx.lineTo(R, at); ctx.stroke(); ctx.fillText(cut(words, 10), L - 6, at); }
      ctx.textAlign = "center"; ctx.textBaseline = "alphabetic";
      let used = -Infinity;
      for (const [at, words] of across.ticks) {
        ctx.beginPath(); ctx.moveTo(at, T); ctx.lineTo(at, B); ctx.stroke();
        const half = ctx.measureText(words).width / 2;
        if (at - half > used + 6) { ctx.fillText(words, at, B + 16); used = at + half; }
      }
      ctx.fillStyle = css("--fore"); ctx.font = "600 12px system-ui, sans-serif";
      ctx.textAlign = "right"; ctx.fillText(cut(this.x, 40), R, B + 34);
      ctx.textAlign = "left"; ctx.fillText(cut(this.y, 40), L + 4, T + 6);
      this.data.ids.forEach((_, index) => {
        const px = across.place(x.values[index]), py = up.place(y.values[index]);
        if (px !== null && py !== null) this.points.push({index, x: px, y: py});
      });
      const colours = coloursOf(this.data, by);
      ctx.strokeStyle = css("--card");
      for (const point of this.points) {
        const isIn = !this.chosen || this.chosen.has(point.index);
        ctx.globalAlpha = isIn ? 0.85 : 0.15;
        ctx.fillStyle = colours[point.index];
        ctx.beginPath(); ctx.arc(point.x, point.y, this.points.length > 400 ? 3.5 : 5.5, 0, 7); ctx.fill(); ctx.stroke();
      }
      ctx.globalAlpha = 1;
      const missing = this.data.ids.length - this.points.length;
      const range = by && !by.values.some((value) => typeof value === "string") ? by.values.filter(isKnown) : [];
      this.note.textContent = [`${this.points.length} runs`, missing ? `${missing} without one of the values${this.logX || this.logY ? ", or with 0 or less on a logarithmic axis" : ""}` : "",
        range.length ? `colour: ${this.by} from ${number(Math.min(...range))} (blue) to ${number(Math.max(...range))} (orange)` : ""].filter(Boolean).join(" \u00b7 ");
      this.layers.frame.setAttribute("aria-label", `Scatter plot: ${this.y} over ${this.x}, ${this.points.length} runs. Arrow keys go from run to run, Enter opens a run.`);
    }

    nearest(x, y) {
      let found = null, least = 18 ** 2;
      for (const point of this.points) {
        const away = (point.x - x) ** 2 + (point.y - y) ** 2;
        if (away < least) { least = away; found = point.index; }
      }
      return found;
    }

    order() { return [...this.points].sort((a, b) => a.x - b.x || a.y - b.y).map((point) => point.index); }
    words(index) {
      const names = [...new Set([this.x, this.y, this.by].filter(Boolean))];
      return [this.data.labels[index], ...names.map((name) => `${name} ${textOf(this.column(name).values[index])}`)];
    }
    open(index) { batchml.go(`/run/${encodeURIComponent(this.data.ids[index])}`); }

    light(index) {
      this.lit = index;
      const ctx = this.topCtx, point = this.points?.find((each) => each.index === index);
      if (!ctx) return;
      ctx.clearRect(0, 0, this.width, this.height);
      if (!point) { this.layers.tip.hidden = true; return; }
      ctx.strokeStyle = css("--fore"); ctx.lineWidth = 2;
      ctx.beginPath(); ctx.arc(point.x, point.y, 9, 0, 7); ctx.stroke();
      this.layers.showTip(point.x, point.y, this.words(index));
    }
  }

  // Both plots of an element's data. `options.selected` gets the indices in the ranges, or null for all.
  batchml.plots = (parallelPlace, scatterPlace, data, options) => {
    const shared = {selected: (chosen) => { if (made.scatter) { made.scatter.chosen = chosen; made.scatter.draw(); } options.selected?.(chosen); }, remember: options.remember};
    const made = {};
    made.scatter = new Scatter(scatterPlace, data, shared);
    made.parallel = new Parallel(parallelPlace, data, shared);
    made.take = (fresh) => { made.scatter.take(fresh); made.parallel.take(fresh); };
    const redraw = () => requestAnimationFrame(() => { made.parallel.select(); made.scatter.draw(); });
    document.addEventListener("theme", redraw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    let width = 0;
    new ResizeObserver(() => { if (parallelPlace.clientWidth !== width) { width = parallelPlace.clientWidth; redraw(); } }).observe(parallelPlace);
    return made;
  };
})();
