// What pages do in browsers: follow their stream, update ages and times, and react to keys.
"use strict";
(() => {
  const live = document.getElementById("live");
  const show = (state, text) => {
    if (!live) return;
    if (live.textContent !== text) live.textContent = text;
    live.dataset.state = state;
  };

  // The content of a visible page comes anew whenever it differs. The daemon sends something every ten seconds.
  const main = document.getElementById("main"), LATE_MS = 12000, SILENCE_MS = 30000, LONGEST_PAUSE_MS = 16000;
  let stream = null, heard = 0, failures = 0, version = main.dataset.version;
  const follow = async () => {
    if (stream || document.hidden || !main.dataset.events) return;
    const mine = stream = new AbortController();
    heard = Date.now();
    try {
      const answer = await fetch(main.dataset.events, { headers: { "Last-Event-ID": version }, signal: mine.signal });
      if (answer.status === 401) return location.reload();
      if (!answer.ok) throw new Error(answer.statusText);
      show("on", "live");
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let text = "";;) {
        const { value, done } = await reader.read();
        if (done) break;
        heard = Date.now();
        failures = 0;
        show("on", "live");
        const events = (text + value).split("\n\n");
        text = events.pop();
        const newest = events.findLast((event) => event.startsWith("data: "))?.split("\n");
        if (!newest) continue;
        version = newest.pop().slice("id: ".length);
        // The content is the same for all sessions: the page itself has the token of the forms.
        const token = document.querySelector("input[name=csrf]").value;
        const content = newest.map((line) => line.slice("data: ".length)).join("\n")
          .replaceAll('name="csrf" value=""', `name="csrf" value="${token}"`);
        await htmx.swap({ text: content, sourceElement: main, target: main, swap: "innerMorph" });
      }
    } catch { /* the daemon is away or has ended the stream */ }
    if (stream !== mine) return;
    stream = null;
    show("off", "not live, trying again");
    setTimeout(follow, (0.5 + Math.random()) * Math.min(500 * 2 ** failures++, LONGEST_PAUSE_MS));
  };
  const pause = () => { stream?.abort(); stream = null; show("off", "paused"); };
  document.addEventListener("visibilitychange", () => document.hidden ? pause() : follow());
  addEventListener("pagehide", pause);
  addEventListener("pageshow", follow);

  // What somebody has opened stays open when the page is made anew.
  document.body.addEventListener("htmx:before:morph:attr", (event) => {
    if (event.detail.attrName === "open") event.preventDefault();
  });

  const two = (n) => String(n).padStart(2, "0");
  const told = (seconds) => {
    const whole = Math.max(0, Math.floor(seconds));
    const days = Math.floor(whole / 86400), rest = whole % 86400;
    const hours = Math.floor(rest / 3600), minutes = Math.floor(rest / 60) % 60, left = rest % 60;
    const clock = hours || days ? `${hours}:${two(minutes)}:${two(left)}` : `${minutes}:${two(left)}`;
    return days ? `${days}-${clock}` : clock;
  };
  // Times in the viewer's zone, as the daemon writes those in UTC: the date only on another day than today. A picture's
  // text has the time in `data-at`, in seconds since the epoch.
  const date = (at) => `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  const localize = () => {
    const today = date(new Date());
    const clock = (at, exact) => {
      const time = `${two(at.getHours())}:${two(at.getMinutes())}${exact ? `:${two(at.getSeconds())}` : ""}`;
      return date(at) === today ? time : `${date(at)} ${time}`;
    };
    for (const time of document.querySelectorAll("time:not(.age)")) time.textContent = clock(new Date(time.dateTime), !time.classList.contains("minute"));
    for (const mark of document.querySelectorAll("text[data-at]")) mark.textContent = clock(new Date(mark.dataset.at * 1000));
  };
  const zone = document.getElementById("zone");
  if (zone) zone.textContent = `times in ${Intl.DateTimeFormat().resolvedOptions().timeZone}`;
  localize();
  const chip = document.querySelector(".chips [aria-current]"), right = (node) => node.getBoundingClientRect().right;
  if (chip) chip.parentElement.scrollLeft = right(chip) - right(chip.parentElement);
  document.body.addEventListener("htmx:after:swap", localize);
  follow();

  setInterval(() => {
    if (document.hidden) return;
    const silence = Date.now() - heard;
    if (live && stream) {
      live.dataset.age = `${told(silence / 1000)} ago`;
      if (silence > LATE_MS) show("late", "no answer, last news");
    }
    if (silence > SILENCE_MS) stream?.abort();
    for (const age of document.querySelectorAll("time.age"))
      age.textContent = told((Date.now() - Date.parse(age.dateTime)) / 1000);
  }, 1000);

  // The output of a job that is not over: text, never markup.
  let asking = false;
  setInterval(async () => {
    if (document.hidden || asking) return;
    asking = true;
    try {
      for (const shown of document.querySelectorAll("pre[data-output]")) {
        const answer = await fetch(shown.dataset.output, { headers: { Accept: "text/plain" } });
        if (!answer.ok) continue;
        const text = await answer.text(), follows = shown.scrollHeight - shown.scrollTop - shown.clientHeight < 40;
        if (!text || shown.textContent === text) continue;
        shown.textContent = text;
        if (follows) shown.scrollTop = shown.scrollHeight;
      }
    } catch { /* the daemon is away: what was there stays, and "live" tells it */ }
    asking = false;
  }, 2000);

  // The numbers of a shape of a picture that has the focus or the pointer, below the picture.
  for (const kind of ["focusin", "mouseover"])
    document.body.addEventListener(kind, (event) => {
      const shape = event.target.closest?.("figure.picture a[aria-label]");
      const tip = shape?.closest("figure").querySelector("[data-tip]");
      if (tip) tip.textContent = shape.getAttribute("aria-label");
    });

  const rows = () => [...document.querySelectorAll("main tr[data-href]")];
  const move = (step) => {
    const all = rows(), at = all.findIndex((row) => row.hasAttribute("data-here"));
    const next = all[Math.min(all.length - 1, Math.max(0, at < 0 ? 0 : at + step))];
    if (!next) return;
    all[at]?.removeAttribute("data-here");
    next.setAttribute("data-here", "");
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
      (document.querySelector("main input[type=search]") ?? document.getElementById("search"))?.focus();
    }
    else if (key === "j") move(1);
    else if (key === "k") move(-1);
    else if (key === "x") document.querySelector("tr[data-here] input[type=checkbox]")?.click();
    else return;
    event.preventDefault();
  });
})();
