// Stages, their replicas, what flows between them, and real microbatches as they went.
"use strict";
S.pipeline = (() => {
  const MANY = 24, MOST = 200, DOTS = 10;
  const SVG = "http://www.w3.org/2000/svg";
  const tiles = new Map();  // replica -> its tile
  let lastSample = 0, dots = 0;

  function makeStage() {
    const title = S.el("h3"), text = S.el("p", { class: "quiet" }), list = S.el("ul", { class: "tiles" });
    const node = S.el("li", { class: "stage" }, title, text, list);
    Object.assign(node, { title_: title, text_: text, list });
    return node;
  }

  function updateStage(node, { stage, rows }) {
    node.className = `stage${stage.bottleneck ? " slow" : ""}${stage.empty ? " empty" : ""}`;
    node.title_.replaceChildren(`Stage ${stage.stage}`,
      ...(stage.bottleneck ? [" ", S.el("span", { class: "badge" }, "bottleneck")] : []),
      ...(stage.empty ? [" ", S.el("span", { class: "badge bad" }, "nobody serves")] : []));
    S.text(node.text_, stage.text + (stage.rate ? ` · ${stage.rate} microbatches/s` : ""));
    const many = rows.length > MANY, shown = rows.slice(0, MOST);
    node.list.classList.toggle("many", many);
    S.keyed(node.list, shown.map((row) => ({ key: `${row.key}${many}`, row, many })), (item) => item.key, makeTile, updateTile);
    if (rows.length > MOST) {
      if (!node.more) node.more = S.el("p", { class: "quiet" });
      S.text(node.more, `and ${rows.length - MOST} more in the table`);
      node.append(node.more);
    } else if (node.more) node.more.remove();
  }

  function makeTile({ row, many }) {
    const sign = S.el("span", { class: "sign", "aria-hidden": "true" }), who = S.peerLink(row, [sign, many ? "" : ` ${row.name}`]);
    const node = S.el("li", { class: "tile" }, who);
    Object.assign(node, { sign, who });
    if (!many) {
      node.state_ = S.el("span", { class: "quiet" });
      node.share_ = S.el("span", { class: "quiet" });
      node.bar = S.el("i");
      node.version_ = S.el("span", { class: "quiet" });
      node.append(node.state_, node.share_, S.el("span", { class: "share", "aria-hidden": "true" }, node.bar), node.version_);
    }
    return node;
  }

  function updateTile(node, { row, many }) {
    if (node.row === row) return;
    node.row = row;
    tiles.set(row.key, node);
    node.dataset.state = row.state;
    S.text(node.sign, S.signs[row.state] || "·");
    const state = `${row.state}${row.queue ? ` · queue ${row.queue}` : ""}${row.service_s ? ` · ${S.service(row.service_s)}` : ""}`;
    if (many) {
      const words = `${row.name}, ${state}`;
      node.who.setAttribute("aria-label", words);
      node.title = words;
      return;
    }
    S.text(node.state_, state);
    const serving = row.state === "serving";
    S.text(node.share_, serving ? `${S.percent(row.share)} of the stage` : row.reason || "");
    node.bar.style.width = serving ? `${row.share * 100}%` : "0";
    S.text(node.version_, row.version ? `v${row.version}` : "");
  }

  function makeFlow() {
    const svg = document.createElementNS(SVG, "svg"), line = document.createElementNS(SVG, "path"), tip = document.createElementNS(SVG, "path");
    svg.setAttribute("viewBox", "0 0 80 34");
    svg.setAttribute("aria-hidden", "true");
    line.setAttribute("d", "M2 17H68");
    line.setAttribute("stroke", "currentColor");
    tip.setAttribute("fill", "currentColor");
    tip.setAttribute("d", "M66 6L79 17L66 28Z");
    svg.append(line, tip);
    const words = S.el("span");
    const node = S.el("li", { class: "flow" }, svg, words);
    Object.assign(node, { line, words });
    return node;
  }

  function updateFlow(node, { flow }) {
    node.className = `flow${flow.bottleneck ? " slow" : ""}`;
    node.line.setAttribute("stroke-width", String(1.5 + 14 * flow.level));
    S.text(node.words, S.rate(flow.wire_bps));
    node.setAttribute("aria-label", `Stage ${flow.boundary} to ${flow.boundary + 1}: ${S.rate(flow.wire_bps)}${flow.bottleneck ? ", into the bottleneck" : ""}`);
  }

  function update(p, rows) {
    const byStage = p.stages.map(() => []);
    for (const row of rows) if (byStage[row.stage]) byStage[row.stage].push(row);
    const items = [];
    p.stages.forEach((stage, at) => {
      items.push({ id: `s${at}`, stage, rows: byStage[at] });
      if (p.flows[at]) items.push({ id: `f${at}`, flow: p.flows[at] });
    });
    S.keyed(S.id("stages"), items, (item) => item.id, (item) => item.flow ? makeFlow() : makeStage(),
      (node, item) => item.flow ? updateFlow(node, item) : updateStage(node, item));
    for (const key of tiles.keys()) if (!p.replicas[key]) tiles.delete(key);
    if (S.id("samples").open) tables(p);
    move(p);
  }

  function tables(p) {
    S.keyed(S.id("flow-rows"), p.flows, (flow) => flow.boundary,
      () => S.el("tr", {}, S.el("td"), S.el("td"), S.el("td")),
      (tr, flow) => [`${flow.boundary} → ${flow.boundary + 1}`, S.rate(flow.wire_bps), S.rate(flow.raw_bps)].forEach((words, at) => S.text(tr.cells[at], words)));
    const name = (key) => (p.replicas[key] || {}).name || "somebody who has left";
    S.keyed(S.id("sample-rows"), p.samples.slice().reverse(), (each) => each.t,
      () => S.el("tr", {}, S.el("td"), S.el("td"), S.el("td")),
      (tr, each) => [S.clock(each.t), S.service(each.s), each.r.map(name).join(" → ")].forEach((words, at) => S.text(tr.cells[at], words)));
  }

  // A dot goes the way a sampled microbatch went, there and back, in the time it took (or so).
  function move(p) {
    const fresh = p.samples.filter((each) => each.t > lastSample);
    if (!fresh.length) return;
    const first = lastSample === 0;
    lastSample = Math.max(...fresh.map((each) => each.t));
    if (first || S.still.matches || document.hidden || S.recorded) return;
    const stages = S.id("stages"), home = stages.getBoundingClientRect();
    for (const each of fresh.slice(-3)) {
      const way = each.r.map((key) => tiles.get(key)).filter((tile) => tile && tile.isConnected);
      if (way.length < each.r.length || dots >= DOTS) continue;
      const points = way.map((tile) => {
        const box = tile.getBoundingClientRect();
        return { transform: `translate(${box.left - home.left + box.width / 2}px, ${box.top - home.top + box.height / 2}px)` };
      });
      const dot = S.el("li", { class: "dot", "aria-hidden": "true" });
      dots += 1;
      stages.append(dot);
      const there = [...points, ...points.slice(0, -1).reverse()];
      const run = dot.animate(there, { duration: Math.min(Math.max(each.s * 1000, 900), 5000), easing: "ease-in-out" });
      run.finished.catch(() => null).then(() => { dot.remove(); dots -= 1; });
    }
  }

  return { update, tables };
})();
