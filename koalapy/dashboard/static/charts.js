// Draws each chart of the page from the JSON of its element, by uPlot; the tables have the same values. A drag over a
// chart or a timeline shows the selected time.
"use strict";
(() => {
  const zoom = (from, to) => {
    const query = new URLSearchParams(location.search);
    from = Math.min(from, Date.now() / 1000 - 61);
    const text = (at) => new Date(at * 1000).toISOString().slice(0, 19) + "Z";
    query.set("since", text(from));
    query.set("until", text(Math.max(to, from + 60)));
    location.search = query;
  };

  // Lanes are SVG of the server.
  let drag = null;
  const share = (event) => {
    const box = drag.picture.getBoundingClientRect();
    return Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  };
  document.body.addEventListener("pointerdown", (event) => {
    const picture = event.target.closest?.("svg.timeline[data-since]");
    if (!picture || event.button || event.pointerType === "touch") return;
    drag = { picture, x: event.clientX };
    drag.first = share(event);
  });
  addEventListener("pointermove", (event) => {
    if (!drag || Math.abs(event.clientX - drag.x) < 8) return;
    drag.rect ??= drag.picture.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "rect"));
    const ends = [drag.first, share(event)].sort((one, other) => one - other);
    for (const [name, value] of [["class", "selected"], ["y", 0], ["height", "100%"], ["x", `${100 * ends[0]}%`], ["width", `${100 * (ends[1] - ends[0])}%`]])
      drag.rect.setAttribute(name, value);
  });
  addEventListener("pointerup", (event) => {
    if (drag?.rect) {
      const { since, until } = drag.picture.dataset, [from, to] = [drag.first, share(event)].sort((one, other) => one - other);
      const at = (part) => +since + part * (until - since);
      addEventListener("click", (click) => click.preventDefault(), { capture: true, once: true });
      zoom(at(from), at(to));
    }
    drag?.rect?.remove();
    drag = null;
  });
  document.body.addEventListener("dragstart", (event) => { if (drag) event.preventDefault(); });

  if (!window.uPlot) return;
  const drawn = new Map();
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3]], SERIES = 6, DAY = 86400, SMALL = 120, TALL = 220;
  const UNITS = [[86400, "d", 172800], [3600, "h", 3600], [60, "min", 60], [1, "s", 1], [0.001, "ms", Number.MIN_VALUE], [1, "s", 0]];
  const clock = uPlot.fmtDate("{MM}-{DD} {HH}:{mm}");
  const span = (s) => {
    const [unit, name] = UNITS.find(([, , least]) => s >= least);
    return `${+(s / unit).toPrecision(s < unit * 100 ? 2 : 3)} ${name}`;
  };
  // Distances of marks at round numbers of each unit, in seconds.
  const STEPS = [0.001, 0.01, 0.1, 1].flatMap((unit) => [1, 2, 5].map((n) => n * unit))
    .concat([10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800, 2419200]);
  const short = new Intl.NumberFormat("en", { notation: "compact" });
  const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7].flatMap((unit) => [1, 2, 5].map((n) => n * unit));
  const TOLD = { rate: (v) => `${+(v / 1e6).toPrecision(3)} MB/s`, share: (v) => `${(100 * v).toFixed(0)} %`, seconds: span, count: (v) => (+v.toPrecision(4)).toLocaleString("en") };

  // The last slot is drawn to its end. Curves of a stack are drawn from the top one to the bottom one.
  const values = (chart) => {
    const closed = (list) => [...list, list.at(-1)];
    if (!chart.stacked) return chart.curves.map((curve) => closed(curve.values));
    const total = chart.at.map(() => null);
    return chart.curves.map((curve) => closed(curve.values.map((value, index) => value === null ? null : (total[index] = total[index] + value)))).reverse();
  };
  const data = (chart) => [[...chart.at, chart.at.at(-1) + chart.length], ...values(chart)];

  const draw = (chart, place) => {
    const line = colour("line"), told = TOLD[chart.unit], small = place.classList.contains("small");
    const axis = { stroke: colour("quiet"), grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
    const curves = chart.curves.map((curve, index) => {
      const stroke = colour(curve.colour || `series-${index % SERIES + 1}`);
      return {
        label: curve.name || "all", stroke, width: chart.stacked ? 1 : 2, spanGaps: false, fill: chart.stacked ? stroke : undefined,
        dash: curve.colour ? [] : DASHES[Math.floor(index / SERIES) % DASHES.length], paths: uPlot.paths.stepped({ align: 1 }), points: { show: false },
        value: (_, value, __, at) => at === null ? "" : (value = plotted(place).curves[index].values[Math.min(at, chart.at.length - 1)]) === null ? "–" : told(value),
      };
    });
    if (chart.stacked) curves.reverse();
    const isWhole = chart.unit === "count" && chart.curves.every((curve) => curve.values.every((value) => value === null || Number.isInteger(value)));
    const utc = chart.length >= DAY, end = chart.at.at(-1) + chart.length;
    return new uPlot({
      width: Math.max(160, place.clientWidth), height: small ? SMALL : TALL, series: [{ label: " ", value: (_, at) => at === null ? "" : `from ${utc ? new Date(at * 1000).toISOString().slice(0, 10) : clock(new Date(at * 1000))}` }, ...curves],
      legend: { markers: { dash: (_, index) => curves[index - 1].dash.length ? "dashed" : "solid" } },
      ...(utc && { tzDate: (at) => uPlot.tzDate(new Date(at * 1000), "Etc/UTC") }),
      scales: { x: { range: () => [plotted(place).at[0], plotted(place).at.at(-1) + chart.length] }, y: { range: (_, low, high) => [0, chart.unit === "share" ? 1 : (high || 1) * 1.05] } },
      axes: [{ ...axis, space: small ? 60 : 70, size: small ? 24 : 36, values: utc ? (_, at) => at.map((time) => new Date(time * 1000).toISOString().slice(5, 10)) : (_, at) => at.map((time) => {
        const date = new Date(time * 1000), days = end - chart.at[0] > 2 * DAY;
        return days ? clock(date).slice(0, 5) : clock(date).slice(6);
      }), ...(utc && { incrs: [1, 2, 7, 14, 28, 91, 364].map((days) => days * DAY) }), ...(!utc && end - chart.at[0] > 2 * DAY && { incrs: [1, 2, 5, 7, 14].map((days) => days * DAY) }) },
      { ...axis, size: small ? 52 : 64, space: small ? 24 : 30, values: (_, marks) => marks.map((mark) => mark === null ? "" : mark >= 1e4 && chart.unit === "count" ? short.format(mark) : told(mark)), ...(chart.unit === "seconds" && { incrs: STEPS }), ...(isWhole && { incrs: WHOLE }) }],
      cursor: { sync: { key: "page" }, drag: { x: true, y: false, setScale: false }, points: { show: !chart.stacked } },
      hooks: {
        setSelect: [(plot) => { if (plot.select.width > 8) zoom(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")); }],
        setCursor: [(plot) => {
          const near = plot.cursor.left >= 0 && plotted(place).marks.filter(([at]) => Math.abs(plot.valToPos(at, "x") - plot.cursor.left) < 8);
          if (near && near.length) place.dataset.mark = near.map(([, text]) => text).join("; ");
          else delete place.dataset.mark;
        }],
        draw: [(plot) => {
          const { ctx, bbox } = plot;
          ctx.save();
          ctx.strokeStyle = colour("warn");
          ctx.lineWidth = 2;
          ctx.setLineDash([4, 3]);
          for (const [at] of plotted(place).marks) {
            const x = plot.valToPos(at, "x", true);
            if (x < bbox.left || x > bbox.left + bbox.width) continue;
            ctx.beginPath();
            ctx.moveTo(x, bbox.top);
            ctx.lineTo(x, bbox.top + bbox.height);
            ctx.stroke();
          }
          ctx.restore();
        }],
      },
    }, data(chart), place);
  };
  const plotted = (place) => drawn.get(place).chart;

  const show = (always) => {
    for (const [place, { plot }] of drawn) if (!place.isConnected) { plot.destroy(); drawn.delete(place); }
    for (const place of document.querySelectorAll(".plot[data-chart]")) {
      const old = drawn.get(place), text = place.dataset.chart;
      if (old && old.text === text && !always) continue;
      const chart = JSON.parse(text), names = (one) => JSON.stringify([one.curves.map((curve) => curve.name), one.length]);
      if (old && !always && names(old.chart) === names(chart)) {
        Object.assign(old, { text, chart });
        old.plot.setData(data(chart));
        continue;
      }
      old?.plot.destroy();
      const entry = { text, chart };
      drawn.set(place, entry);
      entry.plot = draw(chart, place);
    }
  };
  show(true);
  document.body.addEventListener("htmx:after:swap", () => show(false));
  for (const media of ["print", "(prefers-color-scheme: dark)"]) matchMedia(media).addEventListener("change", () => show(true));
  let waiting;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => show(true), 200); });
})();
