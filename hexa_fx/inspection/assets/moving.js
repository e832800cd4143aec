/* Moving about: sizes, scrolling, keys. Pictures are scrolled by the browser, so that wheels, fingers and bars work as everywhere. */
const least = () => (narrow() ? 0.6 : 0.65), MOST = 1.3;  // below the least, text is too small to read without asking for it
const narrow = () => matchMedia("(max-width: 760px)").matches;
const scales = {left: 1, right: 1};
const fitted = {left: false, right: false};
const whole = side => ({width: svgOf(side).viewBox.baseVal.width, height: svgOf(side).viewBox.baseVal.height});

function scaleTo(side, scale) {
  const {width, height} = whole(side), svg = svgOf(side);
  scales[side] = Math.min(4, Math.max(0.1, scale));
  svg.setAttribute("width", Math.floor(width * scales[side]));
  svg.setAttribute("height", Math.floor(height * scales[side]));
}

/** The scale at which all of a picture is seen, and the one at which its width is. */
function fits(side) {
  const view = panes[side].querySelector(".view"), {width, height} = whole(side);
  return [Math.min(view.clientWidth / width, view.clientHeight / height), view.clientWidth / width];
}

function fit(side) {
  fitted[side] = true;
  scaleTo(side, Math.min(MOST, fits(side)[0]));
}

/** As a picture is first shown: all of it if it can be read so, else in its width, from the top. */
function open_(side) {
  const view = panes[side].querySelector(".view");
  if (!view.clientWidth || !svgOf(side)) return;  // not shown on a phone now
  fitted[side] = false;
  const [all, across] = fits(side);
  scaleTo(side, Math.min(MOST, Math.max(all, Math.min(1, across - 0.02), least())));
  view.scrollTop = 0;
  view.scrollLeft = (view.scrollWidth - view.clientWidth) / 2;
}

function isWhole(side) {
  const view = panes[side].querySelector(".view");
  return view.scrollHeight <= view.clientHeight && view.scrollWidth <= view.clientWidth;
}

function zoom(side, factor, x, y) {
  const view = panes[side].querySelector(".view"), before = scales[side];
  const at = [x ?? view.clientWidth / 2, y ?? view.clientHeight / 2];
  const point = [(view.scrollLeft + at[0]) / before, (view.scrollTop + at[1]) / before];
  scaleTo(side, before * factor);
  view.scrollLeft = point[0] * scales[side] - at[0];
  view.scrollTop = point[1] * scales[side] - at[1];
}

/** Scrolls a side's picture so that a box is seen. */
function bringIntoView(side, found) {
  const view = panes[side].querySelector(".view");
  if (!view.clientWidth) return;
  const frame = view.getBoundingClientRect(), at = found.getBoundingClientRect();
  const inside = at.top >= frame.top && at.bottom <= frame.bottom && at.left >= frame.left && at.right <= frame.right;
  if (inside) return;
  view.scrollLeft += (at.left + at.right - frame.left - frame.right) / 2;
  view.scrollTop += (at.top + at.bottom - frame.top - frame.bottom) / 2;
}

function toggleCode(side) {
  const view = panes[side].querySelector(".view"), code = panes[side].querySelector(".code");
  view.hidden = !view.hidden;
  code.hidden = !view.hidden;
  panes[side].querySelector("[data-act=code]").ariaPressed = view.hidden;
  if (!view.hidden) open_(side);
}

/** The side that keys are meant for, and that a phone shows. */
function activate(side) {
  const changed = !panes[side].classList.contains("shown");
  active = side;
  for (const s in panes) {
    panes[s].classList.toggle("shown", s === side);
    document.querySelector(`#sides [data-side=${s}]`).ariaPressed = s === side;
  }
  if (changed && narrow()) open_(side);
}

/* -- keys ---------------------------------------------------------------------------------------------------------- */

const middle = box => { const r = box.getBoundingClientRect(); return [(r.left + r.right) / 2, (r.top + r.bottom) / 2]; };

/** The next box in a direction: along an arrow, or in the same row. */
function neighbour(side, box, key) {
  const [x, y] = middle(box), name = box.dataset.node;
  let among;
  if (key === "ArrowDown" || key === "ArrowUp") {
    const [from, to] = key === "ArrowDown" ? ["from", "to"] : ["to", "from"];
    const ends = [...panes[side].querySelectorAll(".arrow")].filter(a => a.dataset[from] === name).map(a => a.dataset[to]);
    among = boxes(side).filter(b => ends.includes(b.dataset.node));
  } else {
    const sign = key === "ArrowRight" ? 1 : -1;
    among = boxes(side).filter(b => Math.abs(middle(b)[1] - y) < 4 && sign * (middle(b)[0] - x) > 1);
  }
  const distance = b => Math.hypot(middle(b)[0] - x, middle(b)[1] - y);
  return among.sort((a, b) => distance(a) - distance(b))[0];
}

