// One picture, kept up to date by one stream (or by asking, or from a recording), and shown.
"use strict";
(() => {
  const STALE_S = 15, QUIET_MS = 20000, POLL_MS = 5000;
  let picture = null, skew = 0, lastData = 0, source = null, pause = 1000, polling = null, announced = "";
  let rows = [], rowsOf = null;
  const recording = S.id("recording") && JSON.parse(S.id("recording").textContent);
  S.recorded = Boolean(recording);

  function apply(message) {
    if (message.whole || !picture) picture = { ...message };
    else {
      for (const [key, value] of Object.entries(message)) {
        if (key === "replicas") {
          const next = { ...picture.replicas };
          for (const [name, row] of Object.entries(value)) if (row) next[name] = row; else delete next[name];
          picture.replicas = next;
        } else if (key === "feed" && picture.feed.length) picture.feed = picture.feed.concat(value).slice(-60);
        else picture[key] = value;
      }
    }
    if (message.at) skew = Date.now() / 1000 - message.at;
  }

  function show() {
    const began = performance.now(), p = picture, head = p.head;
    if (rowsOf !== p.replicas) {
      rowsOf = p.replicas;
      const before = new Map(rows.map((row) => [row.key, row]));
      rows = Object.entries(p.replicas).map(([key, row]) => {
        const old = before.get(key);
        return old && old.of === row ? old : { key, of: row, ...row };
      }).sort((a, b) => a.stage - b.stage || (a.name < b.name ? -1 : a.name > b.name ? 1 : a.key < b.key ? -1 : 1));
      S.lists.peers(rows);
    }
    S.text(S.id("name"), head.name || "waiting for the run");
    const status = S.id("status");
    status.dataset.state = head.state;
    S.text(status.querySelector(".sign"), S.signs[head.state]);
    S.text(status.querySelector(".w"), head.word);
    S.text(S.id("reason"), head.reason);
    const facts = [
      `${head.step} of ${head.num_steps}`, S.fixed(head.loss, 4), S.fixed(head.validation_loss, 4),
      head.tokens_per_s ? S.count(head.tokens_per_s) : "–", `${head.serving || 0} of ${head.peers || 0}`, head.eta_s ? S.duration(head.eta_s) : "–",
    ];
    S.id("facts").querySelectorAll("dd").forEach((dd, at) => S.text(dd, facts[at]));
    S.id("progress").max = head.num_steps || 1;
    S.id("progress").value = head.step;
    document.title = `${head.word} · step ${head.step} · ${head.name || "swarm"}`;
    if (announced !== head.state) { S.text(S.id("announce"), announced ? `${head.word}: ${head.reason}` : ""); announced = head.state; }
    S.pipeline.update(p, rows);
    S.lists.feed(p.feed);
    S.lists.contributors(p.contributors);
    if (p.help.stage != null && S.id("help-why")) {
      if (S.id("help-why").textContent !== `One more peer helps most in stage ${p.help.stage}: ${p.help.why}.`) {
        S.id("help-why").replaceChildren("One more peer helps most in ", S.el("strong", {}, `stage ${p.help.stage}`), `: ${p.help.why}.`);
      }
    }
    if (S.id("notes")) S.text(S.id("notes"), head.notes ? ` · ${head.notes} records made no sense` : "");
    S.lastUpdateMs = performance.now() - began;
  }

  function age() {
    if (!picture || S.recorded) return;
    const heard = picture.head.heard_at;
    const seconds = heard ? Date.now() / 1000 - skew - heard : null;
    const cut = lastData && Date.now() - lastData > QUIET_MS;
    S.text(S.id("updated"), seconds == null ? "nothing heard yet" : `updated ${S.ago(seconds)}${cut ? ", the dashboard does not answer" : ""}`);
    const over = picture.head.state === "finished" || picture.head.state === "failed";
    document.body.classList.toggle("stale", !over && (seconds == null || seconds > STALE_S));
  }

  function heard(message) {
    lastData = Date.now();
    apply(message);
    show();
    age();
  }

  function connect() {
    if (source) source.close();
    source = new EventSource("api/v1/stream");
    source.onmessage = (event) => {
      const message = JSON.parse(event.data);
      if (!message.whole && (!picture || message.n !== picture.n + 1)) { connect(); return; }
      pause = 1000;
      if (polling) { clearInterval(polling); polling = null; }
      heard(message);
    };
    source.onerror = () => {
      source.close();
      if (!polling) polling = setInterval(poll, POLL_MS);
      setTimeout(connect, pause);
      pause = Math.min(pause * 1.7, 30000);
    };
  }

  async function poll() {
    try {
      const answer = await fetch("api/v1/status");
      if (answer.ok) heard({ ...await answer.json(), whole: true });
    } catch { age(); }
  }

  // A recorded run: the same page, fed by a slider.
  function replay() {
    const { frames, series } = recording, slider = S.id("scrub"), button = S.id("play");
    let timer = null;
    const go = () => {
      const frame = frames[Number(slider.value)];
      picture = { ...picture, ...frame.picture, feed: recording.feed.filter((line) => line.n <= frame.picture.upto).slice(-60) };
      show();
      const words = S.moment(frame.t);
      S.text(S.id("scrub-time"), words);
      slider.setAttribute("aria-valuetext", `${words}, step ${frame.picture.head.step}`);
      const upto = series.t.findIndex((t) => t > frame.t), end = upto < 0 ? series.t.length : Math.max(upto, 2);
      const cut = { marks: series.marks.filter((mark) => mark.t <= frame.t) };
      for (const [key, column] of Object.entries(series)) if (key !== "marks") cut[key] = column.slice(0, end);
      S.charts.show(cut);
    };
    const stop = () => { clearInterval(timer); timer = null; S.text(button, "Play"); };
    slider.addEventListener("input", () => { stop(); go(); });
    button.addEventListener("click", () => {
      if (timer) { stop(); return; }
      if (Number(slider.value) >= frames.length - 1) slider.value = 0;
      S.text(button, "Pause");
      timer = setInterval(() => {
        if (Number(slider.value) >= frames.length - 1) { stop(); return; }
        slider.value = Number(slider.value) + 1;
        go();
      }, Math.max(60, 20000 / frames.length));
    });
    go();
  }

  function theme() {
    const names = ["auto", "light", "dark"], button = S.id("theme"), root = document.documentElement;
    let chosen = "auto";
    try { chosen = names.includes(localStorage.theme) ? localStorage.theme : "auto"; } catch { /* a file has no storage */ }
    const set = () => {
      if (chosen === "auto") root.removeAttribute("data-theme"); else root.dataset.theme = chosen;
      S.text(button, `Theme: ${chosen}`);
      S.charts.repaint();
      S.lists.repaint();
    };
    button.hidden = false;
    button.addEventListener("click", () => {
      chosen = names[(names.indexOf(chosen) + 1) % names.length];
      try { localStorage.theme = chosen; } catch { /* then for this page only */ }
      set();
    });
    set();
  }

  apply(JSON.parse(S.id("first").textContent));
  theme();
  S.charts.start();
  S.lists.start();
  show();
  S.id("samples").addEventListener("toggle", () => S.pipeline.tables(picture));
  if (S.recorded) { replay(); return; }
  S.id("dots-legend").hidden = S.still.matches;
  if (S.id("copy") && navigator.clipboard) {
    S.id("copy").hidden = false;
    S.id("copy").addEventListener("click", async () => {
      await navigator.clipboard.writeText(S.id("help-line").textContent);
      S.text(S.id("copy"), "Copied");
      setTimeout(() => S.text(S.id("copy"), "Copy the command"), 2000);
    });
  }
  connect();
  setInterval(age, 1000);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) { show(); age(); } });
})();
