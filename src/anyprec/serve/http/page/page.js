// The page: reads /v2/models/NAME/live once a second, draws the last two minutes, sets the precision, and shows the
// answer of every level for one image. No library, nothing fetched from elsewhere. Text is set as text, never as HTML.
"use strict";

const SPAN = 120; // seconds shown
const KEEP = new Map(); // second -> what happened in it
const FLOAT = "32";
const $ = (id) => document.getElementById(id);
const RUNS = 5; // of one image at every width; the table shows the median time
let key = "", model = "", last = null, picture = null;

// --- Asking -----------------------------------------------------------------------------------------------------------

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  const reply = await fetch(path, { ...options, headers, cache: "no-store" });
  if (reply.status === 401 || reply.status === 403) $("key-form").hidden = false;
  let body = null;
  try { body = await reply.json(); } catch { /* not JSON: the status says it */ }
  if (!reply.ok) throw new Error(body?.error ?? `the server answered ${reply.status}`);
  return body;
}

const at = (part) => `/v2/models/${encodeURIComponent(model)}/${part}`;

function trouble(error) {
  const line = $("trouble");
  line.hidden = !error;
  line.textContent = error ? `${error.message ?? error}` : "";
}

// --- Every second -----------------------------------------------------------------------------------------------------

async function watch() {
  let wait = 1000;
  if (model && !document.hidden) {
    const asked = model;
    try {
      // All that may be missing, so that a pause or a sleeping tab leaves no hole.
      const newest = KEEP.size ? Math.max(...KEEP.keys()) : 0;
      const missing = Math.min(SPAN, Math.max(2, Math.floor(Date.now() / 1000) - newest + 1));
      const seen = await ask(at(`live?seconds=${KEEP.size ? missing : SPAN}`));
      if (asked === model) take(seen);
      trouble(null);
    } catch (error) {
      trouble(error instanceof TypeError ? "the server does not answer; trying again" : error);
      lost();
      wait = 2000;
    }
  }
  setTimeout(watch, wait);
}

function take(seen) {
  for (const second of seen.seconds) KEEP.set(seen.time - second.ago, second);
  for (const time of KEEP.keys()) if (time < seen.time - SPAN) KEEP.delete(time);
  const first = !last || last.model_name !== seen.model_name || last.levels.length !== seen.levels.length;
  last = seen;
  if (first) makeDial();
  show();
}

// Numbers of a server that does not answer are old, and say so.
function lost() {
  const old = last ? `; these numbers are ${Math.max(0, Math.round(Date.now() / 1000 - last.time))} s old` : "";
  state("bad", `no answer from the server${old}`);
  $("figures").classList.add("stale");
}

const MARKS = { good: "\u2713", warn: "!", bad: "\u25b2", idle: "\u00b7" };

function state(level, words) {
  const line = $("state");
  if (!line.classList.contains(level)) $("said").textContent = words; // read aloud when it changes, not every second
  line.className = `state ${level}`;
  $("state-mark").textContent = MARKS[level];
  $("state-words").textContent = words;
}

function show() {
  const names = last.levels.map((level) => level.name);
  const rows = [...KEEP].sort((a, b) => a[0] - b[0]).map(([time, second]) => ({ time, ...second }));
  const now = last.window, share = now.attainment; // every tile is of this one window
  $("figures").classList.remove("stale");
  for (const over of document.querySelectorAll(".over")) over.textContent = `last ${now.seconds} s`;
  set("now-load", now.per_second.toFixed(now.per_second < 10 ? 1 : 0));
  set("now-attainment", share === null ? "–" : percent(share), share !== null && share < 0.99);
  set("now-latency", now.p99_ms === null ? "–" : ms(now.p99_ms), now.p99_ms > last.target_ms);
  set("now-slowest", now.max_ms === null ? "–" : ms(now.max_ms), now.max_ms > last.target_ms);
  set("now-target", `${Number(last.target_ms.toPrecision(4))} ms`);
  set("now-bits", now.mean_bits === null ? "–" : now.mean_bits.toFixed(1));
  set("now-accuracy", now.accuracy === null ? "–" : `${now.accuracy.toFixed(1)} %`);
  const { level, words } = last.condition, waits = last.queue?.images ?? 0;
  state(level, waits ? `${words}; ${waits} waiting now` : words);
  const precision = last.precision;
  if (precision) {
    const value = precision.policy === "fixed" ? String(precision.bits) : precision.policy;
    const box = document.querySelector(`#choices input[value="${CSS.escape(value)}"]`);
    if (box && !box.checked && !$("dial").contains(document.activeElement)) box.checked = true;
    $("dial-note").textContent = NOTES[value] ?? `Every request runs at ${title(value)}, however many are late.`;
  }
  front();
  strips();
  const empty = rows.every((row) => !row.requests);
  $("empty").hidden = !empty;
  for (const id of ["charts", "note", "details"]) $(id).hidden = empty;
  if (empty) return;
  charts(rows, names);
  table(rows);
}

