// Listens to the server, keeps the document up to date, and has its parts drawn.
import { showBoard, showCharts, showHead, showJoin, showKept, showPeers, showRevisions, showRuns, showTexts, showTimeline } from "./parts.js";

const MAX_PAUSE_S = 30;
const QUIET_S = 12; // the server speaks every second
const byId = (id) => document.getElementById(id);

let all = {};
let shownRun = null;
let isWholeTimeline = false;
let pause = 1;
let heard = Date.now();
let lastTone = null;

// JSON Merge Patch, RFC 7396.
function merge(target, patch) {
  for (const [key, value] of Object.entries(patch)) {
    if (value === null) delete target[key];
    else if (typeof value === "object" && !Array.isArray(value)) {
      const before = target[key];
      target[key] = merge(before && typeof before === "object" && !Array.isArray(before) ? before : {}, value);
    } else target[key] = value;
  }
  return target;
}

function tell(tone, words, trouble = "") {
  const link = byId("link");
  link.dataset.tone = tone;
  link.textContent = words;
  document.body.classList.toggle("stale", tone !== "good");
  byId("banner").hidden = !trouble;
  if (byId("banner").textContent !== trouble) byId("banner").textContent = trouble;
}

function listen() {
  const address = new URL("ws", location.href);
  address.protocol = location.protocol === "https:" ? "wss:" : "ws:";
  const socket = new WebSocket(address);
  let isFirst = true;
  socket.onmessage = (message) => {
    const patch = JSON.parse(message.data);
    all = merge(isFirst ? {} : all, patch);
    isFirst = false;
    pause = 1;
    heard = Date.now();
    tell("good", "live");
    show();
  };
  socket.onclose = (event) => {
    const words = event.reason || "The connection to the dashboard is lost; what you see is old. Trying again…";
    tell("bad", "not connected", words);
    setTimeout(listen, pause * 1000);
    pause = Math.min(2 * pause, MAX_PAUSE_S);
  };
  const watchdog = setInterval(() => {
    if (socket.readyState === WebSocket.CLOSED) clearInterval(watchdog);
    else if (Date.now() - heard > QUIET_S * 1000) {
      heard = Date.now();
      socket.close();
    }
  }, 2000);
}

function show() {
  const runs = Object.values(all.runs ?? {});
  const wanted = location.hash.slice(1);
  const run = runs.find((one) => one.run_id === wanted) ?? runs.find((one) => one.run_id === shownRun) ?? runs[0];
  byId("run").hidden = !run;
  byId("empty").hidden = Boolean(run);
  if (!run) return;
  if (shownRun !== run.run_id) {
    shownRun = run.run_id;
    isWholeTimeline = false;
    lastTone = null;
    for (const id of ["timeline", "texts"]) {
      byId(id).replaceChildren();
      byId(id).known = undefined;
    }
  }
  document.title = `${run.name} · epoch ${run.epoch} · Collab`;
  showRuns(runs, run.run_id);
  showHead(run, all.time);
  showPeers(run, all.time);
  showTimeline(run, isWholeTimeline);
  showBoard(run);
  showKept(run);
  showRevisions(run);
  showTexts(run);
  showJoin(run);
  if (!document.hidden) showCharts(run, chosenAxis());
  if (lastTone !== null && lastTone !== run.tone) byId("announce").textContent = run.state; // sparingly: it is read aloud
  lastTone = run.tone;
}

const chosenAxis = () => document.querySelector("input[name=axis]:checked").value;

async function copy(text, what) {
  let isCopied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // a browser gives the clipboard only to https and to this machine
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    isCopied = document.execCommand("copy");
    area.remove();
  }
  byId("copied").textContent = isCopied ? `${what} copied` : "Your browser does not let us copy; select it by hand.";
  setTimeout(() => { byId("copied").textContent = ""; }, 4000);
}

byId("copy").onclick = () => copy(byId("command").textContent, "Command");
byId("copy-invite").onclick = () => copy(all.runs[shownRun].invite, "Invite");
byId("more").onclick = () => {
  isWholeTimeline = !isWholeTimeline;
  show();
};
byId("axis").onchange = show;
byId("theme").onclick = () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  try {
    localStorage.setItem("collab-theme", root.dataset.theme);
  } catch {
    // then it lasts as long as the page
  }
};
addEventListener("hashchange", show);
document.addEventListener("visibilitychange", () => document.hidden || show());
listen();
