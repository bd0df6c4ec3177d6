// Markdown that a model wrote, as elements that can do nothing.

import MarkdownIt from "./vendor/markdown-it.mjs";
import DOMPurify from "./vendor/purify.mjs";

const markdown = new MarkdownIt({ html: false, linkify: true, breaks: false });
markdown.disable("image"); // an address in a text must not be fetched

const RULES = {
  RETURN_DOM_FRAGMENT: true,
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "s",
    "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["href", "start", "title"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
};

export function render(text) {
  const fragment = DOMPurify.sanitize(markdown.render(text), RULES);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = document.createElement("div");
    frame.className = "table";
    table.replaceWith(frame);
    frame.append(table);
  }
  return fragment;
}

// Draws a text that grows. What lies before the last empty line outside of code will not change any more, and is drawn
// once; only the rest is drawn again, at most once a frame.
export class Growing {
  constructor(target) {
    this.target = target;
    this.text = "";
    this.done = 0;
    this.tail = [];
    this.frame = 0;
  }

  add(text) {
    this.text += text;
    if (!this.frame) this.frame = requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = 0;
    const cut = this.boundary();
    for (const node of this.tail) node.remove();
    if (cut > this.done) {
      this.target.append(render(this.text.slice(this.done, cut)));
      this.done = cut;
    }
    const fragment = render(this.text.slice(this.done));
    this.tail = [...fragment.childNodes];
    this.target.append(fragment);
    this.target.dispatchEvent(new CustomEvent("drawn", { bubbles: true }));
  }

  boundary() {
    const end = this.text.lastIndexOf("\n\n");
    if (end <= this.done) return this.done;
    const part = this.text.slice(this.done, end);
    const fences = part.match(/^\s*(?:```|~~~)/gm)?.length ?? 0;
    const inList = /^\s*(?:[-*+]|\d+[.)])\s/.test(part.slice(part.lastIndexOf("\n\n") + 2));
    return fences % 2 || inList ? this.done : end + 2;
  }

  finish() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.target.replaceChildren(render(this.text));
  }
}
