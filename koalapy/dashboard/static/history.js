// Draws what the page's twin tells: each figure over time. Without this the tables tell the same.
"use strict";
(() => {
  if (!window.uPlot) return;
  const drawn = new Map();
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const COLOURS = ["--series-1", "--series-2", "--series-3", "--series-4", "--series-5", "--series-6"];
  const DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3]];
  const UNITS = [[86400, "d", 172800], [3600, "h", 3600], [60, "min", 60], [1, "s", 1], [0.001, "ms", Number.MIN_VALUE], [1, "s", 0]];
  const span = (s) => {
    if (s === null) return "–";
    const [unit, name] = UNITS.find(([, , least]) => s >= least);
    return `${+(s / unit).toPrecision(s < unit * 100 ? 2 : 3)} ${name}`;
  };
  // Distances of marks at round numbers of each unit, in seconds.
  const STEPS = [0.001, 0.01, 0.1, 1, 10].flatMap((unit) => [1, 2, 5].map((n) => n * unit))
    .concat([60, 120, 300, 600, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800, 2419200]);
  const TOLD = { share: (v) => v === null ? "–" : `${(100 * v).toFixed(0)} %`, seconds: span,
                 count: (v) => v === null ? "–" : (+v.toPrecision(4)).toLocaleString("en") };

  const draw = (picture, place, view) => {
    const day = (text) => Date.parse(text) / 1000;
    const told = (_, values) => values.map((value) => value === null ? "" : TOLD[picture.unit](value));
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 } };
    const series = picture.curves.map((curve, index) => ({
      label: curve.name || "all", stroke: colour(COLOURS[index % COLOURS.length]), width: 2, spanGaps: false,
      dash: DASHES[Math.floor(index / COLOURS.length) % DASHES.length], points: { show: picture.at.length < 40, fill: colour("--card") },
      value: (_, value) => value === undefined || value === null ? "–" : TOLD[picture.unit](value),
    }));
    const options = {
      width: Math.max(240, place.clientWidth), height: 220, series: [{ value: "{YYYY}-{MM}-{DD}" }, ...series],
      tzDate: (at) => uPlot.tzDate(new Date(at * 1000), "Etc/UTC"),
      scales: { x: { range: [day(view.since > view.first ? view.since : view.first) - 43200, day(view.last) + 43200] }, y: { range: (_, low, high) => [0, picture.unit === "share" ? Math.max(1, high ?? 1) : (high || 1) * 1.05] } },
      axes: [{ ...axis, incrs: [1, 2, 7, 14, 28, 91, 364].map((days) => days * 86400), values: (_, at) => at.map((time) => new Date(time * 1000).toISOString().slice(5, 10)) }, { ...axis, size: 64, values: told, ...(picture.unit === "seconds" && { incrs: STEPS }) }], cursor: { sync: { key: "history" } },
    };
    place.replaceChildren();
    return new uPlot(options, [picture.at, ...picture.curves.map((curve) => curve.values)], place);
  };

  let shown = "";
  const show = async (always) => {
    const places = [...document.querySelectorAll(".plot[data-picture]")];
    if (!places.length) return;
    const answer = await fetch(`/history.json${location.search}`, { headers: { Accept: "application/json" } });
    if (!answer.ok) return;
    const text = await answer.text();
    if (text === shown && !always && places.every((place) => place.firstChild)) return;
    shown = text;
    const view = JSON.parse(text);
    const pictures = new Map(view.pictures.map((picture) => [picture.figure, picture]));
    for (const plot of drawn.values()) plot.destroy();
    drawn.clear();
    for (const place of places) {
      const picture = pictures.get(place.dataset.picture);
      if (picture) drawn.set(picture.figure, draw(picture, place, view.table));
    }
  };
  show(true);
  document.body.addEventListener("htmx:after:swap", () => show(false));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(true));
  let waiting;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => show(true), 200); });
})();