// What to type, with this server's address and model in it.
function showCommands(takesImages) {
  const header = (name) => key ? ` ${name} "Authorization: Bearer KEY"` : "";
  const lines = [["Load it, 100 requests a second:", `anyprec loadtest ${location.origin} --model ${model} --arrivals poisson:100 --seconds 30${header("--header")}`]];
  if (takesImages) lines.unshift(["Classify a photo:", `curl${header("-H")} --data-binary @photo.jpg ${location.origin}${at("classify")}`]);
  $("drop").hidden = !takesImages;
  $("commands").replaceChildren(...lines.flatMap(([words, command]) => {
    const row = make("dd", {}, make("code", {}, command));
    if (navigator.clipboard) { // only on https and on this machine
      const button = make("button", { type: "button" }, "Copy");
      button.addEventListener("click", async () => {
        await navigator.clipboard.writeText(command);
        button.textContent = "Copied";
        setTimeout(() => { button.textContent = "Copy"; }, 1500);
      });
      row.append(button);
    }
    return [make("dt", {}, words), row];
  }));
}

async function describe() {
  let takesImages = true;
  try {
    const about = await ask(`/v2/models/${encodeURIComponent(model)}`);
    takesImages = about.inputs[0].shape.length === 4 && about.parameters.datatypes.includes("UINT8");
  } catch { /* not loaded: the state line says so */ }
  showCommands(takesImages);
}

function set(id, text, bad = false) {
  $(id).textContent = text;
  $(id).classList.toggle("bad", Boolean(bad));
}

const ms = (value) => value >= 10000 ? `${(value / 1000).toFixed(1)} s` : value >= 100 ? `${value.toFixed(0)} ms` : value >= 10 ? `${value.toFixed(1)} ms` : `${value.toFixed(2)} ms`;
// Never rounded to all or nothing: 99.996 % is not 100 %.
const percent = (share) => share === 1 || share === 0 ? `${100 * share} %` : share < 0.001 ? "< 0.1 %" : share > 0.99 ? `${Math.min(99.99, 100 * share).toFixed(2)} %` : `${(100 * share).toFixed(1)} %`;
const title = (name) => name === FLOAT ? "float" : name === "auto" ? "cascade" : /^\d+$/.test(name) ? `${name} bit` : name;

// A plan lies between the colors of the widths around its mean.
function color(name) {
  if (name === FLOAT) return "var(--wf)";
  if (name === "auto") return "var(--wa)";
  if (/^[1-8]$/.test(name)) return `var(--w${name})`;
  const bits = last?.levels.find((level) => level.name === name)?.bits[0];
  if (!bits?.length) return "var(--wm)";
  const mean = Math.min(8, bits.reduce((total, width) => total + width, 0) / bits.length), low = Math.floor(mean);
  return `color-mix(in srgb, var(--w${Math.ceil(mean)}) ${Math.round(100 * (mean - low))}%, var(--w${low}))`;
}

// --- The dial ---------------------------------------------------------------------------------------------------------

const NOTES = {
  adaptive: "Every batch runs at the most accurate level that still meets the deadlines.",
  accuracy: "Every batch runs at the most accurate level, unless its deadline would surely be missed.",
};

