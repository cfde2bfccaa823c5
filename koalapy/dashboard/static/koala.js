// What pages do beyond asking for themselves again: ages that go on, keys, and whether the page is live.
"use strict";
(() => {
  const live = document.getElementById("live");
  const show = (state, text) => { if (live) { live.dataset.state = state; live.textContent = text; } };

  document.body.addEventListener("htmx:sse:after:connection", () => show("on", "live"));
  document.body.addEventListener("changed", () => show("on", "live"));
  for (const lost of ["htmx:sse:error", "htmx:sse:close"])
    document.body.addEventListener(lost, () => show("off", "not live, trying again"));
  document.addEventListener("visibilitychange", () => { if (document.hidden) show("off", "paused"); });

  // What somebody has opened stays open when the page is made anew.
  document.body.addEventListener("htmx:before:morph:attr", (event) => {
    if (event.detail.attrName === "open") event.preventDefault();
  });

  const told = (seconds) => {
    const whole = Math.max(0, Math.floor(seconds)), two = (n) => String(n).padStart(2, "0");
    const days = Math.floor(whole / 86400), rest = whole % 86400;
    const hours = Math.floor(rest / 3600), minutes = Math.floor(rest / 60) % 60, left = rest % 60;
    const clock = hours || days ? `${hours}:${two(minutes)}:${two(left)}` : `${minutes}:${two(left)}`;
    return days ? `${days}-${clock}` : clock;
  };
  setInterval(() => {
    if (document.hidden) return;
    for (const age of document.querySelectorAll("time.age"))
      age.textContent = told((Date.now() - Date.parse(age.dateTime)) / 1000);
  }, 1000);

  const rows = () => [...document.querySelectorAll("main tr[data-href]")];
  const move = (step) => {
    const all = rows(), at = all.findIndex((row) => row.classList.contains("here"));
    const next = all[Math.min(all.length - 1, Math.max(0, at < 0 ? 0 : at + step))];
    if (!next) return;
    all[at]?.classList.remove("here");
    next.classList.add("here");
    next.querySelector("a")?.focus();
    next.scrollIntoView({ block: "nearest" });
  };
  let going = false;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input:not([type=checkbox]), textarea, select, dialog")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const key = event.key;
    if (going) {
      going = false;
      const link = document.querySelector(`nav a[data-key="${CSS.escape(key)}"]`);
      if (link) { event.preventDefault(); link.click(); }
      return;
    }
    if (key === "g") going = true;
    else if (key === "?") document.getElementById("keys")?.showModal();
    else if (key === "/") {
      const filter = document.querySelector("input[type=search]");
      if (filter) filter.focus(); else location.href = "/queue";
    }
    else if (key === "j") move(1);
    else if (key === "k") move(-1);
    else if (key === "x") document.querySelector("tr.here input[type=checkbox]")?.click();
    else return;
    event.preventDefault();
  });
})();
