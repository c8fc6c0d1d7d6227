// Draws the episodes of the data block. Everything a model wrote reaches the page as text (append, textContent), never as markup.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent),
  episodes = data.episodes;
const byId = (id) => document.getElementById(id);
const el = (name, cls, text) => {
  const node = document.createElement(name);
  if (cls) node.className = cls;
  if (text !== undefined) node.textContent = text;
  return node;
};
const RAMPS = {
  light: {
    diverging: ["#a8480a", "#e08a3c", "#f8d9b8", "#f6f6f3", "#c9def2", "#5c9fd6", "#17579c"],
    sequential: ["#f6f6f3", "#cfe6dd", "#83c2af", "#36907e", "#0a5a4f"],
  },
  dark: {
    diverging: ["#ffb067", "#bd6c22", "#57371d", "#232931", "#1b4066", "#2f77bd", "#8cc4ff"],
    sequential: ["#232931", "#17473f", "#1f7b6b", "#3bb8a0", "#96f2db"],
  },
};
const CATEGORIES = ["#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999"];
const wanted = new URLSearchParams(location.hash.slice(1));
const state = {
  at: Math.max(
    0,
    episodes.findIndex((e) => e.id === wanted.get("e")),
  ),
  view: wanted.get("v") || "text",
  scope: wanted.get("s") || "one",
  theme: wanted.get("t") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"),
  hidden: new Set(),
  hot: -1,
  card: null,
};

const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
function ramp(stops, x) {
  const p = Math.min(1, Math.max(0, x)) * (stops.length - 1),
    i = Math.min(stops.length - 2, Math.floor(p)),
    a = rgb(stops[i]),
    b = rgb(stops[i + 1]);
  return a.map((v, k) => Math.round(v + (b[k] - v) * (p - i)));
}
function colour(value, scale, domain) {
  if (value === null || value === undefined) return null;
  if (scale === "categorical") return rgb(CATEGORIES[value % CATEGORIES.length]);
  return ramp(RAMPS[state.theme][scale], (value - domain[0]) / (domain[1] - domain[0]));
}
const css = (c) => `rgb(${c.join(",")})`;
const inkOn = (c) => {
  const l = c.map((v) => {
    v /= 255;
    return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  });
  const luminance = 0.2126 * l[0] + 0.7152 * l[1] + 0.0722 * l[2];
  return luminance > 0.3 ? "#14171b" : luminance > 0.179 ? "#000000" : "#ffffff"; // contrast at least 4.5 on any colour
};
function paint(node, value, scale, domain, masked) {
  const c = masked ? null : colour(value, scale, domain);
  if (masked) node.classList.add("masked");
  else if (c) {
    node.style.background = css(c);
    node.style.color = inkOn(c);
  } else node.classList.add("novalue");
}
const show = (v) => (v === null || v === undefined ? "no value" : typeof v === "number" ? (Object.is(v, -0) ? "0" : String(v)) : String(v));
const short = (v) => {
  if (v === null) return "";
  const a = Math.abs(v);
  return a === 0 ? "0" : a >= 100 ? v.toFixed(0) : a >= 10 ? v.toFixed(1) : a >= 0.005 ? v.toFixed(2) : v.toExponential(0);
};
const signed = (v) => (typeof v === "number" ? (v > 0 ? "+" : "") + show(v) : show(v));
const valueText = (strip, v) => (v !== null && strip.scale === "categorical" && strip.labels[v] ? strip.labels[v] : show(v));