function makeDial() {
  const choices = $("choices");
  choices.replaceChildren();
  for (const value of ["adaptive", "accuracy", ...last.levels.map((level) => level.name)]) {
    const box = make("input", { type: "radio", name: "precision", value });
    box.addEventListener("change", () => choose(value));
    const words = { adaptive: "adaptive", accuracy: "accuracy first" }[value] ?? title(value);
    const label = make("label", {}, box, make("span", {}, words));
    choices.append(label);
  }
}

async function choose(value) {
  const wish = value in NOTES ? { policy: value } : { bits: /^\d+$/.test(value) ? Number(value) : value };
  try {
    await ask(at("precision"), {
      method: "POST", body: JSON.stringify(wish), headers: { "content-type": "application/json" },
    });
    trouble(null);
  } catch (error) {
    trouble(error);
  }
}

// --- Levels -----------------------------------------------------------------------------------------------------------

// The level of most answers in the window; of the last batch, where there were none.
function inUse() {
  const counts = Object.entries(last.window.bits).sort((a, b) => b[1] - a[1]);
  return counts.length ? counts[0][0] : last.last_level ?? null;
}

// Time against accuracy: the front as a line, levels that policies pass over as rings, the one in use with a halo.
function front() {
  const known = last.levels.filter((level) => level.accuracy !== null && level.name !== FLOAT);
  $("levels").hidden = known.length < 2;
  if ($("levels").hidden) return;
  const box = $("front"), width = Math.max(200, box.clientWidth), height = box.clientHeight;
  const used = inUse(), times = known.map((level) => level.ms), rights = known.map((level) => level.accuracy);
  const high = above(Math.max(...times)), spread = Math.max(0.2, Math.max(...rights) - Math.min(...rights));
  const across = LINEAR(0, high, round(0, high)), low = Math.max(0, Math.min(...rights) - 0.15 * spread);
  const top = Math.min(100, Math.max(...rights) + 0.15 * spread), up = LINEAR(low, top, round(low, top));
  const x = (value) => LEFT + (width - LEFT - RIGHT) * across.at(value), y = (value) => TOP + (height - TOP - BOTTOM) * (1 - up.at(value));
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `Levels by time and accuracy: ${known.map((level) => `${title(level.name)} ${ms(level.ms)}, ${level.accuracy.toFixed(2)} %${level.front ? "" : ", not on the front"}`).join("; ")}` });
  for (const value of up.ticks) root.append(
    svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
    svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, `${value}`));
  for (const value of across.ticks) root.append(svg("text", { x: x(value), y: height - 4, "text-anchor": "middle" }, value ? `${value} ms` : "0"));
  const chosen = known.filter((level) => level.front).sort((a, b) => a.ms - b.ms);
  root.append(svg("path", { d: chosen.map((level, i) => `${i ? "L" : "M"}${x(level.ms).toFixed(1)} ${y(level.accuracy).toFixed(1)}`).join(""), fill: "none", stroke: "var(--quiet)", "stroke-width": 1.5 }));
  const written = []; // names that would cover another are left out: the tip has them
  for (const level of [...known].sort((a, b) => (b.name === used) - (a.name === used) || b.front - a.front)) {
    const place = { cx: x(level.ms), cy: y(level.accuracy) };
    if (level.name === used) root.append(svg("circle", { ...place, r: 10, fill: "none", stroke: "var(--main)", "stroke-width": 2.5 }));
    const share = last.window.went_on ?? level.share;
    const about = `${title(level.name)}: ${ms(level.ms)}, ${level.accuracy.toFixed(2)} %${level.share === null ? "" : `, ${percent(share)} go on`}${level.front ? "" : "; another level is better in both"}`;
    root.append(svg("circle", { ...place, r: level.front ? 5 : 4, fill: level.front ? color(level.name) : "var(--panel)", stroke: color(level.name), "stroke-width": 1.5 }, svg("title", {}, about)));
    const text = { x: place.cx + 12, y: place.cy + 14, wide: 7 * title(level.name).length };
    const free = written.every((other) => Math.abs(other.y - text.y) > 12 || text.x > other.x + other.wide || other.x > text.x + text.wide);
    if (!level.front || !free || text.x + text.wide > width) continue;
    written.push(text);
    root.append(svg("text", { class: "named", x: text.x, y: text.y }, title(level.name)));
  }
  box.replaceChildren(root);
}