function focusBox(side, box) {
  activate(side);
  for (const b of boxes(side)) b.tabIndex = -1;
  box.tabIndex = 0;
  box.focus({preventScroll: true});
  bringIntoView(side, box);
}

function step(side, by) {
  const names = data[block].stages.map(s => s.name), at = names.indexOf(shown[side]) + by;
  if (names[at]) show(side, names[at]);
}

const KEYS = {
  "[": () => step(active, -1),
  "]": () => step(active, 1),
  "+": () => zoom(active, 1.25),
  "=": () => zoom(active, 1.25),
  "-": () => zoom(active, 0.8),
  0: () => fit(active),
  c: () => toggleCode(active),
  t: () => themes.toggle(),
  "?": () => document.getElementById("help").showModal(),
  Escape: () => (drawer.hidden ? release() : closeSource()),
};

addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.getElementById("help").open) return;
  if (event.target.tagName === "SELECT") return;
  const box = event.target.closest?.(".box");
  if (box) {
    const next = event.key.startsWith("Arrow") ? neighbour(active, box, event.key) : null;
    if (next) focusBox(active, next);
    else if (event.key === "Enter" || event.key === " ") keep(active, box);
    else if (event.key === "x" && counterparts(active, box).length) focusBox(other(active), counterparts(active, box)[0]);
    if (event.key.startsWith("Arrow") || event.key === " ") event.preventDefault();
  }
  KEYS[event.key]?.();
});

/* -- hands --------------------------------------------------------------------------------------------------------- */

for (const side in panes) {
  const pane = panes[side], view = pane.querySelector(".view");
  pane.querySelector(".stage").onchange = event => show(side, event.target.value);
  pane.addEventListener("pointerdown", () => activate(side));
  const acts = {fit: () => fit(side), code: () => toggleCode(side), in: () => zoom(side, 1.25), out: () => zoom(side, 0.8)};
  for (const button of pane.querySelectorAll(".buttons button")) button.onclick = acts[button.dataset.act];
  view.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const at = view.getBoundingClientRect();
    zoom(side, event.deltaY > 0 ? 0.9 : 1.11, event.clientX - at.left, event.clientY - at.top);
  }, {passive: false});
  let dragged = false;
  view.onclick = () => dragged || release();
  view.onpointerdown = event => {
    dragged = false;
    if (event.pointerType !== "mouse" || event.target.closest(".box")) return;
    const from = [event.clientX + view.scrollLeft, event.clientY + view.scrollTop];
    view.classList.add("moving");
    const move = e => {
      dragged = true;
      view.scrollLeft = from[0] - e.clientX;
      view.scrollTop = from[1] - e.clientY;
    };
    const stop = () => { view.classList.remove("moving"); removeEventListener("pointermove", move); removeEventListener("pointerup", stop); };
    addEventListener("pointermove", move);
    addEventListener("pointerup", stop);
  };
}
for (const button of document.querySelectorAll("#sides button")) button.onclick = () => activate(button.dataset.side);
document.getElementById("block").onchange = event => showBlock(+event.target.value);
document.getElementById("keys").onclick = () => document.getElementById("help").showModal();
let resized;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => { for (const s in panes) (fitted[s] ? fit : open_)(s); }, 120); });
activate("right");
showBlock(0);

/* -- #left=capture&right=lower&node=right:h&source=1&fit=1&side=left&theme=dark opens it at a place - */
const place = new URLSearchParams(location.hash.slice(1));
if (place.has("block")) showBlock(+place.get("block"));
for (const side in panes) if (place.has(side)) show(side, place.get(side));
if (place.has("side")) activate(place.get("side"));
if (place.has("theme")) themes.choose(place.get("theme"));
if (place.has("node")) {
  const [side, name] = place.get("node").split(":"), found = boxOf(side, name);
  if (found) activate(side);
  if (found) found.dispatchEvent(new MouseEvent("click", {bubbles: true}));
  if (place.has("source")) detail.querySelectorAll(".kernels button")[+place.get("source")]?.click();
}
if (place.has("fit")) { fit("left"); fit("right"); }
if (place.has("code")) toggleCode(place.get("code"));
document.body.dataset.ready = "yes";
