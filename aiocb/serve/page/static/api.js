// The server's interface: status, figures, and streamed chats.

const KEY = "aiocb.key";

export class ServerError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function failure(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // no JSON: the status says enough
  }
  return new ServerError(error.message ?? `The server answered ${response.status}.`, response.status, error.code);
}

export async function getJSON(path) {
  const response = await fetch(path, { headers: headers(), cache: "no-store" });
  if (!response.ok && path !== "health") throw await failure(response);
  return response.json();
}

// Yields {content, reasoning, reason, usage} until the answer is whole; throws ServerError where it is not.
export async function* streamChat(body, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers() },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ServerError("The connection ended before the answer did.", 0, "cut");
    rest += value;
    const frames = rest.split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      const line = frame.split("\n").find((each) => each.startsWith("data: "));
      if (!line) continue; // a comment: the server is alive
      const data = line.slice(6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(event.error.message, 0, event.error.code);
      const choice = event.choices[0];
      yield {
        content: choice?.delta?.content ?? "",
        reasoning: choice?.delta?.reasoning_content ?? "",
        reason: choice?.finish_reason ?? null,
        usage: event.usage ?? null,
      };
    }
  }
}
