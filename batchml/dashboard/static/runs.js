"use strict";
// The table of all runs: search as you type, sorting, chosen columns, rows that are drawn when they
// are in view. What is chosen is in the URL.
batchml.views.runs = async () => {
  const {exported, one, all, make, getJson, pause, on} = batchml;
  const region = one(".scroll"), table = one("#runs"), search = one("#search"), count = one("#count");
  if (!table) { on("runs", () => location.reload()); return; }
  const body = one("tbody", table), height = 27, beyond = 20;
  const address = new URLSearchParams(location.search);
  const glyphs = {waiting: "\u25cb", starting: "\u25d4", running: "\u25b6", succeeded: "\u2713", failed: "\u2715",
    cancelled: "\u2298", unknown: "?"};
  if (address.get("q")) search.value = address.get("q");
  const columns = () => encodeURIComponent(address.get("cols") || "");
  const load = async () => {
    for (;;) {
      try { return await getJson(`/api/runs?cols=${columns()}`); }
      catch (error) { count.textContent = error.message; await pause(3000); }
    }
  };
  let known = await load();
  let place = new Map(known.ids.map((id, index) => [id, index]));
  let order = [], first = -1, last = -1;

  const remember = () => { history.replaceState(null, "", `?${address}`.replace(/\?$/, "") || location.pathname); keep(); };
  // The links of other pages lead back to this view; and who goes back finds the row again.
  const keep = () => { if (!exported) sessionStorage.setItem("runs-view", location.search); };
  addEventListener("pagehide", () => { if (!exported) sessionStorage.setItem("runs-top", region.scrollTop); });
  const isBack = performance.getEntriesByType("navigation")[0]?.type === "back_forward";
  keep();
  const set = (name, value) => { if (value) address.set(name, value); else address.delete(name); remember(); };

  // --- choosing and sorting -------------------------------------------------------------------------
  const choose = () => {
    const words = batchml.searchWords(search.value);
    order = [];
    for (let i = 0; i < known.ids.length; i += 1) {
      if (words.every((word) => known.found[i].includes(word))) order.push(i);
    }
    const [name, direction] = (address.get("sort") || "").split(":");
    const column = known.columns.findIndex((each) => each.name === name);
    if (column < 0) order.sort((a, b) => known.created[b] - known.created[a]);
    else {
      const values = known.values[column], sign = direction === "desc" ? -1 : 1;
      order.sort((a, b) => compare(values[a], values[b], sign) || known.created[b] - known.created[a]);
    }
    for (const head of all("th", table)) head.removeAttribute("aria-sort");
    if (column >= 0) all("th", table)[column].setAttribute("aria-sort", direction === "desc" ? "descending" : "ascending");
    const total = known.ids.length;
    const every = `${total} run${total === 1 ? "" : "s"}`;
    count.textContent = order.length === total ? every : `${order.length} of ${every}`;
    const none = one("#no-match");
    none.hidden = order.length > 0;
    none.textContent = `No run has all of these words: ${search.value.trim()}`;
    table.setAttribute("aria-rowcount", order.length + 1);
    showActions();
    draw(true);
  };
  const compare = (a, b, sign) => {
    if (a === null || b === null) return (a === null) - (b === null); // runs without a value come last
    if (typeof a !== typeof b) return (typeof a === "string") - (typeof b === "string");
    return a < b ? -sign : a > b ? sign : 0;
  };

  // --- drawing the rows in view ------------------------------------------------------------------
  const spacer = (rows) => make("tr", {"aria-hidden": "true", class: "spacer"},
    make("td", {colspan: known.columns.length, class: "spacer"}));
  const draw = (always) => {
    const from = Math.max(0, Math.floor(region.scrollTop / height) - beyond);
    const to = Math.min(order.length, Math.ceil((region.scrollTop + region.clientHeight) / height) + beyond);
    if (!always && from >= first && to <= last && last - first < 400) return;
    first = Math.max(0, from - beyond); last = Math.min(order.length, to + beyond);
    const focused = document.activeElement?.closest?.("tbody tr")?.dataset.id;
    const above = spacer(), below = spacer();
    above.firstChild.style.height = `${first * height}px`;
    below.firstChild.style.height = `${(order.length - last) * height}px`;
    const rows = order.slice(first, last).map((index, offset) => drawRow(index, first + offset));
    body.replaceChildren(...(first ? [above] : []), ...rows, ...(last < order.length ? [below] : []));
    // A row that is out of view now leaves the focus to the table, from which Tab and the arrows go on.
    if (focused) (one(`tr[data-id="${CSS.escape(focused)}"] a`, body) || region).focus({preventScroll: true});
  };
  const drawRow = (index, position) => {
    const cells = known.columns.map((column, number) => {
      const text = known.texts[number][index];
      const cell = make("td", {class: column.number ? "number" : null, title: text || null});
      if (column.name === "name") cell.append(make("a", {href: `/run/${encodeURIComponent(known.ids[index])}`}, text));
      else if (column.name === "status") {
        const state = known.states[index];
        cell.append(make("span", {class: `state ${state}`}, make("span", {"aria-hidden": "true"}, glyphs[state]), ` ${text}`));
        const meaning = known.meanings?.[text];
        if (meaning) cell.title = `${text}: ${meaning}`;
      } else cell.textContent = text;
      return cell;
    });
    return make("tr", {"data-id": known.ids[index], "aria-rowindex": position + 2,
      class: selected.has(known.ids[index]) ? "on" : null}, ...cells);
  };

  // --- choosing runs to compare: click on a row, or Space on its name ------------------------------
  const selected = new Set(address.get("runs")?.split(",").filter(Boolean) || []);
  let actionsShown = null;
  const showActions = () => {
    const ids = [...selected];
    const query = address.get("q");
    const shown = [ids, query, order.length].join();
    if (shown === actionsShown) return; // a link in it may have the focus
    actionsShown = shown;
    if (!exported && !ids.length && query && order.length > 1 && order.length < known.ids.length) {
      one("#actions").replaceChildren(make("a", {href: `/compare?q=${encodeURIComponent(query)}`}, `Compare these ${order.length} runs`));
      return;
    }
    one("#actions").replaceChildren(...(ids.length ? [
      make("a", {href: `/compare?runs=${ids.map(encodeURIComponent).join(",")}`}, `Compare ${ids.length} runs`), " ",
    ] : []));
    if (ids.length) {
      const clear = make("button", {type: "button"}, "Clear");
      clear.addEventListener("click", () => { selected.clear(); set("runs", ""); showActions(); draw(true); });
      one("#actions").append(clear);
    }
  };
  const toggle = (id) => {
    if (exported) return; // it has the comparisons that were made with it
    if (!selected.delete(id)) selected.add(id);
    set("runs", [...selected].join(",")); showActions(); draw(true);
  };
  body.addEventListener("click", (event) => {
    const id = event.target.closest("tr")?.dataset.id;
    if (id && !event.target.closest("a")) toggle(id);
  });
  search.form.addEventListener("submit", (event) => event.preventDefault());
  // From the search to the rows, and from row to row.
  const step = (event, link) => {
    if (!link || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    link.focus();
  };
  search.addEventListener("keydown", (event) => { if (event.key === "ArrowDown" || event.key === "Enter") step(event, one("a", body)); });
  body.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr");
    if (event.key === "ArrowDown") step(event, row.nextElementSibling?.querySelector("a"));
    if (event.key === "ArrowUp") step(event, row.previousElementSibling ? row.previousElementSibling.querySelector("a") : search);
    if (event.key === " " && event.target.closest("a")) { event.preventDefault(); toggle(event.target.closest("tr").dataset.id); }
  });

  // --- live changes ------------------------------------------------------------------------------
  const take = (change) => {
    change.ids.forEach((id, from) => {
      let to = place.get(id);
      if (to === undefined) { to = known.ids.length; place.set(id, to); known.ids.push(id); }
      for (const key of ["states", "created", "ended", "found"]) known[key][to] = change[key][from];
      known.columns.forEach((_, number) => {
        known.texts[number][to] = change.texts[number][from];
        known.values[number][to] = change.values[number][from];
      });
    });
    known.revision = change.revision;
  };
  // One question at a time for what has changed since the revision that this tab has.
  let isReading = false, wanted = 0;
  const read = async ({revision}) => {
    wanted = revision;
    if (isReading) return;
    isReading = true;
    while (known.revision !== wanted) {
      try {
        const change = await getJson(`/api/changes?since=${known.revision}&cols=${columns()}`);
        if (change.whole) { known = change; place = new Map(known.ids.map((id, index) => [id, index])); }
        else take(change);
        if (change.revision > wanted) wanted = change.revision;
        choose();
      } catch { await pause(3000); } // the frame says that there is no connection
    }
    isReading = false;
  };
  on("runs", read);
  on("open", read);

  search.addEventListener("input", () => { set("q", search.value.trim()); region.scrollTop = 0; choose(); });
  region.addEventListener("scroll", () => draw(false), {passive: true});
  new ResizeObserver(() => draw(false)).observe(region);
  table.addEventListener("click", (event) => {
    const button = event.target.closest("button.sort");
    if (!button) return;
    const name = button.dataset.column, now = address.get("sort");
    set("sort", now === `${name}:asc` ? `${name}:desc` : now === `${name}:desc` ? "" : `${name}:asc`);
    choose();
  });
  one("#columns")?.addEventListener("change", () => {
    set("cols", all("#columns input:checked").map((box) => box.value).join(","));
    location.reload();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !event.target.closest("input,textarea,select")) { event.preventDefault(); search.focus(); }
  });
  showActions();
  if (search.value.trim()) set("q", search.value.trim()); // typed while the runs were loading
  choose();
  if (isBack && !exported) { region.scrollTop = Number(sessionStorage.getItem("runs-top")) || 0; draw(true); }
};
