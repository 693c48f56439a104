"use strict";
// The page of the cluster: its panels follow the cluster, and have clock times of this browser.
batchml.views.cluster = () => {
  const {one, all, on, refresh} = batchml;
  const panels = all("[data-panel]"), strips = one("[data-pace]");
  const clock = new Intl.DateTimeFormat([], {hour: "2-digit", minute: "2-digit", hourCycle: "h23"});
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  const localize = () => {
    for (const text of all("[data-time]", strips)) text.textContent = clock.format(Number(text.dataset.time));
    for (const place of all("[data-zone]", strips)) place.textContent = zone;
  };

  // One question at a time for each panel; strips of a long time are large, so they are drawn rarely.
  const busy = new Set(), due = new Set();
  let drawn = performance.now();
  const renew = async (panel) => {
    if (busy.has(panel)) { due.add(panel); return; }
    busy.add(panel);
    if (panel === strips) drawn = performance.now();
    await refresh(panel);
    busy.delete(panel);
    if (due.delete(panel)) renew(panel);
  };
  const pace = 1000 * Number(strips.dataset.pace);
  let isOld = false; // whether something has happened that the strips do not show yet
  const renewStrips = () => {
    if (document.hidden || performance.now() - drawn < (isOld ? pace / 5 : pace)) return;
    isOld = false;
    renew(strips);
  };
  const update = () => {
    isOld = true;
    if (document.hidden) return;
    for (const panel of panels) if (panel !== strips) renew(panel);
    renewStrips();
  };
  for (const name of ["cluster", "runs", "open"]) on(name, update);
  document.addEventListener("visibilitychange", update);
  strips.addEventListener("refreshed", localize);
  setInterval(renewStrips, 250); // bars of running runs grow
  setInterval(() => { if (!document.hidden) for (const panel of panels) if (panel !== strips) renew(panel); }, 5000);
  localize();
};
