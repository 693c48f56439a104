"use strict";
// Curves of metrics, drawn by uPlot: zoom, smoothing, several runs over one another, by step or by time, a
// table beside each, and all of it by keyboard. `batchml.curves(place)` makes them in an element.
(() => {
  const {one, make, getJson, number} = batchml;
  const COLOURS = 8, HEIGHT = 230, ROWS = 50, GROUPS = 6;
  const DASHES = [[], [7, 4], [], [2, 3], [], [10, 3, 2, 3], [], [5, 2]];
  const AXES = {step: "Step", time: "Time since the start", clock: "Time of day"};
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const span = (seconds) => {
    const s = Math.round(Math.abs(seconds)), sign = seconds < 0 ? "-" : "", two = (x) => String(x).padStart(2, "0");
    if (s >= 86400) return `${sign}${Math.floor(s / 86400)} d ${Math.floor(s / 3600) % 24} h`;
    if (s >= 3600) return `${sign}${Math.floor(s / 3600)} h ${two(Math.floor(s / 60) % 60)}`;
    if (s >= 60) return `${sign}${Math.floor(s / 60)} min ${two(s % 60)}`;
    return `${Number(seconds.toPrecision(3))} s`;
  };
  // Local times as on the pages: 24 hours, and the date where it changes. `step`: seconds from one to the next.
  const clockTicks = (ticks, step) => {
    const two = (figure) => String(figure).padStart(2, "0");
    let before = "";
    return ticks.map((tick) => {
      const at = new Date(tick * 1000), day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
      const seconds = step < 60 ? `:${two(at.getSeconds())}${step < 1 ? `.${String(at.getMilliseconds()).padStart(3, "0")}` : ""}` : "";
      const time = `${two(at.getHours())}:${two(at.getMinutes())}${seconds}`, isNew = day !== before;
      before = day;
      return step >= 86400 ? day : isNew ? `${time}\n${day}` : time;
    });
  };
  const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], {hour12: false});
  const xText = (x, axis) => (axis === "step" ? number(x) : axis === "time" ? span(x) : clock(x));

  // The points of a line by ascending x; of several at one x the last.
  const pointsOf = (line, axis) => {
    const given = axis === "step" ? line.steps : axis === "time" ? line.times : line.times.map((t) => t + line.start);
    let ascends = true;
    for (let i = 1; i < given.length && ascends; i += 1) ascends = given[i] > given[i - 1];
    if (ascends) return [given, line.values];
    const last = new Map();
    given.forEach((x, i) => last.set(x, line.values[i]));
    const xs = [...last.keys()].sort((a, b) => a - b);
    return [xs, xs.map((x) => last.get(x))];
  };

  // An exponential moving average, corrected for its beginning at 0 (Kingma and Ba 2015, section 3).
  const smooth = (values, weight) => {
    let sum = 0, total = 0;
    return values.map((value) => {
      if (value === null || value === undefined) return value;
      sum = sum * weight + value * (1 - weight);
      total = total * weight + (1 - weight);
      return sum / total;
    });
  };

  class Chart {
    constructor(group, data) {
      this.group = group; this.name = data.name; this.data = data; this.isNear = false; this.page = 0;
      this.words = make("p", {class: "dim small"});
      this.plotPlace = make("div", {class: "plot"});
      this.tip = make("div", {class: "tip", hidden: true, "aria-hidden": "true"});
      this.spoken = make("p", {class: "unseen", role: "status"});
      this.table = make("div", {class: "within values", tabindex: "0", role: "region", "aria-label": `Values of ${data.name}`, hidden: true});
      const button = (words, label, action) => {
        const made = make("button", {type: "button", "aria-label": `${label}: ${data.name}`, title: label}, words);
        made.addEventListener("click", action);
        return made;
      };
      this.tableButton = button("Table", "Show as a table", () => this.toggleTable());
      this.tableButton.setAttribute("aria-expanded", "false");
      this.frame = make("div", {class: "frame", tabindex: "0", role: "group", "aria-roledescription": "chart", "aria-describedby": "curve-keys"},
        this.plotPlace, this.tip);
      this.element = make("figure", {class: "curve", "data-name": data.name},
        make("figcaption", {}, make("h3", {}, data.name), make("span", {class: "buttons"},
          button("+", "Zoom in", () => group.zoomBy(0.5, this)), button("\u2212", "Zoom out", () => group.zoomBy(2, this)),
          button("All", "Show all", () => group.zoom(null)), this.tableButton)),
        this.words, this.frame, this.spoken, this.table);
      this.frame.addEventListener("keydown", (event) => this.key(event));
      this.frame.addEventListener("blur", () => this.leave());
    }

    label(line) {
      const run = this.group.labels.get(line.run) || "";
      const child = line.child === null ? "" : `child ${line.child}`;
      return [run, child].filter(Boolean).join(", ") || this.name;
    }

    colour(line, index) {
      if (this.group.ids.length > 1) return this.group.colours.get(line.run) ?? null;
      return this.lines.length > COLOURS ? null : index; // one above many in grey
    }

    // --- what is drawn ---------------------------------------------------------------------------
    set(data) {
      const lines = data.lines.map((line) => line.run + line.child).join();
      const isOther = lines !== this.lineKey;
      this.lineKey = lines; this.data = data;
      if (isOther) this.fine = null;
      if (this.isNear) this.draw(isOther);
    }

    get isThinned() { return this.data.lines.some((line) => line.total > line.values.length) && (this.group.axis !== "step" || this.data.hasSteps); }

    // Finer points of a part, in which the chart is zoomed in.
    refine(data) {
      this.fine = data && data.lines.length ? data : null;
      if (this.isNear) this.draw(false);
    }

    draw(anew) {
      const {axis, weight, isLog, hidden} = this.group;
      this.lines = (this.fine || this.data).lines.filter((line) => !hidden.has(line.run));
      this.axis = axis === "step" && !this.data.hasSteps ? "step" : axis;
      let refused = 0, missing = 0;
      const tables = [];
      for (const line of this.lines) {
        let [xs, ys] = pointsOf(line, this.axis);
        missing += ys.reduce((sum, y) => sum + (y === null), 0);
        if (isLog) ys = ys.map((y) => { if (y !== null && y <= 0) { refused += 1; return null; } return y; });
        tables.push(weight ? [xs, smooth(ys, weight), ys] : [xs, ys]);
      }
      const columns = weight ? 2 : 1;
      let joined = tables.length > 1 ? uPlot.join(tables) : tables[0] || [[], []];
      if (!joined[0].length) joined = [[], ...joined.slice(1)];
      if (!this.fine) this.whole = [joined[0][0], joined[0][joined[0].length - 1]];
      this.x = joined[0]; this.columns = columns; this.joined = joined;
      this.describe(missing, refused);
      const key = [this.axis, weight > 0, isLog, this.lines.length, Boolean(this.fine), css("--card")].join();
      if (anew || !this.plot || key !== this.plotKey) { this.plotKey = key; this.build(); }
      else {
        const {left, top} = this.plot.cursor;
        this.plot.batch(() => { this.plot.setData(joined, false); this.rescale(); });
        if (left >= 0) this.plot.setCursor({left, top}, false);
      }
      if (!this.table.hidden) this.fillTable();
    }

    describe(missing, refused) {
      const {weight} = this.group, parts = [], line = this.lines[0];
      if (this.lines.length === 1 && line.last !== null && !this.fine) {
        parts.push(`last ${number(line.last)}`);
        const known = line.values.filter((v) => v !== null);
        if (this.data.direction) parts.push(`best ${number(known.reduce((a, b) => (this.data.direction === "max" ? Math.max(a, b) : Math.min(a, b))))}`);
      }
      const total = this.lines.reduce((sum, each) => sum + each.total, 0);
      const shown = this.lines.reduce((sum, each) => sum + each.values.length, 0);
      const where = this.fine ? " in this part" : "";
      parts.push(total > shown ? `${number(shown, true)} of ${number(total, true)} values${where}, extremes kept` : `${number(total, true)} values${where}`);
      if (weight) parts.push(`smoothed by ${weight} (exponential moving average), raw behind`);
      if (missing) parts.push(`${missing} not finite: marked below`);
      if (refused) parts.push(`${refused} of 0 or less, which a logarithmic axis cannot show`);
      if (this.data.leftOut) parts.push(`and ${this.data.leftOut} lines more, left out`);
      if (this.axis === "step" && !this.data.hasSteps) parts.push("no steps: values are numbered");
      this.words.textContent = parts.join(" \u00b7 ");
      this.frame.setAttribute("aria-label", `${this.name}, ${this.lines.length === 1 ? "one line" : `${this.lines.length} lines`}, ${parts.join(", ")}`);
    }

    build() {
      this.plot?.destroy();
      const {group, axis, columns} = this, many = this.lines.length > 1 && this.lines.some((line, index) => this.colour(line, index) === null);
      const fore = css("--dim"), grid = css("--grid"), grey = css("--edge");
      const series = [{}];
      this.strokes = this.lines.map((line, index) => {
        const place = this.colour(line, index);
        return place === null ? grey : css(`--c${place + 1}`);
      });
      this.lines.forEach((line, index) => {
        const place = this.colour(line, index), stroke = this.strokes[index];
        const dash = place !== null && this.lines.length > 1 ? DASHES[place] : [];
        const few = line.values.length <= 60;
        const width = many ? 1 : 1.75;
        series.push({label: this.label(line), width, dash, points: {show: few && columns === 1, size: 5},
          stroke: many ? (plot, at) => (this.focused === at ? css("--c1") : grey) : stroke});
        if (columns === 2) series.push({label: "", stroke, width: 1, alpha: 0.4, points: {show: false}});
      });
      const text = "11px system-ui, sans-serif";
      const common = {stroke: fore, font: text, grid: {stroke: grid, width: 1}, ticks: {show: false}};
      const isTime = axis === "clock";
      const incrs = axis === "time" ? {incrs: [0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 604800]} : {};
      const values = axis === "time" ? {values: (plot, ticks) => ticks.map((v) => (v === 0 ? "0" : span(v)))} : axis === "step"
        ? {values: (plot, ticks) => ticks.map((v) => number(v))} : {values: (plot, ticks, index, space, step) => clockTicks(ticks, step)};
      const opts = {
        width: this.width(), height: HEIGHT, legend: {show: false}, focus: {alpha: many ? 0.5 : 0.3},
        padding: [10, this.endWidth(), 0, 0],
        scales: {x: {time: isTime, auto: false, range: (plot, low, high) => (low === high ? [low - 0.5, high + 0.5] : [low, high])},
          y: {distr: group.isLog ? 3 : 1}},
        axes: [{...common, ...incrs, ...values, space: 70, size: 30}, {...common, size: 58, values: (plot, ticks) => ticks.map((v) => (v === null ? "" : number(v)))}],
        series,
        cursor: {
          sync: {key: group.key, setSeries: false, scales: ["x", null]}, drag: {x: true, y: false, setScale: false, dist: 6},
          focus: {prox: this.lines.length > 1 ? 24 : -1}, y: false,
          points: {size: 7},
        },
        hooks: {
          setCursor: [() => this.point()],
          setSelect: [(plot) => {
            if (plot.select.width < 4) return;
            const low = plot.posToVal(plot.select.left, "x"), high = plot.posToVal(plot.select.left + plot.select.width, "x");
            plot.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
            group.zoom([low, high]);
          }],
          setSeries: [(plot, at) => { this.pointedAt = at; this.element.classList.toggle("pointed", Boolean(this.pointed())); if (at !== this.focused) { this.focused = at; if (many) plot.redraw(false); } }],
          draw: [(plot) => this.mark(plot)],
        },
      };
      this.plotPlace.replaceChildren();
      this.plot = new uPlot(opts, this.joined, this.plotPlace);
      this.plot.over.addEventListener("dblclick", () => group.zoom(null));
      this.plot.over.addEventListener("mouseleave", () => { this.tip.hidden = true; this.group.point(null); });
      // A click on a line opens its run; a drag zooms.
      let began = null;
      this.plot.over.addEventListener("mousedown", (event) => { began = [event.clientX, event.clientY]; });
      this.plot.over.addEventListener("click", (event) => {
        const line = this.pointed();
        if (line && began && Math.hypot(event.clientX - began[0], event.clientY - began[1]) < 4) batchml.go(this.address(line));
      });
      this.rescale();
    }

    // The line near the pointer, if it leads to another page than this one.
    pointed() {
      const line = this.pointedAt ? this.lines[Math.floor((this.pointedAt - 1) / this.columns)] : null;
      return line && this.lines.length > 1 && location.pathname !== this.address(line) ? line : null;
    }

    address(line) { return `/run/${encodeURIComponent(line.run)}${line.child === null ? "" : `:${line.child}`}`; }

    width() { return Math.max(200, Math.floor(this.frame.clientWidth) || 300); }

    endWidth() {
      if (this.lines.length < 2 || this.lines.length > COLOURS || this.width() < 340) return 14;
      const longest = Math.max(...this.lines.map((line) => this.label(line).length));
      return Math.min(Math.max(40, longest * 7 + 16), this.width() > 700 ? 180 : 110);
    }

    rescale() {
      const [low, high] = this.group.range || this.extent();
      if (low === undefined) return;
      this.plot.setScale("x", {min: low, max: high});
    }

    // All of the axis. By the time of day it is the axis that the page's charts and its timeline share.
    extent() {
      const [low, high] = this.whole, shared = this.axis === "clock" ? this.group.options.bounds?.() : null;
      return shared && low !== undefined ? [Math.min(low, shared[0]), Math.max(high, shared[1])] : [low, high];
    }

    // Beside and below the lines: names at their ends, attempts, values that are not finite.
    mark(plot) {
      const {ctx, bbox} = plot, ratio = uPlot.pxRatio || devicePixelRatio || 1;
      ctx.save();
      ctx.font = `${11 * ratio}px system-ui, sans-serif`;
      ctx.textBaseline = "middle";
      const inside = (x) => x >= bbox.left && x <= bbox.left + bbox.width;
      if (this.axis === "step") {
        ctx.strokeStyle = css("--edge"); ctx.lineWidth = ratio; ctx.setLineDash([2 * ratio, 3 * ratio]);
        for (const line of this.lines.length > COLOURS ? [] : this.lines) for (const step of line.breaks) {
          const x = plot.valToPos(step, "x", true);
          if (!inside(x)) continue;
          ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
        }
        ctx.setLineDash([]);
      }
      const ends = [];
      this.lines.forEach((line, index) => {
        const ys = this.joined[1 + index * this.columns], raw = this.joined[(index + 1) * this.columns];
        ctx.fillStyle = this.strokes[index];
        ctx.textAlign = "center";
        ctx.font = `bold ${14 * ratio}px system-ui, sans-serif`;
        for (let i = 0; i < raw.length; i += 1) {
          if (raw[i] !== null) continue;
          const x = plot.valToPos(this.x[i], "x", true);
          if (inside(x)) ctx.fillText("\u00d7", x, bbox.top + bbox.height - 6 * ratio);
        }
        let last = ys.length - 1;
        while (last >= 0 && (ys[last] === null || ys[last] === undefined || this.x[last] > plot.scales.x.max)) last -= 1;
        if (last >= 0) ends.push({index, y: plot.valToPos(ys[last], "y", true), words: this.label(line)});
      });
      ctx.font = `${11 * ratio}px system-ui, sans-serif`;
      if (this.endWidth() > 20) {
        ends.sort((a, b) => a.y - b.y);
        const gap = 13 * ratio, bottom = bbox.top + bbox.height;
        ends.forEach((end, i) => { end.y = Math.max(end.y, bbox.top + 4 * ratio, i ? ends[i - 1].y + gap : 0); });
        for (let i = ends.length - 1, most = bottom; i >= 0; i -= 1, most -= gap) ends[i].y = Math.min(ends[i].y, most);
        ctx.textAlign = "left";
        for (const end of ends) {
          ctx.fillStyle = this.strokes[end.index];
          let words = end.words;
          const room = (this.endWidth() - 8) * ratio;
          while (words.length > 2 && ctx.measureText(words).width > room) words = `${words.slice(0, -2)}\u2026`;
          ctx.fillText(words, bbox.left + bbox.width + 6 * ratio, end.y);
        }
      }
      ctx.restore();
    }

    // --- pointing at values -----------------------------------------------------------------------
    rowsAt(index) {
      const plot = this.plot, rows = [];
      this.lines.forEach((line, at) => {
        const place = plot.cursor.idxs?.[1 + at * this.columns] ?? index;
        const value = this.joined[1 + at * this.columns]?.[place];
        if (value === undefined || place === null) return;
        rows.push({at, value, raw: this.columns === 2 ? this.joined[2 + at * 2][place] : undefined, x: this.x[place], label: this.label(line)});
      });
      return rows;
    }

    point() {
      const {left, idx} = this.plot.cursor;
      const isHere = this.plot.cursor.event?.type !== undefined && this.plot.over.matches(":hover") || this.isByKey;
      if (left === undefined || left < 0 || idx === null || idx === undefined || !isHere) { this.tip.hidden = true; return; }
      this.group.point(this.momentAt(idx));
      let rows = this.rowsAt(idx);
      const only = this.lines.length > COLOURS && this.focused ? Math.floor((this.focused - 1) / this.columns) : null;
      if (only !== null) rows = rows.filter((row) => row.at === only);
      else if (this.lines.length > COLOURS) rows = [];
      const text = (row) => `${row.value === null ? "not finite" : number(row.value)}${row.raw !== undefined && row.raw !== null ? ` (raw ${number(row.raw)})` : ""}`;
      this.tip.replaceChildren(make("div", {}, `${this.axis === "step" ? "step " : ""}${xText(this.x[idx], this.axis)}`), ...rows.map((row) => {
        const swatch = make("span", {class: "swatch"});
        swatch.style.background = this.strokes[row.at];
        return make("div", {}, swatch, `${this.lines.length > 1 ? `${row.label}: ` : ""}${text(row)}`);
      }));
      this.tip.hidden = !rows.length && only === null && this.lines.length <= COLOURS;
      const width = this.frame.clientWidth, x = left + 66;
      this.tip.style.left = x > width / 2 ? "auto" : `${x + 8}px`;
      this.tip.style.right = x > width / 2 ? `${width - x + 8}px` : "auto";
      if (this.isByKey) {
        clearTimeout(this.saying);
        const words = `${AXES[this.axis]} ${xText(this.x[idx], this.axis)}: ${rows.slice(0, 4).map((row) => `${this.lines.length > 1 ? `${row.label} ` : ""}${text(row)}`).join(", ")}`;
        this.saying = setTimeout(() => { this.spoken.textContent = words; }, 250);
      }
    }

    // The time of a place, in seconds since the epoch; and the place of a time.
    momentAt(index) {
      const x = this.x[index];
      if (this.axis === "clock") return x;
      for (const line of this.lines) {
        if (this.axis === "time") return x + line.start;
        const at = line.steps.indexOf(x);
        if (at >= 0) return line.times[at] + line.start;
      }
      return null;
    }

    show(moment) {
      if (!this.plot || !this.lines.length || this.plot.over.matches(":hover")) return;
      const line = this.lines[0];
      let x = this.axis === "clock" ? moment : moment - line.start;
      if (this.axis === "step" && moment !== null) {
        let at = line.times.findIndex((time) => time >= x);
        if (at < 0) at = line.times.length - 1;
        x = line.steps[at];
      }
      const left = moment === null ? -10 : this.plot.valToPos(x, "x");
      this.plot.setCursor({left, top: moment === null ? -10 : 5}, false, false);
    }

    leave() { this.isByKey = false; this.tip.hidden = true; this.group.point(null); this.plot?.setCursor({left: -10, top: -10}); }

    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target !== this.frame || !this.plot) return;
      const count = this.x.length, page = Math.max(1, Math.round(count / 10));
      const now = this.at === undefined ? -1 : this.at;
      const moves = {ArrowRight: now + 1, ArrowLeft: now < 0 ? count - 1 : now - 1, PageDown: now + page, PageUp: now - page, Home: 0, End: count - 1};
      if (Object.hasOwn(moves, event.key)) this.moveTo(Math.min(count - 1, Math.max(0, moves[event.key])));
      else if (event.key === "+" || event.key === "=") this.group.zoomBy(0.5, this);
      else if (event.key === "-") this.group.zoomBy(2, this);
      else if (event.key === "0") this.group.zoom(null);
      else if (event.key === "Escape") this.leave();
      else return;
      event.preventDefault();
    }

    moveTo(index) {
      this.at = index; this.isByKey = true;
      const plot = this.plot, x = this.x[index], range = this.group.range;
      if (range && (x < range[0] || x > range[1])) {
        const wide = range[1] - range[0];
        this.group.zoom([x - wide / 2, x + wide / 2]);
      }
      const value = this.joined.slice(1).map((ys) => ys[index]).find((y) => y !== null && y !== undefined);
      plot.setCursor({left: plot.valToPos(x, "x"), top: value === undefined ? 10 : plot.valToPos(value, "y")});
    }

    // --- the same as a table ----------------------------------------------------------------------
    toggleTable() {
      this.table.hidden = !this.table.hidden;
      this.tableButton.setAttribute("aria-expanded", String(!this.table.hidden));
      this.page = 0;
      if (this.table.hidden) return;
      if (!this.plot) { this.isNear = true; this.draw(true); } else this.fillTable();
    }

    fillTable() {
      const count = this.x.length, pages = Math.max(1, Math.ceil(count / ROWS));
      this.page = Math.min(this.page, pages - 1);
      const from = this.page * ROWS, to = Math.min(count, from + ROWS);
      const cell = (value) => make("td", {class: "number", title: value}, value === null ? "not finite" : value === undefined ? "" : number(value));
      const rows = [];
      for (let i = from; i < to; i += 1) {
        rows.push(make("tr", {}, make("th", {scope: "row"}, xText(this.x[i], this.axis)), ...this.lines.map((_, at) => cell(this.joined[(at + 1) * this.columns][i]))));
      }
      const move = (words, by, can) => {
        const button = make("button", {type: "button", disabled: !can}, words);
        button.addEventListener("click", () => { this.page += by; this.fillTable(); });
        return button;
      };
      this.table.replaceChildren(
        make("table", {}, make("caption", {class: "unseen"}, `Values of ${this.name}`),
          make("thead", {}, make("tr", {}, make("th", {scope: "col"}, AXES[this.axis]), ...this.lines.map((line) => make("th", {scope: "col", class: "number"}, this.label(line))))),
          make("tbody", {}, ...rows)),
        ...(pages > 1 ? [make("div", {class: "bar"}, move("Earlier", -1, this.page > 0), make("span", {}, `${from + 1} to ${to} of ${count}`), move("Later", 1, this.page < pages - 1))] : []));
    }
  }

  // All charts of a page: they share the axis, the zoom, the smoothing and the colours of runs.
  class Curves {
    constructor(place, options) {
      this.place = place; this.options = options; this.charts = new Map(); this.ids = []; this.labels = new Map(); this.hidden = new Set();
      this.key = `curves-${Math.random()}`; this.range = null; this.colours = new Map();
      const address = new URLSearchParams(location.search);
      this.axis = options.axis || (Object.hasOwn(AXES, address.get("x")) ? address.get("x") : "step");
      this.weight = Math.min(0.99, Math.max(0, Number(address.get("smooth")) || 0));
      this.isLog = address.get("log") === "1";
      this.grid = make("div", {class: "charts"});
      this.note = make("p", {class: "dim", role: "status"}, "Loading ...");
      const axis = make("select", {"aria-label": "Horizontal axis"}, ...Object.entries(AXES).map(([name, words]) => make("option", {value: name, selected: name === this.axis}, words)));
      const weight = make("input", {type: "range", min: "0", max: "0.99", step: "0.01", value: this.weight, "aria-label": "Smoothing"});
      const shown = make("output", {}, this.weight ? String(this.weight) : "off");
      const log = make("input", {type: "checkbox", checked: this.isLog});
      this.filter = make("input", {type: "search", placeholder: "Metric", "aria-label": "Show metrics with this text", hidden: true});
      this.bar = make("div", {class: "bar", hidden: true}, make("label", {}, "Axis ", axis), make("label", {}, "Smoothing ", weight, " ", shown),
        make("label", {}, log, " Logarithmic"), this.filter);
      this.legend = make("div", {class: "legend", role: "group", "aria-label": "Runs"});
      const keys = make("p", {class: "unseen", id: "curve-keys"}, "Arrow keys go from value to value, Page Up and Page Down by a tenth, Home and End to the ends. Plus and minus zoom, 0 shows all.");
      place.replaceChildren(...(options.axis ? [] : [this.bar]), this.legend, this.note, this.grid, ...(one("#curve-keys") ? [] : [keys]));
      batchml.on("moment", ({moment, from}) => { if (from !== this) for (const chart of this.charts.values()) chart.show(moment); });
      batchml.on("zoom", ({range, from}) => { if (from !== this && this.axis === "clock" && this.range !== range) this.zoom(range, true); });
      axis.addEventListener("change", () => { this.axis = axis.value; this.zoom(null); this.remember("x", axis.value === "step" ? "" : axis.value); this.draw(); });
      weight.addEventListener("input", () => {
        this.weight = Number(weight.value); shown.textContent = this.weight ? String(this.weight) : "off";
        this.remember("smooth", this.weight || ""); this.drawSoon();
      });
      log.addEventListener("change", () => { this.isLog = log.checked; this.remember("log", log.checked ? "1" : ""); this.draw(); });
      this.filter.addEventListener("input", () => this.choose());
      this.near = new IntersectionObserver((entries) => {
        for (const entry of entries) {
          const chart = this.charts.get(entry.target.dataset.name);
          if (chart && entry.isIntersecting && !chart.isNear) { chart.isNear = true; chart.draw(true); }
        }
      }, {rootMargin: "300px"});
      this.sizes = new ResizeObserver(() => this.resizeSoon());
      this.sizes.observe(this.grid);
      document.addEventListener("theme", () => this.recolour());
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.recolour());
    }

    remember(name, value) {
      const address = new URLSearchParams(location.search);
      if (value) address.set(name, value); else address.delete(name);
      history.replaceState(null, "", `${location.pathname}${address.size ? `?${address}` : ""}${location.hash}`);
    }

    update(found) {
      this.ids = found.runs.map((run) => run.id);
      this.labels = new Map(found.runs.map((run) => [run.id, found.runs.length > 1 ? run.label : ""]));
      this.colours = new Map(found.runs.map((run) => [run.id, run.colour]));
      this.note.textContent = found.charts.length ? "" : this.options.none?.() || "No metrics yet. The program reports them, or [metrics] in job.toml finds them in its output, which `batchml adopt SCRIPT` writes for what a script prints.";
      this.note.hidden = Boolean(found.charts.length);
      this.bar.hidden = !found.charts.length;
      this.filter.hidden = found.charts.length <= GROUPS;
      const names = new Set(found.charts.map((chart) => chart.name));
      for (const [name, chart] of this.charts) if (!names.has(name)) { chart.element.remove(); this.charts.delete(name); }
      for (const data of found.charts) {
        const known = this.charts.get(data.name);
        if (known) { known.set(data); continue; }
        const chart = new Chart(this, data);
        chart.set(data);
        this.charts.set(data.name, chart);
        this.grid.append(chart.element);
        this.near.observe(chart.element);
      }
      this.choose();
      this.drawLegend(found.runs);
    }

    drawLegend(runs) {
      if (runs.length < 2) { this.legend.replaceChildren(); return; }
      const text = runs.map((run) => run.id + run.label).join();
      if (text === this.legendText) return;
      this.legendText = text;
      this.legend.replaceChildren(...runs.map((run) => {
        const swatch = make("span", {class: `swatch${run.colour === null ? "" : ` c${run.colour + 1}`}`, "aria-hidden": "true"});
        const box = make("input", {type: "checkbox", checked: !this.hidden.has(run.id), "aria-label": `Show ${run.label}`});
        box.addEventListener("change", () => { if (box.checked) this.hidden.delete(run.id); else this.hidden.add(run.id); this.draw(); });
        return make("span", {title: run.id}, make("label", {}, box, swatch), make("a", {href: `/run/${encodeURIComponent(run.id)}`}, run.label));
      }));
    }

    choose() {
      const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const [name, chart] of this.charts) chart.element.hidden = !words.every((word) => name.toLowerCase().includes(word));
    }

    draw(anew = false) { for (const chart of this.charts.values()) if (chart.isNear) chart.draw(anew); }
    drawSoon() { this.frame ??= requestAnimationFrame(() => { this.frame = null; this.draw(); }); }
    recolour() { requestAnimationFrame(() => this.draw(true)); }
    resizeSoon() {
      this.sizing ??= requestAnimationFrame(() => {
        this.sizing = null;
        for (const chart of this.charts.values()) {
          if (chart.plot && chart.plot.width !== chart.width()) chart.plot.setSize({width: chart.width(), height: HEIGHT});
        }
      });
    }

    zoom(range, isTold = false) {
      this.range = range;
      if (!range) for (const chart of this.charts.values()) if (chart.fine) chart.refine(null);
      for (const chart of this.charts.values()) if (chart.plot) chart.rescale();
      if (!isTold) batchml.emit("zoom", {range: this.axis === "clock" ? range : null, from: this});
      clearTimeout(this.refining);
      if (range) this.refining = setTimeout(() => this.refine(), 200);
    }

    // Ask for finer points of the part that is shown, if there are any.
    async refine() {
      const {series, document: written} = this.place.dataset, range = this.range;
      if (written || batchml.exported || !range || ![...this.charts.values()].some((chart) => chart.isThinned)) return;
      const query = new URLSearchParams({x: this.axis, from: range[0], to: range[1]});
      try {
        const found = await getJson(`${series}${series.includes("?") ? "&" : "?"}${query}`);
        if (this.range !== range) return; // zoomed again meanwhile
        for (const data of found.charts) { const chart = this.charts.get(data.name); if (chart?.isThinned) chart.refine(data); }
      } catch (error) { this.note.hidden = false; this.note.textContent = error.message; }
    }

    // All charts of the page and its timeline show the time that is pointed at in one of them.
    point(moment) {
      if (moment === this.moment) return;
      this.moment = moment;
      batchml.emit("moment", {moment, from: this});
    }

    zoomBy(factor, chart) {
      const {x, plot} = chart;
      if (!x.length || !plot) return;
      const all = chart.extent(), [low, high] = this.range || all;
      const at = chart.isByKey && x[chart.at] >= low && x[chart.at] <= high ? x[chart.at] : (low + high) / 2;
      const from = at - (at - low) * factor, to = at + (high - at) * factor;
      if (from <= all[0] && to >= all[1]) this.zoom(null);
      else if (to > from) this.zoom([from, to]);
    }

    // Ask again, but for a log that takes long to read less often. Returns whether there was an answer.
    async read() {
      if (this.isReading || performance.now() < (this.next || 0)) return false;
      let isRead = false;
      this.isReading = true;
      const began = performance.now();
      try {
        const {document: written, series} = this.place.dataset; // a page without a server has its curves
        const answer = written ? JSON.parse(written) : await getJson(series);
        this.update(answer);
        this.options.take?.(answer);
        this.place.removeAttribute("data-stale");
        isRead = !answer.partial;
        if (answer.partial) { this.note.hidden = false; this.note.textContent = "The log is still being read ..."; }
      } catch (error) {
        this.place.dataset.stale = "";
        this.note.hidden = false;
        this.note.textContent = error.message;
      }
      this.next = performance.now() + 4 * (performance.now() - began);
      this.isReading = false;
      return isRead;
    }
  }

  batchml.curves = (place, options = {}) => new Curves(place, options);
})();
