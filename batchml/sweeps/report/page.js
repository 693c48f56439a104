// The page: its head, the best trial, the states of trials, the plots, a table.
function head() {
  const h = D.head, top = document.querySelector("header");
  const title = el("h1", "", top, h.name);
  el("span", "pill " + h.status.split(" ")[0], title, h.status);
  const about = el("div", "about", top);
  const goals = D.goals.map(g => `${g.direction} ${g.metric}`).join(", ");
  const words = [goals, `${h.method}${D.stop === "none" ? "" : " + " + D.stop}`, `job ${h.job}`, `env ${h.env}`, h.queue && `queue ${h.queue}`, h.commit && `commit ${h.commit.slice(0, 10)}`,
    h.began ? `${new Date(h.began * 1000).toISOString().slice(0, 16).replace("T", " ")}Z` : "", `took ${time(h.took)}`, `seed ${h.seed}`, h.key];
  for (const each of words.filter(Boolean)) el("span", "", about, each);
  if (h.why) el("div", "about", top, h.why[0].toUpperCase() + h.why.slice(1) + (/[.!?]$/.test(h.why) ? "" : "."));
  if (h.notices.length) { const list = el("ul", "notices", top); for (const n of h.notices) el("li", "", list, n); }
}

function best() {
  const b = D.best, c = card("best", "Best trial", "", "rest");
  if (b.n === undefined) return nothing(c, "No trial has a result yet.");
  const p = el("p", "big", c.plot);
  el("span", "best", p, b.values.map(number).join(" \u00b7 "));
  el("small", "", p, `  ${D.goals.map(g => g.metric).join(" \u00b7 ")}, trial ${b.n}${D.max ? `, ${D.step} ${b.step}` : ""}${b.state === "DONE" ? "" : ", " + b.state.toLowerCase()}`);
  const params = el("dl", "params", c.plot);
  for (const name in b.params) {
    const row = el("div", "", params);
    el("span", "", row, name);
    el("b", "", row, typeof b.params[name] === "number" ? number(b.params[name]) : String(b.params[name]));
  }
  if (b.command) el("pre", "command", c.plot, b.command);
  for (const again of b.confirmed) {
    const sure = again.runs > 1 ? ` \u00b1 ${number(again.deviation)}` : "";
    el("p", "note", c.plot, `Confirmed: trial ${again.n} has ${number(again.mean)}${sure} over ${plural(again.runs, "run")}.`).style.margin = "8px 0 0";
  }
}

function standing() {
  const c = card("standing", "Trials", "", "third");
  const p = el("p", "big", c.plot, count(D.head.trials) + " ");
  const ended = Object.entries(D.counts).filter(([s]) => !["WAITING", "RUNNING", "PAUSED"].includes(s)).reduce((sum, e) => sum + e[1], 0);
  el("small", "", p, ended === D.head.trials ? "all ended" : `${count(ended)} ended`);
  const parts = Object.entries(D.counts);
  bar(c.plot, parts.map(([s, n]) => [color(s), n]), D.head.trials);
  legend(c.plot, parts.map(([s, n]) => [s.toLowerCase(), color(s), count(n)]));
  for (const limit of D.limits) {
    const row = el("div", "meter", c.plot), full = limit.limit !== null && limit.used >= limit.limit;
    el("span", "", row, limit.name);
    bar(row, limit.limit === null ? [] : [[full && limit.name.startsWith("failed") ? color("FAILED") : color("DONE"), limit.used]], limit.limit);
    el("b", "", row, `${number(Number(limit.used.toPrecision(3)))}${limit.limit === null ? "" : " of " + number(limit.limit)}`);
  }
}

function table() {
  const c = card("trials", "The best trials", D.table.length < D.head.trials ? `The first ${D.table.length}; all are in the CSV file.` : "", "wide");
  if (!D.table.length) return nothing(c, "No trial has a result yet.");
  const node = el("table", "", el("div", "scroll", c.plot)), top = el("tr", "", node);
  const names = D.parameters.slice(0, 20);
  for (const words of ["trial", "state"]) el("th", "", top, words);
  for (const words of [...D.goals.map(g => g.metric), ...(D.max ? [D.step] : []), "ran", ...names]) el("th", "r", top, words);
  D.table.forEach((t, i) => {
    const row = el("tr", i ? "" : "first", node);
    el("td", "", row, t.n);
    el("td", "state", row, t.state).style.color = color(t.state);
    const cells = [...D.goals.map((g, k) => number(t.values[k])), ...(D.max ? [t.step] : []), time(t.ran), ...names.map(n => n in t.params ? String(typeof t.params[n] === "number" ? number(t.params[n]) : t.params[n]).slice(0, 60) : "")];
    for (const words of cells) el("td", "r", row, words);
  });
}

head(); best(); standing(); pareto(); history(); curves(); rungs(); importance(); parallel(); slices(); timeline(); failures(); cost(); table();
document.querySelector("footer").textContent = `Written by batchml, ${new Date(D.head.written * 1000).toISOString().slice(0, 19).replace("T", " ")}Z. Times count from the sweep's beginning.`;
document.body.dataset.drawn = "yes";
