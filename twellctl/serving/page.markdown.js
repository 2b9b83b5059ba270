"use strict";
const at = (id) => document.getElementById(id);

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

// ---- Markdown, as elements: a model's text only ever becomes text nodes ----
// A line is {text, start}: what is left of it, and where in the source that begins. Where a text node
// comes from in the source is passed on, so that what is shown can be traced to the model's tokens.

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(?=\S)/;
const RULE = /^ {0,3}([-*_])([ \t]*\1){2,}[ \t]*$/;
const ITEM = /^[ \t]{0,3}([-*+]|\d{1,9}[.)])([ \t]{1,4}|$)/;
const QUOTE = /^ {0,3}> ?/;
const LINK = /!?\[([^[\]]*)\]\(([^\s()]*(?:\([^\s()]*\)[^\s()]*)*)(?:[ \t]+"[^"\n]*")?\)/y;
const DEEPEST = 8, LONGEST = 20000;  // of blocks in blocks; characters of a paragraph with marks in it
// of a text that is being written: marks whose meaning the next characters decide
const UNSETTLED = /(?:(?:^|\n)[ \t]*(?:[-+*>#_`~]+|\d{1,3}[.)]?)?[ \t]*|[*_`~]+)$/;

// Make `body` show `source`. What it showed of it before stays as it is: nothing flickers, scrolls
// back or loses its selection. `open`: more is to come; what is begun is shown as if it were complete.
// `leaf(parent, text, where)` appends text whose i-th character is the source's where[i]-th.
function showMarkdown(body, source, open, leaf) {
  const tail = open ? source.slice(-80).match(UNSETTLED)?.[0].length ?? 0 : 0;
  const text = source.slice(0, source.length - tail);
  const lines = [];
  for (let start = 0; start <= text.length;) {
    const end = text.indexOf("\n", start);
    lines.push({ text: text.slice(start, end < 0 ? text.length : end), start });
    start = end < 0 ? text.length + 1 : end + 1;
  }
  const found = blocksOf(lines, 0);
  found.forEach((block, i) => {
    const last = open && i === found.length - 1;
    const key = `${last} ${block.start} ${text.slice(block.start, block.end)}`;
    const old = body.children[i];
    if (old?.key === key) return;
    const made = block.make(leaf, last);
    if (old?.nodeName === made.nodeName) become(old, made);
    else if (old) old.replaceWith(made);
    else body.append(made);
    body.children[i].key = key;
  });
  while (body.children.length > found.length) body.lastChild.remove();
}

function become(old, made) {  // two nodes of one kind
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== made.data) old.data = made.data;
    return;
  }
  for (const { name, value } of made.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  old.first = made.first;
  const nodes = [...made.childNodes];
  nodes.forEach((node, i) => {
    const before = old.childNodes[i];
    if (before?.nodeName === node.nodeName) become(before, node);
    else if (before) before.replaceWith(node);
    else old.append(node);
  });
  while (old.childNodes.length > nodes.length) old.lastChild.remove();
}

// ---- blocks: {start, end} in the source, make(leaf, open) their element ----

const isBlank = (line) => !line.text.trim();
const cut = (line, from) => ({ text: line.text.slice(from), start: line.start + from });

function indent(line, most = Infinity) {  // [columns, characters] of white space, `most` columns
  let columns = 0, i = 0;
  for (; columns < most && " \t".includes(line.text[i] ?? "x"); i++) {
    columns += line.text[i] === "\t" ? 4 : 1;
  }
  return [columns, i];
}

function blocksOf(lines, depth) {
  const found = [], kinds = depth < DEEPEST ? [fenced, heading, rule, quote, list] : [];
  for (let i = 0; i < lines.length;) {
    if (isBlank(lines[i])) { i++; continue; }
    const [next, make] = kinds.reduce((made, kind) => made ?? kind(lines, i, depth), null) ??
      paragraph(lines, i, depth);
    const last = lines[next - 1];
    found.push({ start: lines[i].start, end: last.start + last.text.length, make });
    i = next;
  }
  return found;
}

const begins = (line) => [FENCE, HEADING, RULE, QUOTE].some((kind) => kind.test(line.text)) ||
  /^[ \t]{0,3}([-*+]|\d{1,9}[.)])[ \t]+\S/.test(line.text);

function paragraph(lines, first, depth) {
  let next = first + 1;
  while (next < lines.length && !isBlank(lines[next]) && !(depth < DEEPEST && begins(lines[next]))) {
    next++;
  }
  const own = lines.slice(first, next);
  return [next, (leaf, open) => written(element("p", ""), own, leaf, open)];
}

function heading(lines, i) {
  const mark = lines[i].text.match(HEADING);
  if (!mark) return null;
  const line = cut(lines[i], mark[0].length);
  line.text = line.text.replace(/[ \t]+#+[ \t]*$/, "");
  const tag = `h${Math.min(6, mark[1].length + 2)}`;  // below the page's own
  return [i + 1, (leaf, open) => written(element(tag, ""), [line], leaf, open)];
}

function rule(lines, i) {
  return RULE.test(lines[i].text) ? [i + 1, () => element("hr", "")] : null;
}

function fenced(lines, first) {
  const mark = lines[first].text.match(FENCE);
  if (!mark) return null;
  const [, ticks, language] = mark;
  const ends = (line) => {
    const text = line.text.trim();
    return text.length >= ticks.length && text === ticks[0].repeat(text.length);
  };
  let next = first + 1;
  while (next < lines.length && !ends(lines[next])) next++;
  const most = indent(lines[first])[0];
  const own = lines.slice(first + 1, next).map((line) => cut(line, indent(line, most)[1]));
  return [Math.min(next + 1, lines.length), (leaf) => {
    const box = element("pre", ""), code = element("code", "");
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", language ? `code, ${language}` : "code");
    const { text, where } = joinedUp(own);
    leaf(code, text, where);
    box.append(code);
    return box;
  }];
}

function quote(lines, first, depth) {
  let next = first;
  while (next < lines.length && QUOTE.test(lines[next].text)) next++;
  if (next === first) return null;
  const own = lines.slice(first, next).map((line) => cut(line, line.text.match(QUOTE)[0].length));
  return [next, (leaf, open) => filled(element("blockquote", ""), own, depth, leaf, open)];
}

function list(lines, first, depth) {
  const mark = lines[first].text.match(ITEM);
  if (!mark) return null;
  const ordered = /\d/.test(mark[1]), items = [];
  const goesOn = (line) => {
    const more = line.text.match(ITEM);
    return more && /\d/.test(more[1]) === ordered && !RULE.test(line.text) ? more : null;
  };
  let next = first, least = 0;  // least: columns that make a line part of the item
  while (next < lines.length) {
    const line = lines[next], [columns] = indent(line);
    const more = columns < least || !items.length ? goesOn(line) : null;
    if (more) {
      items.push({ width: more[0].length, own: [cut(line, more[0].length)] });
      least = columns + 2;
    } else if (columns >= least && !isBlank(line)) {
      items.at(-1).own.push(cut(line, indent(line, items.at(-1).width)[1]));
    } else if (isBlank(line)) {
      const after = lines.slice(next + 1).find((other) => !isBlank(other));
      if (!after || (indent(after)[0] < least && !goesOn(after))) break;
      items.at(-1).own.push(line);
    } else break;
    next++;
  }
  return [next, (leaf, open) => {
    const box = element(ordered ? "ol" : "ul", "");
    if (ordered) box.setAttribute("start", parseInt(mark[1], 10));
    items.forEach(({ own }, i) => box.append(
      filled(element("li", ""), own, depth, leaf, open && i === items.length - 1)));
    return box;
  }];
}

function filled(box, lines, depth, leaf, open) {
  const found = blocksOf(lines, depth + 1);
  found.forEach((block, i) => box.append(block.make(leaf, open && i === found.length - 1)));
  return box;
}

// ---- text: code, bold, italics, links ----

function joinedUp(lines) {  // their text, and where in the source each of its characters is
  const where = [];
  lines.forEach(({ text, start }, number) => {
    for (let i = 0; i < text.length; i++) where.push(start + i);
    if (number < lines.length - 1) where.push(start + text.length);  // the line break
  });
  return { text: lines.map((line) => line.text).join("\n"), where };
}

function written(box, lines, leaf, open) {
  const { text, where } = joinedUp(lines);
  const put = (parent, from, to) => {
    if (to > from) leaf(parent, text.slice(from, to), where.slice(from, to));
  };
  if (text.length > LONGEST) put(box, 0, text.length);
  else inline({ text, put, open, none: new Set() }, box, 0, text.length, 0);
  return box;
}

function inline(source, parent, from, to, depth) {
  let plain = from;  // up to there it is written
  for (let i = from; i < to;) {
    const mark = "\\`*_[!".includes(source.text[i]) && depth < DEEPEST && markAt(source, i, to);
    if (!mark) { i++; continue; }
    if (mark.tag !== "") {
      source.put(parent, plain, i);
      const box = mark.tag ? element(mark.tag, "") : parent;
      if (mark.url) link(box, mark.url);
      const inside = mark.within ? box.appendChild(element(mark.within, "")) : box;
      if (mark.verbatim) source.put(inside, ...mark.inner);
      else inline(source, inside, ...mark.inner, depth + 1);
      if (box !== parent) parent.append(box);
      plain = mark.end;
    }
    i = mark.end;
  }
  source.put(parent, plain, to);
}

// What begins at i: {tag, inner: [from, to], end}. No tag: its inside alone; tag "": what it looks like.
function markAt(source, i, to) {
  const { text } = source, letter = text[i];
  if (letter === "\\") {
    return "\\`*_".includes(text[i + 1] ?? "x") && i + 1 < to &&
      { verbatim: true, inner: [i + 1, i + 2], end: i + 2 };
  }
  if (letter === "[" || letter === "!") {
    LINK.lastIndex = i;
    const found = LINK.exec(text);
    if (!found || i + found[0].length > to) return null;
    const inner = i + found[0].indexOf("[") + 1;
    return { tag: /^https?:\/\/[^/]/i.test(found[2]) ? "a" : "span", url: found[2],
      inner: [inner, inner + found[1].length], end: i + found[0].length };
  }
  let size = 1;
  while (text[i + size] === letter && i + size < to) size++;
  const mark = letter.repeat(size), as = { tag: "", end: i + size };  // as it stands
  const most = letter === "`" ? Infinity : letter === "*" ? 3 : 1;
  const word = /\w/, tight = letter !== "`";  // stars and dashes stay within words: 2**8, snake_case
  if (size > most) return as;
  if (tight && (!/\S/.test(text[i + size] ?? " ") || word.test(text[i - 1] ?? " "))) return as;
  const closes = (at) => text[at + size] !== letter && text[at - 1] !== letter &&
    !(tight && (/\s/.test(text[at - 1]) || word.test(text[at + size] ?? " ")));
  let end = source.none.has(mark) ? -1 : text.indexOf(mark, i + size);
  while (end >= 0 && end + size <= to && !closes(end)) end = text.indexOf(mark, end + 1);
  if (end < 0) source.none.add(mark);  // nor further on
  const closed = end >= 0 && end + size <= to;
  if (!closed && !(source.open && to === text.length && (!tight || size === 2))) return as;
  const inner = [i + size, closed ? end : to];
  const after = closed ? end + size : to;
  if (!tight) return { tag: "code", verbatim: true, inner, end: after };
  return { tag: ["em", "strong", "strong"][size - 1], within: size === 3 && "em", inner, end: after };
}

function link(box, url) {  // only to the web, and only by a hand
  box.title = url;
  if (box.nodeName !== "A") return;
  box.href = url;
  box.target = "_blank";
  box.rel = "noopener noreferrer";
}
