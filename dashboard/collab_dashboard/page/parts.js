// The parts of the page. Whatever comes from peers goes in as text, never as HTML.
import { Chart } from "./charts.js";

const MAX_FIRST_EVENTS = 12;
const MINUTE = 60e3;
const byId = (id) => document.getElementById(id);

// --- words and numbers ---

export function compact(number) {
  if (number == null) return "–";
  const size = Math.abs(number);
  for (const [limit, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= limit) {
      const part = unit === "k" ? number / 1e3 : number / limit;
      return `${part >= 100 ? part.toFixed(0) : part >= 10 ? part.toFixed(1) : part.toFixed(2)} ${unit}`;
    }
  }
  return size >= 100 || Number.isInteger(number) ? Math.round(number).toLocaleString("en") : number.toFixed(1);
}

export const fixed = (number) => (number == null ? "–" : Math.abs(number) < 1e4 ? number.toFixed(3) : number.toExponential(2));
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let index = 0;
  for (; count >= 1000 && index < units.length - 1; index++) count /= 1000;
  return `${count >= 100 || !index ? count.toFixed(0) : count.toFixed(1)} ${units[index]}`;
}

function ago(seconds) {
  if (seconds < 2) return "now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`;
}

const clock = (ms, hasSeconds = true) =>
  new Date(ms).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", ...(hasSeconds && { second: "2-digit" }) });

