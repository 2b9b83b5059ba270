// ---- what all of it uses ----

const turns = [];           // {text, question: its element, answer, beside: another's, or null}
let models = [];            // {id, max_model_len, twell: {chat, drafters}}
let model = null;           // the one of them that answers
let controller = null;      // of the answer that is being written
let drawn = true;           // nothing has changed since it was drawn

function draw() {  // once a frame at most
  if (drawn) requestAnimationFrame(drawNow);
  drawn = false;
}

function drawNow() {
  drawn = true;
  if (controller && turns.length) follow(() => {
    const { answer, beside } = turns.at(-1);
    for (const one of [answer, beside]) {
      if (!one || one.caption) continue;
      show(one);
      showPace(one);
    }
  });
  drawChart();
}

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
  const body = await response.json().catch(() => null);
  const failure = new Error(body?.error?.message ?? `The server answers ${response.status}.`);
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
    models = (await (await ask("/v1/models")).json()).data;
  } catch (error) {
    at("model").textContent = "not connected";
    return fail(error);
  }
  fail(null);
  at("name").replaceChildren(...models.map(({ id }) => element("option", "", id)));
  at("beside").replaceChildren(element("option", "", "nobody"),
    ...models.map(({ id }) => element("option", "", id)));
  at("name-field").hidden = at("beside-field").hidden = models.length < 2;
  use(models[0]);
  const { chat } = model.twell;
  at("max-tokens").value = Math.min(512, model.max_model_len >> 1);
  at("system-field").hidden = !chat;
  at("fresh").textContent = chat ? "New chat" : "Clear";
  at("prompt").placeholder = chat ? "Message" : "Text for the model to go on from";
  at("example").textContent = chat ? "Explain binary search, with code in Python." : "Once upon a time";
  at("example").hidden = false;
  if (!turns.length) restore();
}

function use(one) {
  model = one;
  at("name").value = at("model").textContent = model.id;
  document.title = `${model.id} · twellctl`;
  at("max-tokens").max = model.max_model_len;
  at("marks-field").hidden = !models.some(({ twell }) => twell.drafters.length);
}

function other() {  // who answers beside the model, if anybody
  const one = models[at("beside").selectedIndex - 1];
  return one && one !== model ? one : null;
}

function fail(error) {
  at("error").hidden = !error;
  at("error").textContent = error ? error.message : "";
  if (error?.status === 401) {
    if (!at("key").value) at("error").textContent = "A key is needed: enter it above.";
    at("key-field").hidden = false;
    openSettings(true);
    at("key").focus();
  }
}

// ---- the conversation ----

function request(by) {  // of the last turn, whose answer does not count yet
  const number = (id) => Number.isNaN(at(id).valueAsNumber) ? null : at(id).valueAsNumber;
  const common = {
    model: by.id, stream: true, stream_options: { include_usage: true }, twell_densities: true,
    twell_drafters: true,
    temperature: number("temperature"), top_p: number("top-p"), seed: number("seed"),
    max_tokens: number("max-tokens"),
  };
  if (!model.twell.chat) return ["/v1/completions", { ...common, prompt: turns.at(-1).text }];
  const messages = turns.flatMap(({ text, answer }) => [
    { role: "user", content: text }, { role: "assistant", content: answer.text }]).slice(0, -1);
  const system = at("system").value.trim();
  if (system) messages.unshift({ role: "system", content: system });
  return ["/v1/chat/completions", { ...common, messages }];
}

function addMessage(place, who, label, text = "") {
  const box = element("article", `message ${who}`);
  const body = element("div", "text", text);
  box.append(element("h2", "", label), body);
  place.append(box);
  return { box, body };
}

function addTurn(text, by) {  // `by`: who answers, too, or null
  const { chat } = model.twell, log = at("log");
  at("empty").hidden = true;
  const question = addMessage(log, "user plain", chat ? "You" : "Text", text).box;
  const pair = by && element("div", "pair");
  if (pair) log.append(pair);
  const answer = addAnswer(pair ?? log, model, chat || pair);
  const beside = pair && addAnswer(pair, by, true);
  turns.push({ text, question, answer, beside });
  return turns.at(-1);
}