// What to print for a character without a glyph of its own: a piece of a UTF-8 sequence, control, zero-width and direction marks. "" for others.
function boxed(ch) {
  const code = ch.codePointAt(0);
  if (code === 0xfffd || (code >= 0xd800 && code <= 0xdfff)) return "byte";
  const odd = [
    [0, 31],
    [127, 160],
    [0xad, 0xad],
    [0x200b, 0x200f],
    [0x2028, 0x202e],
    [0x2060, 0x206f],
    [0xfeff, 0xfeff],
  ];
  return odd.some(([low, high]) => low <= code && code <= high) ? "U+" + code.toString(16).toUpperCase().padStart(4, "0") : "";
}
// One token as nodes: spaces get a dot, newlines and tabs a sign, what has no glyph of its own a dashed box.
function fill(node, token, breaks) {
  if (token === "") {
    node.append(el("span", "sign", "\u2205"));
    return;
  }
  let run = "";
  const flush = () => {
    if (run) {
      node.append(run);
      run = "";
    }
  };
  for (const ch of token) {
    if (ch === " ") {
      flush();
      node.append(el("span", "space", " "));
    } else if (ch === "\n") {
      flush();
      node.append(el("span", "sign", "\u21b5"));
      if (breaks) node.append("\n");
    } else if (ch === "\t") {
      flush();
      node.append(el("span", "sign", "\u21e5"));
      if (breaks) node.append("\t");
    } else if (boxed(ch)) {
      flush();
      node.append(el("span", "odd", boxed(ch)));
    } else run += ch;
  }
  flush();
}
const stripsOf = (episode) => episode.strips.filter((s) => !state.hidden.has(s.name));
const turnAt = (episode, i) => episode.turns.find((t) => t.start <= i && i < t.end);
function tokenSpan(episode, strip, i) {
  const node = el("span", "tok");
  node.dataset.i = i;
  fill(node, episode.tokens[i], true);
  const masked = episode.masked && episode.masked[i];
  if (strip) paint(node, strip.values[i], strip.scale, strip.domain, masked);
  else if (masked) node.classList.add("masked");
  return node;
}
function turnBar(turn) {
  const bar = el("div", "turn");
  bar.append(el("span", "", turn.name), el("span", "", turn.value === null ? "" : signed(turn.value)));
  paint(bar, turn.value, "diverging", data.turn_domain, false);
  return bar;
}
function flowing(episode, strip) {
  const box = el("div", "text");
  let i = 0;
  const until = (parent, end) => {
    for (; i < end; i++) parent.append(tokenSpan(episode, strip, i));
  };
  for (const turn of episode.turns) {
    if (turn.start > i) until(box.appendChild(el("div", "turnbody")), turn.start);
    box.append(turnBar(turn));
    until(box.appendChild(el("div", "turnbody")), Math.max(i, turn.end));
  }
  if (episode.turns.length && i < episode.tokens.length) until(box.appendChild(el("div", "turnbody")), episode.tokens.length);
  until(box, episode.tokens.length);
  return box;
}
function textBody(episode) {
  const box = el("div"),
    strips = stripsOf(episode);
  if (!strips.length) box.append(flowing(episode, null)); // turns alone
  for (const strip of strips) {
    const row = el("section", "strip"),
      head = el("h4", "", strip.name);
    if (strip.note) head.append(el("small", "", strip.note));
    row.append(head, flowing(episode, strip));
    box.append(row);
  }
  return box;
}
// Lines are laid out by measured width, so that every line repeats the strip names at its left.
const pen = document.createElement("canvas").getContext("2d");
function gridBody(episode, width, numbers) {
  const box = el("div", "grid"),
    strips = stripsOf(episode);
  pen.font = '13.5px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace';
  const room = Math.max(160, width - (state.scope === "group" ? 110 : 150));
  const sizes = episode.tokens.map((t) =>
    Math.max(numbers ? 34 : 13, pen.measureText([...(t || "0")].map((ch) => (/[\n\t]/.test(ch) ? "\u21b5" : boxed(ch) || ch)).join("")).width + 6),
  );
  let start = 0;
  while (start < episode.tokens.length) {
    let end = start,
      used = 0;
    while (end < episode.tokens.length && (end === start || used + sizes[end] <= room)) {
      used += sizes[end];
      end++;
      if (/\n/.test(episode.tokens[end - 1])) break;
    }
    const table = el("table");
    if (episode.turns.some((t) => t.start < end && t.end > start)) {
      const row = el("tr");
      row.append(el("th", "", "turn"));
      for (let i = start; i < end;) {
        const turn = turnAt(episode, i);
        let j = i + 1;
        while (j < end && turnAt(episode, j) === turn) j++;
        const cell = el("td", "turncell");
        cell.colSpan = j - i;
        if (turn) {
          cell.textContent = `${turn.name} ${turn.value === null ? "" : signed(turn.value)}`;
          cell.title = cell.textContent;
          paint(cell, turn.value, "diverging", data.turn_domain, false);
        }
        row.append(cell);
        i = j;
      }
      table.append(row);
    }
    const head = el("tr");
    head.append(el("th", "", `${start}`));
    for (let i = start; i < end; i++) {
      const cell = el("td");
      cell.dataset.i = i;
      fill(cell, episode.tokens[i], false);
      if (episode.masked && episode.masked[i]) cell.classList.add("masked");
      cell.style.minWidth = `${numbers ? 30 : 9}px`;
      head.append(cell);
    }
    table.append(head);
    const allMasked = episode.masked && episode.masked.slice(start, end).every(Boolean); // an observation line has nothing to compare
    for (const strip of allMasked ? [] : strips) {
      const row = el("tr"),
        name = el("th", "", strip.name);
      name.title = strip.name;
      row.append(name);
      for (let i = start; i < end; i++) {
        const cell = el("td", "cell");
        cell.dataset.i = i;
        const masked = episode.masked && episode.masked[i];
        paint(cell, strip.values[i], strip.scale, strip.domain, masked);
        const value = strip.values[i];
        if (numbers && !masked && value !== null)
          cell.textContent = strip.scale === "categorical" ? valueText(strip, value).slice(0, 5) : short(value);
        row.append(cell);
      }
      table.append(row);
    }
    box.append(table);
    start = end;
  }
  return box;
}
function barcode(canvas, n, colourAt, height) {
  const width = Math.max(1, Math.round((canvas.clientWidth || 200) * devicePixelRatio)),
    context = canvas.getContext("2d");
  canvas.width = width;
  canvas.height = Math.round(height * devicePixelRatio);
  for (let i = 0; i < n; i++) {
    const c = colourAt(i);
    if (!c) continue;
    context.fillStyle = css(c);
    const left = Math.floor((i * width) / n);
    context.fillRect(left, 0, Math.max(1, Math.floor(((i + 1) * width) / n) - left), canvas.height);
  }
}
const stripColour = (episode, strip) => (i) => (episode.masked && episode.masked[i] ? null : colour(strip.values[i], strip.scale, strip.domain));
function overview(episode) {
  const box = el("div", "overview"),
    jobs = [];
  const add = (name, colourAt) => {
    const canvas = el("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${name} along the response`);
    canvas.dataset.bar = 1;
    box.append(el("label", "", name), canvas);
    jobs.push(() => barcode(canvas, episode.tokens.length, colourAt, 15));
  };
  if (episode.turns.length)
    add("turns", (i) => {
      const t = turnAt(episode, i);
      return t ? colour(t.value, "diverging", data.turn_domain) : null;
    });
  for (const strip of stripsOf(episode)) add(strip.name, stripColour(episode, strip));
  const axis = el("div", "axis");
  axis.append(el("span", "", "token 0"), el("span", "", String(episode.tokens.length - 1)));
  if (episode.tokens.length) box.append(el("span"), axis);
  return [box, jobs];
}
function card(episode, parent) {
  const box = el("article");
  box.dataset.id = episode.id;
  if (state.scope === "one" && episode.group) box.append(el("div", "kicker", episode.group));
  box.append(el("h3", "", episode.title));
  const facts = el("div", "facts");
  for (const [name, value] of Object.entries(episode.facts)) {
    const chip = el("span");
    chip.append(el("i", "", name), show(value));
    facts.append(chip);
  }
  box.append(facts);
  for (const note of episode.notes) box.append(el("p", "", note));
  const [bars, jobs] = overview(episode);
  box.append(bars);
  parent.append(box);
  return () => {
    box.append(state.view === "text" ? textBody(episode) : gridBody(episode, box.clientWidth - 34, state.view === "numbers"));
    for (const job of jobs) job();
  };
}
const members = () => (state.scope === "one" ? [episodes[state.at]] : episodes.filter((e) => e.group === episodes[state.at].group));
function scales() {
  const box = byId("scales"),
    seen = new Map(),
    shown = members();
  box.replaceChildren();
  for (const episode of shown)
    for (const strip of episode.strips) {
      const key = strip.name + "\u0000" + strip.scale + strip.domain.join();
      if (!seen.has(key)) seen.set(key, strip);
    }
  for (const strip of seen.values()) {
    const node = el("button", "scale");
    node.setAttribute("aria-pressed", String(!state.hidden.has(strip.name)));
    node.title = "Show or hide this strip";
    node.append(el("b", "", strip.name));
    if (strip.scale === "categorical") {
      const list = el("small"),
        codes = strip.labels.length
          ? strip.labels
          : [...new Set(shown.flatMap((e) => e.strips.filter((s) => s.name === strip.name).flatMap((s) => s.values)))]
              .filter((v) => v !== null)
              .sort((a, b) => a - b);
      codes.forEach((label, code) => {
        const mark = el("span", "swatch");
        mark.style.background = CATEGORIES[(strip.labels.length ? code : label) % CATEGORIES.length];
        list.append(mark, `${label}  `);
      });
      node.append(list);
    } else {
      const bar = el("span", "ramp"),
        ends = el("span", "ends"),
        [low, high] = strip.domain;
      bar.style.background = `linear-gradient(90deg, ${RAMPS[state.theme][strip.scale].join(",")})`;
      const all = episodes
        .flatMap((e) => e.strips.filter((s) => s.name === strip.name && s.scale === strip.scale))
        .flatMap((s) => s.values)
        .filter((v) => v !== null);
      const below = all.some((v) => v < low),
        above = all.some((v) => v > high),
        tidy = (v) => String(Number(v.toPrecision(3)));
      ends.append(
        el("span", "", (below ? "\u2264 " : "") + tidy(low)),
        el("span", "", tidy((low + high) / 2)),
        el("span", "", (above ? "\u2265 " : "") + tidy(high)),
      );
      node.append(bar, ends);
    }
    const notes = new Set(episodes.flatMap((e) => e.strips.filter((s) => s.name === strip.name).map((s) => s.note)));
    if (strip.note && notes.size === 1) node.append(el("small", "", strip.note)); // a note that varies stands at each response instead
    node.onclick = () => toggle(strip.name);
    box.append(node);
  }
}
function toggle(name) {
  state.hidden.has(name) ? state.hidden.delete(name) : state.hidden.add(name);
  draw();
}
function sidebar() {
  const nav = byId("episodes");
  nav.replaceChildren();
  let last = null;
  episodes.forEach((episode, index) => {
    if (episode.group !== last) {
      last = episode.group;
      if (last) nav.append(el("h2", "", last));
    }
    const node = el("button"),
      row = el("span", "row");
    node.dataset.index = index;
    const [name, value] = Object.entries(episode.facts).find((f) => /^(total|return|reward|success|advantage)$/i.test(f[0])) ||
      Object.entries(episode.facts)[0] || ["", ""];
    row.append(el("span", "", episode.title), el("span", "", typeof value === "number" ? short(value) : show(value)));
    row.lastChild.title = name;
    const thumb = el("canvas");
    thumb.style.height = `${Math.max(4, 4 * Math.min(6, episode.strips.length))}px`;
    node.append(row, thumb);
    nav.append(node);
    node.onclick = () => {
      state.at = index;
      draw();
      scrollTo(0, 0);
    };
  });
}
function thumbs() {
  document.querySelectorAll("nav button").forEach((node) => {
    const episode = episodes[node.dataset.index],
      canvas = node.querySelector("canvas"),
      strips = episode.strips.slice(0, 6),
      n = episode.tokens.length;
    const width = canvas.clientWidth || 200,
      context = canvas.getContext("2d");
    canvas.width = width;
    canvas.height = Math.max(1, strips.length * 4);
    strips.forEach((strip, k) => {
      const at = stripColour(episode, strip);
      for (let i = 0; i < n; i++) {
        const c = at(i);
        if (c) {
          context.fillStyle = css(c);
          context.fillRect((i * width) / n, k * 4, Math.max(1, width / n), 3);
        }
      }
    });
  });
}
function draw() {
  document.documentElement.dataset.theme = state.theme;
  document.documentElement.style.setProperty("--head", `${document.querySelector("header").offsetHeight}px`);
  byId("theme").textContent = state.theme === "dark" ? "Light" : "Dark";
  for (const [id, key] of [
    ["view", "view"],
    ["scope", "scope"],
  ])
    for (const node of byId(id).children) node.setAttribute("aria-pressed", String(node.dataset.value === state[key]));
  if (!episodes.length) {
    byId("cards").replaceChildren(el("p", "", "No episodes were recorded."));
    byId("prompt").hidden = true;
    return;
  }
  const shown = members(),
    box = byId("cards");
  document.querySelectorAll("nav button").forEach((node) => node.setAttribute("aria-current", String(shown.includes(episodes[node.dataset.index]))));
  state.card = null;
  state.hot = -1;
  byId("tip").hidden = true;
  byId("prompt").querySelector("pre").textContent = shown[0].prompt;
  byId("prompt").hidden = !shown[0].prompt;
  box.className = state.scope === "group" ? "group" : "";
  box.replaceChildren();
  scales();
  for (const body of shown.map((episode) => card(episode, box))) body(); // bodies need the width that a card has among the others
  thumbs();
  history.replaceState(null, "", "#" + new URLSearchParams({ e: episodes[state.at].id, v: state.view, s: state.scope, t: state.theme }));
}
function heat(article, i, x, y) {
  if (state.card !== article || state.hot !== i) {
    document.querySelectorAll(".hot").forEach((node) => node.classList.remove("hot"));
    if (article) article.querySelectorAll(`[data-i="${i}"]`).forEach((node) => node.classList.add("hot"));
    state.card = article;
    state.hot = i;
  }
  const tip = byId("tip");
  if (!article) {
    tip.hidden = true;
    return;
  }
  const episode = episodes.find((e) => e.id === article.dataset.id);
  tip.replaceChildren();
  const head = el("div");
  head.append(el("b", "", JSON.stringify(episode.tokens[i])), `  token ${i}${episode.masked && episode.masked[i] ? ", not trained on" : ""}`);
  const table = el("table"),
    turn = turnAt(episode, i);
  const line = (name, text, c) => {
    const row = el("tr"),
      first = el("td"),
      mark = el("span", "swatch");
    if (c) mark.style.background = css(c);
    first.append(mark, name);
    row.append(first, el("td", "", text));
    table.append(row);
  };
  if (turn) line(turn.name, show(turn.value), colour(turn.value, "diverging", data.turn_domain));
  for (const strip of episode.strips) line(strip.name, valueText(strip, strip.values[i]), colour(strip.values[i], strip.scale, strip.domain));
  tip.append(head, table);
  tip.hidden = false;
  tip.style.left = `${Math.max(4, Math.min(innerWidth - tip.offsetWidth - 8, x + 14))}px`;
  tip.style.top = `${y + 20 + tip.offsetHeight > innerHeight ? Math.max(4, y - tip.offsetHeight - 14) : y + 20}px`;
}
byId("cards").addEventListener("mousemove", (event) => {
  const article = event.target.closest("article");
  if (!article) return heat(null, -1);
  const bar = event.target.closest("canvas[data-bar]"),
    token = event.target.closest("[data-i]");
  if (token) return heat(article, Number(token.dataset.i), event.clientX, event.clientY);
  if (bar) {
    const n = episodes.find((e) => e.id === article.dataset.id).tokens.length,
      box = bar.getBoundingClientRect();
    return heat(article, Math.min(n - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * n))), event.clientX, event.clientY);
  }
  heat(null, -1);
});
byId("cards").addEventListener("mouseleave", () => heat(null, -1));
byId("cards").addEventListener("click", (event) => {
  if (event.target.closest("canvas[data-bar]") && state.card)
    state.card.querySelector(`[data-i="${state.hot}"]`)?.scrollIntoView({ block: "center" });
});
function step(by) {
  if (state.scope === "one") state.at = (state.at + by + episodes.length) % episodes.length;
  else {
    const groups = [...new Set(episodes.map((e) => e.group))],
      next = groups[(groups.indexOf(episodes[state.at].group) + by + groups.length) % groups.length];
    state.at = episodes.findIndex((e) => e.group === next);
  }
  draw();
  document.querySelector('nav button[aria-current="true"]')?.scrollIntoView({ block: "nearest" });
}
function moveToken(by) {
  const article = state.card || document.querySelector("article"),
    n = episodes.find((e) => e.id === article.dataset.id).tokens.length;
  if (!n) return;
  const i = state.hot < 0 ? 0 : (state.hot + by + n) % n,
    node = article.querySelector(`[data-i="${i}"]`);
  if (!node) return;
  node.scrollIntoView({ block: "nearest" });
  const box = node.getBoundingClientRect();
  heat(article, i, box.left, box.bottom - 14);
}
const VIEWS = ["text", "grid", "numbers"];
const actions = {
  v: () => {
    state.view = VIEWS[(VIEWS.indexOf(state.view) + 1) % 3];
    draw();
  },
  s: () => {
    state.scope = state.scope === "one" ? "group" : "one";
    draw();
  },
  t: () => {
    state.theme = state.theme === "dark" ? "light" : "dark";
    draw();
  },
  p: () => {
    byId("prompt").open = !byId("prompt").open;
  },
  "?": () => byId("keys").showModal(),
  ArrowLeft: () => step(-1),
  ArrowRight: () => step(1),
  ",": () => moveToken(-1),
  ".": () => moveToken(1),
  Escape: () => heat(null, -1),
};
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("keys").open || !episodes.length) return;
  const digit = /^[1-9]$/.test(event.key) ? episodes[state.at].strips[event.key - 1] : null;
  if (digit) toggle(digit.name);
  else if (Object.hasOwn(actions, event.key)) {
    actions[event.key]();
    event.preventDefault();
  }
});
byId("view").onclick = (event) => {
  if (event.target.dataset.value) {
    state.view = event.target.dataset.value;
    draw();
  }
};
byId("scope").onclick = (event) => {
  if (event.target.dataset.value) {
    state.scope = event.target.dataset.value;
    draw();
  }
};
byId("theme").onclick = actions.t;
byId("help").onclick = actions["?"];
let waiting = 0;
addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(draw, 150);
});
sidebar();
draw();
document.querySelector('nav button[aria-current="true"]')?.scrollIntoView({ block: "nearest" });
