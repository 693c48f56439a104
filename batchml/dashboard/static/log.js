"use strict";
// The log of a run: lines are data, of which only those in view are elements. A line has the same
// height as another one, or, wrapped, as many times it as it has rows of characters.
batchml.log = (place) => {
  const {one, make, getJson, ready} = batchml;
  const most = 100000, margin = 30;
  const search = one("#log-search"), count = one("#log-count"), notice = one("#log-notice");
  const level = one("#log-level"), part = one("#log-part"), wrap = one("#log-wrap"), following = one("#log-follow");
  let lines = [], levels = [], first = 0, origin = "", isOver = false, isReading = false;
  let shown = [], tops = [0], matches = [], match = -1, marked = null; // `shown`: indices of lines; tops: rows above each
  place.replaceChildren(make("p", {class: "dim"}, "Loading ..."));
  let height = 19, columns = 80, from = -1, to = -1;

  const words = (line) => (line[1] ? `${line[1]} | ${line[2]}` : line[2]);
  const isError = /\b(error|exception|traceback|fatal|critical)\b/i, isRaised = /\b[A-Z]\w*(Error|Exception)\b/, isWarning = /\bwarn(ing)?\b/i;
  const levelOf = (text) => (isRaised.test(text) || isError.test(text) ? 2 : isWarning.test(text) ? 1 : 0);

  // --- which lines are shown, and where --------------------------------------------------------------
  const rows = (index) => (wrap.checked ? Math.max(1, Math.ceil(words(lines[index]).length / columns)) : 1);
  const choose = (start = 0) => { // from a line on: new lines only follow the others
    if (!start) { shown = []; tops = [0]; matches = []; }
    const wanted = {error: 2, warning: 1}[level.value] || 0, of = part.value, word = search.value.toLowerCase();
    for (let i = start; i < lines.length; i += 1) {
      if (levels[i] < wanted || (of && lines[i][1].split("/")[0] !== of)) continue;
      if (word && words(lines[i]).toLowerCase().includes(word)) matches.push(shown.length);
      shown.push(i);
      tops.push(tops[tops.length - 1] + rows(i));
    }
    describe();
  };
  const describe = () => {
    const figure = (number) => number.toLocaleString("en");
    const all = `${figure(first + lines.length)} line${first + lines.length === 1 ? "" : "s"}${first ? `, the first ${figure(first)} only in the download` : ""}`;
    count.textContent = search.value ? `${match >= 0 ? `${figure(match + 1)} of ` : ""}${figure(matches.length)} line${matches.length === 1 ? " matches" : "s match"}`
      : shown.length < lines.length ? `${figure(shown.length)} of ${all}` : lines.length ? all : "";
  };
  const measure = () => {
    const probe = make("div", {class: "line"}, make("span", {}, "0".repeat(50)));
    place.append(probe);
    height = probe.firstChild.getClientRects()[0] ? probe.getBoundingClientRect().height / Math.max(1, probe.firstChild.getClientRects().length) : 19;
    probe.style.whiteSpace = "pre";
    const wide = probe.firstChild.getBoundingClientRect().width / 50;
    probe.remove();
    columns = Math.max(10, Math.floor((place.clientWidth - 30) / (wide || 7.5)));
  };

  // --- drawing the lines in view ---------------------------------------------------------------------
  const find = (row) => { // the place of the line that has this row
    let low = 0, high = shown.length;
    while (low < high) { const middle = (low + high) >> 1; if (tops[middle + 1] <= row) low = middle + 1; else high = middle; }
    return low;
  };
  const space = (count) => { const found = make("div", {"aria-hidden": "true"}); found.style.height = `${count * height}px`; return found; };
  const draw = (always) => {
    if (!lines.length) { place.replaceChildren(make("p", {class: "dim"}, `It has printed nothing${isOver ? "" : " yet"}.`)); return; }
    const top = find(place.scrollTop / height), bottom = find((place.scrollTop + place.clientHeight) / height);
    if (!always && top >= from && bottom < to) return;
    from = Math.max(0, top - margin); to = Math.min(shown.length, bottom + 1 + margin);
    const word = search.value.toLowerCase();
    place.classList.toggle("nowrap", !wrap.checked);
    place.replaceChildren(space(tops[from]), ...shown.slice(from, to).map((index) => drawLine(index, word)),
      space(tops[shown.length] - tops[to]));
  };
  const drawLine = (index, word) => {
    const text = words(lines[index]);
    const line = make("div", {class: `line ${["", "warning", "error"][levels[index]]}`.trimEnd()});
    if (lines[index][0]) line.title = new Date(lines[index][0]).toISOString();
    if (lines[index] === marked) line.append(make("mark", {}, text || " "));
    else if (word) {
      let at = 0;
      for (let hit = text.toLowerCase().indexOf(word); hit >= 0; hit = text.toLowerCase().indexOf(word, at)) {
        line.append(text.slice(at, hit), make("mark", {}, text.slice(hit, hit + word.length)));
        at = hit + word.length;
      }
      line.append(text.slice(at));
    } else line.append(text || " ");
    return line;
  };
  const goToEnd = () => { if (following.checked) place.scrollTop = place.scrollHeight; };
  const redraw = () => { measure(); choose(); draw(true); goToEnd(); draw(false); };
  const show = (position) => {
    following.checked = false;
    marked = lines[shown[position]];
    draw(true);
    place.scrollTop = Math.max(0, tops[position] * height - place.clientHeight / 3);
    draw(true);
  };
  const move = (step) => {
    if (!matches.length) return;
    match = (match + step + matches.length) % matches.length;
    show(matches[match]);
    describe();
  };

  // --- reading ---------------------------------------------------------------------------------------
  const take = (answer) => {
    if (answer.log !== origin || answer.total < first + lines.length) { // another reading: from its beginning
      const isNew = !origin;
      origin = answer.log;
      if (!isNew) { lines = []; levels = []; first = 0; choose(); return true; }
    }
    if (answer.first > first + lines.length) { lines = []; levels = []; first = answer.first; choose(); }
    const start = lines.length;
    for (const line of answer.lines) { lines.push(line); levels.push(levelOf(line[2])); }
    if (lines.length > most * 1.2) { // the oldest ones go
      const gone = lines.length - most;
      lines = lines.slice(gone); levels = levels.slice(gone); first += gone; marked = null; match = -1;
      choose();
    } else if (answer.lines.length) choose(start);
    noteParts(answer.lines);
    isOver = answer.over;
    notice.textContent = answer.notice;
    return first + lines.length < answer.total;
  };
  const parts = new Set();
  const noteParts = (found) => {
    for (const line of found) {
      const name = line[1].split("/")[0];
      if (!name || parts.has(name) || parts.size > 1000) continue;
      parts.add(name);
      part.append(make("option", {value: name}, `Part ${name}`));
      part.hidden = false;
    }
  };
  const read = async () => {
    if (isReading || document.hidden) return;
    isReading = true;
    try {
      for (let more = true; more;) {
        const had = first + lines.length, wasEmpty = !lines.length;
        more = take(await getJson(`${place.dataset.lines}?after=${had}`));
        if (wasEmpty && lines.length) measure();
        if (first + lines.length !== had || isOver || !lines.length) { draw(true); goToEnd(); draw(false); }
      }
      ready();
    } catch (error) { notice.textContent = error.message; if (!lines.length) place.replaceChildren(); }
    isReading = false;
  };

  search.addEventListener("input", () => { match = -1; marked = null; choose(); if (matches.length) move(1); else draw(true); });
  search.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); move(event.shiftKey ? -1 : 1); } });
  one("#log-next").addEventListener("click", () => move(1));
  one("#log-previous").addEventListener("click", () => move(-1));
  one("#log-error").addEventListener("click", () => {
    const found = shown.findIndex((index) => levels[index] === 2);
    if (found >= 0) show(found); else count.textContent = "No line looks like an error.";
  });
  for (const control of [level, part, wrap]) control.addEventListener("change", redraw);
  following.addEventListener("change", () => { goToEnd(); draw(false); });
  // Who scrolls up does not want to be taken to the end.
  place.addEventListener("wheel", (event) => { if (event.deltaY < 0) following.checked = false; }, {passive: true});
  place.addEventListener("keydown", (event) => {
    if (["ArrowUp", "PageUp", "Home"].includes(event.key)) following.checked = false;
    if (event.key === "End") following.checked = true;
  });
  place.addEventListener("scroll", () => draw(false), {passive: true});
  let width = place.clientWidth;
  new ResizeObserver(() => { if (place.clientWidth !== width) { width = place.clientWidth; redraw(); } }).observe(place);
  document.addEventListener("visibilitychange", read);
  return {read, isOver: () => isOver};
};
