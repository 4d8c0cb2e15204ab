"use strict";
// What the page does besides being read: columns sort, plots tell their values, contents follow, a limit ranks again.

const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
function make(tag, text, name, ...children) {
  const made = document.createElement(tag);
  made.textContent = text;
  if (name) made.className = name;
  made.append(...children);
  return made;
}

// Columns sort by a button in their heading: first by size, then reversed, then as before. Unknown values stay last.

const SCALE = {KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, min: 60, h: 3600};
const words = new Intl.Collator("en", {numeric: true});
/** @returns the number in a cell: "1,761" 1761, "≥5.7 MiB" in bytes, "1 min 15 s" 75, "104 (98 to 110)" 104; else null */
function amount(text) {
  const parts = [...text.split("(")[0].replaceAll(",", "").matchAll(/([+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([A-Za-z]*)/g)];
  return parts.length ? parts.reduce((sum, [, value, unit]) => sum + value * (SCALE[unit] ?? 1), 0) : null;
}

function sortable(table) {
  const body = table.tBodies[0], heads = [...table.tHead.rows].at(-1).cells;
  if (body.rows.length < 2) return;
  [...heads].forEach((head, at) => {
    const numeric = head.classList.contains("n"), button = make("button", head.textContent);
    button.type = "button";
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const ways = numeric ? ["descending", "ascending"] : ["ascending", "descending"];
      const way = ways[ways.indexOf(head.getAttribute("aria-sort")) + 1];
      if (!all("[aria-sort]", table.tHead).length) table.unsorted = [...body.rows];
      [...heads].forEach(each => each.removeAttribute("aria-sort"));
      if (way) head.setAttribute("aria-sort", way);
      body.append(...(way ? sorted(table.unsorted, at, numeric, way === "ascending" ? 1 : -1) : table.unsorted));
    });
  });
}

function sorted(rows, at, numeric, sign) {
  const key = row => numeric ? amount(row.cells[at].textContent) : row.cells[at].textContent.trim();
  return rows.map(row => ({row, key: key(row)})).sort((one, other) => {
    const [a, b] = [one.key, other.key], unknown = [a, b].map(each => each === null || each === "–");
    if (unknown[0] || unknown[1]) return unknown[0] - unknown[1];
    return sign * (numeric ? a - b : words.compare(a, b));
  }).map(each => each.row);
}

// The link to the section that is read is marked, and in view.

const bar = document.querySelector("nav ul"), links = all("nav a");
const targets = links.map(link => document.getElementById(link.hash.slice(1)));
function follow() {
  const ended = scrollY > 0 && innerHeight + scrollY >= document.documentElement.scrollHeight - 2;
  const at = ended ? -1 : targets.findLastIndex(each => each.getBoundingClientRect().top < Math.min(innerHeight / 3, 200));
  const now = links.at(at);
  if (!now || now.hasAttribute("aria-current")) return;
  links.forEach(link => link.removeAttribute("aria-current"));
  now.setAttribute("aria-current", "location");
  bar.scrollLeft = now.parentNode.offsetLeft - (bar.clientWidth - now.offsetWidth) / 2;
}

// Values of a plot show at the pointer, or at the focus: one stop per plot, arrow keys go from value to value.

const NEAR = 28;
const tip = make("div", "", "tip");
function tell(point) {
  tip.hidden = !point;
  if (!point) return;
  tip.textContent = point.dataset.value;
  const at = point.getBoundingClientRect(), {width, height} = tip.getBoundingClientRect();
  const left = Math.min(Math.max(at.left + at.width / 2 - width / 2, 4), document.documentElement.clientWidth - width - 4);
  tip.style.left = `${Math.max(left, 4)}px`;
  tip.style.top = `${at.top - height - 8 < 4 ? at.bottom + 8 : at.top - height - 8}px`;
}

function telling(svg) {
  const points = all(".value", svg);
  points.forEach((point, at) => {
    point.querySelector("title").remove();
    const roles = {role: "img", "aria-label": point.dataset.value, tabindex: at ? -1 : 0};
    Object.entries(roles).forEach(([name, value]) => point.setAttribute(name, value));
    point.addEventListener("focus", () => tell(point));
    point.addEventListener("blur", () => tell(null));
  });
  const far = (point, event) => {
    const {left, top, width, height} = point.getBoundingClientRect();
    return Math.hypot(left + width / 2 - event.clientX, top + height / 2 - event.clientY);
  };
  const nearest = event => {
    const best = points.reduce((one, other) => far(other, event) < far(one, event) ? other : one);
    tell(far(best, event) < NEAR ? best : null);
  };
  if (points.length) ["pointermove", "pointerdown"].forEach(name => svg.addEventListener(name, nearest));
  svg.addEventListener("pointerleave", () => tell(null));
  svg.addEventListener("keydown", event => {
    const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
    const next = points[points.indexOf(document.activeElement) + step];
    if (!step) return;
    event.preventDefault();
    if (!next) return;
    points.forEach(each => each.setAttribute("tabindex", each === next ? 0 : -1));
    next.focus();
  });
}

