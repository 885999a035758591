// The course of the run over time: four charts with one cursor, marks of who came and went, tables.
"use strict";
S.charts = (() => {
  const KINDS = [
    { id: "loss", lines: [["loss", "training", "--c-compute"], ["validation_loss", "validation", "--c-move"]], words: (v) => v.toFixed(4) },
    { id: "speed", lines: [["tokens_per_s", "tokens/s", "--c-compute"]], words: S.count, zero: true },
    { id: "traffic", lines: [["raw_bps", "before the codec", "--c-transfer"], ["wire_bps", "on the wire", "--c-compute"]], words: S.rate, zero: true },
    { id: "use", lines: [["utilisation", "utilisation", "--c-compute"], ["peers", "peers", "--c-move"]], words: S.percent, zero: true, second: (v) => v.toFixed(0) },
  ];
  const plots = new Map();
  let data = null, span = "1h";

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function marks(u) {
    if (!data || !data.marks) return;
    const { ctx, bbox } = u, last = { x: -99 };
    ctx.save();
    ctx.fillStyle = color("--quiet");
    ctx.strokeStyle = color("--line");
    ctx.font = `${11 * devicePixelRatio}px sans-serif`;
    ctx.textAlign = "center";
    ctx.setLineDash([]);
    for (const mark of data.marks) {
      const x = u.valToPos(mark.t, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      if (x - last.x > 9 * devicePixelRatio) { ctx.fillText(mark.sign, x, bbox.top - 2 * devicePixelRatio); last.x = x; }
    }
    ctx.restore();
  }

  function build(kind) {
    const box = S.id(`${kind.id}-plot`);
    const old = plots.get(kind.id);
    if (old) old.destroy();
    box.replaceChildren();
    const axis = { stroke: color("--quiet"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const two = Boolean(kind.second);
    const series = [{}].concat(kind.lines.map(([, label, name], at) => ({
      label, stroke: color(name), width: 1.6, dash: at ? [6, 4] : undefined, spanGaps: true, points: { show: label === "validation", size: 5 }, scale: two && at ? "z" : "y",
    })));
    const range = (u, low, high) => {
      if (low == null) return [0, 1];
      const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
      return [kind.zero ? 0 : low - room, high + room];
    };
    const times = (u, at) => {
      const wide = at.length > 1 ? at[at.length - 1] - at[0] : 0, short = at.length > 1 && at[1] - at[0] < 60;
      return at.map((t, n) => wide > 86400 ? S.day(t).slice(5) : S.clock(t, short));
    };
    const axes = [{ ...axis, values: times, space: 70 }, { ...axis, size: 62, values: (u, at) => at.map((v) => v == null ? "" : kind.words(v)) }];
    if (two) axes.push({ ...axis, size: 40, side: 1, scale: "z", grid: { show: false }, values: (u, at) => at.map((v) => Number.isInteger(v) ? kind.second(v) : "") });
    const plot = new uPlot({
      width: box.clientWidth || 400, height: 180, series, axes, legend: { show: false }, padding: [14, 8, 0, 0],
      scales: { x: { time: true }, y: { range: two ? [0, 1] : range }, ...(two ? { z: { range } } : {}) },
      cursor: { sync: { key: "run" }, drag: { x: false, y: false } },
      hooks: { draw: [marks], setCursor: [(u) => now(kind, u.cursor.idx)] },
    }, columns(kind), box);
    plot.root.setAttribute("role", "img");
    plot.root.setAttribute("aria-label", `${kind.lines.map((line) => line[1]).join(" and ")} over time; the numbers are in the table below`);
    plots.set(kind.id, plot);
    now(kind, null);
  }

  function columns(kind) { return data ? [data.t, ...kind.lines.map(([name]) => data[name])] : [[], ...kind.lines.map(() => [])]; }

  // What the cursor points at, or the newest values: the legend in words.
  function now(kind, at) {
    if (!data) return;
    const words = kind.lines.map(([name, label], number) => {
      const values = data[name];
      let value = at == null ? null : values[at];
      if (at == null) for (let i = values.length - 1; i >= 0 && value == null; i--) value = values[i];
      return value == null ? null : `${number ? "┄" : "─"} ${label} ${(number && kind.second || kind.words)(value)}`;
    }).filter(Boolean);
    S.text(S.id(`${kind.id}-now`), (at == null ? "" : `${S.clock(data.t[at])}  `) + words.join("   "));
  }

  function table(kind) {
    const box = S.id(`${kind.id}-table`);
    if (!data || !box.closest("details").open) return;
    const body = S.el("tbody");
    for (let i = data.t.length - 1, rows = 0; i >= 0 && rows < 60; i--) {
      if (kind.lines.every(([name]) => data[name][i] == null)) continue;
      rows += 1;
      body.append(S.el("tr", {}, S.el("td", {}, S.moment(data.t[i])), ...kind.lines.map(([name], n) => {
        const value = data[name][i];
        return S.el("td", {}, value == null ? "–" : (n && kind.second || kind.words)(value));
      })));
    }
    const head = S.el("thead", {}, S.el("tr", {}, S.el("th", { scope: "col" }, "Time"), ...kind.lines.map(([, label]) => S.el("th", { scope: "col" }, label))));
    box.replaceChildren(S.el("table", {}, head, body));
  }

  function show(series) {
    data = series;
    for (const kind of KINDS) {
      if (!series.t.length) continue;
      const plot = plots.get(kind.id);
      if (plot) { plot.setData(columns(kind)); now(kind, null); } else build(kind);
      table(kind);
    }
    S.id("marks-legend").hidden = !(series.marks && series.marks.length);
  }

  async function load() {
    const asked = span;
    try {
      const answer = await fetch(`api/v1/series?span=${asked}`);
      if (answer.ok && asked === span) show(await answer.json());
    } catch { /* the stream says so when the server is gone */ }
  }

  function start() {
    for (const kind of KINDS) S.id(`${kind.id}-table`).closest("details").addEventListener("toggle", () => table(kind));
    let width = innerWidth;
    addEventListener("resize", () => {
      if (innerWidth === width) return;
      width = innerWidth;
      for (const [id, plot] of plots) plot.setSize({ width: S.id(`${id}-plot`).clientWidth, height: 180 });
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
    if (S.recorded) return;
    S.id("spans").hidden = false;
    S.id("spans").addEventListener("change", (event) => { span = event.target.value; load(); });
    load();
    setInterval(() => { if (!document.hidden) load(); }, 5000);
  }

  function repaint() { if (data) for (const kind of KINDS) if (plots.has(kind.id)) build(kind); }

  return { start, show, repaint, load };
})();
