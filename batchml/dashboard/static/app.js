"use strict";
// What all pages share: theme, copying, the stream of changes, actions. Pages add views to `batchml`.
const batchml = (() => {
  const one = (selector, under = document) => under.querySelector(selector);
  const all = (selector, under = document) => [...under.querySelectorAll(selector)];

  // A page of `--export` has no server: `path` is the one that it had, and `export.js` answers its questions.
  const {path = location.pathname} = document.body?.dataset || {}, exported = Boolean(document.body?.matches("[data-exported]"));
  const go = (to) => location.assign(batchml.address ? batchml.address(to) : to);

  // --- building elements; texts are inserted as texts, never as HTML ------------------------------
  const make = (name, attributes = {}, ...children) => {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (value === true) element.setAttribute(key, "");
      else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  };

  // Markup of this server, which has escaped every text in it (html.py).
  const policy = window.trustedTypes
    ? trustedTypes.createPolicy("batchml", {createHTML: (html) => html}) : {createHTML: (html) => html};
  const parse = (html) => {
    const holder = document.createElement("template");
    holder.innerHTML = policy.createHTML(html);
    return holder.content;
  };

  const getJson = async (path, options = {}) => {
    const answer = await fetch(path, options);
    if (!answer.ok) throw new Error(await sentence(answer));
    return answer.json();
  };
  const sentence = async (answer) => {
    const page = parse(await answer.text());
    return (page.querySelector("main p") || page).textContent.trim() || `HTTP ${answer.status}`;
  };

  // Change the content of an element. What had the focus has it afterwards: it is found by its id, address, label
  // or words. If nothing like it is left, such as the button of an action that is done, the element has it, so
  // that the keyboard goes on from here.
  const keepFocus = (element, change) => {
    const focused = element.contains(document.activeElement) && document.activeElement !== element ? document.activeElement : null;
    const sign = (each) => each.id || each.getAttribute("href") || each.getAttribute("aria-label") || each.textContent;
    const alike = () => all(focused.localName, element).filter((each) => sign(each) === sign(focused));
    const place = focused ? alike().indexOf(focused) : 0;
    change();
    if (!focused) return;
    const found = alike();
    if (!found.length) element.tabIndex = -1;
    (found[place] || found[0] || element).focus({preventScroll: true});
  };

  // Replace the content of an element; what is focused, open or scrolled in it stays so.
  const replaceContent = (element, content) => keepFocus(element, () => {
    const open = all("details[id][open]", element).map((each) => each.id);
    const scrolled = all("[aria-label]", element).filter((each) => each.scrollLeft || each.scrollTop)
      .map((each) => [each.getAttribute("aria-label"), each.scrollLeft, each.scrollTop]);
    element.replaceChildren(content);
    for (const id of open) one(`#${CSS.escape(id)}`, element)?.setAttribute("open", "");
    for (const [label, left, top] of scrolled) one(`[aria-label="${CSS.escape(label)}"]`, element)?.scrollTo(left, top);
  });

  // Replace the content of every element with data-panel by the HTML that its path gives.
  const refresh = async (element) => {
    if (!element?.dataset.panel) return;
    if (one("dialog[open]", element)) { element.dataset.missed = ""; return; } // act.js refreshes it later
    try {
      const answer = await fetch(element.dataset.panel);
      if (!answer.ok) throw new Error(await sentence(answer));
      const content = parse(await answer.text());
      if (element.contains(document.activeElement) && element.dataset.keep !== undefined) return;
      if (one("dialog[open]", element)) { element.dataset.missed = ""; return; }
      replaceContent(element, content);
      element.removeAttribute("data-stale");
    } catch (error) {
      element.dataset.stale = "";
      if (!element.childElementCount) element.textContent = error.message;
    }
    element.dispatchEvent(new CustomEvent("refreshed", {bubbles: true}));
  };

  // Replace the content of an element by newer content of the same kind: what has the focus, is unfolded or
  // scrolled stays so, by its id; what is selected stays.
  const swap = (element, content) => {
    const chosen = getSelection();
    if (one("dialog[open]", element)) return; // a confirmation in it
    if (chosen.type === "Range" && element.contains(chosen.anchorNode)) return;
    const open = all("details[id][open]", element).map((each) => each.id);
    const scrolled = all("[id]", element).filter((each) => each.scrollLeft || each.scrollTop).map((each) => [each.id, each.scrollLeft, each.scrollTop]);
    keepFocus(element, () => element.replaceChildren(...(content instanceof Node ? [content] : content)));
    for (const id of open) one(`#${CSS.escape(id)}`, element)?.setAttribute("open", "");
    for (const [id, x, y] of scrolled) one(`#${CSS.escape(id)}`, element)?.scrollTo(x, y);
    element.dispatchEvent(new CustomEvent("refreshed", {bubbles: true}));
  };
  const trouble = (text, id = "trouble") => {
    const place = one(`#${id}`);
    if (place && place.textContent !== text) { place.textContent = text; place.hidden = !text; }
  };

  // A number for people: four significant figures; with `whole` all of them.
  const number = (value, whole = false) => {
    if (value === null || value === undefined) return "-";
    const size = Math.abs(value);
    if (whole) return value.toLocaleString("en");
    if (size && (size >= 1e6 || size < 1e-3)) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
    return size >= 1e4 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
  };

  // --- theme, copying --------------------------------------------------------------------------
  const themes = ["", "light", "dark"];
  one("#theme")?.addEventListener("click", () => {
    const root = document.documentElement;
    const next = themes[(themes.indexOf(root.dataset.theme || "") + 1) % themes.length];
    if (next) root.dataset.theme = next; else delete root.dataset.theme;
    try { localStorage.setItem("theme", next); } catch { /* no storage */ }
    one("#theme").textContent = `Theme: ${next || "system"}`;
    document.dispatchEvent(new CustomEvent("theme"));
  });
  document.addEventListener("click", async (event) => {
    const button = event.target.closest?.("[data-copy]");
    if (!button) return;
    if (navigator.clipboard) await navigator.clipboard.writeText(button.dataset.copy);
    else {
      const take = (copied) => { copied.clipboardData.setData("text/plain", button.dataset.copy); copied.preventDefault(); };
      document.addEventListener("copy", take, {once: true});
      document.execCommand("copy");
      document.removeEventListener("copy", take);
    }
    const words = button.textContent;
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = words; }, 1500);
  });

  // --- the stream of changes: one for all tabs of a browser, which has six connections per server -
  const listeners = {};
  const on = (name, take) => { (listeners[name] ||= []).push(take); };
  const emit = (name, data) => { for (const take of listeners[name] || []) take(data); };
  const channel = "BroadcastChannel" in window ? new BroadcastChannel("batchml") : null;
  const status = (words) => { const place = one("#connection"); if (place) place.textContent = words; };
  const follow = () => {
    const revision = one("[data-revision]")?.dataset.revision;
    const columns = new URLSearchParams(location.search).get("cols") || "";
    const source = new EventSource(`/events?cols=${encodeURIComponent(columns)}${revision ? `&since=${revision}` : ""}`);
    const share = (name) => (event) => {
      const data = JSON.parse(event.data);
      emit(name, data);
      channel?.postMessage({name, data});
    };
    for (const name of ["runs", "cluster", "trouble", "reload", "end"]) source.addEventListener(name, share(name));
    source.addEventListener("open", () => { status(""); channel?.postMessage({name: "open"}); emit("open"); });
    source.addEventListener("error", () => {
      status("Connection lost, trying again"); channel?.postMessage({name: "lost"});
    });
    on("end", () => { source.close(); status("The dashboard has ended"); });
  };
  channel?.addEventListener("message", ({data}) => {
    if (data.name === "lost") status("Connection lost, trying again");
    else if (data.name === "open") { status(""); emit("open"); }
    else emit(data.name, data.data);
  });
  on("end", () => status("The dashboard has ended"));
  on("trouble", (data) => trouble(data.text));
  if (document.body?.dataset.view && !exported) {
    // The tab that holds the lock has the stream; when it closes, another tab gets the lock.
    if (navigator.locks && channel) navigator.locks.request("batchml-events", () => { follow(); return new Promise(() => {}); });
    else follow();
  }

  // --- acting ------------------------------------------------------------------------------------
  // `key`: the server does an action once for each key, and repeats its answer.
  // crypto.randomUUID, Web Locks and the clipboard exist in secure contexts only: not with --host.
  const newKey = () => [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  const act = (path, body, key = newKey()) => getJson(path, {
    method: "POST",
    headers: {
      "Content-Type": "application/json", "X-Batchml-Act": localStorage.getItem("act") || "",
      "Idempotency-Key": key,
    },
    body: JSON.stringify(body),
  });

  const ready = () => { document.documentElement.dataset.ready = String(Number(document.documentElement.dataset.ready || 0) + 1); };
  const views = {};
  document.addEventListener("DOMContentLoaded", () => {
    for (const element of all("[data-panel]")) refresh(element);
    Promise.resolve(views[document.body.dataset.view]?.()).then(ready);
  });
  return {path, exported, go, one, all, make, parse, getJson, refresh, swap, trouble, number, on, emit, act, newKey, ready, views};
})();
