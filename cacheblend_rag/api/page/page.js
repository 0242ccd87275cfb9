// Asks a server for both answers to one prompt, and draws them. It uses the routes that any client
// has: /v1/cacheblend/documents, /v1/cacheblend/stats, and /v1/compare.

import { EXAMPLE, WORDS } from "./words.js";

const at = (id) => document.getElementById(id);
const PHASES = ["find", "tokenize", "look_up", "load", "lay_in", "early_layers", "selection", "recompute", "first_token"];

let language = (navigator.language || "").startsWith("zh") ? "zh" : "en";
let key = ""; // in this page's memory only
let running = null; // the AbortController of the running comparison
let again = null; // what is done once a key was given

const word = (name, ...values) => {
  const text = WORDS[language][name] ?? WORDS.en[name] ?? name;
  return values.reduce((told, value, index) => told.replaceAll(`{${index}}`, value), text);
};
const count = (number) => number.toLocaleString(language);
const seconds = (value) => (value < 1 ? `${(1000 * value).toFixed(value < 0.1 ? 1 : 0)} ms` : `${value.toFixed(2)} s`);
const mebibytes = (bytes) => (bytes == null ? "–" : `${(bytes / 2 ** 20).toLocaleString(language, { maximumFractionDigits: 1 })} MiB`);

/** Make an element; text is set as text, so nothing in it is read as HTML. */
function made(tag, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}

function translate() {
  document.documentElement.lang = language;
  for (const element of document.querySelectorAll("[data-word]")) element.textContent = word(element.dataset.word);
  const other = language === "en" ? "zh" : "en";
  Object.assign(at("language"), { textContent: WORDS[other].name, lang: other });
}

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Send a request with the key; throws Refused with the server's own message. */
async function send(method, path, body, signal) {
  const headers = { ...(key && { Authorization: `Bearer ${key}` }), ...(body && { "Content-Type": "application/json" }) };
  const answer = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  throw new Refused(answer.status, told?.error?.message ?? `${answer.status} ${answer.statusText}`);
}

/** Yield the JSON of each server-sent event of an answer. */
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const whole = (rest + value).split("\n\n");
    rest = whole.pop();
    for (const one of whole) yield JSON.parse(one.replace(/^data: /, ""));
  }
}

/** Return a passage's document id: by its text (FNV-1a, 64 bits), so that it is stored once. */
function documentId(text) {
  let hash = 0xcbf29ce484222325n;
  for (const byte of new TextEncoder().encode(text)) hash = BigInt.asUintN(64, (hash ^ BigInt(byte)) * 0x100000001b3n);
  return `page/${hash.toString(16).padStart(16, "0")}`;
}

const asksCollection = () => document.documentElement.dataset.collection === "true" && document.forms.ask.elements.from.value === "collection";

/** Store each pasted passage as a document of its own, as an index would. */
async function store(passages, signal) {
  for (const [index, text] of passages.entries()) {
    tell(word("storing", index + 1, passages.length));
    await send("PUT", `v1/cacheblend/documents/${documentId(text)}`, { chunks: [text] }, signal);
  }
}

