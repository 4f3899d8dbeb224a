// Charts of the page's data: values under the mouse in all of them at once, a dragged range of steps, a double click for all steps.
"use strict";
(() => {
const HIGH = 170, LEFT = 46, RIGHT = 14, TOP = 8, BOTTOM = 20;
const svg = (tag, given, ...inside) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(given)) made.setAttribute(name, value);
  made.append(...inside);
  return made;
};
const html = (tag, kind, ...inside) => {
  const made = document.createElement(tag);
  made.className = kind;
  made.append(...inside);
  return made;
};
const present = value => value !== null && value !== undefined;
const number = value => !present(value) ? "" : value && Math.abs(value) < 1e-3
  ? (+value.toPrecision(4)).toExponential() : +value.toPrecision(4) + "";

const all = [...document.querySelectorAll("[data-curves]")].flatMap(place =>
  JSON.parse(document.getElementById(place.dataset.curves).textContent).map((given, i) =>
    ({ ...given, steps: place.dataset.steps, box: place.children[i] })));
let charts, range;  // of the kind of steps that is drawn: those of RL, or of the warm-up

// The last of the steps that is not after `step`; -1: none.
function before(steps, step) {
  let low = 0, high = steps.length;
  while (low < high) { const mid = (low + high) >> 1; if (steps[mid] <= step) low = mid + 1; else high = mid; }
  return low - 1;
}

function ticks(low, high, count, least = 0) {
  const ten = 10 ** Math.floor(Math.log10((high - low) / count));
  const step = Math.max(least, [1, 2, 5, 10].map(times => times * ten).find(one => one >= (high - low) / count * 0.999));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(+(i * step).toPrecision(12));
  return found;
}

function logTicks(low, high) {
  const decades = high / low > 30 ? [1] : [1, 2, 5], found = [];
  const every = Math.ceil(Math.log10(high / low) / 6) || 1;
  for (let ten = Math.floor(Math.log10(low)); ten <= Math.log10(high); ten++)
    if (ten % every === 0) found.push(...decades.map(times => times * 10 ** ten).filter(one => one >= low && one <= high));
  return found.length > 1 ? found : [low, high];
}

// Lowest and highest value of what is in sight.
function ends(chart) {
  let low = Infinity, high = -Infinity;
  for (const line of chart.lines) for (const values of [line.y, line.low, line.high]) {
    if (!values || (chart.stacked && values === line.y)) continue;
    for (let i = Math.max(0, before(line.x, range[0] - 1e-9)); i < line.x.length && line.x[i] <= range[1]; i++)
      if (present(values[i]) && line.x[i] >= range[0]) { low = Math.min(low, values[i]); high = Math.max(high, values[i]); }
  }
  if (low > high) [low, high] = [0, 1];
  if (chart.log) return low < high ? [low / 1.15, high * 1.15] : [low / 2, high * 2];
  if (chart.at_least !== null) return [Math.min(0, low), Math.max(chart.at_least, high * 1.03) || 1];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
}

// Which points of a line to draw: those in sight and one more on either side; of very many the lowest and highest of each pixel.
function points(xs, ys, x) {
  const found = [], first = Math.max(0, before(xs, range[0]) - 1), last = Math.min(xs.length - 1, before(xs, range[1]) + 1);
  const all = last - first < 4 * (x(range[1]) - x(range[0]));
  let low = first, high = first, pixel = NaN;
  for (let i = first; i <= last; i++) {
    if (all || Math.floor(x(xs[i])) !== pixel) {
      if (i > first) found.push(...(low === high ? [low] : [Math.min(low, high), Math.max(low, high)]));
      [low, high, pixel] = [i, i, Math.floor(x(xs[i]))];
    } else if (present(ys[i])) {
      if (!present(ys[low]) || ys[i] < ys[low]) low = i;
      if (!present(ys[high]) || ys[i] > ys[high]) high = i;
    }
  }
  return [...found, ...new Set([low, high, last])].sort((a, b) => a - b);
}

function trace(xs, ys, x, y) {
  let path = "", pen = "M";
  for (const i of points(xs, ys, x)) {
    if (!present(ys[i])) { pen = "M"; continue; }
    path += `${pen}${x(xs[i]).toFixed(1)} ${y(ys[i]).toFixed(1)}`;
    pen = "L";
  }
  return path;
}