function addAnswer(place, by, named) {
  const answer = {
    ...addMessage(place, `assistant ${by.twell.chat ? "" : "plain"}`, named ? by.id : "The model goes on"),
    by, text: "", pieces: [], tokens: [], sums: [], counts: [], times: [], pace: element("p", "pace"),
    usage: null, reason: null, caption: null };
  answer.box.append(answer.pace);
  answer.box.answer = answer;
  return answer;
}

async function say(text) {
  fail(null);
  if (!model) await connect();
  if (!model) return;
  const turn = addTurn(text, other()), { answer, beside, question } = turn;
  at("prompt").value = "";
  fit();
  at("log").scrollTop = at("log").scrollHeight;
  busy(true);
  await write(answer);
  if (answer.text || answer.reason !== "failed") end(answer, summary(answer));
  if (beside && ["stopped", "failed"].includes(answer.reason)) drop(turn);
  else if (beside) {
    await write(beside);
    show(beside);
    end(beside, [summary(beside), difference(turn)].filter(Boolean).join(" · "));
  }
  busy(false);
  if (!answer.box.isConnected || answer.caption) return;  // another chat has begun, or it is there
  turns.pop();
  question.remove();
  answer.box.remove();
  at("empty").hidden = turns.length > 0;
  at("prompt").value ||= text;
  fit();
}

function drop(turn) {  // what would have been beside the answer
  turn.beside.box.parentNode?.replaceWith(turn.answer.box);
  turn.beside = null;
}

async function write(answer) {
  answer.box.classList.add("writing");
  try {
    await read(answer);
  } catch (error) {
    if (error.name !== "AbortError") fail(error);
    answer.reason = error.name === "AbortError" ? "stopped" : "failed";
  }
}

function difference({ answer, beside }) {  // in words; its first token is marked in both
  if (!beside || !["stop", "length"].includes(beside.reason)) return "";
  if (answer.text === beside.text) return `as ${answer.by.id} answers`;
  const most = Math.min(answer.text.length, beside.text.length);
  let place = 0;
  while (place < most && answer.text[place] === beside.text[place]) place++;
  for (const { body } of [answer, beside]) {
    const span = [...body.querySelectorAll(".token")].find(({ to }) => to > place);
    span?.classList.add("differs");
  }
  const same = beside.counts[pieceAt(beside.pieces, place) - 1] ?? 0;
  return `other than ${answer.by.id} from token ${same + 1} on`;
}

async function read(answer) {
  const [path, body] = request(answer.by);
  const options = { method: "POST", body: JSON.stringify(body), signal: controller.signal };
  for await (const event of events(await ask(path, options))) {
    answer.usage = event.usage ?? answer.usage;
    for (const choice of event.choices) {
      answer.reason = choice.finish_reason ?? answer.reason;
      const text = choice.delta ? choice.delta.content ?? "" : choice.text;
      if (text || event.twell) add(answer, text, event.twell);
    }
  }
}

function add(answer, text, { densities = [], drafters = [] } = {}) {
  densities = densities.filter((shares) => shares.length);  // a model without gates has none
  const piece = { text, densities, drafters, start: answer.text.length, first: answer.tokens.length };
  answer.text += text;
  answer.pieces.push(piece);
  answer.times.push(performance.now());
  answer.counts.push((answer.counts.at(-1) ?? 0) + (drafters.length || 1));
  for (const shares of densities) {
    answer.tokens.push({ shares, piece });
    shares.forEach((share, layer) => { answer.sums[layer] = (answer.sums[layer] ?? 0) + share; });
  }
  if (densities.length && shown !== answer) [shown, picked] = [answer, null];
  draw();
}

