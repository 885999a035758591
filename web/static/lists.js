// Events, contributors, the table of peers, and how peers spend their time.
"use strict";
S.lists = (() => {
  const PAGE = 100;
  const COLORS = { compute: "--c-compute", average: "--c-average", move: "--c-move", transfer: "--c-transfer", wait: "--c-wait" };
  let order = { key: "stage", down: false }, page = 0, rows = [], timeline = null;

  function feed(lines) {
    S.keyed(S.id("feed"), lines.slice().reverse(), (line) => line.n, (line) => S.el("li", { "data-kind": line.kind },
      S.el("span", { class: "sign", "aria-hidden": "true" }, line.sign), S.el("span", {}, line.text),
      S.el("time", { datetime: new Date(line.t * 1000).toISOString() }, S.moment(line.t))), () => null);
  }

  function contributors(list) {
    if (!list.length) return;
    S.keyed(S.id("contributors"), list, (row) => row.peer,
      (row) => S.el("tr", {}, S.el("td"), S.el("td", { class: "num" })),
      (tr, row) => {
        tr.cells[0].replaceChildren(row.name, ...(row.label ? [" ", S.el("span", { class: "quiet" }, row.label)] : []));
        S.text(tr.cells[1], String(row.counted));
      });
  }

  const CELLS = [
    ["stage", (r) => String(r.stage), "num"], ["state", (r) => `${S.signs[r.state] || "·"} ${r.state}${r.reason ? `: ${r.reason}` : ""}`],
    ["queue", (r) => String(r.queue), "num"], ["service_s", (r) => S.service(r.service_s), "num"], ["share", (r) => S.percent(r.share), "num"],
    ["counted", (r) => String(r.counted), "num"], ["step", (r) => String(r.step), "num"], ["device", (r) => r.device], ["version", (r) => r.version],
  ];

  function makeRow(row) {
    const who = S.el("th", { scope: "row" }, S.peerLink(row, [row.name]), ...(row.label ? [" ", S.el("span", { class: "quiet" }, row.label)] : []));
    return S.el("tr", {}, who, ...CELLS.map(([, , number]) => S.el("td", number ? { class: "num" } : {})));
  }

  function peers(all) { rows = all; draw(); }

  function draw() {
    const wanted = S.id("search").value.trim().toLowerCase();
    let found = rows;
    if (wanted) found = rows.filter((row) => `${row.name} ${row.label} ${row.peer} ${row.state} stage ${row.stage} ${row.device} ${row.version}`.toLowerCase().includes(wanted));
    const { key, down } = order;
    found = found.slice().sort((a, b) => {
      const x = a[key], y = b[key];
      if (x === y) return a.name < b.name ? -1 : a.name > b.name ? 1 : a.key < b.key ? -1 : 1;
      return (x == null ? 1 : y == null ? -1 : x < y ? -1 : 1) * (down ? -1 : 1);
    });
    const last = Math.max(Math.ceil(found.length / PAGE) - 1, 0);
    page = Math.min(page, last);
    const shown = found.slice(page * PAGE, (page + 1) * PAGE);
    S.keyed(S.id("peer-rows"), shown, (row) => row.key + row.label, makeRow, (tr, row) => CELLS.forEach(([, words], at) => S.text(tr.cells[at + 1], words(row))));
    if (!found.length) { S.id("peer-rows").keyed = null; S.id("peer-rows").replaceChildren(S.el("tr", {}, S.el("td", { colspan: "10", class: "quiet" }, wanted ? "Nobody matches." : "Nobody is here."))); }
    const bar = S.id("pages");
    bar.hidden = !last;
    if (last) {
      if (!bar.words) {
        bar.words = S.el("span", { class: "quiet", role: "status" });
        const turn = (by, words) => { const b = S.el("button", { type: "button" }, words); b.addEventListener("click", () => { page = Math.max(page + by, 0); draw(); }); return b; };
        bar.append(turn(-1, "Previous"), bar.words, turn(1, "Next"));
      }
      S.text(bar.words, `${page * PAGE + 1} to ${page * PAGE + shown.length} of ${found.length}`);
    }
  }

  async function loadTimeline() {
    if (document.hidden) return;
    try {
      const answer = await fetch("api/v1/timeline?span=600");
      if (answer.ok) { timeline = await answer.json(); drawTimeline(); }
    } catch { /* the stream says so when the server is gone */ }
  }

  function drawTimeline() {
    if (!timeline || !timeline.peers.length) return;
    const box = S.id("timeline-rows"), names = timeline.activities;
    S.id("timeline").hidden = false;
    const style = getComputedStyle(document.documentElement), colors = names.map((name) => style.getPropertyValue(COLORS[name]).trim());
    // Begin where something is known, but show two minutes at least.
    const known = timeline.peers.map((peer) => peer.seconds.findIndex(Boolean)).filter((at) => at >= 0);
    const first = Math.max(Math.min(...known, timeline.t.length - 12), 0);
    const items = timeline.peers.slice(0, 40).flatMap((peer) => ["name", "canvas", "words"].map((part) => ({ id: peer.peer + part, part, peer })));
    S.keyed(box, items, (item) => item.id,
      ({ part, peer }) => part === "name" ? S.el("span", {}, peer.name) : part === "canvas" ? S.el("canvas", { role: "img" }) : S.el("span", { class: "quiet" }),
      (node, { part, peer }) => {
        const total = sums(peer.seconds, names.length), all = total.reduce((a, b) => a + b, 0);
        const words = `${S.percent(all ? total[0] / all : null)} compute`;
        if (part === "words") S.text(node, words);
        if (part !== "canvas") return;
        node.setAttribute("aria-label", `${peer.name}: ${words} over the last ten minutes; the table below has all`);
        paint(node, peer.seconds.slice(first), colors);
      });
    const table = S.id("timeline-table");
    if (table.closest("details").open) {
      table.replaceChildren(S.el("table", {},
        S.el("thead", {}, S.el("tr", {}, S.el("th", { scope: "col" }, "Peer"), ...names.map((name) => S.el("th", { scope: "col" }, name)))),
        S.el("tbody", {}, ...timeline.peers.map((peer) => {
          const total = sums(peer.seconds, names.length), all = total.reduce((a, b) => a + b, 0) || 1;
          return S.el("tr", {}, S.el("th", { scope: "row" }, peer.name), ...total.map((value) => S.el("td", {}, S.percent(value / all))));
        }))));
    }
  }

  function sums(buckets, count) {
    const total = new Array(count).fill(0);
    for (const bucket of buckets) if (bucket) bucket.forEach((value, at) => { total[at] += value; });
    return total;
  }

  function paint(canvas, buckets, colors) {
    const scale = devicePixelRatio || 1, wide = canvas.clientWidth || 300, tall = 22;
    canvas.width = wide * scale;
    canvas.height = tall * scale;
    const ctx = canvas.getContext("2d"), step = canvas.width / buckets.length;
    buckets.forEach((bucket, at) => {
      if (!bucket) return;
      const all = bucket.reduce((a, b) => a + b, 0) || 1;
      let y = canvas.height;
      bucket.forEach((value, kind) => {
        const high = value / all * canvas.height;
        ctx.fillStyle = colors[kind];
        ctx.fillRect(at * step, y - high, Math.max(step - scale, 1), high);
        y -= high;
      });
    });
  }

  function start() {
    S.id("search-label").hidden = false;
    S.id("search").addEventListener("input", () => { page = 0; draw(); });
    for (const th of document.querySelectorAll("#peer-table thead th")) {
      const button = S.el("button", { type: "button" }, th.textContent.trim());
      th.replaceChildren(button);
      button.addEventListener("click", () => {
        order = { key: th.dataset.key, down: order.key === th.dataset.key ? !order.down : th.classList.contains("num") && th.dataset.key !== "stage" };
        for (const other of th.parentNode.cells) other.removeAttribute("aria-sort");
        th.setAttribute("aria-sort", order.down ? "descending" : "ascending");
        draw();
      });
    }
    if (S.recorded) return;
    S.id("activity-legend").replaceChildren(...Object.entries(COLORS).flatMap(([name, variable]) => {
      const key = S.el("span", { class: "key" });
      key.style.background = `var(${variable})`;
      return [key, name];
    }), " (from the bottom up)");
    S.id("timeline-table").closest("details").addEventListener("toggle", drawTimeline);
    loadTimeline();
    setInterval(loadTimeline, 10000);
  }

  return { start, feed, contributors, peers, repaint: drawTimeline };
})();
