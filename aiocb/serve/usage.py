"""Token counts of an answer: the prompt once, the output summed over all choices."""

from __future__ import annotations

from typing import Any

from aiocb.outputs import Usage

__all__ = ["UsageSum"]


class UsageSum:
    """Adds up what every choice says when it ends.

    Args:
        n: choices per prompt.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.num_reasoning_tokens = 0

    def add(self, choice: int, usage: Usage) -> None:
        """Add those of a choice that has ended."""
        if choice % self._n == 0:
            self.num_prompt_tokens += usage.num_prompt_tokens
            self.num_cached_tokens += usage.num_cached_tokens
        self.num_output_tokens += usage.num_output_tokens
        self.num_reasoning_tokens += usage.num_reasoning_tokens

    def to_wire(self) -> dict[str, Any]:
        """As chats and completions write it."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
        }

    def to_response(self) -> dict[str, Any]:
        """As responses write it."""
        return {
            "input_tokens": self.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
        }
