"""What opening a model is about: what is asked for, what was found, and what a room makes of it.

ModelRequest ─► Material ─► plan ─► Candidate ─► build ─► Runner ─► Opened
                             └► Refusal            └► Refusal

A plan is cheap and changes nothing; only `build` takes memory. Either may refuse with the reason that users will read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from aiocb.config import Choice, EngineConfig
from aiocb.sampling_params import ModelDefaults
from aiocb.step import CacheLayout, Runner

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from aiocb.model.eager.parallel import ParallelRunner
    from aiocb.model.load.gguf_stored import StoredModel
    from aiocb.model.load.hub import Found, Progress
    from aiocb.model.native.families import ModelDescription
    from aiocb.sampling.sampler import Sampler

__all__ = ["Candidate", "Material", "ModelRequest", "Opened", "Refusal"]


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A model to open: by name, or one that the user has loaded.

    Attributes:
        config: the engine's settings.
        name: as in `Engine.from_pretrained`; not used where there is a model.
        model: the user's module, which is left as it was found.
        dtype, device, options: for loading by name.
        quantization: "int8" or "int4" for weights of so many bits, or None for the weights as they are.
        progress: called with a stage and the fraction of it that is done.
        sampler: None makes one that suits the runner.
        distributed: over how many processes it is to be spread: our `DistributedConfig`, or transformers'; None is one.
        agree: makes of a layout of the cache that this process has room for one that all have room for.
    """

    config: EngineConfig
    name: str = ""
    model: PreTrainedModel | None = None
    dtype: Any = "auto"
    device: Any = None
    quantization: str | None = None
    progress: Progress | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    sampler: Sampler | None = None
    distributed: Any = None
    agree: Callable[[CacheLayout], CacheLayout] | None = None

    @property
    def is_owned(self) -> bool:
        """Nobody else has the module: its memory may be taken over."""
        return self.model is None

    def report(self, stage: str, fraction: float) -> None:
        """Tell how far loading is, where somebody wants to know."""
        if self.progress is not None:
            self.progress(stage, fraction)


class Material(NamedTuple):
    """A model as it was found.

    Attributes:
        defaults: what the model says about itself.
        length_reason: where `defaults.max_model_len` comes from.
        module: in eval mode where the engine owns it; None where an earlier start has left all that is needed.
        description: in place of the module, for the native room.
        stored: a GGUF file as it is, in place of both.
        parity: what the comparison with the module gave in that earlier start.
        tokenizer: None when there is none.
        choices: what was decided on the way, with reasons.
        found: the files, where they will be the same at the next start.
        max_model_len: most tokens of a request: the model's own number, or a smaller one that is configured.
    """

    defaults: ModelDefaults
    length_reason: str
    module: Any = None
    description: ModelDescription | None = None
    stored: StoredModel | None = None
    parity: str = ""
    tokenizer: Any = None
    choices: tuple[Choice, ...] = ()
    found: Found | None = None
    max_model_len: int = 0


class Refusal(NamedTuple):
    """A room cannot run the model; the reason goes into a message or a choice."""

    reason: str


class Candidate(NamedTuple):
    """A runner that can be built."""

    build: Callable[[], Runner | Refusal]


class Opened(NamedTuple):
    """A model that is ready to step.

    Attributes:
        runner: built over the model.
        defaults: what the model says about itself.
        tokenizer: None when there is none.
        choices: what was decided on the way, with reasons.
        model: the transformers module, or None where the runner has taken its weights over.
        parallel: the runner, where it is one of several processes' that run the model together.
    """

    runner: Runner
    defaults: ModelDefaults
    tokenizer: Any
    choices: tuple[Choice, ...]
    model: Any
    parallel: ParallelRunner | None = None
