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

  const pause = (ms) => new Promise((done) => { setTimeout(done, ms); });
  // crypto.randomUUID, Web Locks and the clipboard exist in secure contexts only: not with --host.
  const newKey = () => [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

  // Ask for a path, also while the network changes (ERR_NETWORK_CHANGED), the laptop wakes or a tunnel is
  // renewed. An answer that takes long is fetched later: a browser has six connections for all its tabs.
  // What acts can be asked again, too, as the server does it once for each key. `waiting` is called then.
  const TRIES = [150, 600, 1500];
  const ask = async (path, options = {}, waiting = () => {}) => {
    const headers = {...options.headers, ...(options.method ? {} : {"X-Batchml-Question": newKey()})};
    for (let tries = 0; ;) {
      try {
        const answer = await fetch(path, {...options, headers});
        if (answer.status !== 202) return answer;
        waiting();
        await pause(600);
      } catch (error) {
        if (!(error instanceof TypeError)) throw error; // an export says what it lacks
        if (tries >= TRIES.length) throw new TypeError("The dashboard does not answer.");
        await pause(TRIES[tries]);
        tries += 1;
      }
    }
  };
  const getJson = async (path, options = {}) => {
    const answer = await ask(path, options);
    if (!answer.ok) throw new Error(await sentence(answer));
    return answer.json();
  };
  const getHtml = async (path, waiting) => {
    const answer = await ask(path, {}, waiting);
    if (!answer.ok) throw new Error(await sentence(answer));
    return parse(await answer.text());
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

  // Replace the content of every element with data-panel by the HTML that its path gives. While it is asked
  // for, or if that failed, the old content stays, greyed, with its age and the reason; it is asked for again.
  // What is in a user's hands stays: an open confirmation, and a button that is pressed but not yet let go.
  const isHeld = (element) => one("dialog[open]", element) || element.matches(":active");
  const panels = new WeakMap(); // element -> {asked, again, seen, timer, failures}
  const refresh = (element) => {
    if (!element?.dataset.panel) return Promise.resolve();
    if (isHeld(element)) { element.dataset.missed = ""; return Promise.resolve(); } // act.js refreshes it later
    if (!panels.has(element)) panels.set(element, {failures: 0});
    const panel = panels.get(element);
    if (panel.asked) panel.again = true;
    else panel.asked = load(element, panel).finally(() => {
      panel.asked = null;
      if (panel.again) { panel.again = false; refresh(element); }
    });
    return panel.asked;
  };
  const load = async (element, panel) => {
    const began = performance.now(), isEmpty = () => !element.querySelector(":scope > :not(.panel-note)");
    clearTimeout(panel.timer);
    const waiting = () => {
      const seconds = Math.round((performance.now() - began) / 1000);
      element.setAttribute("aria-busy", "true");
      if (isEmpty()) note(element, panel, seconds < 3 ? "Loading ..." : `Loading ... ${seconds} s`);
      else if (seconds > 5) note(element, panel, `Asking again, for ${seconds} s.`);
    };
    try {
      const content = await getHtml(element.dataset.panel, waiting);
      if (isHeld(element)) element.dataset.missed = "";
      else replaceContent(element, content);
      element.removeAttribute("data-stale");
      panel.seen = performance.now();
      panel.failures = 0;
    } catch (error) {
      panel.failures += 1;
      if (exported) { note(element, panel, error.message); return; }
      if (!isEmpty()) element.dataset.stale = "";
      const again = make("button", {type: "button"}, "Try again");
      again.addEventListener("click", () => refresh(element));
      note(element, panel, error.message, again);
      const soon = () => (document.hidden ? (panel.timer = setTimeout(soon, 2000)) : refresh(element));
      panel.timer = setTimeout(soon, Math.min(60000, 2500 * 2 ** panel.failures));
    }
    element.removeAttribute("aria-busy");
    element.dispatchEvent(new CustomEvent("refreshed", {bubbles: true}));
  };
  const note = (element, panel, words, ...more) => {
    if (!element.childElementCount) element.textContent = ""; // the words of the first paint
    const age = panel.seen && element.querySelector(":scope > :not(.panel-note)") ? Math.round((performance.now() - panel.seen) / 1000) : 0;
    let place = element.querySelector(":scope > .panel-note");
    if (!place) { place = make("p", {class: "panel-note", role: "status"}); element.append(place); }
    const had = place.contains(document.activeElement);
    place.replaceChildren(`${words}${age ? ` What you see is ${span(age)} old.` : ""} `, ...more);
    if (had) one("button", place)?.focus();
  };
  const span = (seconds) => (seconds < 120 ? `${seconds} s` : seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`);

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
  // The words of a search, all of which must occur: the same rule as `search_words` in runs.py.
  const searchWords = (text) => text.toLowerCase().split(/[ \t\n\v\f\r\u00a0]+/).filter(Boolean);

  const trouble = (text, id = "trouble") => {
    let place = one(`#${id}`);
    if (!place && text && one("main")) {
      place = make("p", {id, role: "alert"});
      one("main").prepend(place);
    }
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
  // The tab that holds a lock has the stream, and passes on what comes. Each tab asks for what it shows. A tab
  // that was hidden for a minute gives the lock to another, so that nothing is sent that nobody sees.
  const listeners = {};
  const on = (name, take) => { (listeners[name] ||= []).push(take); };
  const emit = (name, data) => { for (const take of listeners[name] || []) take(data); };
  const HIDDEN = 60000, SILENT = 45000, OPEN = 300000, LOST = "Connection lost, retrying";
  const channel = "BroadcastChannel" in window && navigator.locks ? new BroadcastChannel("batchml") : null;
  let revision = Number(one("[data-revision]")?.dataset.revision ?? NaN); // of the runs, as this tab knows them
  let source = null, heard = 0, probe = 0, leave = null, isEnded = false;

  const status = (words) => { const place = one("#connection"); if (place && place.textContent !== words) place.textContent = words; };
  const take = (name, data) => { // in every tab
    if (name === "status") status(data);
    else if (name === "trouble") shown(data);
    else if (name === "hello") {
      const missed = revision !== data.revision && !Number.isNaN(revision);
      status(""); shown(data);
      revision = data.revision;
      emit("open", data);
      if (missed) emit("missed", data);
    } else {
      if (name === "runs") revision = data.revision;
      emit(name, data);
    }
  };
  const share = (name, data) => { take(name, data); channel?.postMessage({name, data}); };
  channel?.addEventListener("message", ({data}) => take(data.name, data.data));

  let failing = null; // since when, and with which words, the environment does not answer
  const shown = ({text, age}) => {
    failing = text ? {text, at: performance.now() - 1000 * (age ?? 0), isKnown: age !== null} : null;
    tell();
  };
  const tell = () => {
    if (!failing) { trouble(""); return; }
    const age = Math.round((performance.now() - failing.at) / 10000) * 10;
    trouble(`${failing.text}${failing.isKnown && age >= 10 ? ` What you see is ${span(age)} old.` : ""}`);
  };

  const connect = () => {
    clearTimeout(probe);
    source?.close();
    heard = performance.now();
    source = new EventSource("/events");
    for (const name of ["hello", "runs", "cluster", "trouble", "alive", "end"]) {
      source.addEventListener(name, (event) => {
        heard = performance.now(); isEnded = false;
        if (name === "end") { source.close(); isEnded = true; share("status", "The dashboard has ended"); again(3000); }
        else share(name, JSON.parse(event.data));
      });
    }
    source.addEventListener("error", () => {
      if (!isEnded) share("status", LOST);
      if (source.readyState === EventSource.CLOSED) again(0); // else the browser tries again by itself
    });
  };
  // Look whether the server is there, and whether it is still the one of this tab.
  const again = (ms) => { clearTimeout(probe); probe = setTimeout(look, ms); };
  const look = async () => {
    try {
      const answer = await fetch("/alive");
      if (answer.ok) { connect(); return; }
      share("status", await sentence(answer));
    } catch { /* it is not there */ }
    again(3000);
  };
  const lead = () => {
    if (leave) return;
    const end = new AbortController();
    let done = null;
    leave = () => { leave = null; clearTimeout(probe); source?.close(); source = null; done?.(); end.abort(); };
    if (!channel) { connect(); return; }
    navigator.locks.request("batchml-events", {signal: end.signal}, () => {
      connect();
      return new Promise((resolve) => { done = resolve; });
    }).catch(() => { /* it was left before it had the lock */ });
  };
  if (document.body?.dataset.view && !exported) {
    let away = 0;
    const follow = () => {
      clearTimeout(away);
      if (!document.hidden) lead();
      // Without locks each tab has a stream of its own, but only while it is in view.
      else away = setTimeout(() => leave?.(), channel ? HIDDEN : 500);
    };
    document.addEventListener("visibilitychange", follow);
    follow();
    setInterval(() => { if (source && source.readyState === EventSource.OPEN && performance.now() - heard > SILENT) { share("status", LOST); connect(); } }, 5000);
    setInterval(tell, 10000);
    setInterval(() => fetch("/alive").catch(() => {}), OPEN); // a hidden tab keeps the dashboard, too
    // What was kept while another page was shown is old.
    window.addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });
    on("open", () => { for (const element of all("[data-stale]")) if (element.dataset.panel) refresh(element); });
  }

  // --- acting ------------------------------------------------------------------------------------
  // `key`: the server does an action once for each key, and repeats its answer.
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
    // Links to the list of runs keep its search, columns and order; from the list itself they clear them.
    const kept = exported || document.body.dataset.view === "runs" ? "" : sessionStorage.getItem("runs-view") || "";
    if (kept) for (const link of all("header a[href='/']")) link.href = `/${kept}`;
    Promise.resolve(views[document.body.dataset.view]?.()).then(ready);
  });
  return {path, exported, go, one, all, make, parse, getJson, getHtml, pause, refresh, swap, trouble, number, on, emit, act, newKey, ready, views, searchWords};
})();