async function compare() {
  const question = at("question").value.trim();
  const passages = asksCollection() ? [] : [...new Set(at("passages").value.split(/\n\s*\n/).map((one) => one.trim()).filter(Boolean))];
  if (!asksCollection() && !passages.length) throw new Error(word("noPassages"));
  const { signal } = running;
  clear();
  if (passages.length) await storeIfAllowed(passages, signal);
  const content = passages.length ? [word("instruction"), ...passages, `${word("asks")} ${question}`].join("\n\n") : question;
  const body = { messages: [{ role: "user", content }], max_tokens: Number(at("tokens").value) || 48, temperature: 0 };
  if (!asksCollection()) body.retrieve = false;
  const answer = await send("POST", "v1/compare", body, signal);
  at("result").hidden = false;
  const reports = {}, texts = { full: "", blend: "" };
  let side = "", ticking = null, ended = false;
  try {
    for await (const told of events(answer)) {
      if (told.error) throw new Refused(0, told.error.message);
      if (told.tokens) {
        drawPrompt(told, reports.blend);
        ended = true;
      } else if (told.report) {
        clearInterval(ticking);
        reports[told.side] = told.report;
        drawSide(told.side, reports);
      } else if (told.side === side) {
        texts[side] += told.text;
        at(side).querySelector(".answer").textContent = texts[side];
      } else {
        side = told.side; // its first event comes before its work
        tell(word("answering", word(side)));
        ticking = tick(side);
      }
    }
  } finally {
    clearInterval(ticking);
    for (const side of document.querySelectorAll(".running")) side.classList.remove("running");
  }
  if (!ended) throw new Error(word("cutOff"));
  const ratio = reports.full.seconds.time_to_first_token / reports.blend.seconds.time_to_first_token;
  const same = texts.full === texts.blend ? "sameAnswer" : "otherAnswer";
  const compared = ratio < 1 ? ["later", (1 / ratio).toFixed(1)] : ["sooner", ratio.toFixed(1)];
  at("verdict").textContent = `${word(...(reports.blend.blended ? compared : ["notBlended"]))} ${word(same)}`;
  tell(word("done"));
}

/** Store passages; without the right to, say so, and let the comparison go on. */
async function storeIfAllowed(passages, signal) {
  try {
    await store(passages, signal);
  } catch (error) {
    if (error.status !== 403 && error.status !== 404) throw error;
    show(`${word("notStored")} ${error.message}`);
  }
}

function clear() {
  for (const id of ["result", "prompt", "sources", "error"]) at(id).hidden = true;
  at("verdict").textContent = "";
  for (const side of ["full", "blend"]) {
    at(side).querySelectorAll(":scope > :not(h2)").forEach((one) => one.remove());
    at(side).append(at("side").content.cloneNode(true));
  }
  translate();
}

/** Show the time that passes on a side, until its interval is cleared. */
function tick(side) {
  const begun = performance.now(), shown = at(side).querySelector(".time b");
  at(side).classList.add("running");
  return setInterval(() => (shown.textContent = `${((performance.now() - begun) / 1000).toFixed(1)} s`), 100);
}

/** Draw a side's time and phases; once both are there, both on one scale. */
function drawSide(side, reports) {
  at(side).classList.remove("running");
  const longest = Math.max(...Object.values(reports).map((one) => one.seconds.time_to_first_token));
  for (const [name, report] of Object.entries(reports)) {
    at(name).querySelector(".time b").textContent = seconds(report.seconds.time_to_first_token);
    const rows = PHASES.filter((phase) => report.seconds[phase] > 0).flatMap((phase) => {
      const track = made("div", "", "track"), bar = made("i");
      bar.style.left = `${Math.min(99.5, (100 * (report.starts[phase] ?? 0)) / longest)}%`;
      bar.style.width = `${Math.min(100, (100 * report.seconds[phase]) / longest)}%`;
      track.append(bar);
      return [made("span", word(phase)), track, made("span", seconds(report.seconds[phase]))];
    });
    at(name).querySelector(".water").replaceChildren(...rows);
  }
}

/** Draw the prompt in its parts, each token in the colour of what became of it. */
function drawPrompt({ tokens, explanation, sources }, report) {
  const chunks = explanation.chunks.filter((one) => one.start >= 0 && one.tokens).sort((a, b) => a.start - b.start);
  const fates = new Array(tokens.length).fill("computed"), parts = [];
  let done = 0;
  for (const chunk of chunks) {
    const end = chunk.start + chunk.tokens;
    if (chunk.hit) fates.fill("reused", chunk.start, end);
    for (const { position, fate } of chunk.marked) if (fate !== "protected") fates[position] = "recomputed";
    parts.push({ from: done, to: chunk.start }, { from: chunk.start, to: end, chunk });
    done = end;
  }
  parts.push({ from: done, to: tokens.length });
  const missing = explanation.chunks.filter((one) => one.start < 0).map((chunk) => drawPart(chunk, []));
  at("parts").replaceChildren(...parts.filter(({ from, to, chunk }) => chunk || tokens.slice(from, to).join("").trim()).map(({ from, to, chunk }) => drawPart(chunk, runs(tokens, fates, from, to))), ...missing);
  at("summary").textContent = [explanation.summary, ...explanation.notes].join(" ");
  for (const fate of ["reused", "recomputed", "computed"]) {
    document.querySelector(`.legend .${fate} b`).textContent = count(report[`${fate}_tokens`]);
  }
  at("prompt").hidden = false;
  at("sources").hidden = !sources.length;
  at("sources").querySelector("ol").replaceChildren(...sources.map(drawSource));
}

