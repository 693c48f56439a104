"use strict";
// The page that compares runs: its plots, and what changes while runs go on.
batchml.views.compare = () => {
  const {one, all, make, parse, getJson, on} = batchml;
  const values = one("#values");
  if (!values) return;
  let data = JSON.parse(values.dataset.document);
  const curves = batchml.curves(one("[data-series]"));
  const remember = (name, value) => curves.remember(name, value);

  // --- plots, and the table of their values, which shows the chosen runs -----------------------------
  let chosen = null;
  const show = () => {
    const ids = new Map(data.ids.map((id, index) => [id, index]));
    for (const row of all("tbody tr", values)) row.hidden = Boolean(chosen) && !chosen.has(ids.get(row.dataset.id));
    const link = one("#chosen");
    if (link) link.remove();
    if (!chosen || chosen.size < 2 || chosen.size === data.ids.length) return;
    const query = [...chosen].map((index) => encodeURIComponent(data.ids[index])).join(",");
    values.before(make("p", {id: "chosen"}, make("a", {href: `/compare?runs=${query}`}, `Compare only these ${chosen.size} runs`)));
  };
  const plots = batchml.plots(one("#parallel"), one("#scatter"), data, {remember, selected: (found) => { chosen = found; show(); }});

  // --- live ----------------------------------------------------------------------------------------
  const html = async (element) => {
    const answer = await fetch(element.dataset.source);
    if (answer.ok) element.replaceChildren(parse(await answer.text()));
  };
  const read = async () => {
    await Promise.all([html(one("#differences")), html(values)]);
    data = await getJson(values.dataset.source.replace("/compare/values", "/compare/document"));
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
  const wait = async () => {
    if (!document.hidden && !isFinal) { const wasOver = isOver; isFinal = (await curves.read()) && wasOver; }
    setTimeout(wait, 1000);
  };
  wait();
};