function band(line, x, y) {
  const corner = (i, value) => present(value) ? `L${x(line.x[i]).toFixed(1)} ${y(value).toFixed(1)}` : "";
  const chosen = points(line.x, line.high, x), above = chosen.map(i => corner(i, line.high[i]));
  return "M" + [...above, ...chosen.reverse().map(i => corner(i, line.low[i]))].join("").slice(1) + "Z";
}

function draw(chart, place, width) {
  const wide = Math.max(200, width), [low, high] = ends(chart), scale = chart.log ? Math.log : value => value;
  const x = step => LEFT + (step - range[0]) / (range[1] - range[0]) * (wide - LEFT - RIGHT);
  const y = value => HIGH - BOTTOM - (scale(value) - scale(low)) / (scale(high) - scale(low)) * (HIGH - BOTTOM - TOP);
  const clip = `clip-${place}`, inside = svg("g", { "clip-path": `url(#${clip})` }), drawing = svg("svg", {
    viewBox: `0 0 ${wide} ${HIGH}`, height: HIGH, role: "img", "aria-label": chart.title });
  drawing.append(svg("clipPath", { id: clip }, svg("rect", { x: LEFT, y: 0, width: wide - LEFT - RIGHT, height: HIGH - BOTTOM + 2 })));
  for (const value of chart.log ? logTicks(low, high) : ticks(low, high, 5)) drawing.append(
    svg("line", { class: "grid", x1: LEFT, x2: wide - RIGHT, y1: y(value), y2: y(value) }),
    svg("text", { x: LEFT - 5, y: y(value) + 3, "text-anchor": "end" }, short(value)));
  for (const step of ticks(...range, Math.max(2, Math.floor(wide / 70)), 1))
    drawing.append(svg("text", { x: x(step), y: HIGH - 5, "text-anchor": "middle" }, `${step}`));
  for (const line of chart.lines) {
    if (line.low) inside.append(svg("path", { d: band(line, x, y), fill: line.colour, "fill-opacity": chart.stacked ? 0.85 : 0.18 }));
    if (chart.stacked) continue;
    const stroke = { fill: "none", stroke: line.colour, "stroke-linejoin": "round" };
    inside.append(svg("path", { d: trace(line.x, line.y, x, y), ...stroke, "stroke-width": line.mean ? 0.6 : 1.6,
      "stroke-opacity": line.mean ? Math.min(0.35, 0.7 / chart.lines.length) : 1, "stroke-dasharray": line.mean ? "" : line.dash }));
    if (line.mean) inside.append(svg("path", { d: trace(line.x, line.mean, x, y), ...stroke, "stroke-width": 1.7, "stroke-dasharray": line.dash }));
    else if (line.x.length < 30) line.x.forEach((step, i) => present(line.y[i]) &&
      inside.append(svg("circle", { cx: x(step), cy: y(line.y[i]), r: 2, fill: line.colour })));
  }
  chart.at = svg("line", { class: "at", y1: TOP, y2: HIGH - BOTTOM, visibility: "hidden" });
  chart.chosen = svg("rect", { class: "range", y: TOP, height: HIGH - BOTTOM - TOP, visibility: "hidden" });
  drawing.append(inside, chart.chosen, chart.at);
  chart.x = x;
  chart.step = event => {
    const to = (event.clientX - drawing.getBoundingClientRect().left - LEFT) / (wide - LEFT - RIGHT);
    return Math.round(Math.min(range[1], Math.max(range[0], range[0] + to * (range[1] - range[0]))));
  };
  chart.box.replaceChildren(chart.head, chart.legend, drawing);
}

function short(value) {
  const size = Math.abs(value), [unit, name] = [[1e9, "G"], [1e6, "M"], [1e4, "k"]].find(([least]) => size >= least) ?? [1, ""];
  if (size >= 1e13 || (size && size < 1e-3)) return value.toExponential(1).replace(".0", "").replace("e+", "e");
  return number(value / (name === "k" ? 1e3 : unit)) + name;
}