/** Return spans of neighbouring tokens that became the same. */
function runs(tokens, fates, from, to) {
  const spans = [];
  for (let index = from; index < to; index += 1) {
    if (index === from || fates[index] !== fates[index - 1]) spans.push(made("span", "", fates[index]));
    spans.at(-1).textContent += tokens[index];
  }
  return spans;
}

function drawPart(chunk, spans) {
  const part = made("div", "", chunk ? `part ${chunk.hit ? "hit" : "miss"}` : "part");
  part.dir = "auto";
  part.append(...spans);
  if (!chunk) {
    part.firstChild.textContent = part.firstChild.textContent.trimStart();
    return part;
  }
  const title = made("h3", `${chunk.document_id ?? chunk.chunk_id.slice(0, 12)} · `);
  title.append(made("b", word(chunk.hit ? "hit" : "miss")), made("span", ` · ${chunk.why}`));
  title.lastChild.classList.add("why");
  Object.assign(part, { tabIndex: 0, title: chunk.why });
  part.prepend(title);
  return part;
}

function drawSource({ source, text }) {
  const item = made("li"), details = made("details"), passage = made("p", text);
  passage.dir = "auto";
  details.append(made("summary", source ?? "–"), passage);
  item.append(details);
  return item;
}

async function drawTiers() {
  const { tiers } = await (await send("GET", "v1/cacheblend/stats")).json();
  const rows = Object.entries(tiers).map(([name, held]) => {
    const row = made("tr");
    row.append(made("td", name), made("td", count(held.entries ?? 0)), made("td", mebibytes(held.bytes)), made("td", mebibytes(held.capacity_bytes)));
    return row;
  });
  at("tiers").querySelector("tbody").replaceChildren(...rows);
  at("tiers").hidden = !rows.length;
}

const tell = (text) => (at("status").textContent = text);
const show = (text) => Object.assign(at("error"), { textContent: text, hidden: false });

/** Do something; if a key is missing, ask for it and do it again. */
async function attempt(work) {
  try {
    await work();
    return;
  } catch (error) {
    if (error.name === "AbortError") return tell(word("stopped"));
    tell("");
    show(error.message === "Failed to fetch" || error instanceof TypeError ? word("noServer") : error.message);
    if (error.status !== 401) return;
    again = work;
    at("keys").hidden = false;
    at("key").focus();
  }
}

async function run() {
  if (running) return;
  running = new AbortController();
  at("compare").disabled = !(at("stop").disabled = false);
  await attempt(compare);
  running = null;
  at("compare").disabled = !(at("stop").disabled = true);
  if (at("keys").hidden) await drawTiers().catch(() => {}); // who may only ask does not see them
}

at("ask").addEventListener("submit", (event) => (event.preventDefault(), run()));
at("stop").addEventListener("click", () => running?.abort());
at("example").addEventListener("click", () => {
  const [passages, question] = EXAMPLE;
  if (document.documentElement.dataset.collection === "true") document.forms.ask.elements.from.value = "passages";
  Object.assign(at("passages"), { value: passages.join("\n\n") });
  at("question").value = question;
  toggle();
});
at("keys").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value.trim();
  at("key").value = "";
  at("keys").hidden = at("error").hidden = true;
  (again === compare ? run() : attempt(again)).catch(() => {});
});
at("language").addEventListener("click", () => {
  language = language === "en" ? "zh" : "en";
  translate();
});
const toggle = () => (at("pasted").hidden = asksCollection());
at("from").hidden = document.documentElement.dataset.collection !== "true";
at("from").addEventListener("change", toggle);
toggle();
translate();
attempt(drawTiers);
