"use strict";
// Before the first paint: the theme that the user has chosen, else the system's.
(() => {
  let theme = "";
  try { theme = localStorage.getItem("theme") || ""; } catch { /* no storage: the system's */ }
  if (theme) document.documentElement.dataset.theme = theme;
})();
