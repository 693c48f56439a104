"use strict";
// The page of a run: panels that follow its state, and its log.
batchml.views.run = () => {
  const {path, one, all, on, refresh, number} = batchml;
  const id = decodeURIComponent(path.split("/")[2]);
  const log = batchml.log(one("#log"));
  let isOver = "over" in one("[data-series]").dataset, isFinal = false;

  // The curves, and with them the last values of the metrics.
  const curves = batchml.curves(one("[data-series]"), {take: (found) => {
    if (found.charts.length && !one("[data-metric]")) all("[data-panel$=metrics]").forEach(refresh);
    for (const chart of found.charts) {
      const cell = one(`[data-metric="${CSS.escape(chart.name)}"]`);
      if (cell && chart.lines.length === 1 && chart.lines[0].last !== null) { cell.textContent = number(chart.lines[0].last); cell.title = chart.lines[0].last; }
    }
  }});

  on("runs", (change) => {
    const index = change.ids.indexOf(id);
    if (index < 0) return;
    isOver = change.ended[index];
    for (const panel of all("[data-live]")) refresh(panel);
    log.read(); curves.read();
  });
  const wait = async () => {
    await log.read();
    if (!document.hidden && !isFinal) { const wasOver = isOver; isFinal = (await curves.read()) && wasOver; }
    if (!isOver && !document.hidden) for (const panel of all("[data-live][data-panel$=usage]")) refresh(panel);
    setTimeout(wait, isOver && log.isOver() ? 15000 : 1000);
  };
  wait();
};