// Bits of every layer at the level in use, a line for each stage of a cascade.
function strips() {
  const used = inUse(), level = last.levels.find((one) => one.name === used), box = $("strips");
  const share = last.window.went_on;
  const text = JSON.stringify([used, level?.bits, share, last.layers]);
  if (box.dataset.shown === text) return;
  box.dataset.shown = text;
  if (!level || !last.layers.length) { box.replaceChildren(make("p", { class: "quiet" }, "No batch has run yet.")); return; }
  const lines = level.bits.map((bits, stage) => {
    const words = level.bits.length === 1 ? title(used)
      : stage === 0 ? "first, for all inputs" : share === null ? "then, for unsure ones" : `then, for ${percent(share)} of them`;
    const cells = bits.map((width, i) => {
      const cell = make("span", { title: `${last.layers[i]}: ${title(String(width))}` }, width === 32 ? "f" : `${width}`);
      cell.style.background = color(String(width));
      return cell;
    });
    return [make("dt", {}, words), make("dd", { class: "strip", "aria-label": `bits by layer: ${bits.join(", ")}` }, ...cells)];
  });
  const also = used !== "auto" && share !== null ? [make("p", { class: "quiet" }, `Of the inputs that ran at the cascade, ${percent(share)} went on.`)] : [];
  box.replaceChildren(make("dl", {}, ...lines.flat()), ...also);
}

// --- Charts -----------------------------------------------------------------------------------------------------------

const LEFT = 44, RIGHT = 40, TOP = 8, BOTTOM = 20; // names of lines and widths stand at the right

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "fill" || name === "stroke") element.style[name] = value; // colors of the style sheet
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// The next round number, with a round half.
function above(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.2, 1.6, 2, 3, 4, 6, 8, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

const LINEAR = (low, high, ticks = [low, (low + high) / 2, high]) => ({ at: (value) => (value - low) / (high - low), ticks });

// Three to six round numbers from low to high: 1, 2 or 5 times a power of ten apart.
function round(low, high) {
  const power = 10 ** Math.floor(Math.log10((high - low) / 3));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => (high - low) / size <= 6);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= high / step + 1e-9; i++) ticks.push(Number((i * step).toPrecision(6)));
  return ticks;
}

// From a round number below the least value to one above the greatest: whatever happened is on it, a second as well as a millisecond.
function logarithmic(values) {
  const steps = [];
  for (let power = 0.001; power < 1e7; power *= 10) steps.push(power, 2 * power, 5 * power);
  const low = Math.max(...steps.filter((step) => step <= Math.min(...values) * 1.001));
  const high = Math.min(...steps.filter((step) => step >= Math.max(...values) * 0.999 && step > low));
  let ticks = steps.filter((step) => step >= low * 0.999 && step <= high * 1.001);
  if (ticks.length > 7) ticks = ticks.filter((step, i) => i === 0 || i === ticks.length - 1 || /^[^1-9]*1/.test(step.toPrecision(1)));
  return { at: (value) => Math.log(value / low) / Math.log(high / low), ticks };
}

// A frame with its axes. `layers(x, y)` gives the SVG elements, `tell(row)` the words for one second.
function draw(id, rows, scale, words, layers, tell, summary) {
  const box = $(id), width = Math.max(200, box.clientWidth), height = box.clientHeight;
  const x = (time) => LEFT + (width - LEFT - RIGHT) * (1 - (last.time - 1 - time) / (SPAN - 1));
  const y = (value) => TOP + (height - TOP - BOTTOM) * (1 - scale.at(value));
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": summary });
  for (const value of scale.ticks) {
    root.append(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
    root.append(svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, words(value)));
  }
  const ends = [[SPAN, "2 min ago", "start"], [SPAN / 2, "1 min", "middle"], [1, "now", "end"]];
  for (const [ago, text, anchor] of ends)
    root.append(svg("text", { x: x(last.time - ago), y: height - 4, "text-anchor": anchor }, text));
  root.append(...layers(x, y));
  root.addEventListener("pointermove", (event) => point(box, root, event, rows, x, tell, height));
  root.addEventListener("pointerleave", () => box.querySelectorAll(".tip, .cross").forEach((part) => part.remove()));
  const tip = box.querySelector(".tip"); // stays while the pointer rests
  box.replaceChildren(root, ...(tip ? [tip] : []));
}

