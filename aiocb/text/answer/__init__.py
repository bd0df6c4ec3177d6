"""What a model's answer holds besides text: reasoning and tool calls. No threads, no event loop, no torch."""
