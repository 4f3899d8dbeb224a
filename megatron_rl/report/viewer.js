// Every sampled rollout: found, sorted, coloured. The list has elements only for the lines in sight.
"use strict";
const data = JSON.parse(document.getElementById("rollouts").textContent);
const viewer = document.getElementById("viewer"), HIGH = 26;
const pick = name => viewer.querySelector(`[name=${name}]`);
const list = viewer.querySelector(".list"), spacer = list.firstElementChild, detail = viewer.querySelector(".detail");
const number = value => value === null || value === undefined ? "" : +value.toPrecision(4) + "";
const node = (tag, text, kind) => {
  const made = document.createElement(tag);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
};
for (const row of data.rows) {
  const remarks = Object.values(row.remarks || {}).flat().map(([text]) => text);
  row.said = row.conversation ? row.conversation.map(([, text]) => text).join("\n") : row.response;
  row.text = [...data.prompts[row.prompt].map(([, text]) => text), row.said, row.answer, ...remarks].join("\n").toLowerCase();
}
const fill = (name, values) => values.forEach(value => pick(name).append(new Option(value, value)));
fill("run", data.runs);
fill("step", [...new Set(data.rows.map(row => row.step))].sort((a, b) => a - b));
fill("ended", [...new Set(data.rows.map(row => row.finish_reason))].sort());
pick("run").hidden = data.runs.length < 2;

const CONTROLS = ["search", "run", "step", "ended", "sign", "sort", "colour"];
let shown = [], chosen = null;
const SORTS = {
  order: () => 0,
  "advantage, highest": (a, b) => (b.advantage ?? -Infinity) - (a.advantage ?? -Infinity),
  "advantage, lowest": (a, b) => (a.advantage ?? Infinity) - (b.advantage ?? Infinity),
  "reward, highest": (a, b) => b.reward - a.reward,
  "reward, lowest": (a, b) => a.reward - b.reward,
  longest: (a, b) => b.tokens - a.tokens,
  shortest: (a, b) => a.tokens - b.tokens,
};
fill("sort", Object.keys(SORTS));
const SIGNS = { "advantage > 0": a => a > 0, "advantage < 0": a => a < 0, "advantage = 0": a => a === 0 };
fill("sign", Object.keys(SIGNS));

function select() {
  const [search, run, step, ended, sign, sort] = CONTROLS.map(name => pick(name).value);
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  shown = data.rows.filter(row =>
    words.every(word => row.text.includes(word)) && (!run || data.runs[row.run] === run) && (!step || row.step === +step) &&
    (!ended || row.finish_reason === ended) && (!sign || SIGNS[sign](row.advantage)));
  shown.sort(SORTS[sort]);
  spacer.style.height = shown.length * HIGH + "px";
  viewer.querySelector(".count").textContent = `${shown.length.toLocaleString("en")} of ${data.rows.length.toLocaleString("en")}`;
  list.scrollTop = 0;
  if (!shown.includes(chosen)) { chosen = shown[0] ?? null; open(); }
  draw();
}

function draw() {
  const first = Math.max(0, Math.floor(list.scrollTop / HIGH) - 5), last = first + Math.ceil(list.clientHeight / HIGH) + 10;
  spacer.replaceChildren(...shown.slice(first, last).map((row, i) => {
    const line = node("button", "", row === chosen ? "line chosen" : "line");
    line.style.top = (first + i) * HIGH + "px";
    const sign = row.advantage > 0 ? "good" : row.advantage < 0 ? "bad" : "";
    line.append(node("span", `${row.step}`), node("span", number(row.reward)), node("span", number(row.advantage), sign),
      node("span", `${row.tokens}`), node("span", row.said.slice(0, 200).replace(/\s+/g, " ")));
    line.onclick = () => { chosen = row; open(); draw(); list.focus(); };
    return line;
  }));
}

// Each token on a ground of its own: stronger the further its value is from 0, or 1 (ratios), the same for all rollouts.
const away = (kind, value) => kind === "ratio" ? Math.log(value) : value;
const farthest = kind => data.rows.reduce((most, row) => (row[kind] || []).reduce((m, value) =>
  Math.max(m, Math.abs(away(kind, value))), most), kind === "weight" ? 1e-30 : 0.01);
