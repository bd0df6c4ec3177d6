// The page: one chat at a time, its turns, and what the server does meanwhile.

import { ServerError, getJSON, setKey, streamChat } from "./api.js";
import { Growing, render } from "./markdown.js";
import { CHATS, DEFAULTS, loadChats, loadSettings, newChat, saveChats, saveSettings } from "./store.js";

const $ = (id) => document.getElementById(id);
const EXAMPLES = [
  "Explain in three sentences why the sky is blue.",
  "Write a short poem about the sea.",
  "Name three things to see in Paris.",
  "Write a Python function that reverses a string.",
];
const THEMES = ["system", "light", "dark"];

const settings = loadSettings();
let chats = loadChats();
let chat = chats[0] ?? newChat(settings.system);
let running = null; // {controller, count}
let sticky = true;
const forgotten = new Set(); // deleted here, whatever another tab still has

// ── drawing ──────────────────────────────────────────────────────────────────────────────────────────────────────────

function drawList() {
  const list = $("list");
  list.replaceChildren(
    ...chats.map((each) => {
      const row = document.createElement("div");
      row.className = "row";
      const open = document.createElement("button");
      open.className = "quiet open";
      open.textContent = each.title || "New chat";
      if (each === chat) open.setAttribute("aria-current", "true");
      open.addEventListener("click", () => switchTo(each));
      const remove = document.createElement("button");
      remove.className = "icon";
      remove.textContent = "✕";
      remove.setAttribute("aria-label", `Delete “${open.textContent}”`);
      remove.addEventListener("click", () => forget(each));
      row.append(open, remove);
      return row;
    }),
  );
}

function drawChat() {
  $("log").replaceChildren(...chat.turns.map(drawTurn));
  $("empty").hidden = chat.turns.length > 0;
  $("system").value = chat.system ?? "";
  sticky = true;
  follow();
}

function drawTurn(turn) {
  const node = $("turn").content.firstElementChild.cloneNode(true);
  turn.node = node;
  node.querySelector(".user .text").textContent = turn.user;
  node.querySelector(".edit").addEventListener("click", () => edit(turn));
  drawAnswers(turn);
  return node;
}

function drawAnswers(turn) {
  const place = turn.node.querySelector(".answers");
  place.classList.toggle("two", turn.answers.length > 1);
  place.replaceChildren(...turn.answers.map((answer, index) => drawAnswer(turn, answer, index)));
}

function drawAnswer(turn, answer, index) {
  const node = $("answer").content.firstElementChild.cloneNode(true);
  answer.node = node;
  const { temperature, top_p, max_tokens } = answer.settings;
  node.querySelector(".label").textContent =
    turn.answers.length > 1 ? `temperature ${temperature} · top-p ${top_p} · ${max_tokens} tokens` : "";
  node.querySelector(".text").replaceChildren(render(answer.text));
  drawThought(answer);
  drawFoot(turn, answer, index);
  node.querySelector(".copy").addEventListener("click", async (event) => {
    await navigator.clipboard?.writeText(answer.text);
    event.target.textContent = "Copied";
    setTimeout(() => (event.target.textContent = "Copy"), 1200);
  });
  node.querySelector(".again").addEventListener("click", () => regenerate(turn, index));
  node.querySelector(".pick").addEventListener("click", () => pick(turn, index));
  return node;
}

function drawThought(answer) {
  const details = answer.node.querySelector(".thought");
  details.hidden = !answer.reasoning;
  details.querySelector(".thought-text").textContent = answer.reasoning;
}

function drawFoot(turn, answer, index) {
  const node = answer.node;
  const facts = [];
  if (answer.first !== undefined) facts.push(`first token ${seconds(answer.first)}`);
  if (answer.tokens) facts.push(`${answer.tokens} tokens`);
  if (answer.speed) facts.push(`${answer.speed.toFixed(0)} tokens/s`);
  if (answer.cached) facts.push(`${answer.cached} from cache`);
  if (answer.reason === "length") facts.push("cut at max tokens");
  if (answer.stopped) facts.push("stopped");
  node.querySelector(".facts").textContent = facts.join(" · ");
  const error = node.querySelector(".error");
  error.hidden = !answer.error;
  error.textContent = answer.error ?? "";
  node.querySelector(".again").textContent = answer.error ? "Try again" : "Regenerate";
  const last = chat.turns.at(-1) === turn;
  node.querySelector(".pick").hidden = !(turn.answers.length > 1 && last && turn.picked !== index);
  node.classList.toggle("picked", turn.answers.length > 1 && turn.picked === index);
  node.classList.toggle("working", Boolean(answer.working));
}

