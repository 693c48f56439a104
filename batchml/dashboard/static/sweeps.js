"use strict";
// The list of sweeps: kept current, and searched as you type by the server, which knows all columns.
batchml.views.sweeps = () => {
  const {one, getHtml, swap, trouble, on} = batchml;
  const place = one("#sweeps"), search = one("#search"), count = one("#count");
  let asked = 0, timer = 0;
  const say = () => { count.textContent = one("[data-count]", place)?.dataset.count || ""; };
  const read = async () => {
    const mine = asked += 1;
    clearTimeout(timer);
    try {
      const content = await getHtml(`/sweeps/rows?q=${encodeURIComponent(search.value)}`);
      if (mine !== asked) return; // a later question is on its way
      swap(place, content);
      place.removeAttribute("data-stale");
      trouble("", "sweep-trouble");
      say();
    } catch (error) {
      if (mine !== asked) return;
      place.dataset.stale = "";
      trouble(error instanceof TypeError ? "" : error.message, "sweep-trouble");
    }
    timer = setTimeout(() => (document.hidden ? null : read()), 500);
  };
  document.addEventListener("visibilitychange", () => { if (!document.hidden) read(); });
  one("form[role=search]").addEventListener("submit", (event) => event.preventDefault());
  search.addEventListener("input", () => {
    history.replaceState(null, "", search.value.trim() ? `?q=${encodeURIComponent(search.value.trim())}` : location.pathname);
    clearTimeout(timer);
    timer = setTimeout(read, 120);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !event.target.closest("input, textarea, select")) { event.preventDefault(); search.focus(); }
  });
  on("open", read);
  say();
  return read();
};