// What is fixed of a chart: its title, and a legend with a place for each line's value.
function prepare(chart) {
  chart.note_ = html("span", "sub", chart.note);
  chart.head = html("div", "title", html("span", "", chart.title), chart.note_);
  chart.values = chart.lines.map(() => html("b", ""));
  const alone = chart.lines.length === 1 && chart.note;
  chart.legend = html("div", "legend", ...chart.lines.map((line, i) => html("span", "", ...(alone ? [] : [
    svg("svg", { width: 16, height: 8 }, svg("line", { x1: 0, x2: 16, y1: 4, y2: 4, stroke: line.colour,
      "stroke-width": chart.stacked ? 8 : 2, "stroke-dasharray": line.dash })), line.label + " "]), chart.values[i])));
}

function hover(step) {
  for (const chart of charts) {
    const places = chart.lines.map(line => step === null ? -1 : before(line.x, step));
    const found = chart.lines.flatMap((line, i) => places[i] < 0 ? [] : [line.x[places[i]]]);
    const own = Math.max(...found), shown = found.length > 0 && own >= range[0] && own <= range[1];  // no value between two
    chart.at.setAttribute("visibility", shown ? "visible" : "hidden");
    if (shown) { chart.at.setAttribute("x1", chart.x(own)); chart.at.setAttribute("x2", chart.x(own)); }
    chart.note_.textContent = shown ? `${chart.axis} ${own}` : chart.note;
    chart.lines.forEach((line, i) => {
      const at = shown ? places[i] : -1;
      const spread = at >= 0 && line.low && !chart.stacked ? ` (${number(line.low[at])} to ${number(line.high[at])})` : "";
      const earlier = at >= 0 && line.x[at] !== own ? `, ${chart.axis} ${line.x[at]}` : "";
      chart.values[i].textContent = at < 0 ? "" : number(line.y[at]) + spread + earlier;
    });
  }
}

// Charts whose steps are of one kind: they have one range, and one place under the mouse.
function together(own) {
  let shown = [...own.reduce((ends, chart) => chart.lines.reduce(([a, b], { x }) =>
    [Math.min(a, x[0]), Math.max(b, x[x.length - 1])], ends), [Infinity, -Infinity])];
  if (shown[0] === shown[1]) { shown[0] -= 1; shown[1] += 1; }
  const whole = shown;
  const enter = () => { charts = own; range = shown; };
  function zoom(to) {
    shown = to;
    enter();
    const widths = own.map(chart => chart.box.clientWidth);  // all before the first change, so that the page is laid out once
    own.forEach((chart, place) => draw(chart, `${chart.steps}${place}`, widths[place]));
  }
  let from = null;
  for (const chart of own) {
    prepare(chart);
    chart.box.addEventListener("pointerdown", event => {
      if (event.button || !event.target.closest(".chart > svg")) return;
      enter();
      from = { chart, step: chart.step(event) };
      chart.box.setPointerCapture(event.pointerId);
    });
    chart.box.addEventListener("pointermove", event => {
      enter();
      if (from === null && !event.target.closest(".chart > svg")) return hover(null);
      const step = chart.step(event);
      hover(step);
      if (from === null) return;
      const [left, right] = [chart.x(from.step), chart.x(step)].sort((a, b) => a - b);
      chart.chosen.setAttribute("visibility", "visible");
      chart.chosen.setAttribute("x", left);
      chart.chosen.setAttribute("width", right - left);
    });
    chart.box.addEventListener("pointerup", event => {
      if (from === null) return;
      enter();
      const [first, last] = [from.step, chart.step(event)].sort((a, b) => a - b);
      from = null;
      chart.chosen.setAttribute("visibility", "hidden");
      if (last > first) zoom([first, last]);
    });
    chart.box.addEventListener("pointercancel", () => { from = null; chart.chosen.setAttribute("visibility", "hidden"); });
    chart.box.addEventListener("pointerleave", () => { enter(); if (from === null) hover(null); });
    chart.box.addEventListener("dblclick", () => zoom(whole));
  }
  zoom(whole);
  let width = 0;
  new ResizeObserver(() => { if (own[0].box.clientWidth !== width) { width = own[0].box.clientWidth; zoom(shown); } })
    .observe(document.body);
}
for (const steps of new Set(all.map(chart => chart.steps))) together(all.filter(chart => chart.steps === steps));
})();
