"use strict";
// The page of a run: panels that follow its state, and its log.
batchml.views.run = () => {
  const {one, all, make, getJson, on, refresh, ready, number} = batchml;
  const id = decodeURIComponent(location.pathname.split("/")[2]);
  const log = one("#log"), search = one("#log-search"), matches = one("#log-count"), following = one("#log-follow");
  let lines = [], match = -1, isReading = false, isOver = "over" in one("[data-series]").dataset, isFinal = false;

  const shown = (line) => (line[1] ? `${line[1]} | ${line[2]}` : line[2]);
  const draw = (from) => {
    if (!from) log.replaceChildren();
    const part = document.createDocumentFragment();
    for (const line of lines.slice(from)) part.append(make("span", {class: "line"}, `${shown(line)}\n`));
    log.append(part);
    if (following.checked) log.scrollTop = log.scrollHeight;
    ready();
  };
  const read = async () => {
    if (isReading) return;
    isReading = true;
    try {
      const answer = await getJson(`${log.dataset.lines}?after=${lines.length}`);
      const before = lines.length;
      lines = lines.concat(answer.lines);
      if (answer.lines.length) draw(before);
      if (search.value) find(false);
    } catch (error) { matches.textContent = error.message; }
    isReading = false;
  };
  const find = (move) => {
    const word = search.value.toLowerCase();
    all("#log mark").forEach((mark) => mark.replaceWith(mark.textContent));
    if (!word) { matches.textContent = ""; return; }
    const found = lines.flatMap((line, index) => (shown(line).toLowerCase().includes(word) ? [index] : []));
    matches.textContent = `${found.length} lines`;
    if (!move || !found.length) return;
    match = found.find((index) => index > match) ?? found[0];
    show(match);
  };
  const show = (index) => {
    following.checked = false;
    const line = log.children[index];
    const text = line.textContent;
    line.replaceChildren(make("mark", {}, text));
    log.scrollTop = line.offsetTop - log.offsetTop - log.clientHeight / 3;
  };
  search.addEventListener("input", () => { match = -1; find(true); });
  search.addEventListener("keydown", (event) => { if (event.key === "Enter") find(true); });
  one("#log-next").addEventListener("click", () => find(true));
  one("#log-error").addEventListener("click", () => {
    const index = lines.findIndex((line) => /\b(error|exception|traceback|fatal)\b/i.test(line[2])
      || /\b[A-Z]\w*(Error|Exception)\b/.test(line[2]));
    if (index >= 0) show(index); else matches.textContent = "no error";
  });

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
    read(); curves.read();
  });
  const wait = async () => {
    await read();
    if (!document.hidden && !isFinal) { const wasOver = isOver; isFinal = (await curves.read()) && wasOver; }
    if (!isOver && !document.hidden) for (const panel of all("[data-live][data-panel$=usage]")) refresh(panel);
    setTimeout(wait, isOver ? 15000 : 1000);
  };
  wait();
};
