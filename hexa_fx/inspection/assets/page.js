"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const panes = {left: document.getElementById("left"), right: document.getElementById("right")};
const shown = {left: null, right: null};
const detail = document.getElementById("detail"), hint = detail.innerHTML;
let block = 0, kept = null;

const other = side => (side === "left" ? "right" : "left");
const exact = key => !key.startsWith("r:");
const element = (tag, text, cls) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (cls) made.className = cls;
  return made;
};
const stageOf = side => data[block].stages.find(s => s.name === shown[side]);
const boxes = side => [...panes[side].querySelectorAll(".box")];
const keysOf = box => (box.dataset.keys ? box.dataset.keys.split(" ") : []);

/* -- what is shown ------------------------------------------------------------------------------------------------- */

function showBlock(number) {
  block = number;
  const stages = data[block].stages;
  document.getElementById("facts").replaceChildren(...data[block].facts.map(([name, value]) => {
    const chip = element("span", value);
    chip.prepend(element("b", name));
    return chip;
  }));
  for (const side in panes) {
    const select = panes[side].querySelector(".stage");
    select.replaceChildren(...stages.map(s => new Option(s.name, s.name)));
  }
  const passes = document.getElementById("passes");
  passes.replaceChildren();
  stages.forEach((stage, i) => {
    if (i && !stage.first) passes.append(element("i", "→"));
    const button = element("button");
    button.dataset.stage = stage.name;
    button.title = stage.difference || stage.title;
    button.append(element("b", stage.name), element("small", `${stage.count} operators`));
    button.onclick = event => show(event.shiftKey ? "left" : "right", stage.name);
    passes.append(button);
  });
  show("left", stages[0].name);
  show("right", (stages.find(s => s.name === "rewrite") || stages[stages.length - 1]).name);
}

function show(side, name) {
  shown[side] = name;
  const pane = panes[side], stage = stageOf(side);
  pane.querySelector(".stage").value = name;
  pane.querySelector(".about").textContent = stage.title + (stage.difference ? ` · ${stage.difference}` : "");
  pane.querySelector(".about").title = stage.difference;
  pane.querySelector(".code").textContent = stage.code;
  const template = document.querySelector(`template[data-block="${block}"][data-stage="${name}"]`);
  pane.querySelector(".view").replaceChildren(template.content.cloneNode(true));
  for (const button of document.querySelectorAll("nav button")) {
    for (const s in panes) button.classList.toggle(s, button.dataset.stage === shown[s]);
  }
  for (const box of boxes(side)) {
    box.onmouseenter = () => kept || light(side, box);
    box.onmouseleave = () => kept || clear();
    box.onclick = event => { event.stopPropagation(); keep(side, box); };
  }
  kept = null;
  clear();
  detail.innerHTML = hint;
  fit(side);
}

/* -- provenance ---------------------------------------------------------------------------------------------------- */

/** Boxes of the other side that stand for a box: by what names one thing, else by the part of the mixture. */
function counterparts(side, box) {
  const keys = new Set(keysOf(box));
  const sharing = test => boxes(other(side)).filter(b => keysOf(b).some(key => keys.has(key) && test(key)));
  const precise = sharing(exact);
  return precise.length ? precise : sharing(() => true);
}

function light(side, box) {
  clear();
  box.classList.add("on");
  for (const arrow of panes[side].querySelectorAll(".arrow, .label")) {
    const touches = arrow.dataset.from === box.dataset.node || arrow.dataset.to === box.dataset.node;
    arrow.classList.toggle("on", touches);
  }
  for (const b of counterparts(side, box)) b.classList.add("same");
  for (const s in panes) panes[s].querySelector("svg").classList.add("dimmed");
}

function clear() {
  for (const s in panes) {
    panes[s].querySelector("svg")?.classList.remove("dimmed");
    panes[s].querySelectorAll(".on, .same").forEach(e => e.classList.remove("on", "same"));
  }
}

function keep(side, box) {
  kept = [side, box.dataset.node];
  light(side, box);
  const found = counterparts(side, box);
  detail.replaceChildren(about(side, [box]), about(other(side), found), kernels(box));
  detail.scrollTop = 0;
  if (found.length) bringIntoView(other(side), found[0]);
}

function release() {
  kept = null;
  clear();
  detail.innerHTML = hint;
}

/* -- details ------------------------------------------------------------------------------------------------------- */

