/* What is said of a box: its operator, types, cost, line of code, and the kernels that run it. */
const readable = (n, units) => {
  let i = 0;
  while (n >= 1000 && i < units.length - 1) { n /= 1000; i++; }
  return `${n >= 100 || i === 0 ? Math.round(n) : n.toFixed(1)} ${units[i]}`;
};

function about(side, found, chosen) {
  const made = element("div", undefined, chosen ? "chosen" : "other");
  if (!found.length) made.append(element("p", `nothing in ${shown[side]} stands for it`));
  else if (found.length > 2) made.append(...several(side, found));
  else for (const box of found) made.append(...single(side, box));
  return made;
}

function several(side, found) {
  const nodes = stageOf(side).nodes, chips = element("div", undefined, "many");
  for (const box of found) {
    const node = nodes[box.dataset.node], line = node.where ? `:${node.where.split(":").pop()}` : "";
    const chip = element("code", `${node.op}${line}`);
    chip.title = `${node.types || ""} ${node.code || ""}`;
    chips.append(chip);
  }
  return [element("h3", `${found.length} boxes of ${shown[side]}`), chips];
}

function single(side, box) {
  const node = stageOf(side).nodes[box.dataset.node];
  const head = element("h3", `${node.op} `), line = element("p"), cost = [];
  head.append(element("small", `${box.dataset.node} in ${shown[side]}${node.times > 1 ? `, ran ${node.times} times` : ""}`));
  for (const text of [node.types, node.detail]) if (text) line.append(element("code", text), " ");
  if (node.flops) cost.push(readable(node.flops, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"]));
  if (node.moved) cost.push(`${readable(node.moved, ["B", "kB", "MB", "GB"])} moved`);
  line.append(cost.join(", "));
  const made = line.childNodes.length ? [head, line] : [head];
  if (node.where) {
    const where = element("p"), code = element("code");
    code.append(highlighted(node.code || "", "python"));
    where.append(code, ` ${node.where}`);
    made.push(where);
  }
  return made;
}

function kernels(box) {
  const keys = keysOf(box), own = keys.filter(key => key.startsWith("l:"));
  const wanted = new Set(own.length ? own : keys.filter(key => !exact(key)));
  const found = data[block].kernels.filter(k => k.keys.some(key => wanted.has(key)));
  if (!found.length) return "";
  const made = element("div", `CUDA source for ${data[block].card}: `, "kernels");
  for (const kernel of found) {
    if (!kernel.source) { made.append(element("span", `${kernel.operator}: ${kernel.fallback} `)); continue; }
    const button = element("button", `${kernel.operator.replace("hexa.", "")} · ${kernel.direction}`);
    button.title = kernel.name;
    button.onclick = () => openSource(kernel.name, data.sources[kernel.source]);
    made.append(button);
  }
  return made;
}

/* -- CUDA source --------------------------------------------------------------------------------------------------- */

const drawer = document.getElementById("drawer");
const behind = document.querySelectorAll("body > :not(#drawer, script, template, dialog)");
let opener = null;

function openSource(name, text) {
  const list = document.getElementById("sources");
  list.replaceChildren(element("li", "kernels of this block", "head"));
  const item = (label, sub, source) => {
    const made = element("li"), button = element("button", label);
    if (sub) button.append(element("small", sub));
    button.onclick = () => openSource(sub || label, source);
    if ((sub || label) === name) made.className = "chosen";
    made.append(button);
    list.append(made);
  };
  const seen = new Set();
  for (const k of data[block].kernels) {
    if (k.source && !seen.has(k.source)) {
      seen.add(k.source);
      item(`${k.operator.replace("hexa.", "")} · ${k.direction}`, k.name, data.sources[k.source]);
    }
  }
  list.append(element("li", "headers they include", "head"));
  for (const header of Object.keys(data.headers).sort()) item(header, "", data.headers[header]);
  document.getElementById("source-title").textContent = name;
  const source = document.getElementById("source");
  source.replaceChildren(highlighted(text, "cuda"));
  source.scrollTop = 0;
  if (drawer.hidden) opener = document.activeElement;
  drawer.hidden = false;
  behind.forEach(e => { e.inert = true; });  // keys stay in the drawer
  document.getElementById("close").focus();
}

function closeSource() {
  drawer.hidden = true;
  behind.forEach(e => { e.inert = false; });
  opener?.focus();
}

document.getElementById("close").onclick = closeSource;
document.getElementById("copy").onclick = () => navigator.clipboard?.writeText(document.getElementById("source").textContent);
