"use strict";
// The page of costs: its panel is asked for again every minute, and soon after a run has ended.
batchml.views.cost = () => {
  const {one, on, refresh} = batchml;
  const panel = one("[data-panel]");
  let last = performance.now();
  const update = () => {
    if (document.hidden || performance.now() - last < 60000) return;
    last = performance.now();
    refresh(panel);
  };
  on("open", update);
  document.addEventListener("visibilitychange", update);
  setInterval(update, 5000);
};
