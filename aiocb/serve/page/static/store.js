// Conversations and settings, kept in this browser.

export const CHATS = "aiocb.chats";
const SETTINGS = "aiocb.settings";
const MOST = 200;

export const DEFAULTS = [
  { temperature: 0.7, top_p: 0.95, max_tokens: 512 },
  { temperature: 0, top_p: 1, max_tokens: 512 },
];

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false; // full, or forbidden: the chat goes on without
  }
}

export function loadChats() {
  const chats = read(CHATS, []);
  return Array.isArray(chats) ? chats.filter((chat) => chat && Array.isArray(chat.turns)) : [];
}

// Adds what another tab has written meanwhile.
export function saveChats(chats, forgotten) {
  const known = new Set([...chats.map((chat) => chat.id), ...forgotten]);
  const theirs = loadChats().filter((chat) => !known.has(chat.id));
  let kept = [...chats, ...theirs].slice(0, MOST);
  while (!write(CHATS, kept) && kept.length > 1) kept = kept.slice(0, Math.floor(kept.length / 2));
}

export function newChat(system) {
  return { id: crypto.randomUUID?.() ?? String(Date.now() + Math.random()), title: "", system, turns: [], at: Date.now() };
}

export function loadSettings() {
  return { sets: structuredClone(DEFAULTS), compare: false, open: false, theme: "system", system: "", ...read(SETTINGS, {}) };
}

export function saveSettings(settings) {
  write(SETTINGS, settings);
}