// --- small tools ---

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function set(element, name, value) {
  if (value == null || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

// Fills a list with elements that live as long as their key.
function keyed(parent, items, keyOf, create, update) {
  const known = (parent.known ??= new Map());
  const wanted = new Set(items.map(keyOf));
  for (const [key, element] of known) {
    if (!wanted.has(key)) {
      element.remove();
      known.delete(key);
    }
  }
  items.forEach((item, index) => {
    const key = keyOf(item);
    let element = known.get(key);
    if (!element) known.set(key, (element = create(item)));
    update(element, item);
    if (parent.children[index] !== element) parent.insertBefore(element, parent.children[index] ?? null);
  });
}

// --- the head ---

const unitOf = (run) => (run.tokens_per_sample ? "tokens" : "samples");
const perSample = (run) => run.tokens_per_sample ?? 1;

export function showHead(run, now) {
  say(byId("name"), run.name);
  say(byId("description"), run.description ?? "");
  byId("description").hidden = !run.description;
  const state = byId("state");
  say(state, run.state);
  set(state, "data-tone", run.tone);

  say(byId("epoch"), run.epoch.toLocaleString("en"));
  say(byId("epochs"), run.max_epochs ? `of ${run.max_epochs.toLocaleString("en")}` : "");
  const { collected, target, since } = run.progress;
  const bar = byId("progress");
  const percent = target ? Math.min(100, (100 * collected) / target) : 0;
  bar.hidden = !target;
  set(bar, "aria-valuenow", Math.round(percent));
  bar.firstElementChild.style.width = `${percent}%`;
  const parts = target ? [`${compact(collected)} of ${compact(target)} samples`] : [];
  if (since != null) parts.push(`last epoch ${ago(now - since).replace("now", "just now")}`);
  say(byId("progress-text"), parts.join(" · "));

  say(byId("loss"), fixed(run.loss));
  const notes = [];
  if (run.held_out_loss != null) notes.push(`held-out ${fixed(run.held_out_loss)}`);
  if (run.floor != null) notes.push(`floor ${fixed(run.floor)}`);
  say(byId("loss-note"), notes.join(" · ") || "mean of the trainers");

  say(byId("speed"), compact(run.samples_per_second * perSample(run)));
  say(byId("speed-unit"), `${unitOf(run)}/s`);
  say(byId("speed-note"), `${compact(run.samples * perSample(run))} ${unitOf(run)} so far`);

  say(byId("trainers"), String(run.num_trainers));
  say(byId("trainers-unit"), run.num_trainers === 1 ? "trainer" : "trainers");
  const peers = [plural(run.num_auxiliaries, "auxiliary").replace("auxiliarys", "auxiliaries")];
  if (run.num_quarantined) peers.push(`${run.num_quarantined} in quarantine`);
  say(byId("peers-note"), peers.join(" · "));
  const root = run.model_root ? ` · state ${run.model_root.slice(0, 12)}` : "";
  say(byId("identity"), `run ${run.run_id.slice(0, 16)} · ${run.task} · ${run.strategy}${root}`);
}

// --- the charts ---

let charts = null;

function timeTicks(left, right) {
  const sizes = [1 / 6, 0.25, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 240, 480, 1440, 2880, 10080].map((minutes) => minutes * MINUTE);
  const step = sizes.find((size) => (right - left) / size <= 4) ?? sizes.at(-1) * Math.ceil((right - left) / sizes.at(-1) / 4);
  const first = Math.ceil(left / step) * step;
  return Array.from({ length: Math.max(0, Math.floor((right - first) / step) + 1) }, (_, index) => first + index * step);
}

export function showCharts(run, axis) {
  charts ??= {
    loss: new Chart(byId("loss-chart"), byId("loss-reading"), "Loss"),
    speed: new Chart(byId("speed-chart"), byId("speed-reading"), "Speed of all trainers together"),
    trainers: new Chart(byId("trainers-chart"), byId("trainers-reading"), "Number of trainers"),
  };
  const unit = unitOf(run);
  say(byId("axis-tokens"), unit);
  const points = Object.entries(run.history.points).map(([time, point]) => [Number(time), ...point]);
  const held = Object.entries(run.history.held_out ?? {}).map(([time, [epoch, samples, loss]]) => [Number(time), epoch, samples, loss]);
  const xOf = {
    time: ([time]) => time,
    epochs: ([, epoch]) => epoch,
    tokens: ([, , samples]) => samples * perSample(run),
  }[axis];
  const losses = points.filter((point) => point[3] != null);
  const isShort = points.length && points.at(-1)[0] - points[0][0] < 5 * MINUTE;
  const byTime = { xTicks: timeTicks, xText: (x) => clock(x, isShort) };
  const first = losses[0]?.[3], last = losses.at(-1)?.[3];
  charts.loss.show({
    points: losses.map((point) => [xOf(point), point[3]]),
    dots: held.map((point) => [xOf(point), point[3]]),
    floor: run.floor,
    ...(axis === "time" ? byTime : { xText: compact }),
    yText: (y) => y.toFixed(2),
    tell: (index) => {
      const [time, epoch, samples, loss] = losses[index];
      return `epoch ${epoch} · ${compact(samples * perSample(run))} ${unit} · ${clock(time)} · loss ${fixed(loss)}`;
    },
    summary: losses.length ? `From ${fixed(first)} to ${fixed(last)}` : "Nothing yet",
  });
  const legend = byId("loss-legend");
  const entries = [["", "training, mean of the trainers"]];
  if (held.length) entries.push(["held", "held-out"]);
  if (run.floor != null) entries.push(["least", `floor ${fixed(run.floor)}`]);
  keyed(legend, entries, ([kind]) => kind, ([kind]) => make("span", kind), (element, [, text]) => say(element, text));

  const tellAt = (text) => (index) => `${clock(points[index][0])} · ${text(points[index])}`;
  charts.speed.show({
    points: points.map((point) => [point[0], point[4] * perSample(run)]),
    fromZero: true,
    ...byTime,
    yText: compact,
    tell: tellAt((point) => `${compact(point[4] * perSample(run))} ${unit}/s`),
    summary: `Now ${compact(run.samples_per_second * perSample(run))} ${unit} per second`,
  });
  charts.trainers.show({
    points: points.map((point) => [point[0], point[5]]),
    fromZero: true,
    isStep: true,
    ...byTime,
    yText: (y) => (Number.isInteger(y) ? String(y) : ""),
    tell: tellAt((point) => plural(point[5], "trainer")),
    summary: `Now ${run.num_trainers}`,
  });
}

// --- the peers ---

const DOING = { joining: "joining", working: "computing", averaging: "averaging", serving: "serving", left: "left" };

function peerOrder(a, b) {
  return (a.presence === "gone") - (b.presence === "gone") || (a.role === "aux") - (b.role === "aux")
    || b.samples - a.samples || (a.peer_id < b.peer_id ? -1 : 1);
}

function speedOfLink(peer) {
  const directions = [["↓", peer.download], ["↑", peer.upload]].filter(([, rate]) => rate > 0);
  return directions.length ? `${directions.map(([arrow, rate]) => `${arrow} ${compact((8 * rate) / 1e6)}`).join(" ")} Mbit/s`.replaceAll(" ", "\u00a0") : "";
}

function makePeer() {
  const cells = {
    dot: make("i", "dot"), name: make("b"), tag: make("span", "tag"), sub: make("span", "sub"),
    doing: make("span", "doing"), why: make("span", "sub doing"), short: make("span", "sub narrow"), epoch: make("span"), holds: make("span", "sub"),
    loss: make("td", "num wide"), speed: make("td", "num wide"), samples: make("span"), pace: make("span", "sub narrow"), seen: make("td", "num wide"),
    fill: make("i"),
  };
  cells.dot.setAttribute("aria-hidden", "true");
  const row = make("tr", "",
    make("td", "who", cells.dot, cells.name, cells.tag, cells.sub),
    make("td", "", cells.doing, cells.why, cells.short),
    make("td", "num wide", cells.epoch, cells.holds),
    cells.loss, cells.speed,
    make("td", "num", cells.samples, cells.pace, make("span", "share", cells.fill)),
    cells.seen,
  );
  row.cells_ = cells;
  return row;
}

export function showPeers(run, now) {
  const peers = Object.values(run.peers ?? {}).sort(peerOrder);
  const most = Math.max(1, ...peers.map((peer) => peer.samples));
  const rate = perSample(run);
  say(byId("speed-head"), unitOf(run) === "tokens" ? "Tokens/s" : "Samples/s");
  keyed(byId("peers"), peers, (peer) => peer.peer_id, makePeer, (row, peer) => {
    const cells = row.cells_;
    set(row, "data-presence", peer.presence);
    set(row, "data-kept-out", peer.quarantined ? "yes" : null);
    say(cells.name, peer.name);
    const tag = peer.is_this ? "serves this page" : peer.is_organisers ? "organiser’s" : "";
    say(cells.tag, tag);
    cells.tag.hidden = !tag;
    say(cells.sub, [peer.role === "aux" ? "auxiliary" : "trainer", peer.link, speedOfLink(peer), peer.version].filter(Boolean).join(" · "));
    const presence = peer.presence === "gone" ? "gone" : peer.presence === "silent" ? "silent" : DOING[peer.phase] ?? peer.phase;
    say(cells.doing, peer.quarantined ? `kept out until epoch ${peer.quarantined.until_epoch}` : presence);
    say(cells.why, peer.quarantined ? peer.quarantined.reason : "");
    cells.why.hidden = !peer.quarantined;
    say(cells.epoch, peer.epoch.toLocaleString("en"));
    const holds = peer.presence === "gone" ? "" : { newest: "newest state", other: "another state", none: "no state" }[peer.state];
    say(cells.holds, peer.distance != null ? `distance ${peer.distance.toExponential(1)}` : holds);
    say(cells.loss, peer.loss == null ? "" : fixed(peer.loss));
    say(cells.short, [cells.holds.textContent, `seen ${ago(now - peer.last_seen)}`].filter(Boolean).join(" · "));
    const isAtWork = peer.role === "trainer" && peer.presence !== "gone";
    const pace = isAtWork ? `${compact(peer.samples_per_second * rate)}/s` : "";
    say(cells.speed, pace.replace("/s", ""));
    say(cells.pace, pace);
    say(cells.samples, peer.role === "trainer" ? compact(peer.samples) : "");
    cells.fill.parentElement.hidden = peer.role !== "trainer";
    cells.fill.style.width = `${(100 * peer.samples) / most}%`;
    say(cells.seen, ago(now - peer.last_seen));
  });
  byId("unlisted").hidden = !run.num_unlisted;
  say(byId("unlisted"), `and ${run.num_unlisted} more`);
}

// --- the rest ---

export function showTimeline(run, isWhole) {
  const events = Object.entries(run.events ?? {}).reverse();
  const shown = isWhole ? events : events.slice(0, MAX_FIRST_EVENTS);
  const list = byId("timeline");
  keyed(list, shown, ([number]) => number, ([, event]) => {
    const time = make("time", "", clock(event.time * 1e3));
    time.dateTime = new Date(event.time * 1e3).toISOString();
    time.title = new Date(event.time * 1e3).toLocaleString("en-GB");
    const item = make("li", "", time, make("span", "", event.text));
    item.dataset.tone = event.tone;
    return item;
  }, () => {});
  const more = byId("more");
  more.hidden = events.length <= MAX_FIRST_EVENTS;
  set(more, "aria-expanded", isWhole ? "true" : "false");
  say(more, isWhole ? "Show fewer" : `Show all ${events.length}`);
}

export function showBoard(run) {
  keyed(byId("board"), run.leaderboard.rows.slice(0, 10).map((row, place) => ({ ...row, place })), (row) => row.place,
    () => make("li", "", make("span"), make("span")),
    (element, row) => {
      say(element.children[0], row.name);
      say(element.children[1], `${compact(row.samples)} samples`);
      set(element, "data-gone", row.is_here ? null : "yes");
    });
  const counted = run.leaderboard.counted_by === "auxiliary" ? "As this auxiliary saw it in the rounds." : "As everyone says of itself.";
  say(byId("board-note"), run.leaderboard.rows.length ? counted : "Nobody has finished an epoch yet.");
}

export function showKept(run) {
  const facts = [];
  if (run.archive) {
    const size = run.archive.stored_bytes == null ? "" : `, ${bytes(run.archive.stored_bytes)}`;
    facts.push(["Archive", `${plural(run.archive.num_versions, "version")}${size}`]);
  }
  const [newest] = run.checkpoints;
  if (newest) {
    facts.push(["Checkpoint", `epoch ${newest.epoch}${newest.place ? `, in ${newest.place}` : ""}`]);
    facts.push(["Revision", newest.revision]);
  }
  if (!facts.length) facts.push(["Nothing", "is kept yet, as far as can be seen from here"]);
  keyed(byId("kept"), facts.flatMap(([name, value]) => [["dt", name, name], ["dd", name, value]]),
    ([tag, name]) => tag + name, ([tag]) => make(tag), (element, [, , text]) => say(element, text));
  const versions = (run.archive?.newest ?? []).slice(0, 12);
  keyed(byId("versions"), versions, (version) => version.root, () => make("li"), (element, version) => {
    say(element, version.epoch == null ? version.root.slice(0, 8) : `epoch ${version.epoch}`);
    const losses = [["loss", version.loss], ["held-out loss", version.held_out_loss]].filter(([, loss]) => loss != null);
    set(element, "title", [version.root.slice(0, 16), ...losses.map(([what, loss]) => `${what} ${fixed(loss)}`)].join(", "));
  });
}

export function showRevisions(run) {
  byId("revisions-title").hidden = run.checkpoints.length < 2;
  keyed(byId("revisions"), run.checkpoints.length < 2 ? [] : run.checkpoints, (one) => one.epoch, () => make("li"), (element, one) => {
    say(element, `epoch ${one.epoch} · ${one.revision.slice(0, 8)}`);
    set(element, "title", `revision ${one.revision}, root ${one.root.slice(0, 16)}`);
  });
}

export function showTexts(run) {
  const texts = [...(run.texts ?? [])].reverse().slice(0, 6);
  byId("texts-section").hidden = !texts.length;
  keyed(byId("texts"), texts, (text) => `${text.epoch}/${text.time}`, (text) => {
    const written = make("pre", "", text.text);
    written.tabIndex = 0;
    written.setAttribute("aria-label", `Written at epoch ${text.epoch}`);
    return make("li", "", make("p", "note", `epoch ${text.epoch} · ${clock(text.time * 1e3)}`), written);
  }, () => {});
}

export function showJoin(run) {
  say(byId("command"), `collab train ${run.invite}`);
  const picture = byId("qr");
  if (picture.dataset.invite !== run.invite) {  // another run, or one with other addresses than before
    picture.dataset.invite = run.invite;
    picture.hidden = false;
    picture.onerror = () => { picture.hidden = true; };
    picture.src = `api/runs/${run.run_id}/invite.svg?${Date.now()}`;
  }
}

export function showRuns(runs, current) {
  const nav = byId("runs");
  nav.hidden = runs.length < 2;
  if (nav.hidden) return;
  keyed(nav, runs, (run) => run.run_id,
    (run) => {
      const link = make("a", "", make("strong"), make("span", "note"), make("span", "numbers", make("span"), make("span"), make("span")));
      link.href = `#${run.run_id}`;
      return link;
    },
    (link, run) => {
      set(link, "aria-current", run.run_id === current ? "true" : null);
      say(link.children[0], run.name);
      say(link.children[1], run.state);
      const numbers = link.children[2].children;
      say(numbers[0], `epoch ${run.epoch}`);
      say(numbers[1], `loss ${fixed(run.loss)}`);
      say(numbers[2], `${compact(run.samples_per_second * perSample(run))} ${unitOf(run)}/s`);
    });
}
