"""Where an engine's runner comes from, and who has it: `Source`. Worker threads, apart from construction.

A runner has one owner at a time. A life of the engine *leases* it before it serves and gives it back when its worker
has left it, empty; a second life waits for that, in its own worker thread. A source outlives its lives: what
`from_pretrained` has loaded is kept for later ones, a user's model is given back as it was.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiocb.config import Choice, EngineConfig
from aiocb.errors import EngineClosed, EngineError
from aiocb.model.request import ModelRequest
from aiocb.sampling_params import ModelDefaults
from aiocb.step import Runner
from aiocb.text.processor import TextProcessor

if TYPE_CHECKING:
    from aiocb.model.eager.parallel import ParallelRunner
    from aiocb.model.request import Opened

__all__ = ["Built", "LoadedSource", "PretrainedSource", "Progress", "RunnerSource", "Source"]

Progress = Callable[[str, float], None]
"""Called with a stage and a fraction in 0..1, by one thread at a time: the worker, or one that downloads."""


@dataclass(slots=True)
class Built:
    """A runner that is ready to step, and what belongs to it.

    Attributes:
        parallel: the runner, where several processes run the model together.
    """

    runner: Runner
    text: TextProcessor
    defaults: ModelDefaults
    choices: list[Choice] = field(default_factory=list)
    parallel: ParallelRunner | None = None


class Source(ABC):
    """Builds a runner and leases it to one life of an engine at a time.

    Attributes:
        name: for messages.
        model: the transformers model, or None.
        request_ids: ids that none of its runners has met.
    """

    def __init__(self, name: str, model: Any = None) -> None:
        self.name = name
        self.model = model
        self.request_ids = itertools.count(1)
        self._changed = threading.Condition()
        self._holder: object | None = None
        self._is_lost = False

    def lease(self, config: EngineConfig, life: object, is_over: Callable[[], bool]) -> Built:
        """Wait until nobody has the runner, build it if it is not there, and let a life have it.

        Args:
            config: the engine's settings; `start_timeout` bounds the wait.
            life: who wants it; written as `str` in messages to others.
            is_over: true when it has given up meanwhile; looked at again after `interrupt`.

        Raises:
            EngineError: another life has had it for too long; the message says which.
            EngineClosed: `is_over`.
            ConfigError: the model or the settings cannot work.
        """
        with self._changed:
            is_free = self._changed.wait_for(lambda: self._holder is None or is_over(), config.start_timeout)
            if is_over():
                raise EngineClosed("the engine was closed while it was starting")
            if not is_free:
                raise EngineError(
                    f"{self._holder} still has the model after {config.start_timeout:g} s (start_timeout): end its "
                    "requests or close it with a shorter drain, then enter again"
                )
            if self._is_lost:
                raise EngineError(
                    "the processes that ran this model together have lost each other: start all of them anew"
                )
            self._holder = life
        try:
            return self._open(config)
        except BaseException:
            self._free()
            raise

    def give_back(self, built: Built, *, is_dead: bool) -> None:
        """The life that has the runner is over; `is_dead`: a step has raised, the runner cannot be trusted."""
        try:
            if is_dead:
                self._is_lost = built.parallel is not None
                self._discard(built)
            else:
                built.runner.release()
                self._close(built)
        finally:
            self._free()

    def interrupt(self) -> None:
        """Let everybody who waits look again (any thread)."""
        with self._changed:
            self._changed.notify_all()

    def _free(self) -> None:
        with self._changed:
            self._holder = None
            self._changed.notify_all()

    @property
    def device_type(self) -> str | None:
        """Where the model is going to run; None where that is not known before it is loaded."""
        return None

    @abstractmethod
    def _open(self, config: EngineConfig) -> Built:
        """Build a runner, or return the one that is kept."""

    def _close(self, built: Built) -> None:
        """Take back a runner that remembers nothing."""
        built.runner.close()

    def _discard(self, built: Built) -> None:
        """Take back a runner that may be broken."""
        built.runner.close()


def _built(opened: Opened, text: TextProcessor) -> Built:
    return Built(opened.runner, text, opened.defaults, list(opened.choices), opened.parallel)


class PretrainedSource(Source):
    """A model by name or path, loaded on the first lease and kept."""

    def __init__(self, request: ModelRequest) -> None:
        super().__init__(request.name)
        self._request = request
        self._kept: Built | None = None

    def _open(self, config: EngineConfig) -> Built:
        if self._kept is None:
            from aiocb.model.open import open_model

            opened = open_model(dataclasses.replace(self._request, config=config))
            self.model = opened.model
            self._kept = _built(opened, TextProcessor(opened.tokenizer))
        return self._kept

    def _close(self, built: Built) -> None:
        """Keep it: the next entry starts at once."""

    def _discard(self, built: Built) -> None:
        self._kept = None
        built.runner.close()


class LoadedSource(Source):
    """A model that the user has loaded; left as it was found when a life ends."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(type(model).__name__, model)
        self._text = TextProcessor(tokenizer)

    @property
    def device_type(self) -> str | None:
        """That of its weights."""
        return str(self.model.device.type)

    def _open(self, config: EngineConfig) -> Built:
        from aiocb.model.open import open_model

        opened = open_model(ModelRequest(config, model=self.model))
        return _built(opened, self._text)


class RunnerSource(Source):
    """A runner of one's own: fakes for tests, other execution engines."""

    def __init__(
        self, make_runner: Callable[[EngineConfig], Runner], defaults: ModelDefaults, tokenizer: Any = None
    ) -> None:
        super().__init__("runner")
        self._make_runner = make_runner
        self._defaults = defaults
        self._text = TextProcessor(tokenizer)

    @property
    def device_type(self) -> str | None:
        """Its own business: nothing of ours makes it faster."""
        return "runner"

    def _open(self, config: EngineConfig) -> Built:
        runner = self._make_runner(config)
        return Built(runner, self._text, self._defaults, list(runner.choices))
