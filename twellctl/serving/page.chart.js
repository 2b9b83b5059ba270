"use strict";
const at = (id) => document.getElementById(id);

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

// ---- what fired: the bars of one token, and a strip of the last ones ----

const DECADES = 3;          // of the strip's colours: 0.1 % to 100 %, the same for all models
let shown = null;           // the answer whose densities are seen
let picked = null;          // which of its tokens; null: the newest

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const meanOf = (answer) => mean(answer.sums) / answer.tokens.length;
const heat = (share) => Math.min(1, Math.max(0, 1 + Math.log10(share) / DECADES));

function percent(share) {
  const value = 100 * share;
  return `${value.toFixed(value >= 10 ? 1 : value >= 1 ? 2 : 3)} %`;
}

function drawChart() {
  at("firing").classList.toggle("none", !shown);
  drawBars();
  drawStrip();
}

function drawBars() {
  document.querySelectorAll(".token.picked").forEach((span) => span.classList.remove("picked"));
  if (!shown) {
    at("bars").replaceChildren();
    at("bars").setAttribute("aria-label", "No token yet");
    at("which").textContent = "no token yet";
    for (const name of ["share", "first-layer", "last-layer"]) at(name).textContent = "";
    return;
  }
  const index = picked ?? shown.tokens.length - 1;
  const { shares, piece } = shown.tokens[index];
  const bars = at("bars");
  if (bars.children.length !== shares.length) {
    bars.replaceChildren(...shares.map(() => {
      const layer = element("div", "layer");
      layer.append(element("div", "bar"), element("div", "mean"));
      return layer;
    }));
  }
  shares.forEach((share, layer) => {
    const [bar, tick] = bars.children[layer].children;
    const average = shown.sums[layer] / shown.tokens.length;
    bar.style.height = `${100 * share}%`;
    tick.style.bottom = `${100 * average}%`;
    bars.children[layer].title = `layer ${layer}: ${percent(share)}, mean ${percent(average)}`;
  });
  if (picked !== null) {
    for (const span of shown.body.querySelectorAll(".token")) {
      if (span.first === piece.first) span.classList.add("picked");
    }
  }
  at("which").replaceChildren(`token ${index + 1} of ${shown.tokens.length} `,
    element("code", "", piece.text.replaceAll("\n", "↵") || " "));
  at("share").textContent = `${percent(mean(shares))}, mean ${percent(meanOf(shown))}`;
  at("first-layer").textContent = "layer 0";
  at("last-layer").textContent = shares.length - 1;
  bars.setAttribute("aria-label", `Token ${index + 1}: ` +
    shares.map((share, layer) => `layer ${layer} ${percent(share)}`).join(", "));
}

function rows() {  // how many tokens the strip has room for, and how high each is
  const height = at("strip").clientHeight;
  const room = Math.floor(height / 4);
  return { height, room, each: height / room, count: Math.min(room, shown?.tokens.length ?? 0) };
}

function firstRow(count) {  // the newest, or so far back that the picked one is seen
  return picked === null ? shown.tokens.length - 1 : Math.max(picked, Math.min(
    shown.tokens.length - 1, picked + count - 1, shown.newest ?? Infinity));
}

function drawStrip() {
  const canvas = at("strip"), paint = canvas.getContext("2d");
  const { height, room, each, count } = rows();
  const width = canvas.clientWidth, zoom = window.devicePixelRatio;
  [canvas.width, canvas.height] = [Math.round(width * zoom), Math.round(height * zoom)];
  at("newest").textContent = at("oldest").textContent = "";
  if (!count) return;
  paint.scale(zoom, zoom);
  const style = getComputedStyle(document.documentElement);
  const [from, to] = ["--heat-from", "--heat-to"].map(
    (name) => style.getPropertyValue(name).trim().split(" ").map(Number));
  const newest = shown.newest = firstRow(count);
  for (let row = 0; row < count && newest - row >= 0; row++) {
    const { shares } = shown.tokens[newest - row];
    const wide = width / shares.length;
    shares.forEach((share, layer) => {
      const colour = from.map((value, i) => value + (to[i] - value) * heat(share));
      paint.fillStyle = `rgb(${colour.map(Math.round).join(" ")})`;
      paint.fillRect(layer * wide, row * each, wide - (wide > 6 ? 1 : 0), each);
    });
  }
  if (picked !== null) {
    paint.strokeStyle = style.getPropertyValue("--ink");
    paint.strokeRect(0.5, (newest - picked) * each - 0.5, width - 1, each + 1);
  }
  at("newest").textContent = newest + 1;
  if (count === room) at("oldest").textContent = Math.max(newest - count + 2, 1);
}

function pick(answer, index) {
  if (!answer?.tokens.length) return;
  if (answer !== shown || index === null) answer.newest = undefined;
  [shown, picked] = [answer, index];
  draw();
}

at("strip").addEventListener("pointermove", (event) => {
  const { each, count } = rows();
  const row = Math.floor(event.offsetY / each);
  if (row >= 0 && row < count) pick(shown, (shown.newest ?? firstRow(count)) - row);
});
at("strip").addEventListener("pointerleave", () => pick(shown, null));
at("strip").addEventListener("keydown", (event) => {
  const step = { ArrowUp: 1, ArrowDown: -1 }[event.key];
  if (!step || !shown?.tokens.length) return;
  event.preventDefault();
  const last = shown.tokens.length - 1;
  pick(shown, Math.max(0, Math.min(last, (picked ?? last) + step)));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
new ResizeObserver(() => draw()).observe(at("strip"));
