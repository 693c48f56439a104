"use strict";
// The page of a sweep: its panels and plots follow the sweep; trials are searched, sorted and paged in place.
batchml.views.sweep = () => {
  const {one, all, parse, getJson, swap, refresh, trouble, on} = batchml;
  const path = batchml.path.replace(/\/$/, ""), plots = one("#plots"), kept = new Map();
  const slow = 2500; // ms between two drawings of the plots
  let version = "", over = false, timer = 0, asked = 0, seen = 0, drawn = 0, pressed = false, waiting = null;

  const draw = () => {
    if (!waiting) return;
    // A drawing in the user's hands stays as it is.
    const busy = pressed || one(".ranges", plots)?.contains(document.activeElement);
    const early = drawn && performance.now() - drawn < slow && !over;
    if (busy || early) return;
    const found = waiting, next = document.createElement("div");
    waiting = null;
    const draws = batchml.sweepPlots(found, next, kept);
    for (const name of ["pareto", "history", "curves", "parallel", "slices", "timeline", "cost"]) draws[name]();
    swap(one("#spending"), [one("#cost", next)]); // beside the failures
    swap(plots, next.childNodes);
    reach();
    drawn = performance.now();
  };
  // What scrolls sideways in a narrow window does so by keyboard, too.
  const reach = () => {
    for (const plot of all(".plots .plot")) {
      if (plot.scrollWidth <= plot.clientWidth) continue;
      plot.tabIndex = 0;
      plot.setAttribute("role", "group");
      plot.setAttribute("aria-label", one("h2", plot.parentElement).textContent);
    }
  };
  new ResizeObserver(reach).observe(plots);
  // A click on a point or a curve opens the run of its trial.
  let began = null;
  document.addEventListener("pointerdown", (event) => { began = [event.clientX, event.clientY]; });
  document.addEventListener("click", (event) => {
    const plot = event.target.closest?.(".plots svg[data-trial]");
    if (!plot || batchml.exported || event.target.closest(".brush") || !began) return;
    if (Math.hypot(event.clientX - began[0], event.clientY - began[1]) < 4) location.assign(`${path}/trial/${plot.dataset.trial}`);
  });
  plots.addEventListener("pointerdown", () => { pressed = true; });
  for (const name of ["pointerup", "pointercancel"]) document.addEventListener(name, () => { pressed = false; });

  const query = (whole) => {
    const found = new URLSearchParams(location.search);
    if (!whole && version) found.set("known", version);
    return found;
  };
  const read = async (whole = false) => {
    const mine = asked += 1;
    clearTimeout(timer);
    try {
      const found = await getJson(`${path}/live?${query(whole)}`);
      if (mine !== asked) return; // a later question is on its way
      if (found.panels) {
        for (const [name, html] of Object.entries(found.panels)) swap(one(`#${name}`), parse(html));
        waiting = found.document;
        // A page that was asked for before the sweep was read has its key for a name.
        const {name} = found.document.head;
        if (one("h1").textContent !== name) { one("h1").textContent = name; document.title = document.title.replace(/^.*: sweep/, () => `${name}: sweep`); }
        if (found.version !== version && version) all("[data-panel]").forEach(refresh);
      }
      version = found.version; over = found.over; seen = performance.now();
      trouble("", "sweep-trouble");
      for (const panel of all("[data-stale]")) panel.removeAttribute("data-stale");
      draw();
    } catch (error) {
      if (mine !== asked) return;
      // Old values stay, and say how old they are. Without an answer the frame says that the connection is lost.
      for (const panel of all(".card, .plots")) panel.dataset.stale = "";
      const age = seen ? ` What you see is ${Math.round((performance.now() - seen) / 1000)} s old.` : "";
      if (!(error instanceof TypeError)) trouble(error.message + age, "sweep-trouble");
    }
    // Times and costs of a running sweep change without an event.
    const again = !over && performance.now() - renewed > 5000;
    if (again) renewed = performance.now();
    timer = setTimeout(() => (document.hidden ? null : read(again)), over ? 5000 : 500);
  };
  let renewed = performance.now();
  document.addEventListener("visibilitychange", () => { if (!document.hidden) read(); });
  document.addEventListener("acted", () => read(true));
  on("open", () => read());

  // --- choosing trials: the links of the table, and its search ------------------------------------
  const choose = (search) => { history.replaceState(null, "", search || location.pathname); return read(true); };
  one("#trials").addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='?']");
    if (!link || event.metaKey || event.ctrlKey || event.shiftKey) return;
    event.preventDefault();
    choose(link.getAttribute("href").split("#")[0]);
  });
  const search = one("#trial-search");
  search.form.addEventListener("submit", (event) => event.preventDefault());
  search.addEventListener("input", () => {
    const found = new URLSearchParams(location.search);
    found.delete("page");
    if (search.value.trim()) found.set("q", search.value.trim()); else found.delete("q");
    clearTimeout(timer);
    timer = setTimeout(() => choose(String(found) ? `?${found}` : ""), 120);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !event.target.closest("input, textarea, select")) { event.preventDefault(); search.focus(); }
  });
  return read(true);
};