function point(box, root, event, rows, x, tell, height) {
  const where = event.clientX - box.getBoundingClientRect().left;
  const row = rows.reduce((best, row) => Math.abs(x(row.time) - where) < Math.abs(x(best?.time ?? -1e9) - where) ? row : best, null);
  if (!row) return;
  box.querySelectorAll(".tip, .cross").forEach((part) => part.remove());
  root.append(svg("line", { class: "cross", x1: x(row.time), x2: x(row.time), y1: TOP, y2: height - BOTTOM }));
  const tip = make("div", { class: "tip" }, `${last.time - row.time} s ago: ${tell(row)}`);
  box.append(tip);
  tip.style.left = `${Math.min(Math.max(0, x(row.time) - tip.offsetWidth / 2), box.clientWidth - tip.offsetWidth)}px`;
}

// Lines break where a second has no value.
function line(rows, x, y, value, stroke, dash = "none") {
  let path = "", open = false;
  for (const row of rows) {
    const v = value(row);
    if (v === null || v === undefined) { open = false; continue; }
    path += `${open ? "L" : "M"}${x(row.time).toFixed(1)} ${y(v).toFixed(1)}${open ? "" : "h0.01"}`;
    open = true;
  }
  return svg("path", { d: path, fill: "none", stroke, "stroke-width": 2, "stroke-dasharray": dash, "stroke-linejoin": "round" });
}

// Names beside the newest values, moved apart where they would overlap.
function named(entries, x, y) {
  let below = Infinity;
  return entries.filter(([, value]) => value !== null && value !== undefined).sort((a, b) => a[1] - b[1]).map(([words, value]) => {
    below = Math.min(y(value) + 4, below - 12);
    return svg("text", { class: "named", x: x(last.time - 1) + 5, y: below }, words);
  });
}

// Late and refused have stripes: they can be told apart without colors.
function stripes() {
  const pattern = (id, back, angle, wide) => svg("pattern", { id, width: wide, height: wide, patternUnits: "userSpaceOnUse", patternTransform: `rotate(${angle})` },
    svg("rect", { width: wide, height: wide, fill: back }), svg("rect", { width: wide / 2.5, height: wide, fill: "var(--panel)" }));
  return svg("defs", {}, pattern("late", "var(--late)", 45, 5), pattern("missed", "var(--bad)", -45, 3));
}

// Bars on top of each other, one a second.
function bars(rows, x, y, parts) {
  const wide = Math.max(1, x(last.time - 1) - x(last.time - 2) - 0.6);
  return rows.flatMap((row) => {
    let below = 0;
    return parts(row).filter(([value]) => value > 0).map(([value, fill]) => {
      const top = y(below + value), height = y(below) - top;
      below += value;
      return svg("rect", { x: x(row.time) - wide / 2, y: top, width: wide, height, fill });
    });
  });
}

const missed = (row) => row.refused + row.expired + row.failed + row.left + row.turned_away;

const silent = (row) => row.requests && row.p50_ms === null;

