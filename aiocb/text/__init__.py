"""Text: prompts to token ids, token ids to text, stop strings. No threads of its own, no event loop, no torch."""
