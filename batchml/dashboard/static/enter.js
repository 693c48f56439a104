"use strict";
// Exchange the token, which is in the fragment of the first link and a parameter of the second, for the cookie and the secret to act.
(async () => {
  const token = location.hash.slice(1) || new URLSearchParams(location.search).get("token") || "";
  history.replaceState(null, "", "/enter");
  const answer = await fetch("/enter", {
    method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify({token}),
  });
  if (answer.ok) {
    localStorage.setItem("act", (await answer.json()).act);
    location.replace("/");
  } else {
    document.querySelector("main p").textContent =
      "This link has been used. Start `batchml dashboard` again, or open the tab where it is open.";
  }
})();
