"""Where an engine's runner comes from. Worker thread only, apart from construction.

A source outlives a session: what `from_pretrained` loaded is kept for later entries, a user's model is given back as
it was when the session ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiocb.config import Choice, EngineConfig
from aiocb.sampling_params import ModelDefaults
from aiocb.step import Runner
from aiocb.text.processor import TextProcessor

__all__ = ["Built", "LoadedSource", "PretrainedSource", "Progress", "RunnerSource", "Source"]

Progress = Callable[[str, float], None]
"""Called with a stage and a fraction in 0..1, in the worker thread."""


@dataclass(slots=True)
class Built:
    """A runner that is ready to step, and what belongs to it."""

    runner: Runner
    text: TextProcessor
    defaults: ModelDefaults
    choices: list[Choice] = field(default_factory=list)


class Source(Protocol):
    """Builds a runner when a session starts and takes it back when it ends."""

    def build(self, config: EngineConfig) -> Built:
        """Load what is not loaded yet and make a runner (worker thread).

        Raises:
            ConfigError: the model or the settings cannot work.
        """

    def release(self, built: Built, is_dead: bool) -> None:
        """The session is over (worker thread); `is_dead`: a step has raised, the runner cannot be trusted."""

    @property
    def model(self) -> Any:
        """The transformers model, or None."""

    @property
    def name(self) -> str:
        """For messages."""


class PretrainedSource:
    """A model by name or path, loaded on the first build and kept."""

    def __init__(
        self,
        name: str,
        *,
        dtype: Any,
        device: Any,
        quantization: str | None,
        progress: Progress | None,
        options: Mapping[str, Any],
    ) -> None:
        self.name = name
        self._dtype = dtype
        self._device = device
        self._quantization = quantization
        self._progress = progress
        self._options = dict(options)
        self._lock = threading.Lock()  # two sessions never load at once; taken in worker threads only
        self._built: Built | None = None
        self._config: EngineConfig | None = None
        self.model: Any = None

    def build(self, config: EngineConfig) -> Built:
        """Load the model, unless an earlier session has, and make a runner; see `Source`."""
        from aiocb.model.open import open_pretrained

        with self._lock:
            if self._built is not None and self._config == config:
                return self._built
            opened = open_pretrained(
                self.name,
                config,
                dtype=self._dtype,
                device=self._device,
                quantization=self._quantization,
                progress=self._progress,
                options=self._options,
            )
            self.model = opened.model
            self._built = Built(opened.runner, TextProcessor(opened.tokenizer), opened.defaults, opened.choices)
            self._config = config
            return self._built

    def release(self, built: Built, is_dead: bool) -> None:
        """Keep everything, so that the next entry starts at once; load anew after a step has raised."""
        if is_dead:
            self._built = None
            built.runner.close()


class LoadedSource:
    """A model that the user has loaded; left as it was found when the session ends."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model
        self.name = type(model).__name__
        self._text = TextProcessor(tokenizer)
        self._lock = threading.Lock()

    def build(self, config: EngineConfig) -> Built:
        """Make a runner over the user's model; see `Source`."""
        from aiocb.model.build import build_runner, model_defaults

        with self._lock:
            runner, choices = build_runner(self.model, config, owns_model=False)
            return Built(runner, self._text, model_defaults(self.model), list(choices))

    def release(self, built: Built, is_dead: bool) -> None:
        """Close the runner."""
        built.runner.close()


class RunnerSource:
    """A runner of one's own: fakes for tests, other execution engines."""

    def __init__(
        self, make_runner: Callable[[EngineConfig], Runner], defaults: ModelDefaults, tokenizer: Any = None
    ) -> None:
        self.model = None
        self.name = "runner"
        self._make_runner = make_runner
        self._defaults = defaults
        self._text = TextProcessor(tokenizer)

    def build(self, config: EngineConfig) -> Built:
        """Make the runner; see `Source`."""
        return Built(self._make_runner(config), self._text, self._defaults)

    def release(self, built: Built, is_dead: bool) -> None:
        """Close the runner."""
        built.runner.close()
