"use strict";
const at = (id) => document.getElementById(id);
const messages = [];        // what the model is told of the conversation
let model = null;           // {id, max_model_len, twell: {chat}}
let controller = null;      // of the answer that is being written
let shown = null;           // the answer whose densities are seen
let picked = null;          // which of its tokens; null: the newest
let drawn = true;           // nothing has changed since it was drawn

// ---- the server ----

function headers() {
  const key = at("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { headers: headers(), ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached.");
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  const failure = new Error(told?.error?.message ?? `The server answers ${response.status}.`);
  failure.status = response.status;
  throw failure;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("The connection was lost before the end of the answer.");
    const blocks = (text + value).split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      if (block === "data: [DONE]") return;
      const event = JSON.parse(block.slice("data: ".length));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

async function connect() {
  try {
    [model] = (await (await ask("/v1/models")).json()).data;
  } catch (error) {
    at("model").textContent = "not connected";
    return fail(error);
  }
  fail(null);
  at("model").textContent = model.id;
  document.title = `${model.id} · twellctl`;
  at("max-tokens").max = model.max_model_len;
  at("max-tokens").value = Math.min(512, model.max_model_len >> 1);
  at("system-field").hidden = !model.twell.chat;
  at("fresh").textContent = model.twell.chat ? "New chat" : "Clear";
  at("prompt").placeholder = model.twell.chat ? "Message" : "Text for the model to go on from";
}

function fail(error) {
  at("error").hidden = !error;
  at("error").textContent = error ? error.message : "";
  if (error?.status === 401) {
    openSettings(true);
    at("key").focus();
  }
}

// ---- the conversation ----

function request(text) {
  const common = {
    model: model.id, stream: true, stream_options: { include_usage: true }, twell_densities: true,
    temperature: at("temperature").valueAsNumber, max_tokens: at("max-tokens").valueAsNumber,
  };
  if (!model.twell.chat) return ["/v1/completions", { ...common, prompt: text }];
  const system = at("system").value.trim();
  const all = [...messages, { role: "user", content: text }];
  if (system) all.unshift({ role: "system", content: system });
  return ["/v1/chat/completions", { ...common, messages: all }];
}

function addMessage(who, label, text = "") {
  const box = element("article", `message ${who}`);
  const body = element("div", "text", text);
  box.append(element("h2", "", label), body);
  at("log").append(box);
  return { box, body };
}

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

async function say(text) {
  fail(null);
  if (!model) await connect();
  if (!model) return;
  at("empty").hidden = true;
  const chat = model.twell.chat;
  const question = addMessage("user", chat ? "You" : "Text", text);
  const answer = { ...addMessage("assistant writing", chat ? model.id : "The model goes on"),
    text: "", tokens: [], sums: [], most: 0, times: [], usage: null, reason: null };
  answer.box.answer = answer;
  at("prompt").value = "";
  fit();
  at("log").scrollTop = at("log").scrollHeight;
  busy(true);
  try {
    await read(text, answer);
  } catch (error) {
    if (error.name !== "AbortError") fail(error);
    answer.reason = error.name === "AbortError" ? "stopped" : "failed";
  }
  busy(false);
  if (!answer.box.isConnected) return;  // another chat has begun
  answer.box.classList.remove("writing");
  if (!answer.text && answer.reason === "failed") {
    question.box.remove();
    answer.box.remove();
    at("prompt").value ||= text;
    fit();
    return;
  }
  messages.push({ role: "user", content: text }, { role: "assistant", content: answer.text });
  answer.box.append(element("p", "told", summary(answer)));
  follow(() => {});
}

async function read(text, answer) {
  const [path, body] = request(text);
  const options = { method: "POST", body: JSON.stringify(body), signal: controller.signal };
  for await (const event of events(await ask(path, options))) {
    answer.usage = event.usage ?? answer.usage;
    for (const choice of event.choices) {
      answer.reason = choice.finish_reason ?? answer.reason;
      const piece = choice.delta ? choice.delta.content ?? "" : choice.text;
      if (piece || event.twell) follow(() => add(answer, piece, event.twell?.densities ?? []));
    }
  }
}

function add(answer, piece, densities) {
  const span = element("span", "token", piece);
  span.first = answer.tokens.length;
  answer.text += piece;
  answer.body.append(span);
  answer.times.push(performance.now());
  for (const shares of densities) {
    answer.tokens.push({ shares, span, text: piece });
    answer.most = Math.max(answer.most, ...shares);
    shares.forEach((share, layer) => { answer.sums[layer] = (answer.sums[layer] ?? 0) + share; });
  }
  if (shown !== answer) [shown, picked] = [answer, null];
  if (densities.length) draw();
}

function summary(answer) {
  const [first, last] = [answer.times[0], answer.times.at(-1)];
  const count = answer.usage?.completion_tokens ?? answer.tokens.length;
  const told = [`${count} tokens`];
  if (last > first) told.push(`${(1000 * (count - 1) / (last - first)).toFixed(1)} tokens/s`);
  if (answer.tokens.length) told.push(`${percent(meanOf(answer))} of the neurons fired`);
  const ends = { length: "cut at max tokens", stopped: "stopped", failed: "broken off" };
  if (ends[answer.reason]) told.push(ends[answer.reason]);
  return told.join(" · ");
}

function follow(change) {  // stay at the end of the text if that is what is seen
  const log = at("log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function busy(is) {
  controller = is ? new AbortController() : null;
  at("send").hidden = is;
  at("stop").hidden = !is;
  at("log").setAttribute("aria-busy", is);  // it is read out when it is complete
  at("prompt").focus();
}

// ---- what fired ----

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const meanOf = (answer) => mean(answer.sums) / answer.tokens.length;

function percent(share) {
  const value = 100 * share;
  return `${value.toFixed(value >= 10 ? 1 : value >= 1 ? 2 : 3)} %`;
}

function ceiling(share) {  // a round number of per cent not below it
  const steps = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100];
  return (steps.find((step) => step >= 100 * share) ?? 100) / 100;
}

function draw() {
  if (drawn) requestAnimationFrame(() => { drawn = true; drawBars(); drawStrip(); });
  drawn = false;
}

function drawBars() {
  document.querySelector(".token.picked")?.classList.remove("picked");
  if (!shown?.tokens.length) return;
  const index = picked ?? shown.tokens.length - 1;
  const { shares, span, text } = shown.tokens[index];
  const scale = ceiling(shown.most);
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
    bar.style.height = `${100 * share / scale}%`;
    tick.style.bottom = `${100 * average / scale}%`;
    bars.children[layer].title = `layer ${layer}: ${percent(share)}, mean ${percent(average)}`;
  });
  if (picked !== null) span.classList.add("picked");
  at("which").replaceChildren(`token ${index + 1} of ${shown.tokens.length} `,
    element("code", "", text.replaceAll("\n", "↵") || " "));
  at("share").textContent = `${percent(mean(shares))}, mean ${percent(meanOf(shown))}`;
  at("most").textContent = `${+(100 * scale).toFixed(2)} %`;
  at("half").textContent = `${+(50 * scale).toFixed(2)} %`;
  at("least").textContent = "0";
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
  const newest = shown.newest = firstRow(count), scale = ceiling(shown.most);
  for (let row = 0; row < count && newest - row >= 0; row++) {
    const { shares } = shown.tokens[newest - row];
    const wide = width / shares.length;
    shares.forEach((share, layer) => {
      const colour = from.map((value, i) => value + (to[i] - value) * Math.sqrt(share / scale));
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
  if (answer !== shown) answer.newest = undefined;
  [shown, picked] = [answer, index];
  if (index === null) answer.newest = undefined;
  draw();
}

// ---- hands ----

function openSettings(open) {
  at("settings").hidden = !open;
  at("open").setAttribute("aria-expanded", open);
}

function fit() {  // the prompt is as high as its text
  at("prompt").style.height = "auto";
  at("prompt").style.height = `${at("prompt").scrollHeight + 2}px`;
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("prompt").value;
  if (text.trim() && !controller && at("settings").reportValidity()) say(text);
});
at("settings").addEventListener("submit", (event) => event.preventDefault());
at("prompt").addEventListener("input", fit);
at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("composer").requestSubmit();
});
at("stop").addEventListener("click", () => controller?.abort());
at("open").addEventListener("click", () => openSettings(at("settings").hidden));
at("fresh").addEventListener("click", () => {
  controller?.abort();
  messages.length = 0;
  document.querySelectorAll(".message").forEach((box) => box.remove());
  at("empty").hidden = false;
  fail(null);
  at("prompt").focus();
});
at("key").addEventListener("change", () => {
  sessionStorage.setItem("key", at("key").value);
  connect();
});
at("log").addEventListener("pointerover", (event) => {
  const span = event.target.closest(".token");
  if (span) pick(span.closest(".message").answer, span.first);
});
at("log").addEventListener("pointerleave", () => pick(shown, null));
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
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (picked === null) controller?.abort();
  pick(shown, null);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
new ResizeObserver(draw).observe(at("strip"));

at("key").value = sessionStorage.getItem("key") ?? "";
connect();
