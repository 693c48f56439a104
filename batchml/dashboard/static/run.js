"use strict";
// The page of a run: panels that follow its state, and its log.
batchml.views.run = () => {
  const {path, one, all, on, refresh, number} = batchml;
  const id = decodeURIComponent(path.split("/")[2]);
  const log = batchml.log(one("#log"));
  let isOver = "over" in one("#curves [data-series]").dataset, isFinal = false, isUseFinal = false;

  // The curves, and with them the last values of the metrics.
  const timeline = () => one("svg.spans"), bounds = () => { const {begin, end} = timeline()?.dataset || {}; return begin ? [begin / 1000, end / 1000] : null; };
  const curves = batchml.curves(one("#curves [data-series]"), {bounds,
    none: () => (isOver ? "No metrics. The program reports them, or [metrics] in job.toml finds them in its output, which `batchml adopt SCRIPT` writes for what a script prints." : ""), take: (found) => {
    if (found.charts.length && !one("[data-metric]")) all("[data-panel$=metrics]").forEach(refresh);
    for (const chart of found.charts) {
      const cell = one(`[data-metric="${CSS.escape(chart.name)}"]`);
      if (cell && chart.lines.length === 1 && chart.lines[0].last !== null) { cell.textContent = number(chart.lines[0].last); cell.title = chart.lines[0].last; }
    }
  }});

  const use = batchml.curves(one("#use [data-series]"), {bounds, axis: "clock",
    none: () => (isOver ? "It ended before its use was measured." : "Nothing was measured yet: a running container reports its use every few seconds.")});

  // The timeline has the cursor of the charts, and their zoom; and points in them.
  const part = (seconds) => { const [low, high] = bounds(); return Math.min(100, Math.max(0, 100 * (seconds - low) / (high - low))); };
  on("moment", ({moment}) => {
    const line = one("line.moment", timeline() || undefined);
    if (!line) return;
    line.setAttribute("visibility", moment === null ? "hidden" : "visible");
    if (moment !== null) for (const end of ["x1", "x2"]) line.setAttribute(end, `${part(moment)}%`);
  });
  let zoomed = null;
  const showZoom = () => {
    const box = one("rect.zoomed", timeline() || undefined);
    if (!box) return;
    box.setAttribute("x", zoomed ? `${part(zoomed[0])}%` : "0");
    box.setAttribute("width", zoomed ? `${Math.max(0.3, part(zoomed[1]) - part(zoomed[0]))}%` : "0");
  };
  on("zoom", ({range}) => { zoomed = range; showZoom(); });
  document.addEventListener("refreshed", (event) => { if (one("svg.spans", event.target)) showZoom(); });
  document.addEventListener("pointermove", (event) => {
    const svg = event.target.closest?.("svg.spans");
    if (!svg || !bounds()) return;
    const box = svg.getBoundingClientRect(), [low, high] = bounds();
    batchml.emit("moment", {moment: low + (high - low) * (event.clientX - box.left) / box.width, from: svg});
  });
  document.addEventListener("pointerout", (event) => { if (event.target.closest?.("svg.spans")) batchml.emit("moment", {moment: null, from: null}); });

  const read = () => {
    isFinal = isUseFinal = false;
    for (const panel of all("[data-live]")) refresh(panel);
    log.read(); curves.read();
  };
  on("runs", (change) => {
    const index = change.ids.indexOf(id);
    if (index < 0) return;
    isOver = change.ended[index];
    read();
  });
  on("missed", read);
  on("cluster", () => { if (one("[data-waits]")) for (const panel of all("[data-panel$=state]")) refresh(panel); });
  // Times, use and cost of a run grow without an event. Text that the user has selected stays.
  const PACES = [["state", 4], ["usage", 4], ["timeline", 12], ["cost", 20], ["explanation", 60]]; // rounds, of half a second each
  const renew = (name) => {
    const panel = one(`[data-live][data-panel$=${name}]`), chosen = getSelection();
    if (!(chosen.type === "Range" && panel?.contains(chosen.anchorNode))) refresh(panel);
  };
  let round = 0;
  const wait = async () => {
    round += 1;
    await log.read();
    if (!document.hidden && !isUseFinal && round % 4 === 1) { const wasOver = isOver; use.read().then((isRead) => { isUseFinal = isRead && wasOver; }); }
    if (!document.hidden && !isFinal) { const wasOver = isOver; isFinal = (await curves.read()) && wasOver; }
    if (!isOver && !document.hidden) for (const [name, pace] of PACES) if (round % pace === 0) renew(name);
    setTimeout(wait, isOver && log.isOver() && isFinal ? 15000 : 500);
  };
  wait();
};