// Text as it is, blocks of code apart. What is shown already stays: nothing flickers, scrolls back or
// loses its selection.
function show(answer) {
  const { body, text } = answer;
  // what may yet become the end of a block of code waits for the rest of its line
  const sure = answer.reason ? text : text.replace(/(^|\n) {0,3}`{1,2}$/, "$1");
  const blocks = blocksOf(sure, model.twell.chat);
  blocks.forEach(([from, to, isCode], i) => {
    let block = body.children[i];
    if (block?.isCode !== isCode || block.from !== from || block.to > to) {
      const made = element(isCode ? "pre" : "p", "");
      Object.assign(made, { isCode, from, to: from });
      made.append(element(isCode ? "code" : "span", ""));
      if (block) block.replaceWith(made);
      else body.append(made);
      block = made;
    }
    appendTokens(answer, block.firstChild, block.to, to);
    block.to = to;
  });
  while (body.children.length > blocks.length) body.lastChild.remove();
}

function blocksOf(text, chat) {  // [from, to, whether it is code], without the lines that fence code
  const blocks = [];
  let start = 0, isCode = false;
  const put = (end) => {
    let from = start;
    while (chat && from < end && text[from] === "\n") from++;
    while (chat && end > from && text[end - 1] === "\n") end--;
    if (end > from || isCode) blocks.push([from, end, isCode]);
  };
  for (const fence of chat ? text.matchAll(/^ {0,3}```[^`\n]*$/gm) : []) {
    put(fence.index);
    const end = fence.index + fence[0].length;
    start = Math.min(end + 1, text.length);
    isCode = !isCode && end < text.length;  // a block begins after the whole line
  }
  if (start < text.length || isCode) put(text.length);
  return blocks;
}

function appendTokens({ pieces, text }, parent, from, to) {  // a span for what is of one piece
  while (from < to) {
    const piece = pieces[pieceAt(pieces, from)];
    const end = Math.min(to, piece.start + piece.text.length);
    const span = element("span", "token", text.slice(from, end));
    const drafter = piece.drafters.find(Boolean);
    if (drafter) {
      span.classList.add("drafted", drafter);
      span.title = `drafted by ${drafter}`;
    }
    Object.assign(span, { first: piece.first, to: end });
    parent.append(span);
    from = end;
  }
}

function pieceAt(pieces, place) {  // the last that begins at `place` or before
  let low = 0, high = pieces.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (pieces[middle].start <= place) low = middle;
    else high = middle - 1;
  }
  return low;
}

function end(answer, caption) {
  follow(() => {
    show(answer);
    answer.box.classList.remove("writing");
    answer.pace.remove();
    answer.caption = caption;
    answer.box.append(element("p", "caption", caption));
  });
  draw();
  save();
}

function clear() {
  turns.length = 0;
  [shown, picked] = [null, null];
  document.querySelectorAll(".message, .pair").forEach((box) => box.remove());
  at("empty").hidden = false;
  save();
  draw();
}

function paceOf({ times, counts }, count) {  // how many tokens, and how fast they came
  const [first, last] = [times[0], times.at(-1)];
  const pace = [`${count} ${count === 1 ? "token" : "tokens"}`];
  const rate = 1000 * (count - counts[0]) / (last - first);
  if (last > first) pace.push(`${rate.toFixed(1)} tokens/s`);
  return pace;
}

function showPace(answer) {
  if (answer.counts.length) answer.pace.textContent = paceOf(answer, answer.counts.at(-1)).join(" · ");
}

function summary(answer) {
  const caption = paceOf(answer, answer.usage?.completion_tokens ?? answer.tokens.length);
  if (answer.tokens.length) caption.push(`${percent(meanOf(answer))} of the neurons fired`);
  const drafted = draftedBy(answer);
  if (drafted) caption.push(drafted);
  const ends = { length: "cut at max tokens", stopped: "stopped", failed: "broken off" };
  if (ends[answer.reason]) caption.push(ends[answer.reason]);
  else if (!answer.text) caption.push("the model ended its answer at once");
  return caption.join(" · ");
}

function draftedBy({ pieces }) {
  const counts = {}, all = pieces.flatMap(({ drafters }) => drafters).filter(Boolean);
  for (const name of all) counts[name] = (counts[name] ?? 0) + 1;
  const parts = Object.entries(counts).map(([name, count]) => `${count} by ${name}`);
  return all.length && `${all.length} drafted (${parts.join(", ")})`;
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

// ---- what outlives a reload, in this tab alone ----
// Other programs' pages may have had this address before, and other versions of this one.

const CHAT = "twellctl.chat", KEY = "twellctl.key";
const SETTINGS = ["system", "temperature", "top-p", "seed", "max-tokens", "beside"];
const MARKS = "twellctl.marks";

function save() {
  if (!model) return;
  const written = ({ by, caption, reason, pieces }, densities) => ({
    by: by.id, caption, reason, pieces: pieces.map((piece) => (
      [piece.text, { densities: densities(piece), drafters: piece.drafters }])),
  });
  const kept = (densities) => ({
    model: model.id, chat: model.twell.chat,
    settings: Object.fromEntries(SETTINGS.map((id) => [id, at(id).value])),
    turns: turns.map(({ text, answer, beside }) => (
      { text, answer: written(answer, densities), beside: beside && written(beside, densities) })),
  });
  const rounded = ({ densities }) => densities.map((all) => all.map((share) => +share.toFixed(5)));
  for (const densities of [rounded, () => []]) {  // without them where they are too much
    try {
      return sessionStorage.setItem(CHAT, JSON.stringify(kept(densities)));
    } catch {
      sessionStorage.removeItem(CHAT);
    }
  }
}

function restore() {
  try {
    takeUp(JSON.parse(sessionStorage.getItem(CHAT)));
  } catch {  // it makes no sense
    clear();
  }
}

function takeUp(kept) {
  const one = models.find(({ id }) => id === kept?.model);
  if (!one || kept.chat !== one.twell.chat) return;
  use(one);
  for (const id of SETTINGS) at(id).value = kept.settings[id];
  for (const { text, answer, beside } of kept.turns) {
    const turn = addTurn(text, models.find(({ id }) => id === beside?.by) ?? null);
    for (const [made, was] of [[turn.answer, answer], [turn.beside, beside]]) {
      if (!made) continue;
      for (const [piece, ofTokens] of was.pieces) add(made, piece, ofTokens);
      made.reason = was.reason;
      end(made, was.caption ?? `${made.tokens.length} tokens · broken off`);
    }
    difference(turn);
  }
  drawNow();  // the chart takes room
  at("log").scrollTop = at("log").scrollHeight;
}

window.addEventListener("pagehide", () => save());

// ---- hands ----

function openSettings(open) {
  at("settings").hidden = !open;
  at("open").setAttribute("aria-expanded", open);
}

function mark() {
  document.body.classList.toggle("marked", at("marks").checked);
  sessionStorage.setItem(MARKS, at("marks").checked);
}

function fit() {  // the prompt is as high as its text
  at("prompt").style.height = "auto";
  at("prompt").style.height = `${at("prompt").scrollHeight + 2}px`;
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("prompt").value;
  if (!text.trim() || controller) return;
  if (!at("settings").checkValidity()) openSettings(true);  // what is hidden cannot be complained of
  if (at("settings").reportValidity()) say(text);
});
at("settings").addEventListener("submit", (event) => event.preventDefault());
at("prompt").addEventListener("input", fit);
at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("composer").requestSubmit();
});
at("example").addEventListener("click", () => {
  at("prompt").value = at("example").textContent;
  at("composer").requestSubmit();
});
at("stop").addEventListener("click", () => controller?.abort());
at("name").addEventListener("change", () => use(models[at("name").selectedIndex]));
at("marks").addEventListener("change", mark);
at("open").addEventListener("click", () => openSettings(at("settings").hidden));
at("fresh").addEventListener("click", () => {
  controller?.abort();
  clear();
  fail(null);
  at("prompt").focus();
});
at("key").addEventListener("change", () => {
  sessionStorage.setItem(KEY, at("key").value);
  connect();
});
at("log").addEventListener("pointerover", (event) => {
  const span = event.target.closest(".token");
  if (span) pick(span.closest(".message").answer, span.first);
});
at("log").addEventListener("pointerleave", () => pick(shown, null));
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (picked === null) controller?.abort();
  pick(shown, null);
});

at("key").value = sessionStorage.getItem(KEY) ?? "";
at("key-field").hidden = !at("key").value;
at("marks").checked = sessionStorage.getItem(MARKS) !== "false";
mark();
connect();