const scales = {};
function tokens(row, kind, from = 0, to = row.pieces.length) {
  const values = row[kind].slice(from, to), box = document.createElement("pre");
  const scale = scales[kind] ??= farthest(kind);
  row.pieces.slice(from, to).forEach((piece, i) => {
    const token = node("span", piece), value = values[i], by = away(kind, value);
    const strength = Math.sqrt(Math.abs(by) / scale) * 0.8;
    token.style.background = `rgba(${by > 0 ? "5,150,105" : "220,38,38"},${strength.toFixed(2)})`;
    token.title = `${JSON.stringify(piece)}: ${value}`;
    box.append(token);
  });
  return box;
}

function open() {
  if (!chosen) return detail.replaceChildren(node("p", "No rollout matches.", "sub"));
  const kind = pick("colour").value, facts = [`step ${chosen.step}`, `${chosen.sample ?? ""} #${chosen.rollout ?? ""}`,
    `advantage ${number(chosen.advantage)}`, `${chosen.tokens} ${chosen.tokens === 1 ? "token" : "tokens"}`, chosen.finish_reason];
  if (chosen.turn_tokens) facts.push(`${chosen.turn_tokens.length} ${chosen.turn_tokens.length === 1 ? "turn" : "turns"}`);
  if (chosen.failed_by) facts.push(`broken off by the ${chosen.failed_by}`);
  if (data.runs.length > 1) facts.unshift(data.runs[chosen.run]);
  const rewards = Object.entries(chosen.rewards).map(([name, value]) => `${name} ${value === null ? "no score" : number(value)}`);
  const coloured = kind && chosen.pieces && chosen[kind];
  detail.replaceChildren(node("p", facts.concat(rewards).join(" · "), "sub"), node("b", "Prompt"));
  for (const name of chosen.images || []) detail.append(picture(name));
  const turn = (role, content) => detail.append(...(role ? [node("div", role, "role")] : []), content);
  for (const [role, text] of data.prompts[chosen.prompt]) turn(role, node("pre", text));
  if (chosen.conversation) {
    detail.append(node("b", "Conversation"));
    let from = 0, next = 0;
    const parted = chosen.conversation.some(([role]) => role === "sequence");  // turns are then not in their order
    for (const [role, text] of chosen.conversation) {
      const own = role === "assistant" ? next++ : -1, to = from + ((chosen.turn_tokens || [])[own] || 0);
      const worth = Object.entries({ ...chosen.turn_rewards, advantage: chosen.turn_advantages })
        .filter(([, values]) => !parted && own in (values || [])).map(([name, values]) => `${name} ${number(values[own])}`);
      turn([role, ...worth].join(" · "), coloured && to > from ? tokens(chosen, kind, from, to) : node("pre", text));
      from = to;
    }
  } else detail.append(node("b", "Response"), coloured ? tokens(chosen, kind) : node("pre", chosen.response));
  if (kind && !coloured) detail.append(node("p", "Its tokens were not recorded (logging.record_every).", "sub"));
  if (chosen.answer) detail.append(node("b", "Answer"), node("pre", chosen.answer));
  for (const [name, remarks] of Object.entries(chosen.remarks || {})) {
    const lines = node("ul", "", "remarks");
    for (const [text, right] of remarks)
      lines.append(right === null ? node("li", text) : node("li", `${right ? "✓" : "✗"} ${text}`, right ? "good" : "bad"));
    detail.append(node("b", `What ${name} says`), lines);
  }
  detail.scrollTop = 0;
}

function picture(name) {
  if (!data.images[name]) return node("p", `[image samples/images/${name}: beyond what the page holds]`, "sub");
  const image = node("img", "");
  image.src = data.images[name];
  return image;
}

// The state is in the address, so that a view can be sent.
for (const [name, value] of new URLSearchParams(location.hash.slice(1))) if (CONTROLS.includes(name)) pick(name).value = value;
viewer.addEventListener("input", event => {
  if (event.target.name === "colour") open(); else select();
  const state = CONTROLS.filter(name => pick(name).value && pick(name).value !== "order").map(name => [name, pick(name).value]);
  history.replaceState(null, "", "#" + new URLSearchParams(state));
});
list.tabIndex = 0;
list.addEventListener("keydown", event => {
  const by = { ArrowDown: 1, ArrowUp: -1 }[event.key], at = shown.indexOf(chosen) + by;
  if (!by || !shown[at]) return;
  event.preventDefault();
  chosen = shown[at];
  list.scrollTop = Math.min(at * HIGH, Math.max(list.scrollTop, (at + 1) * HIGH - list.clientHeight));
  open();
  draw();
});
list.addEventListener("scroll", () => requestAnimationFrame(draw));
new ResizeObserver(draw).observe(list);
viewer.hidden = false;
select();