function charts(rows, names) {
  const most = above(Math.max(10, ...rows.map((row) => row.requests)));
  const whole = (value) => value >= 1000 ? `${Number((value / 1000).toPrecision(3))}k` : `${Number(value.toPrecision(3))}`;
  draw("load", rows, LINEAR(0, most), whole,
    (x, y) => [stripes(), ...bars(rows, x, y, (row) => [
      [row.in_time, "var(--main)"], [row.late, "url(#late)"], [missed(row), "url(#missed)"]])],
    (row) => `${row.in_time} in time, ${row.late} late, ${row.refused + row.turned_away} refused, ${row.expired} given up${row.failed ? `, ${row.failed} failed` : ""}${row.left ? `, ${row.left} left` : ""}`,
    `Requests a second; ${rows.length ? rows[rows.length - 1].requests : 0} in the last one`);

  const seen = rows.filter((row) => row.p50_ms !== null), newest = seen[seen.length - 1];
  const scale = logarithmic([0.5 * last.target_ms, 2 * last.target_ms, ...seen.flatMap((row) => [row.p50_ms, row.p99_ms])]);
  draw("latency", rows, scale, (value) => value >= 1000 ? `${Number((value / 1000).toPrecision(3))} s` : `${Number(value.toPrecision(3))}`,
    (x, y) => [
      svg("line", { x1: LEFT, x2: x(last.time - 1), y1: y(last.target_ms), y2: y(last.target_ms), stroke: "var(--target)", "stroke-dasharray": "6 4", "stroke-width": 1.5 }),
      ...rows.filter(silent).map((row) => svg("path", { class: "none", d: `M${x(row.time) - 2.5} ${TOP - 2.5}l5 5m0 -5l-5 5` })),
      line(rows, x, y, (row) => row.p50_ms, "var(--quiet)", "2 3"), line(rows, x, y, (row) => row.p99_ms, "var(--main)"),
      ...named([["target", last.target_ms], ["p50", newest?.p50_ms], ["p99", newest?.p99_ms]], x, y)],
    (row) => row.p50_ms === null ? row.requests ? `none of ${row.requests} answered` : "no requests" : `p50 ${ms(row.p50_ms)}, p99 ${ms(row.p99_ms)}, slowest ${ms(row.max_ms)}`,
    `Latency of answers on a logarithmic axis; target ${ms(last.target_ms)}${newest ? `, p99 of the newest second ${ms(newest.p99_ms)}` : ""}`);

  const runs = (row) => Object.values(row.bits).reduce((total, n) => total + n, 0) || 1;
  const now = rows[rows.length - 1];
  draw("bits", rows, LINEAR(0, 1), (value) => `${100 * value} %`,
    (x, y) => {
      let below = 0;
      const places = names.filter((name) => now?.bits[name]).map((name) => {
        const part = now.bits[name] / runs(now);
        below += part;
        return [part > 0.08 && title(name).length < 8 ? title(name) : "", below - part / 2]; // longer ones: the legend
      });
      return [...bars(rows, x, y, (row) => names.map((name) => [(row.bits[name] ?? 0) / runs(row), color(name)])), ...named(places, x, y)];
    },
    (row) => names.filter((name) => row.bits[name]).map((name) => `${row.bits[name]} at ${title(name)}`).join(", ") || "no answers",
    "Share of answers at each level");

  const accuracies = last.levels.map((level) => level.accuracy).filter((value) => value !== null);
  if (accuracies.length) {
    const low = Math.max(0, Math.floor(Math.min(...accuracies) - 1)), high = Math.min(100, Math.ceil(Math.max(...accuracies) + 1));
    draw("accuracy", rows, LINEAR(low, high, round(low, high)), (value) => `${value}`,
      (x, y) => [line(rows, x, y, (row) => row.accuracy, "var(--main)")],
      (row) => row.accuracy === null ? "no answers" : `${row.accuracy.toFixed(2)} %`,
      "Accuracy expected of what is served");
  } else {
    $("accuracy").textContent = "The model file does not note the accuracy of its levels; anyprec pack notes that of a run it packs.";
  }
  legend("load-legend", [["in time", "var(--main)"], ["late", "url(#late)"], ["refused, given up or failed", "url(#missed)"]]);
  legend("latency-legend", rows.some(silent) ? [["requests, but no answers", "none"]] : []);
  legend("bits-legend", names.filter((name) => rows.some((row) => row.bits[name])).map((name) => [title(name).replace(" bit", ""), color(name)]));
}

function legend(id, entries) {
  const text = JSON.stringify(entries);
  if ($(id).dataset.shown === text) return;
  $(id).dataset.shown = text;
  $(id).replaceChildren(...entries.flatMap(([words, fill]) => {
    const mark = svg("svg", { viewBox: "0 0 14 10", "aria-hidden": "true" }, fill === "none"
      ? svg("path", { class: "none", d: "M4.5 2.5l5 5m0 -5l-5 5" }) : svg("rect", { width: 14, height: 10, fill }));
    return [mark, words];
  }));
}