const readable = (n, units) => {
  let i = 0;
  while (n >= 1000 && i < units.length - 1) { n /= 1000; i++; }
  return `${n >= 100 || i === 0 ? Math.round(n) : n.toFixed(1)} ${units[i]}`;
};

function about(side, found) {
  const made = element("div");
  if (!found.length) {
    made.append(element("h3", `nothing in ${shown[side]} stands for it`));
    return made;
  }
  const nodes = stageOf(side).nodes;
  if (found.length > 2) {
    made.append(element("h3", `${found.length} boxes of ${shown[side]}`));
    const chips = element("div", undefined, "many");
    for (const box of found) {
      const node = nodes[box.dataset.node], line = node.where ? `:${node.where.split(":").pop()}` : "";
      const chip = element("code", `${node.op}${line}`);
      chip.title = `${node.types || ""} ${node.code || ""}`;
      chips.append(chip);
    }
    made.append(chips);
    return made;
  }
  for (const box of found) {
    const node = nodes[box.dataset.node];
    const head = element("h3", node.op + " ");
    head.append(element("small", `${box.dataset.node} in ${shown[side]}${node.times > 1 ? `, ran ${node.times} times` : ""}`));
    made.append(head);
    const line = element("p");
    if (node.types) line.append(element("code", node.types), " ");
    if (node.detail) line.append(element("code", node.detail), " ");
    const cost = [];
    if (node.flops) cost.push(readable(node.flops, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"]));
    if (node.moved) cost.push(readable(node.moved, ["B", "kB", "MB", "GB"]) + " moved");
    line.append(cost.join(", "));
    if (line.childNodes.length) made.append(line);
    if (node.where) {
      const where = element("p", node.where + " ");
      if (node.code) where.append(element("code", node.code));
      made.append(where);
    }
  }
  return made;
}

function kernels(box) {
  const made = element("div", undefined, "kernels"), keys = keysOf(box);
  const own = keys.filter(key => key.startsWith("l:"));
  const wanted = new Set(own.length ? own : keys.filter(key => !exact(key)));
  const found = data[block].kernels.filter(k => k.keys.some(key => wanted.has(key)));
  if (!found.length) return made;
  made.append(element("small", `CUDA source (${data[block].card}): `));
  for (const kernel of found) {
    if (!kernel.source) { made.append(element("small", `${kernel.operator}: ${kernel.fallback} `)); continue; }
    const button = element("button", `${kernel.operator.replace("hexa.", "")} · ${kernel.way}`);
    button.title = kernel.name;
    button.onclick = () => openSource(kernel.name, data.sources[kernel.source]);
    made.append(button);
  }
  return made;
}

/* -- CUDA source --------------------------------------------------------------------------------------------------- */

const drawer = document.getElementById("drawer");
const WORDS = /(\/\/[^\n]*|\/\*[\s\S]*?\*\/)|(^[ \t]*#[^\n]*)|("(?:[^"\\]|\\.)*")|\b(template|typename|using|namespace|struct|class|static_assert|constexpr|const|static|inline|void|bool|int|float|double|long|char|short|unsigned|auto|if|else|for|while|do|return|switch|case|break|continue|true|false|extern|__global__|__device__|__grid_constant__|__launch_bounds__|__shared__|__forceinline__|public|private|enum|sizeof|asm|volatile)\b|\b(\d[\w.]*)\b/gm;

function openSource(name, text) {
  const list = document.getElementById("sources");
  list.replaceChildren(element("li", "kernels of this block", "head"));
  const item = (label, sub, source) => {
    const made = element("li", label);
    if (sub) made.append(element("small", sub));
    made.onclick = () => openSource(sub || label, source);
    if ((sub || label) === name) made.className = "chosen";
    list.append(made);
  };
  const seen = new Set();
  for (const k of data[block].kernels) {
    if (k.source && !seen.has(k.source)) {
      seen.add(k.source);
      item(`${k.operator.replace("hexa.", "")} · ${k.way}`, k.name, data.sources[k.source]);
    }
  }
  list.append(element("li", "headers they include", "head"));
  for (const header of Object.keys(data.headers).sort()) item(header, "", data.headers[header]);
  document.getElementById("source-title").textContent = name;
  const source = document.getElementById("source");
  source.replaceChildren();
  let at = 0;
  for (const found of text.matchAll(WORDS)) {
    source.append(text.slice(at, found.index), element("span", found[0], "cpskn"[found.slice(1).findIndex(g => g !== undefined)]));
    at = found.index + found[0].length;
  }
  source.append(text.slice(at));
  source.scrollTop = 0;
  drawer.hidden = false;
}

/* -- moving about -------------------------------------------------------------------------------------------------- */

const box = svg => svg.getAttribute("viewBox").split(" ").map(Number);

function fit(side) {
  const svg = panes[side].querySelector("svg"), view = panes[side].querySelector(".view");
  const width = +svg.dataset.width || (svg.dataset.width = svg.getAttribute("width"));
  const height = +svg.dataset.height || (svg.dataset.height = svg.getAttribute("height"));
  svg.removeAttribute("width");
  svg.removeAttribute("height");
  const least = [view.clientWidth / 1.5, view.clientHeight / 1.5];  // small graphs are not blown up
  const w = Math.max(width, least[0]);
  const h = Math.min(Math.max(height, least[1]), Math.max(view.clientHeight / 0.5, least[1]));  // nor is a tall one illegible
  svg.setAttribute("viewBox", `${(width - w) / 2} ${Math.min(0, (height - h) / 2)} ${w} ${h}`);
}

/** Moves a side's picture so that a box is seen. */
function bringIntoView(side, found) {
  const svg = panes[side].querySelector("svg"), [left, top, w, h] = box(svg), at = found.getBBox();
  const inside = at.y >= top && at.y + at.height <= top + h && at.x + at.width >= left && at.x <= left + w;
  if (!inside) svg.setAttribute("viewBox", `${at.x + at.width / 2 - w / 2} ${at.y + at.height / 2 - h / 2} ${w} ${h}`);
}

function zoom(side, factor, x = 0.5, y = 0.5) {
  const svg = panes[side].querySelector("svg"), [left, top, w, h] = box(svg);
  svg.setAttribute("viewBox", `${left + w * x * (1 - factor)} ${top + h * y * (1 - factor)} ${w * factor} ${h * factor}`);
}

for (const side in panes) {
  const pane = panes[side], view = pane.querySelector(".view");
  pane.querySelector(".stage").onchange = event => show(side, event.target.value);
  for (const button of pane.querySelectorAll("button")) {
    button.onclick = () => {
      const act = button.dataset.act;
      if (act === "fit") fit(side);
      else if (act === "code") [view, pane.querySelector(".code")].forEach(e => { e.hidden = !e.hidden; e.style.display = e.hidden ? "none" : ""; });
      else zoom(side, act === "in" ? 0.8 : 1.25);
    };
  }
  view.onwheel = event => {
    event.preventDefault();
    const at = view.getBoundingClientRect();
    zoom(side, event.deltaY > 0 ? 1.12 : 0.89, (event.clientX - at.left) / at.width, (event.clientY - at.top) / at.height);
  };
  view.onclick = () => release();
  view.onpointerdown = event => {
    const svg = view.querySelector("svg"), [left, top, w, h] = box(svg), from = [event.clientX, event.clientY];
    const scale = Math.max(w / view.clientWidth, h / view.clientHeight);
    view.classList.add("moving");
    const move = e => svg.setAttribute("viewBox", `${left - (e.clientX - from[0]) * scale} ${top - (e.clientY - from[1]) * scale} ${w} ${h}`);
    const stop = () => { view.classList.remove("moving"); removeEventListener("pointermove", move); removeEventListener("pointerup", stop); };
    addEventListener("pointermove", move);
    addEventListener("pointerup", stop);
  };
}
document.getElementById("block").onchange = event => showBlock(+event.target.value);
document.getElementById("close").onclick = () => { drawer.hidden = true; };
addEventListener("keydown", event => { if (event.key === "Escape") { if (drawer.hidden) release(); else drawer.hidden = true; } });
addEventListener("resize", () => { fit("left"); fit("right"); });
showBlock(0);

/* -- #left=capture&right=lower&node=h&source=1 opens the page at a place: for links, and for tests ------------------- */
const place = new URLSearchParams(location.hash.slice(1));
if (place.has("block")) showBlock(+place.get("block"));
for (const side in panes) if (place.has(side)) show(side, place.get(side));
if (place.has("node")) {
  const [side, name] = place.get("node").split(":");
  const found = boxes(side).find(b => b.dataset.node === name);
  if (found) found.dispatchEvent(new MouseEvent("click", {bubbles: true}));
  if (place.has("source")) detail.querySelectorAll(".kernels button")[+place.get("source")]?.click();
}
document.body.dataset.ready = "yes";
