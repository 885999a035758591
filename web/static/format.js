// Words for numbers, and small tools for the document. Text goes in as text only, never as markup.
"use strict";
const S = {
  signs: { healthy: "●", degraded: "▲", stalled: "■", silent: "○", failed: "✕", finished: "✓", serving: "●", ready: "◐", joining: "○", expelled: "✕" },
  still: matchMedia("(prefers-reduced-motion: reduce)"),

  three(value) { return value.toFixed(value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2); },
  count(value) {
    if (value == null) return "–";
    for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (value >= size * 0.9995) return S.three(value / size) + unit;
    }
    return value.toFixed(0);
  },
  rate(value) {
    if (value == null) return "–";
    for (const [size, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
      if (value >= size * 0.9995) return `${S.three(value / size)} ${unit}/s`;
    }
    return `${value.toFixed(0)} B/s`;
  },
  service(value) {
    if (value == null) return "–";
    if (value >= 0.9995) return `${S.three(value)} s`;
    return `${(value * 1e3).toFixed(value >= 0.00995 ? 0 : 1)} ms`;
  },
  duration(value) {
    if (value == null) return "–";
    const whole = Math.round(value), two = (n) => String(n).padStart(2, "0");
    if (whole >= 172800) return `${Math.floor(whole / 86400)} d ${Math.floor(whole % 86400 / 3600)} h`;
    const hours = Math.floor(whole / 3600), minutes = Math.floor(whole % 3600 / 60);
    return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
  },
  ago(value) {
    if (value < 120) return `${Math.max(Math.round(value), 0)} s ago`;
    return value < 7200 ? `${Math.round(value / 60)} min ago` : `${Math.round(value / 3600)} h ago`;
  },
  percent(value) { return value == null ? "–" : `${Math.round(value * 100)} %`; },
  fixed(value, digits) { return value == null ? "–" : value.toFixed(digits); },
  // Local time, the same everywhere: 14:03:21, and with its day where that is not today's.
  clock(t, seconds = true) {
    const at = new Date(t * 1000), two = (n) => String(n).padStart(2, "0");
    return `${two(at.getHours())}:${two(at.getMinutes())}${seconds ? `:${two(at.getSeconds())}` : ""}`;
  },
  day(t) {
    const at = new Date(t * 1000), two = (n) => String(n).padStart(2, "0");
    return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  },
  moment(t) {
    const day = S.day(t);
    return day === S.day(Date.now() / 1000) ? S.clock(t) : `${day} ${S.clock(t)}`;
  },

  id(name) { return document.getElementById(name); },
  // An element: el("td", {class: "num"}, "text", child, …). No attribute takes script.
  el(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes || {})) {
      if (value === true) made.setAttribute(key, "");
      else if (value != null && value !== false) made.setAttribute(key, value);
    }
    made.append(...children.filter((child) => child != null && child !== false));
    return made;
  },
  // Set text only where it differs: an unchanged page costs nothing to draw.
  text(node, value) { if (node.textContent !== value) node.textContent = value; },
  // Children of `parent` as `items`, in order, each kept as long as its key stays.
  keyed(parent, items, key, make, update) {
    const old = parent.keyed || new Map(), now = new Map();
    if (!parent.keyed) parent.replaceChildren();
    let at = parent.firstChild;
    for (const item of items) {
      const name = key(item);
      if (now.has(name)) continue;
      let node = old.get(name);
      if (!node) { node = make(item); node.shown = null; }
      old.delete(name);
      now.set(name, node);
      if (node.shown !== item) { update(node, item); node.shown = item; }
      if (node === at) at = at.nextSibling; else parent.insertBefore(node, at);
    }
    for (const node of old.values()) node.remove();
    parent.keyed = now;
  },
  peerLink(row, extra) {
    if (S.recorded) return S.el("span", { class: "who" }, ...extra);
    return S.el("a", { class: "who", href: `peer/${encodeURIComponent(row.peer)}` }, ...extra);
  },
};