function table(rows) {
  if (!document.querySelector("details").open) return;
  const number = (value) => value === null ? "–" : value.toFixed(2);
  $("seconds").tBodies[0].replaceChildren(...[...rows].reverse().map((row) => make("tr", {}, ...[
    last.time - row.time, row.in_time, row.late, row.refused + row.turned_away, row.expired, row.failed + row.left,
    number(row.p50_ms), number(row.p99_ms), number(row.max_ms),
    Object.entries(row.bits).map(([name, n]) => `${title(name)}: ${n}`).join(", ") || "–", number(row.accuracy),
  ].map((value) => make("td", {}, `${value}`)))));
}

// --- One image at every width ------------------------------------------------------------------------------------------

async function classify(file) {
  const answer = $("answer");
  if (!["image/jpeg", "image/png"].includes(file.type)) {
    answer.textContent = `${file.name} is not a JPEG or PNG image.`;
    return;
  }
  answer.textContent = `Running ${file.name} at every level`;
  if (picture) URL.revokeObjectURL(picture);
  const shown = picture = URL.createObjectURL(file); // another image, dropped meanwhile, ends this one
  const runs = [];
  try {
    while (runs.length < RUNS && picture === shown) {
      const reply = await ask(at("classify?bits=all&top=1"), { method: "POST", body: file, headers: { "content-type": file.type } });
      runs.push(reply.results);
      if (picture === shown) answer.replaceChildren(make("div", { class: "shown" }, make("img", { src: shown, alt: file.name }), compared(runs)));
    }
  } catch (error) {
    if (picture === shown && !runs.length) answer.textContent = `${error.message}`; // else what has been answered stays
  }
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b), half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

// Labels and probabilities are the same in every run; times are medians over the runs.
function compared(runs) {
  const head = ["level", "answer", "how sure", "time", "accuracy"].map((words) => make("th", { scope: "col", class: words === "answer" ? "left" : "" }, words));
  const body = runs[0].map((result, i) => {
    const best = result.labels[0] ?? {}, share = best.probability ?? best.share ?? 0;
    const meter = make("span", { class: "meter" }, make("i", {}));
    meter.firstChild.style.width = `${100 * share}%`;
    return make("tr", {},
      make("th", { scope: "row" }, swatch(String(result.bits)), title(String(result.bits))),
      make("td", { class: "left" }, best.label ?? (best.class === undefined ? "–" : `class ${best.class}`)),
      make("td", {}, meter, `${(100 * share).toFixed(1)} %`),
      make("td", {}, ms(median(runs.map((results) => results[i].run_ms)))),
      make("td", {}, result.accuracy === null ? "–" : `${result.accuracy.toFixed(2)} %`));
  });
  const times = runs.length > 1 ? `Time: engine time, median of ${runs.length} runs.` : "Time: engine time of one run.";
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body)),
    make("p", { class: "quiet" }, times));
}

function swatch(name) {
  const mark = make("span", { class: "swatch" });
  mark.style.background = color(name);
  return mark;
}

// --- Start ------------------------------------------------------------------------------------------------------------

async function start() {
  try {
    const models = await ask("/v2/repository/index");
    $("model").replaceChildren(...models.map(({ name }) => make("option", { value: name }, name)));
    model = $("model").value;
    $("key-form").hidden = true;
    trouble(null);
    await describe();
  } catch (error) {
    trouble(error instanceof TypeError ? "the server does not answer" : error);
  }
}

$("model").addEventListener("change", () => {
  model = $("model").value;
  KEEP.clear();
  last = picture = null;
  $("answer").replaceChildren();
  describe();
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  $("key-form").hidden = true;
  start();
});
$("file").addEventListener("change", () => {
  if ($("file").files[0]) classify($("file").files[0]);
  $("file").value = ""; // so that the same file can be chosen again
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    $("drop").classList.toggle("dragged", kind === "dragover");
    if (kind === "drop" && event.dataTransfer.files[0]) classify(event.dataTransfer.files[0]);
  });
}
document.addEventListener("visibilitychange", () => { if (!document.hidden && last) show(); });
addEventListener("resize", () => { if (last) show(); });
start().then(watch);
