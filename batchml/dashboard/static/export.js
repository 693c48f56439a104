"use strict";
// A page of `--export`, after the other scripts: its questions are answered from the data beside it, its links lead to
// files, and its tables are searched and sorted here.
(() => {
  const {one, all, views} = batchml, {root = ""} = document.body.dataset;
  const answers = globalThis.batchmlAnswers || {}, {files = {}, runs = []} = globalThis.batchmlFiles || {};
  const known = new Map([...Object.entries(files), ...runs.map((id) => [`/run/${id}`, `run/${id}.html`])]);
  const asks = new Set(["/cost", "/cluster", "/compare"]); // other values of their parameters are other pages

  // As `ExportedPages.address` has it.
  batchml.address = (href) => {
    const [, whole, fragment] = /^([^#]*)(.*)$/s.exec(href), [path, query] = whole.split("?");
    let found = known.get(whole) || known.get(decodeURIComponent(path) === path || query ? "" : decodeURIComponent(path));
    if (!found && query && known.has(path) && !asks.has(path)) found = `${known.get(path)}?${query}`;
    return found ? `${root}${found}${fragment}` : "";
  };
  const localize = (link) => {
    const href = link.getAttribute("href");
    if (!href?.startsWith("/")) return;
    const to = batchml.address(href);
    if (to) link.setAttribute("href", to); else link.removeAttribute("href");
  };
  new MutationObserver((changes) => {
    for (const {addedNodes} of changes) for (const node of addedNodes) {
      if (node.nodeType !== 1) continue;
      if (node.localName === "a") localize(node);
      all("a[href^='/']", node).forEach(localize);
    }
  }).observe(document.body, {childList: true, subtree: true});

  window.fetch = async (address) => {
    const [path, query] = String(address).split("?"), asked = new URLSearchParams(query);
    const text = answers[address] ?? answers[path];
    if (text === undefined) throw new Error("This export does not have it; `batchml dashboard` does.");
    if (path.endsWith("/live") && asked.get("known")) {
      const {version} = JSON.parse(text);
      if (version === asked.get("known")) return new Response(JSON.stringify({version, over: true}));
    }
    if (path.endsWith("/log") && Number(asked.get("after"))) {
      const log = JSON.parse(text), first = Math.min(Number(asked.get("after")), log.total);
      return new Response(JSON.stringify({...log, first, lines: log.lines.slice(first)}));
    }
    return new Response(text);
  };

  // --- tables that the server would search and sort ---------------------------------------------------------------
  const search = (input, place, say) => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean), rows = all("tbody tr", place);
    const names = all("thead th", place).map((head) => head.textContent);
    const text = (cell, column) => `${cell.textContent} ${names[column]}=${cell.title || cell.textContent}`;
    for (const row of rows) {
      const found = [...row.children].map(text).join(" ").toLowerCase();
      row.hidden = !words.every((word) => found.includes(word));
    }
    say?.(rows.filter((row) => !row.hidden).length, rows.length);
  };
  const value = (row, column) => {
    const cell = row.children[column], text = cell.title || cell.textContent.trim(), number = Number(text.replace(/,/g, ""));
    return text === "-" || text === "" ? null : Number.isNaN(number) ? text : number;
  };
  const sort = (head) => {
    const column = [...head.parentElement.children].indexOf(head), body = one("tbody", head.closest("table"));
    const falls = head.getAttribute("aria-sort") === "ascending", sign = falls ? -1 : 1;
    const rows = [...body.children].map((row) => [value(row, column), row]);
    rows.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
      return a < b ? -sign : a > b ? sign : 0;
    });
    body.append(...rows.map(([, row]) => row));
    for (const each of head.parentElement.children) each.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", falls ? "descending" : "ascending");
  };
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a.sort");
    if (!link) return;
    event.preventDefault(); event.stopImmediatePropagation();
    sort(link.closest("th"));
  }, true);
  document.addEventListener("input", (event) => {
    if (event.target.id !== "trial-search") return;
    event.stopImmediatePropagation();
    search(event.target, one("#trials"));
  }, true);
  views.sweeps = () => {
    const input = one("#search"), place = one("#sweeps"), count = one("#count");
    const say = (found, total) => { const every = `${total} sweep${total === 1 ? "" : "s"}`; count.textContent = found === total ? every : `${found} of ${every}`; };
    one("form[role=search]").addEventListener("submit", (event) => event.preventDefault());
    input.addEventListener("input", () => search(input, place, say));
    search(input, place, say);
  };
})();
