"use strict";
// Controls, playback and drawing. The numbers come from simulate() and counters() alone.

const POLICIES = {
  static: "Static", inflight: "In-flight", inflight_chunked: "In-flight, chunked prefill", one_prefill: "In-flight, one prefill",
};
const ROWS = [
  ["done", "requests done", 0], ["queue", "in the queue", 0], ["refused", "which waits for", 0], ["ttft", "TTFT, ticks", 1], ["e2e", "E2E, ticks", 1],
  ["itl", "ITL, ticks", 2], ["requests_per_1k", "requests per 1,000 ticks", 0],
  ["tokens_per_1k", "tokens per 1,000 ticks", 0], ["slot_use", "slots in use, %", 0],
];
const WAITS = {
  "": "–", batch: "its batch", slots: "a slot", one_prefill: "a prompt", max_num_tokens: "tokens",
};
const SIDES = ["left", "right"];
const DRAWN = ["requests", "isl", "mean", "spread", "arrival", "rate", "seed"];
const byId = id => document.getElementById(id);
const form = byId("controls"), fields = form.elements;
const state = {now: 0, playing: false, given: INITIAL.load, runs: {}, last: 0};

/** Numbers between 0 and 1 that a seed decides (mulberry32). */
function chance(seed) {
  let a = seed >>> 0;
  return () => {
    a = (a + 0x6D2B79F5) >>> 0;
    let t = Math.imul(a ^ (a >>> 15), a | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

/** The requests that the controls ask for: answers of mean ± spread tokens, every length equally often. */
function draw(wanted) {
  const random = chance(wanted.seed), load = [];
  const low = Math.max(1, Math.round(wanted.mean - wanted.spread)), high = Math.max(low, Math.round(wanted.mean + wanted.spread));
  for (let index = 0, arrival = 0; index < wanted.requests; index++) {
    const osl = low + Math.floor(random() * (high - low + 1));
    if (wanted.arrival === "random") arrival -= Math.log(1 - random()) * 100 / wanted.rate;
    load.push({arrival, isl: wanted.isl, osl});
  }
  return load;
}

/** The values of the controls, or null with the fault shown. */
function wanted() {
  const values = {}, wrong = [];
  for (const field of fields) {
    if (!field.name) continue;
    values[field.name] = field.type === "number" ? field.valueAsNumber : field.value;
    const bad = !field.checkValidity();
    field.classList.toggle("wrong", bad);
    field.setAttribute("aria-invalid", bad);
    if (bad) wrong.push(`${field.labels[0].textContent.trim()}: ${field.validationMessage || "not a number"}`);
  }
  byId("fault").textContent = wrong.join(" ");
  return wrong.length ? null : values;
}

function rerun() {
  const values = wanted();
  if (!values) return;
  const load = state.given || draw(values);
  fields.rate.disabled = values.arrival === "once";
  byId("given-note").hidden = !INITIAL.load || !state.given;
  for (const side of SIDES) {
    const policy = values[side];
    const budget = policy === "inflight_chunked" ? values.max_num_tokens : null;
    state.runs[side] = simulate({...values, policy, max_num_tokens: budget}, load, values.until);
    byId(`${side}-name`).textContent = byId(`${side}-head`).textContent = POLICIES[policy];
  }
  const end = Math.max(...SIDES.map(side => state.runs[side].end));
  byId("time").max = end;
  go(end);
}

/** Show a moment. */
function go(now) {
  const end = Number(byId("time").max);
  state.now = Math.min(Math.max(now, 0), end);
  if (state.now >= end) playing(false);
  byId("time").value = state.now;
  byId("time-shown").textContent = `${shown(state.now, 1)} of ${shown(end, 1)}`;
  const found = SIDES.map(side => counters(state.runs[side], Math.min(state.now, state.runs[side].end)));
  byId("counters").replaceChildren(...ROWS.map(([key, label, digits]) => {
    const row = document.createElement("tr"), head = document.createElement("th");
    head.scope = "row";
    head.textContent = label;
    row.append(head, ...found.map(each => {
      const cell = document.createElement("td");
      cell.dataset.counter = key;
      cell.dataset.value = each[key];
      cell.textContent = key === "refused" ? WAITS[each.refused] : shown(each[key], digits);
      return cell;
    }));
    return row;
  }));
  SIDES.forEach((side, index) => paint(byId(side), state.runs[side], found[index], POLICIES[fields[side].value]));
}

function shown(value, digits) {
  return value === null ? "–" : value.toLocaleString("en", {maximumFractionDigits: digits});
}

function playing(on) {
  if (on && state.now >= Number(byId("time").max)) go(0);
  state.playing = on;
  byId("play").textContent = on ? "Pause" : "Play";
  if (!on) return;
  state.last = performance.now();
  requestAnimationFrame(frame);
}

function frame(stamp) {
  if (!state.playing) return;
  const seconds = Math.min(Math.max(stamp - state.last, 0) / 1000, 0.2);
  state.last = stamp;
  go(state.now + seconds * Number(byId("speed").value));
  requestAnimationFrame(frame);
}

/** The nearest step boundary of either run after (or before) now. */
function step(forward) {
  playing(false);
  const times = SIDES.flatMap(side => [...state.runs[side].iterations.map(each => each.start), state.runs[side].end]);
  const beyond = times.filter(time => forward ? time > state.now + 1e-9 : time < state.now - 1e-9);
  if (beyond.length) go(forward ? Math.min(...beyond) : Math.max(...beyond));
}

const LEFT = 30, ROW = 24, GAP = 3, QUEUE = 86, LABEL = 18;

/** Slots over time up to now, the queue below on the same axis; both sides' queues have the same scale. */
function paint(canvas, run, found, name) {
  const width = canvas.clientWidth, slots = run.iterations.length ? run.iterations[0].cells.length : 0;
  const height = slots * (ROW + GAP) + QUEUE + 26, scale = devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  const colour = role => style.getPropertyValue(`--${role}`).trim();
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  const ticks = Math.max(10, Math.min(run.end, Math.floor((width - LEFT) / 12)));
  const from = Math.max(0, state.now - ticks), each = (width - LEFT) / ticks;
  const view = {pen, colour, run, from, to: Math.min(state.now, run.end), x: time => LEFT + (time - from) * each, width};
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, 0, width - LEFT, height);
  pen.clip();
  for (let slot = 0; slot < slots; slot++) paintSlot(view, slot, slot * (ROW + GAP));
  paintQueue(view, slots * (ROW + GAP) + 4);
  paintAxis(view, height - 8, ticks);
  pen.restore();
  pen.fillStyle = colour("muted");
  pen.textAlign = "right";
  for (let slot = 0; slot < slots; slot++) pen.fillText(String(slot + 1), LEFT - 8, slot * (ROW + GAP) + ROW / 2);
  canvas.setAttribute("aria-label", `${name}, slots: ${slots}, tick ${shown(found.now, 1)}, requests done: ${found.done}, ` +
    `${found.queue} in the queue, ${shown(found.slot_use, 0)} % of the slots in use.`);
}

/** One row of cells; neighbours of the same request and kind are one box. */
function paintSlot(view, slot, top) {
  const {run, from, to} = view;
  let box = null;
  for (const step of run.iterations) {
    if (step.start >= to) break;
    const end = Math.min(step.start + step.ticks, to);
    if (end < from) continue;
    const kind = step.cells[slot], owner = step.owners[slot];
    if (box && box.kind === kind && box.owner === owner) box.end = end;
    else {
      if (box) paintBox(view, box, top);
      box = {kind, owner, start: step.start, end};
    }
  }
  if (box) paintBox(view, box, top);
}

const KINDS = [["", "NoOp"], ["wait", "Context"], ["work", "Gen"], ["s3", "EoS"]];

function paintBox({pen, colour, x}, {kind, owner, start, end}, top) {
  const [role, word] = KINDS[kind], left = Math.max(x(start), LEFT), size = x(end) - left;
  if (role) {
    pen.fillStyle = colour(role);
    pen.fillRect(left + 0.5, top, Math.max(size - 1, 0.5), ROW);
  } else {
    pen.strokeStyle = colour("grid");
    pen.strokeRect(left + 1, top + 0.5, Math.max(size - 2, 0.5), ROW - 1);
  }
  const number = owner === null ? "" : String(owner + 1);
  const texts = kind === CONTEXT ? [`${word} ${number}`, number] : [word, word[0]];
  const text = texts.find(each => pen.measureText(each).width + 4 <= size);
  if (!text || size < 8) return;
  pen.fillStyle = colour(role ? "paper" : "muted");
  pen.textAlign = "center";
  pen.fillText(text, left + size / 2, top + ROW / 2 + 0.5);
}

function paintQueue({pen, colour, run, from, to, x, width}, top) {
  const most = Math.max(1, ...SIDES.flatMap(side => state.runs[side].iterations.map(step => step.queue))), floor = top + QUEUE - 14;
  pen.fillStyle = colour("muted");
  let last = 0;
  for (const step of run.iterations) {
    if (step.start >= to) break;
    const left = x(step.start), high = (QUEUE - 14 - LABEL) * step.queue / most;
    if (step.start + step.ticks >= from) pen.fillRect(left, floor - high, x(Math.min(step.start + step.ticks, to)) - left + 1, high);
    last = step.queue;
  }
  pen.fillStyle = colour("ink");
  pen.textAlign = "left";
  pen.fillText(`queue ${last}`, Math.min(LEFT + 4, width), top + LABEL / 2);
  pen.strokeStyle = colour("muted");
  pen.strokeRect(LEFT, floor + 0.5, width, 0);
}

function paintAxis({pen, colour, from, x, width}, base, ticks) {
  const every = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 20000, 100000].find(each => ticks / each <= 8) || 1000000;
  pen.fillStyle = colour("muted");
  pen.strokeStyle = colour("muted");
  for (let tick = Math.ceil(from / every) * every; tick <= from + ticks; tick += every) {
    pen.strokeRect(x(tick), base - 12, 0, 4);
    pen.textAlign = x(tick) > width - 12 ? "right" : "center";
    pen.fillText(tick === 0 ? "tick 0" : shown(tick, 0), x(tick) + (tick === 0 ? 16 : 0), base);
  }
}

/** Put the values the page was made with into the controls, and widen their ranges to hold them. */
function setUp() {
  for (const side of SIDES) {
    fields[side].replaceChildren(...Object.entries(POLICIES).map(([value, text]) => new Option(text, value)));
  }
  for (const [name, value] of Object.entries(INITIAL.controls)) {
    const field = fields[name];
    field.value = value;
    if (field.type === "number") [field.min, field.max] = [Math.min(field.min, value), Math.max(field.max, value)];
  }
  form.addEventListener("submit", event => event.preventDefault());
  form.addEventListener("input", event => {
    if (DRAWN.includes(event.target.name)) state.given = null;
    rerun();
  });
  byId("given").addEventListener("click", () => { state.given = INITIAL.load; rerun(); });
  byId("play").addEventListener("click", () => playing(!state.playing));
  byId("step").addEventListener("click", () => step(true));
  byId("back").addEventListener("click", () => step(false));
  byId("start").addEventListener("click", () => { playing(false); go(0); });
  byId("end").addEventListener("click", () => go(Number(byId("time").max)));
  byId("time").addEventListener("input", event => { playing(false); go(Number(event.target.value)); });
  byId("speed").addEventListener("input", event => { byId("speed-shown").textContent = event.target.value; });
  addEventListener("keydown", key);
  addEventListener("resize", () => go(state.now));
  matchMedia("(prefers-color-scheme:dark)").addEventListener("change", () => go(state.now));
  rerun();
  go(Math.floor((byId("left").clientWidth - LEFT) / 12));  // the first screen full, where slots begin to differ
}

const KEYS = {" ": "play", ArrowRight: "step", ArrowLeft: "back", Home: "start", End: "end"};

/** Shortcuts, except where the key means something to the control that has the focus. */
function key(event) {
  const on = event.target.tagName;
  if (event.ctrlKey || event.metaKey || event.altKey || on === "INPUT" || on === "SELECT") return;
  if (!(event.key in KEYS) || (on === "BUTTON" && event.key === " ")) return;
  event.preventDefault();
  byId(KEYS[event.key]).click();
}

setUp();
