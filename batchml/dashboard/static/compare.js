"use strict";
// The page that compares runs: its plots, and what changes while runs go on.
batchml.views.compare = async () => {
  const {one, all, make, getJson, getHtml, pause, on, number} = batchml;
  const values = one("#values");
  if (!values) return;
  const address = values.dataset.source.replace("/compare/values", "/compare/document"), ROWS = 200;
  const written = values.dataset.document; // of many runs they are asked for
  const load = async () => {
    for (;;) {
      try { return await getJson(address); }
      catch (error) { batchml.trouble(error.message, "compare-trouble"); await pause(3000); }
    }
  };
  let data = written ? JSON.parse(written) : await load();
  batchml.trouble("", "compare-trouble");
  const curves = batchml.curves(one("[data-series]"));
  const remember = (name, value) => curves.remember(name, value);

  // --- plots, and the table of their values, which shows the chosen runs -----------------------------
  let chosen = null;
  const show = () => {
    const ids = new Map(data.ids.map((id, index) => [id, index]));
    if (data.ids.length > ROWS) drawRows();
    else for (const row of all("tbody tr", values)) row.hidden = Boolean(chosen) && !chosen.has(ids.get(row.dataset.id));
    const link = one("#chosen");
    if (link) link.remove();
    if (!chosen || chosen.size < 2 || chosen.size === data.ids.length) return;
    const query = [...chosen].map((index) => encodeURIComponent(data.ids[index])).join(",");
    values.before(make("p", {id: "chosen"}, make("a", {href: `/compare?runs=${query}`}, `Compare only these ${chosen.size} runs`)));
  };
  // Of many runs the table has the first of the chosen ones.
  const drawRows = () => {
    const found = data.ids.map((_, index) => index).filter((index) => !chosen || chosen.has(index));
    const text = (value) => (typeof value === "number" ? number(value) : value ?? "-");
    one("tbody", values).replaceChildren(...found.slice(0, ROWS).map((index) => make("tr", {"data-id": data.ids[index]},
      make("th", {scope: "row"}, make("a", {href: `/run/${encodeURIComponent(data.ids[index])}`}, data.labels[index])),
      make("td", {}, make("span", {class: `state ${data.states[index]}`}, data.states[index])),
      ...data.columns.map((column) => make("td", {class: column.kind === "metric" ? "number" : null}, text(column.values[index]))))));
    const left = one("#left"), more = found.length - ROWS;
    if (left) { left.hidden = more <= 0; left.textContent = `And ${more} more run${more === 1 ? "" : "s"}.`; }
  };
  const plots = batchml.plots(one("#parallel"), one("#scatter"), data, {remember, selected: (found) => { chosen = found; show(); }});

  // --- live ----------------------------------------------------------------------------------------
  const read = async () => {
    const places = [one("#differences"), values];
    try {
      const [fresh, ...contents] = await Promise.all([getJson(address), ...places.map((place) => getHtml(place.dataset.source))]);
      // All at once: the table shows the chosen runs at any time.
      contents.forEach((content, index) => { places[index].replaceChildren(content); places[index].removeAttribute("data-stale"); });
      data = fresh;
    } catch { for (const place of places) place.dataset.stale = ""; return; } // the panel of results says why, and is asked for again
    plots.take(data);
    show();
  };
  // The logs have been read: the values have the metrics now.
  one("#results").addEventListener("refreshed", () => read());
  const over = new Map();
  let isOver = "over" in one("[data-series]").dataset, isFinal = false;
  on("runs", (change) => {
    change.ids.forEach((id, index) => { if (data.ids.includes(id)) over.set(id, change.ended[index]); });
    if (!change.ids.some((id) => data.ids.includes(id))) return;
    isOver = data.ids.every((id, index) => over.get(id) ?? !["running", "starting", "waiting"].includes(data.states[index]));
    isFinal = false;
    batchml.refresh(one("#results"));
  });
  on("missed", () => { isFinal = false; batchml.refresh(one("#results")); });
  const wait = async () => {
    if (!document.hidden && !isFinal) { const wasOver = isOver; isFinal = (await curves.read()) && wasOver; }
    setTimeout(wait, 1000);
  };
  wait();
};
