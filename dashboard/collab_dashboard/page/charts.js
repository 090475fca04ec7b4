// Line charts in SVG: hairlines, few labels, one reading at a time by mouse, finger or arrow keys.
const SVG = "http://www.w3.org/2000/svg";
const LEFT = 44, RIGHT = 10, TOP = 8, BOTTOM = 22;

function draw(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// Round numbers that lie in a range, about as many as wanted.
export function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(wanted, 1);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const first = Math.ceil(low / step - 1e-9) * step;
  return Array.from({ length: Math.floor((high - first) / step + 1e-9) + 1 }, (_, index) => first + index * step);
}

export class Chart {
  // place: an element; reading: where the value under the cursor is told; label: what this is, for screen readers.
  constructor(place, reading, label) {
    this.place = place;
    this.reading = reading;
    this.label = label;
    this.at = null;
    this.data = null;
    this.svg = draw("svg", { role: "img", tabindex: "0", "aria-label": label });
    place.append(this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.move(null));
    this.svg.addEventListener("blur", () => this.move(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(place);
  }

  // data: {points: [[x, y]], dots: [[x, y]], floor, fromZero, isStep, xText, yText, tell: index → text, summary}
  show(data) {
    this.data = data;
    if (this.at !== null) this.at = data.points.length ? Math.min(this.at, data.points.length - 1) : null;
    this.draw();
  }

  key(event) {
    const last = this.data ? this.data.points.length - 1 : -1;
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    if (last < 0 || (step === undefined && !["Home", "End", "Escape"].includes(event.key))) return;
    event.preventDefault();
    this.reading.setAttribute("aria-live", "polite");
    if (event.key === "Escape") this.move(null);
    else if (event.key === "Home") this.move(0);
    else if (event.key === "End") this.move(last);
    else this.move(Math.max(0, Math.min(last, (this.at ?? last) + step)));
  }

  point(event) {
    if (!this.data || !this.data.points.length || !this.toX) return;
    this.reading.setAttribute("aria-live", "off");
    const wanted = event.clientX - this.svg.getBoundingClientRect().left;
    let best = 0, distance = Infinity;
    this.data.points.forEach(([x], index) => {
      const away = Math.abs(this.toX(x) - wanted);
      if (away < distance) [best, distance] = [index, away];
    });
    this.move(best);
  }

  move(at) {
    if (at === this.at) return;
    this.at = at;
    this.draw();
  }

  draw() {
    const data = this.data;
    const width = this.place.clientWidth, height = this.place.clientHeight;
    if (!data || !width) return;
    const parts = [];
    const all = [...data.points, ...(data.dots ?? [])];
    if (data.points.length < 2) {
      parts.push(draw("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "not enough to draw yet"));
      this.finish(parts, width, height);
      return;
    }
    const [left, right] = [Math.min(...all.map((p) => p[0])), Math.max(...all.map((p) => p[0]))];
    const [low, high] = this.range(all.map((p) => p[1]));
    const toX = (x) => LEFT + ((x - left) / (right - left || 1)) * (width - LEFT - RIGHT);
    const toY = (y) => TOP + (1 - (y - low) / (high - low || 1)) * (height - TOP - BOTTOM);
    this.toX = toX;
    for (const y of ticks(low, high, height > 200 ? 5 : 2)) {
      parts.push(draw("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: toY(y), y2: toY(y) }));
      parts.push(draw("text", { x: LEFT - 8, y: toY(y) + 4, "text-anchor": "end" }, data.yText(y)));
    }
    const places = data.xTicks ? data.xTicks(left, right) : ticks(left, right, Math.max(3, width / 130));
    for (const x of places.filter((place) => toX(place) > LEFT + 14 && toX(place) < width - RIGHT - 14)) {
      parts.push(draw("text", { x: toX(x), y: height - 4, "text-anchor": "middle" }, data.xText(x)));
    }
    let path = "", before = null;
    for (const [x, y] of data.points) {
      const [px, py] = [toX(x).toFixed(1), toY(y).toFixed(1)];
      path += before === null ? `M${px} ${py}` : data.isStep ? `H${px}V${py}` : `L${px} ${py}`;
      before = px;
    }
    if (data.fromZero) {
      parts.push(draw("path", { class: "area", d: `${path}V${toY(low)}H${toX(data.points[0][0]).toFixed(1)}Z` }));
    }
    if (data.floor != null) {
      parts.push(draw("line", { class: "floor", x1: LEFT, x2: width - RIGHT, y1: toY(data.floor), y2: toY(data.floor) }));
    }
    parts.push(draw("path", { class: "line", d: path }));
    for (const [x, y] of data.dots ?? []) parts.push(draw("circle", { class: "dot", cx: toX(x), cy: toY(y), r: 3 }));
    if (this.at !== null) {
      const [x, y] = data.points[this.at];
      parts.push(draw("line", { class: "cursor", x1: toX(x), x2: toX(x), y1: TOP, y2: height - BOTTOM }));
      parts.push(draw("circle", { class: "mark", cx: toX(x), cy: toY(y), r: 3.5 }));
    }
    this.finish(parts, width, height);
  }

  finish(parts, width, height) {
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(...parts);
    const told = this.at === null ? "" : this.data.tell(this.at);
    const summary = told || this.data.summary;
    this.svg.setAttribute("aria-label", `${this.label}. ${summary}`);
    if (this.reading.textContent !== told) this.reading.textContent = told;
  }

  range(values) {
    let low = Math.min(...values), high = Math.max(...values);
    if (this.data.floor != null) low = Math.min(low, this.data.floor);
    if (this.data.fromZero) low = 0;
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    return [this.data.fromZero ? 0 : low - room, high + room];
  }
}