const seconds = (value) => (value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`);

function follow() {
  const scroll = $("scroll");
  if (sticky) scroll.scrollTop = scroll.scrollHeight;
}

// ── chats ────────────────────────────────────────────────────────────────────────────────────────────────────────────

function keep() {
  chat.at = Date.now();
  if (chat.turns.length) chats = [chat, ...chats.filter((each) => each !== chat)];
  const plain = chats.map(({ turns, ...rest }) => ({
    ...rest,
    turns: turns.map((turn) => ({
      user: turn.user,
      picked: turn.picked,
      answers: turn.answers.map(({ node, growing, working, ...answer }) => answer),
    })),
  }));
  saveChats(plain, forgotten);
  drawList();
}

// Another tab has written: its chats are shown here, too; the open one stays as it is.
addEventListener("storage", (event) => {
  if (event.key !== CHATS) return;
  const theirs = loadChats().filter((each) => each.id !== chat.id && !forgotten.has(each.id));
  chats = [...(chats.includes(chat) ? [chat] : []), ...theirs];
  drawList();
});

function switchTo(other) {
  stop();
  chat = other;
  drawChat();
  drawList();
  closeSide();
  $("input").focus();
}

function forget(other) {
  forgotten.add(other.id);
  chats = chats.filter((each) => each !== other);
  if (other === chat) {
    stop();
    chat = chats[0] ?? newChat(settings.system);
    drawChat();
  }
  keep();
}

function messagesUpTo(turn) {
  const messages = chat.system ? [{ role: "system", content: chat.system }] : [];
  for (const each of chat.turns) {
    const answer = each.answers[each.picked ?? 0];
    // A question without an answer is left out: templates want turns to alternate.
    if (each !== turn && !answer?.text) continue;
    messages.push({ role: "user", content: each.user });
    if (each === turn) break;
    messages.push({ role: "assistant", content: answer.text });
  }
  return messages;
}

function send(text) {
  const sets = settings.compare ? settings.sets : settings.sets.slice(0, 1);
  const turn = { user: text, picked: 0, answers: sets.map((set) => fresh(set)) };
  chat.turns.push(turn);
  if (!chat.title) chat.title = text.slice(0, 60);
  $("empty").hidden = true;
  $("log").append(drawTurn(turn));
  sticky = true;
  follow();
  keep();
  answerAll(turn, turn.answers);
}

const fresh = (set) => ({ text: "", reasoning: "", settings: { ...set } });

function regenerate(turn, index) {
  stop();
  const at = chat.turns.indexOf(turn);
  for (const later of chat.turns.splice(at + 1)) later.node?.remove();
  turn.answers[index] = fresh(settings.sets[Math.min(index, 1)]);
  drawAnswers(turn);
  answerAll(turn, [turn.answers[index]]);
}

function pick(turn, index) {
  turn.picked = index;
  turn.answers.forEach((answer, at) => drawFoot(turn, answer, at));
  keep();
  $("input").focus();
}

function edit(turn) {
  stop();
  const box = turn.node.querySelector(".user");
  const form = document.createElement("form");
  form.className = "editing";
  const area = document.createElement("textarea");
  area.value = turn.user;
  area.setAttribute("aria-label", "Edit the message");
  const ok = Object.assign(document.createElement("button"), { textContent: "Send again" });
  const no = Object.assign(document.createElement("button"), { textContent: "Cancel", type: "button", className: "quiet" });
  form.append(area, no, ok);
  const before = [...box.childNodes];
  box.replaceChildren(form);
  area.focus();
  no.addEventListener("click", () => box.replaceChildren(...before));
  const resend = (event) => {
    event?.preventDefault();
    const text = area.value.trim();
    if (!text) return;
    const at = chat.turns.indexOf(turn);
    for (const later of chat.turns.splice(at)) later.node?.remove();
    send(text);
  };
  form.addEventListener("submit", resend);
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) resend(event);
    if (event.key === "Escape") {
      event.stopPropagation();
      no.click();
    }
  });
}

// ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────

async function answerAll(turn, answers) {
  const controller = new AbortController();
  running = { controller };
  const mine = running;
  $("stop").hidden = false;
  $("send").hidden = true;
  const messages = messagesUpTo(turn);
  await Promise.all(answers.map((answer) => answerOne(turn, answer, messages, controller.signal)));
  if (running === mine) {
    running = null;
    $("stop").hidden = true;
    $("send").hidden = false;
  }
  keep();
}

async function answerOne(turn, answer, messages, signal) {
  const index = turn.answers.indexOf(answer);
  const growing = new Growing(answer.node.querySelector(".text"));
  const started = performance.now();
  let firstAt = 0;
  let drawnAt = 0;
  let pieces = 0;
  answer.working = true;
  drawFoot(turn, answer, index);
  try {
    for await (const piece of streamChat({ messages, ...answer.settings }, signal)) {
      if ((piece.content || piece.reasoning) && !firstAt) {
        firstAt = performance.now();
        answer.first = (firstAt - started) / 1000;
      }
      if (piece.reasoning) {
        answer.reasoning += piece.reasoning;
        drawThought(answer);
      }
      if (piece.content) {
        answer.text += piece.content;
        growing.add(piece.content);
      }
      if (piece.content || piece.reasoning) {
        pieces += 1; // of a token or a few: the counts come at the end
        const now = performance.now();
        if (now - drawnAt > 250) {
          drawnAt = now;
          answer.speed = pieces > 1 ? ((pieces - 1) * 1000) / (now - firstAt) : 0;
          drawFoot(turn, answer, index);
        }
      }
      if (piece.reason) answer.reason = piece.reason;
      if (piece.usage) {
        answer.tokens = piece.usage.completion_tokens;
        answer.cached = piece.usage.prompt_tokens_details?.cached_tokens ?? 0;
      }
    }
    $("live").textContent = answer.text.slice(0, 2000);
  } catch (error) {
    if (signal.aborted) answer.stopped = true;
    else answer.error = told(error);
  }
  const took = (performance.now() - (firstAt || started)) / 1000;
  if (answer.tokens > 1 && took > 0) answer.speed = (answer.tokens - 1) / took;
  answer.working = false;
  growing.text = answer.text;
  growing.finish();
  drawFoot(turn, answer, index);
  follow();
}

function told(error) {
  if (error instanceof ServerError) {
    if (error.status === 401) askForKey();
    return error.message;
  }
  return "The server cannot be reached. It may have stopped.";
}

function stop() {
  running?.controller.abort();
}

// ── the server ───────────────────────────────────────────────────────────────────────────────────────────────────────

let timer = 0;
async function look() {
  clearTimeout(timer);
  let wait = 2000;
  try {
    const health = await getJSON("health");
    $("dot").dataset.state = health.status;
    if (health.loading) {
      banner(`The model is being loaded: ${health.loading.stage}, ${Math.round(health.loading.fraction * 100)} %`);
      wait = 500;
    } else if (health.status === "ok") {
      banner("");
      if (!$("model").dataset.known) await learnModel();
      const stats = await getJSON("stats");
      $("f-running").textContent = stats.num_requests_running;
      $("f-waiting").textContent = stats.num_requests_waiting;
      $("f-cache").textContent = percent(stats.kv_cache_usage_perc);
      const asked = stats.prefix_cache_queries;
      $("f-hits").textContent = asked ? percent(stats.prefix_cache_hits / asked) : "–";
    } else {
      banner(health.error ? `The engine has stopped: ${health.error}` : `The server is ${health.status}.`);
    }
  } catch (error) {
    if (error instanceof ServerError && error.status === 401) {
      wait = 10000;
      if (!declined) askForKey();
      banner("This server asks for a key.");
    } else {
      $("dot").dataset.state = "away";
      banner("The server cannot be reached. Trying again …");
    }
  }
  clearTimeout(timer); // one look at a time, however often it was asked for
  timer = setTimeout(look, document.hidden ? 10000 : wait);
}

const percent = (share) => `${Math.round(share * 100)} %`;

async function learnModel() {
  const models = await getJSON("v1/models");
  const name = models.data[0].id;
  $("model").textContent = name.split("/").at(-1);
  $("model").title = name;
  $("model").dataset.known = "yes";
}

function banner(text) {
  const node = $("banner");
  if (node.textContent !== text) node.textContent = text;
  node.hidden = !text;
}

let asking = false;
let declined = false; // until something that the user does needs a key
function askForKey() {
  if (asking || $("key").open) return;
  asking = true;
  $("key-value").value = "";
  $("key").showModal();
}

$("key-cancel").addEventListener("click", () => $("key").close("cancel"));
$("key").addEventListener("close", () => {
  asking = false;
  if ($("key").returnValue === "ok") {
    declined = false;
    setKey($("key-value").value.trim());
    look();
  } else {
    declined = true;
  }
});

// ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────────

function drawSettings() {
  for (const field of document.querySelectorAll(".set")) {
    const set = settings.sets[field.dataset.set];
    for (const input of field.querySelectorAll("input")) {
      input.value = set[input.name];
      const shown = input.parentElement.querySelector("output");
      if (shown) shown.textContent = set[input.name];
    }
  }
  $("settings").hidden = !settings.open;
  document.querySelector('.set[data-set="1"]').hidden = !settings.compare;
  $("tune").setAttribute("aria-expanded", String(settings.open));
  $("compare").setAttribute("aria-pressed", String(settings.compare));
  $("theme").textContent = `Theme: ${settings.theme}`;
  if (settings.theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = settings.theme;
}

$("settings").addEventListener("input", (event) => {
  const input = event.target;
  const index = input.closest(".set").dataset.set;
  const value = Number(input.value);
  if (Number.isFinite(value) && input.value !== "" && input.validity.valid) settings.sets[index][input.name] = value;
  const shown = input.parentElement.querySelector("output");
  if (shown) shown.textContent = input.value;
  saveSettings(settings);
});
$("settings").addEventListener("change", (event) => {
  const set = settings.sets[event.target.closest(".set").dataset.set];
  if (!event.target.validity.valid || event.target.value === "") set[event.target.name] = DEFAULTS[0][event.target.name];
  drawSettings();
  saveSettings(settings);
});

function toggle(name) {
  settings[name] = !settings[name];
  if (name === "compare" && settings.compare) settings.open = true;
  saveSettings(settings);
  drawSettings();
}

$("tune").addEventListener("click", () => toggle("open"));
$("compare").addEventListener("click", () => toggle("compare"));
$("theme").addEventListener("click", () => {
  settings.theme = THEMES[(THEMES.indexOf(settings.theme) + 1) % THEMES.length];
  saveSettings(settings);
  drawSettings();
});
$("system").addEventListener("change", (event) => {
  chat.system = settings.system = event.target.value.trim();
  saveSettings(settings);
  keep();
});

// ── the message box ──────────────────────────────────────────────────────────────────────────────────────────────────

const input = $("input");

function grow() {
  input.style.height = "auto";
  input.style.height = `${Math.min(input.scrollHeight, 200)}px`;
}

function submit() {
  const text = input.value.trim();
  if (!text || running) return;
  input.value = "";
  grow();
  send(text);
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
input.addEventListener("input", grow);
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
$("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (document.body.classList.contains("side-open")) closeSide();
  else if (running) stop();
});

$("scroll").addEventListener("scroll", () => {
  const scroll = $("scroll");
  sticky = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 40;
});
$("log").addEventListener("drawn", follow);

// ── the list ─────────────────────────────────────────────────────────────────────────────────────────────────────────

function closeSide() {
  document.body.classList.remove("side-open");
  $("shade").hidden = true;
}

$("open-side").addEventListener("click", () => {
  document.body.classList.add("side-open");
  $("shade").hidden = false;
  $("close-side").focus();
});
$("close-side").addEventListener("click", () => {
  closeSide();
  $("open-side").focus();
});
$("shade").addEventListener("click", closeSide);
$("new").addEventListener("click", () => switchTo(newChat(settings.system)));

for (const text of EXAMPLES) {
  const button = Object.assign(document.createElement("button"), { textContent: text, className: "example" });
  button.addEventListener("click", () => {
    if (!running) send(text);
  });
  $("examples").append(button);
}

drawSettings();
drawList();
drawChat();
look();
input.focus();
