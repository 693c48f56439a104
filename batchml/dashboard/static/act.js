"use strict";
// Actions (act.py): a button opens a confirmation, which shows the command line that does the same.
// What a page loads later, such as a panel, may have actions, too.
(() => {
  const {one, all, act, newKey, make, refresh, getHtml} = batchml;

  const prepare = (under) => { for (const button of all(".open-action[hidden]", under)) button.hidden = false; };
  prepare(document);
  document.addEventListener("DOMContentLoaded", () => {
    prepare(document);
    for (const form of all("form[data-act]").filter((each) => !each.closest("dialog"))) begin(form);
  });
  document.addEventListener("refreshed", (event) => prepare(event.target));

  // --- what is chosen ----------------------------------------------------------------------------
  const fields = (form) => all("[name]", form);
  const present = (field) => (field.type === "checkbox" ? String(field.checked) : field.value);
  const before = (field) => (field.type === "checkbox" ? field.dataset.value || "false" : field.dataset.value);
  const changed = (form) => fields(form).filter((field) => present(field) !== before(field));
  const sent = (form) => {
    // Not an object: a parameter may have the name __proto__.
    const pairs = new Map(Object.entries(JSON.parse(form.dataset.body))), under = new Map();
    for (const field of changed(form)) {
      const value = field.type === "checkbox" ? field.checked : field.value;
      if (!field.dataset.under) { pairs.set(field.name, value); continue; }
      if (!under.has(field.dataset.under)) under.set(field.dataset.under, new Map());
      under.get(field.dataset.under).set(field.name, value);
    }
    for (const [name, group] of under) pairs.set(name, Object.fromEntries(group));
    return Object.fromEntries(pairs);
  };
  const quote = (word) => (/^[\w@%+=:,./-]+$/.test(word) && !/[^\x20-\x7e]/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);
  // The words of a command as a shell reads them.
  const split = (text) => [...text.matchAll(/(?:[^\s"'\\]|\\.|"(?:[^"\\]|\\.)*"|'[^']*')+/g)].map(([word]) => word.replace(
    /\\(.)|"((?:[^"\\]|\\.)*)"|'([^']*)'/g, (_, one, two, three) => one ?? two?.replace(/\\(["\\$`])/g, "$1") ?? three));
  const commandOf = (form) => {
    const words = [], last = [];
    for (const field of changed(form)) {
      if (field.dataset.flag === "--") { if (field.value.trim()) last.push("--", ...split(field.value).map(quote)); }
      else if (field.type === "checkbox") words.push(field.dataset.flag);
      else if (field.value || field.dataset.prefix) {
        words.push(...(field.dataset.flag ? [field.dataset.flag] : []), quote((field.dataset.prefix || "") + field.value));
      }
    }
    return [form.dataset.command, ...words, ...last].join(" ");
  };

  // --- the preview: what batchml says of the fields, before anything is done ---------------------
  const look = async (form) => {
    const place = one("[data-preview]", form);
    if (!place) return;
    const number = form.dataset.asked = String(Number(form.dataset.asked || 0) + 1);
    try {
      const content = await getHtml(`${place.dataset.preview}?body=${encodeURIComponent(JSON.stringify(sent(form)))}`);
      if (form.dataset.asked !== number) return; // a later question is on its way
      place.replaceChildren(content);
    } catch (error) { if (form.dataset.asked === number) place.replaceChildren(make("p", {class: "problem"}, error.message)); }
  };
  const show = (form) => {
    const command = commandOf(form);
    one(".command code", form).textContent = command;
    one(".command .copy", form).dataset.copy = command;
  };
  const timers = new WeakMap();
  document.addEventListener("input", (event) => {
    const form = event.target.closest("form[data-act]");
    if (!form) return;
    show(form);
    clearTimeout(timers.get(form));
    timers.set(form, setTimeout(() => look(form), 250));
  });

  const begin = (form) => {
    form.reset();
    form.dataset.key = newKey();
    problem(form, "");
    show(form);
    for (const place of all("[data-later]", form)) { place.dataset.panel = place.dataset.later; refresh(place); }
    look(form);
  };

  // --- opening, closing, acting ------------------------------------------------------------------
  const problem = (form, text) => {
    const place = one("[role=alert]", form);
    place.textContent = text;
    place.hidden = !text;
  };
  const say = (text, [label, url]) => {
    let place = one("#done");
    if (!place) {
      place = make("p", {id: "done", role: "status"});
      one("main").prepend(place);
    }
    place.textContent = text;
    if (!url) return;
    const link = make("a", {href: url, target: "_blank", rel: "noopener noreferrer"}, label);
    place.append(" ", link);
    link.focus();
  };
  // Typing replaces what is selected: all of a value, or the word of a command that is wrong.
  const selectIn = (field) => {
    if (!field.matches("input[type=text], textarea")) return;
    const part = field.dataset.selected, at = part ? field.value.indexOf(part) : -1;
    if (part === undefined) field.select();
    else if (at < 0) field.setSelectionRange(field.value.length, field.value.length);
    else field.setSelectionRange(at, at + part.length);
  };
  document.addEventListener("click", (event) => {
    const opener = event.target.closest?.(".open-action");
    if (opener) {
      const dialog = one("dialog", opener.parentElement), form = one("form", dialog);
      begin(form);
      dialog.showModal();
      // Not on the button that acts: Enter alone must not do it.
      const first = one("[data-first]", form) || one("[name]", form) || one(".close-action", form);
      first.focus();
      selectIn(first);
    } else if (event.target.closest?.(".close-action")) event.target.closest("dialog").close();
  });
  // A panel that was not replaced while it was in the user's hands.
  const follow = () => { for (const panel of all("[data-missed]")) { panel.removeAttribute("data-missed"); refresh(panel); } };
  document.addEventListener("close", follow, true);
  for (const name of ["pointerup", "pointercancel", "keyup"]) document.addEventListener(name, () => setTimeout(follow)); // after the click
  document.addEventListener("submit", async (event) => {
    const form = event.target.closest("form[data-act]");
    if (!form) return;
    event.preventDefault();
    const button = one("[type=submit]", form);
    if (button.disabled) return;
    button.disabled = true;
    form.setAttribute("aria-busy", "true");
    problem(form, "");
    try {
      const answer = await act(form.dataset.act, sent(form), form.dataset.key);
      form.dataset.key = newKey();
      form.closest("dialog")?.close();
      if (answer.go) location.assign(answer.go);
      else say(answer.text, answer.link);
      document.dispatchEvent(new CustomEvent("acted", {detail: answer}));
    } catch (error) {
      // Without an answer the same key asks for the same action again; after one, it is another.
      if (error instanceof TypeError) problem(form, "The dashboard did not answer. Press again: it is done once.");
      else { form.dataset.key = newKey(); problem(form, error.message); }
    }
    button.disabled = false;
    form.removeAttribute("aria-busy");
  });
})();
