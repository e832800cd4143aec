/* What is shown: a block, a pass on each side, and what belongs together. */
const data = JSON.parse(document.getElementById("data").textContent);
const panes = {left: document.getElementById("left"), right: document.getElementById("right")};
const shown = {left: null, right: null};
const detail = document.getElementById("detail");
let block = 0, kept = null, active = "right";

const other = side => (side === "left" ? "right" : "left");
const exact = key => !key.startsWith("r:");
const element = (tag, text, cls) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (cls) made.className = cls;
  return made;
};
const pair = (name, value) => {
  const made = element("span", value);
  made.prepend(element("b", name));
  return made;
};
const stageOf = side => data[block].stages.find(s => s.name === shown[side]);
const svgOf = side => panes[side].querySelector(".view svg");
const boxes = side => [...panes[side].querySelectorAll(".box")];
const boxOf = (side, name) => boxes(side).find(b => b.dataset.node === name);
const keysOf = box => (box.dataset.keys ? box.dataset.keys.split(" ") : []);
const GROUPS = {block: "the block", forward: "forward ↓", backward: "backward ↑"};

function showBlock(number) {
  block = number;
  const {stages, facts, score} = data[block];
  document.getElementById("facts").replaceChildren(...facts.map(([name, value]) => pair(name, value)));
  document.getElementById("score").replaceChildren(...score.map(cost => {
    const made = pair(cost.name, cost.before === cost.after ? cost.after : `${cost.before} → ${cost.after}`);
    if (cost.change) made.append(element("i", cost.change, cost.change.startsWith("+") ? "more" : ""));
    return made;
  }));
  const directions = Object.keys(GROUPS).filter(direction => stages.some(s => s.direction === direction));
  for (const side in panes) {
    panes[side].querySelector(".stage").replaceChildren(...directions.map(direction => {
      const group = element("optgroup");
      group.label = GROUPS[direction];
      group.append(...stages.filter(s => s.direction === direction).map(s => new Option(s.short, s.name)));
      return group;
    }));
  }
  document.getElementById("passes").replaceChildren(...directions.map(direction => {
    const group = element("div", undefined, "group"), row = element("div");
    for (const stage of stages.filter(s => s.direction === direction)) {
      if (row.children.length) row.append(element("span", "→", "then"));
      row.append(passButton(stage));
    }
    group.append(element("small", GROUPS[direction]), row);
    return group;
  }));
  show("left", stages[0].name);
  show("right", (stages.find(s => s.name === "rewrite") || stages[stages.length - 1]).name);
}

function passButton(stage) {
  const button = element("button");
  button.dataset.stage = stage.name;
  button.type = "button";
  button.title = `${stage.title}: ${stage.count} operators${stage.difference ? `\n${stage.difference}` : ""}`;
  button.append(element("b", stage.short), element("small", stage.count));
  button.onclick = event => show(event.shiftKey ? "left" : narrow() ? active : "right", stage.name);
  return button;
}

function show(side, name) {
  shown[side] = name;
  const pane = panes[side], stage = stageOf(side), direction = pane.querySelector(".direction");
  pane.querySelector(".stage").value = name;
  direction.className = `direction ${stage.direction}`;
  direction.textContent = stage.direction === "block" ? "" : GROUPS[stage.direction];
  pane.querySelector(".about").textContent = stage.title;
  pane.querySelector(".about").title = stage.difference;
  pane.querySelector(".code").replaceChildren(highlighted(stage.code, "python"));
  pane.querySelector(".totals").replaceChildren(...stage.totals.map(([value, unit]) => {
    const made = element("span", ` ${unit}`);
    made.prepend(element("b", value));
    return made;
  }));
  document.querySelector(`#sides [data-side=${side}]`).textContent = `${side}: ${stage.short} ${direction.textContent.slice(-1)}`;
  const template = document.querySelector(`template[data-block="${block}"][data-stage="${name}"]`);
  pane.querySelector(".view").replaceChildren(template.content.cloneNode(true));
  for (const button of document.querySelectorAll("#passes button")) {
    for (const s in panes) button.classList.toggle(s, button.dataset.stage === shown[s]);
    button.ariaPressed = button.classList.contains("left") || button.classList.contains("right");
  }
  boxes(side).forEach((box, i) => {
    box.tabIndex = i ? -1 : 0;  // one stop of Tab a graph; arrows lead on
    box.onmouseenter = () => kept || light(side, box);
    box.onmouseleave = () => kept || clear();
    box.onfocus = () => { activate(side); if (!kept && box.matches(":focus-visible")) light(side, box); };
    box.onclick = event => { event.stopPropagation(); keep(side, box); };
  });
  release();
  open_(side);
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
  for (const s in panes) svgOf(s).classList.add("dimmed");
}

function clear() {
  for (const s in panes) {
    svgOf(s)?.classList.remove("dimmed");
    panes[s].querySelectorAll(".on, .same").forEach(e => e.classList.remove("on", "same"));
  }
}

/** Pins a box. What is said of it stands under its own graph. */
function keep(side, box) {
  kept = [side, box.dataset.node];
  light(side, box);
  const found = {[side]: [box], [other(side)]: counterparts(side, box)};
  detail.replaceChildren(...Object.keys(panes).map(s => about(s, found[s], s === side)), kernels(box));
  const seen = Object.keys(panes).filter(s => detail.hidden && isWhole(s));
  detail.hidden = false;
  seen.forEach(open_);  // what was seen whole stays so, beside the details
  detail.scrollTop = 0;
  bringIntoView(side, box);
  if (found[other(side)].length) bringIntoView(other(side), found[other(side)][0]);
}

function release() {
  kept = null;
  clear();
  detail.hidden = true;
}