// A ranking: every step was computed with the report, and the limit chooses which one is shown.

const STEPS = 1000;
function ranking(box) {
  const {start, unit, steps} = JSON.parse(box.querySelector("script").textContent);
  const [view, slider, field, none] = ["select", "[type=range]", "[type=number]", "button"].map(
    each => box.querySelector(`.controls ${each}`));
  const bounds = steps.flat().map(step => step.at).filter(at => at > 0);
  const low = 0.8 * Math.min(...bounds), ratio = 1.25 * Math.max(...bounds) / low;
  let limit = start;
  const show = first => {
    const own = steps[view?.selectedIndex ?? 0];
    const step = own.findLast(each => limit === null ? each.at === null : each.at !== null && each.at <= limit) ?? own.at(-1);
    const answer = box.querySelector(".callout"), named = limit === null ? "no limit" : `at most ${limit} ${unit}`;
    answer.className = `callout ${step.kind}`;
    if (answer.textContent !== step.answer) answer.textContent = step.answer;
    box.querySelector(".shown").textContent = [view?.selectedOptions[0].text, slider && `${box.dataset.limit}: ${named}`]
      .filter(Boolean).join(" · ");
    fill(box.querySelector("figure"), step);
    if (step.cards.length && first !== true) document.querySelector(".cards").replaceChildren(...step.cards.map(card));
    if (!slider) return;
    slider.setAttribute("aria-valuetext", named);
    slider.value = limit === null ? STEPS : Math.min(STEPS - 1, Math.max(0, STEPS * Math.log(limit / low) / Math.log(ratio)));
    if (document.activeElement !== field) field.value = limit ?? "";
  };
  view?.addEventListener("change", show);
  slider?.addEventListener("input", () => {
    limit = +slider.value === STEPS ? null : +(low * ratio ** (slider.value / STEPS)).toPrecision(3);
    show();
  });
  field?.addEventListener("input", () => {
    const bad = field.validity.badInput || (field.value !== "" && !(field.valueAsNumber > 0));
    field.setAttribute("aria-invalid", bad);
    if (bad) return;
    limit = field.value === "" ? null : field.valueAsNumber;
    show();
  });
  none?.addEventListener("click", () => { limit = null; show(); });
  box.querySelector(".controls").hidden = !view && !slider;
  show(true);
}

function fill(figure, step) {
  figure.querySelector("figcaption").lastChild.textContent = ` ${step.caption}`;
  const table = figure.querySelector("table"), columns = [...[...table.tHead.rows].at(-1).cells];
  columns.forEach(each => each.removeAttribute("aria-sort"));
  table.tBodies[0].replaceChildren(...step.rows.map((row, at) => {
    const strong = at === step.strong, made = make("tr", "", strong ? "strong" : "");
    const kind = (text, column) => columns[column].className || (text.length < 14 ? "w" : "");
    made.append(...row.map((text, column) => make(column ? "td" : "th", text, column && kind(text, column))));
    made.cells[0].scope = "row";
    if (strong) made.cells[0].append(" ", make("span", "chosen", "chosen"));
    return made;
  }));
  all(".fine", figure).forEach(each => each.remove());
  figure.append(...step.notes.map(note => make("p", note, "fine")));
}

function card({title, value, unit, detail, origin}) {
  const shown = make("p", value, "value"), told = make("p", `${detail} `, "detail");
  if (unit) shown.append(" ", make("span", unit, "unit"));
  if (origin) told.append(make("span", origin, "tag"));
  return make("div", "", "card", make("h2", title), shown, told);
}

tip.hidden = true;
tip.setAttribute("aria-hidden", "true");
document.body.append(tip);
addEventListener("keydown", event => event.key === "Escape" && tell(null));
["scroll", "resize"].forEach(name => addEventListener(name, () => {
  follow();
  tell(document.activeElement.closest(".value"));  // a focus scrolls to it, and its value stays beside it
}, {passive: true}));
all("table").forEach(sortable);
all(".plot svg").forEach(telling);
all(".ranking").forEach(ranking);
follow();
