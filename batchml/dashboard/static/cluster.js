"use strict";
// The page of the cluster: its panel follows the cluster, and has clock times of this browser.
batchml.views.cluster = () => {
  const {one, all, on, refresh} = batchml;
  const panel = one("[data-panel]");
  const clock = new Intl.DateTimeFormat([], {hour: "2-digit", minute: "2-digit", hourCycle: "h23"});
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  const localize = () => {
    for (const text of all("[data-time]", panel)) text.textContent = clock.format(Number(text.dataset.time));
    for (const place of all("[data-zone]", panel)) place.textContent = zone;
  };

  let isBusy = false, isDue = false;
  const update = async () => {
    if (document.hidden) return;
    if (isBusy) { isDue = true; return; }
    isBusy = true;
    await refresh(panel);
    isBusy = false;
    if (isDue) { isDue = false; update(); }
  };
  for (const name of ["cluster", "runs", "reload", "open"]) on(name, update);
  document.addEventListener("visibilitychange", update);
  panel.addEventListener("refreshed", localize);
  setInterval(update, 5000); // bars of running runs grow
  localize();
};
