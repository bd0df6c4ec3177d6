"""The only file that knows the transformers seam.

A transformers model is run as it is. Its attention modules do two things with the outside: they hand new keys and
values to a cache (`cache.update(k, v, layer_idx)`), and they call the attention function that `config` names. Both
are answered here, by whatever *handler* is active: a `Recorder` in the dry run at load, a `PagedHandler` in each step.

The name that steps use, `"aiocb"`, is registered among the attention functions and *not* among the mask functions: so
the models build no mask (what their masks would hide is learned once at load, see `masks`). The config's own attention
name is set and restored around each step by `ModelAdapter.forward`; nothing else of the model is changed.

Legend: T packed tokens, H query heads, K key/value heads, D head dim, N logit rows, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from aiocb.attention.base import AttentionBackend, LayerSpec
from aiocb.errors import ConfigError
from aiocb.model.eager.batch import pack
from aiocb.model.eager.handlers import Handler, NotPlainError, PagedHandler, Recorder
from aiocb.model.eager.masks import MaskKind, MaskRecorder
from aiocb.model.eager.positions import PositionTable, find_tables, injected, learn_tables
from aiocb.model.kv import PagedCache
from aiocb.records import Record
from aiocb.step import StepEntry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from aiocb.model.eager.linears import PackedLinears

__all__ = ["ATTENTION_NAME", "ModelAdapter", "text_config"]

ATTENTION_NAME = "aiocb"
PROBE_NAME = "aiocb-probe"
"""Known to the mask functions too; used once at load, to learn what the model's masks hide (see `masks`)."""

_ACTIVE: ContextVar[Handler | None] = ContextVar("aiocb_attention", default=None)


def _attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    handler = _ACTIVE.get()
    if handler is None:
        raise RuntimeError("the attention function 'aiocb' was called outside of an engine's step")
    return handler.attend(module, query, key, value, attention_mask, scaling, options), None


def _probe_mask(
    q_length: int, kv_length: int, mask_function: Callable[..., Any], device: Any = "cpu", **_: Any
) -> Tensor:
    handler = _ACTIVE.get()
    assert isinstance(handler, MaskRecorder)
    return handler.make_mask(mask_function, q_length, kv_length, torch.device(device))


def _register() -> None:
    """Make the names known to transformers. Idempotent."""
    for name in (ATTENTION_NAME, PROBE_NAME):
        if ALL_ATTENTION_FUNCTIONS.get(name) is not _attention_forward:
            ALL_ATTENTION_FUNCTIONS.register(name, _attention_forward)
    if ALL_MASK_ATTENTION_FUNCTIONS.get(PROBE_NAME) is not _probe_mask:
        ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE_NAME, _probe_mask)


class StepCache(Cache):
    """What the model takes for its cache: hands everything to the active handler and holds nothing itself.

    Positions are passed to the model, so the length it reports is 0; models that would compute positions from it are
    told the packed positions by `positions.injected`.
    """

    is_compileable = False

    def __init__(self, num_layers: int) -> None:
        layers: list[Any] = [_Layer() for _ in range(num_layers)]
        super().__init__(layers=layers)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Hand new keys and values [1, K, T, D] to the active handler."""
        handler = _ACTIVE.get()
        if handler is None:
            raise RuntimeError("the cache of an engine was used outside of its step")
        return handler.update(key_states, value_states, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are passed explicitly."""
        return 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: no bound of its own."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the sizes of a mask over this step's tokens alone."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return 0: positions are passed explicitly."""
        return 0

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Refuse: asked by recurrent layers."""
        raise NotPlainError("it keeps a recurrent state (has_previous_state)")

    def get_conv_state(self, *_: Any, **__: Any) -> Any:
        """Refuse: asked by convolution layers."""
        raise NotPlainError("it keeps a convolution state (get_conv_state)")

    def update_conv_state(self, *_: Any, **__: Any) -> Any:
        """Refuse: asked by convolution layers."""
        raise NotPlainError("it keeps a convolution state (update_conv_state)")

    def get_recurrent_state(self, *_: Any, **__: Any) -> Any:
        """Refuse: asked by recurrent layers."""
        raise NotPlainError("it keeps a recurrent state (get_recurrent_state)")

    def update_recurrent_state(self, *_: Any, **__: Any) -> Any:
        """Refuse: asked by recurrent layers."""
        raise NotPlainError("it keeps a recurrent state (update_recurrent_state)")

    def update_indexer(self, *_: Any, **__: Any) -> Any:
        """Refuse: asked by sparse attention."""
        raise NotPlainError("it selects keys with an indexer (update_indexer)")


class _Layer:
    """A layer of `StepCache`, for models that look at `cache.layers`."""

    is_sliding = False
    is_initialized = False
    is_compileable = False
    keys = None
    values = None

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


class ModelAdapter:
    """Runs a transformers causal LM over packed rows.

    Attributes:
        model: as it was given; its configuration is as found whenever no step runs.
        specs: each cache layer's attention, learned in the dry run.
        dtype: of keys and values.
        device: of the model's input.
        vocab_size: rows of the logits.
        length_bound: longest sequence for which the layers are what `specs` says; None is any.

    Raises:
        ConfigError: packed execution cannot run this model; the message names the reason.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.device: torch.device = model.device
        self._configs = _configs_of(model)
        self._arguments = _forward_arguments(model)
        _register()
        if model.training:
            raise ConfigError("the model is in training mode; call model.eval() first")
        self._tables: list[PositionTable] = []
        self._num_layers = 4096  # any index is answered in the dry run
        try:
            with torch.inference_mode():
                recorder, logits = self._dry_run()
                masks = self._learn_masks()
                tables = find_tables(model)
                if tables:
                    ids = torch.tensor([self.probe_ids(3)], device=self.device)
                    gaps = torch.tensor([0, 2, 5], device=self.device)
                    self._tables = learn_tables(
                        tables, gaps, lambda: model(input_ids=ids, use_cache=False), lambda: self._dry_run(gaps)
                    )
        except NotPlainError as error:
            raise ConfigError(f"{type(model).__name__} cannot be run in packed batches: {error}") from error
        except Exception as error:
            raise ConfigError(
                f"{type(model).__name__} cannot be run in packed batches: its dry run failed with "
                f"{type(error).__name__}: {error}"
            ) from error
        self.specs: dict[int, LayerSpec] = dict(sorted(recorder.specs.items()))
        self.length_bound: int | None = None
        self._obey_masks(masks)
        self.vocab_size = int(logits.shape[-1])
        assert recorder.dtype is not None
        self.dtype: torch.dtype = recorder.dtype
        self._check_layers(len(recorder.attending_modules))
        self._num_layers = max(self.specs) + 1
        self.linears: PackedLinears | None = None

    def _learn_masks(self) -> dict[int, MaskKind]:
        """Let the model build its masks once, and learn what they hide."""
        recorder = MaskRecorder()
        try:
            self._dry_run(handler=recorder)
        except NotPlainError:
            raise
        except Exception:
            # A model that cannot work with such a mask: what its modules say has to do.
            return {}
        return recorder.kinds

    def _obey_masks(self, masks: Mapping[int, MaskKind]) -> None:
        """Take windows from the masks, and bound the length where a mask cuts the sequence into chunks."""
        for layer, kind in masks.items():
            self.specs[layer] = self.specs[layer]._replace(window=kind.window)
            if kind.chunk is not None:
                self.length_bound = min(kind.chunk, self.length_bound or kind.chunk)

    def _dry_run(self, positions: Tensor | None = None, handler: Recorder | None = None) -> tuple[Recorder, Tensor]:
        """Run three tokens of one request and write down what the layers ask for."""
        recorder = Recorder() if handler is None else handler
        ids = torch.tensor([self.probe_ids(3)], device=self.device)
        positions = torch.arange(3, device=self.device) if positions is None else positions
        logits = self.forward(ids, positions.unsqueeze(0), torch.tensor([0, 2], device=self.device), recorder)
        recorder.check_finished()
        return recorder, logits

    def probe_ids(self, length: int, seed: int = 0) -> list[int]:
        """Ids spread over the vocabulary; those with a meaning of their own (images, padding) are passed over."""
        config = text_config(self.model)
        values = [*vars(self.model.config).items(), *vars(config).items()]
        special = {value for key, value in values if key.endswith("token_id") and isinstance(value, int)}
        rows = max(_vocab_rows(self.model), 1)
        ids: list[int] = []
        candidate = 17 + 101 * seed
        while len(ids) < length:
            candidate = (candidate * 48271 + 11) % 2147483647
            if candidate % rows not in special or rows < 16:
                ids.append(candidate % rows)
        return ids

    def _check_layers(self, num_attending: int) -> None:
        """Every decoder layer must have attended, and with the window that its configuration names."""
        config = text_config(self.model)
        # In the bart family num_hidden_layers counts the encoder's.
        num_layers = getattr(config, "decoder_layers", None) or getattr(config, "num_hidden_layers", None)
        name = type(self.model).__name__
        if isinstance(num_layers, int) and num_attending < num_layers:
            raise ConfigError(
                f"{name} cannot be run in packed batches: only {num_attending} of its {num_layers} layers use the "
                "attention interface"
            )
        types = getattr(config, "layer_types", None)
        if not isinstance(types, (list, tuple)) or len(types) != len(self.specs):
            return
        for kind, spec in zip(types, self.specs.values(), strict=True):
            wrong = (kind == "sliding_attention" and spec.window is None) or (
                kind == "full_attention" and spec.window is not None
            )
            if wrong:
                raise ConfigError(
                    f"{name} cannot be run in packed batches: layer {spec.layer} is {kind} in its configuration but "
                    f"asks its attention for a window of {spec.window}"
                )

    def run(
        self, entries: Sequence[StepEntry], records: Sequence[Record], backend: AttentionBackend, cache: PagedCache
    ) -> Tensor:
        """Pack the entries of a plan, and run the model over the pages: logits [N, V]."""
        packed = pack(entries, records, cache.layout, self.device, self.dtype)
        handler = PagedHandler(backend, cache, self.specs, packed.batch)
        with nullcontext() if self.linears is None else self.linears.active():
            return self.forward(packed.input_ids, packed.positions, packed.logit_rows, handler)

    def forward(self, input_ids: Tensor, positions: Tensor, logit_rows: Tensor, handler: Handler) -> Tensor:
        """Run the model once. input_ids and positions [1, T], logit_rows [N] -> logits [N, V]."""
        values: dict[str, Any] = {self._arguments.cache: StepCache(self._num_layers), "use_cache": True}
        if self._arguments.takes_positions:
            values["position_ids"] = positions
        if self._arguments.takes_logit_rows:
            values["logits_to_keep"] = logit_rows
        with self._stepping(handler), injected(self._tables, positions):
            logits: Tensor = self.model(input_ids=input_ids, **values).logits  # [1, N, V]
        if not self._arguments.takes_logit_rows:
            logits = logits.index_select(1, logit_rows)
        return logits[0]

    @contextmanager
    def _stepping(self, handler: Handler) -> Iterator[None]:
        """Name our attention in the model's configs and activate `handler`; undo both on the way out."""
        before = [(config, config._attn_implementation_internal) for config in self._configs]
        token = _ACTIVE.set(handler)
        try:
            name = PROBE_NAME if isinstance(handler, MaskRecorder) else ATTENTION_NAME
            for config in self._configs:
                config._attn_implementation_internal = name
            yield
        finally:
            for config, previous in before:
                config._attn_implementation_internal = previous
            _ACTIVE.reset(token)


class _Arguments:
    """How this model's forward wants its arguments."""

    __slots__ = ("cache", "takes_logit_rows", "takes_positions")

    def __init__(self, cache: str, takes_positions: bool, takes_logit_rows: bool) -> None:
        self.cache = cache
        self.takes_positions = takes_positions
        self.takes_logit_rows = takes_logit_rows


def _forward_arguments(model: PreTrainedModel) -> _Arguments:
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    # transformers 5.2x renamed past_key_values to cache.
    name = next((name for name in ("cache", "past_key_values") if name in parameters), None)
    if name is None:
        if not takes_any:
            raise ConfigError(f"{type(model).__name__} cannot be run in packed batches: its forward takes no cache")
        name = "past_key_values"
    return _Arguments(name, "position_ids" in parameters or takes_any, "logits_to_keep" in parameters)


def _configs_of(model: PreTrainedModel) -> list[Any]:
    """Every config object that a module of the model may ask for the attention's name."""
    found: dict[int, Any] = {}
    pending: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    while pending:
        config = pending.pop()
        if id(config) in found or not hasattr(config, "_attn_implementation_internal"):
            continue
        found[id(config)] = config
        pending.extend(getattr(config, key, None) for key in getattr(config, "sub_configs", ()) or ())
    return list(found.values())


def text_config(model: PreTrainedModel) -> Any:
    """The config of the decoder: nested in composite models."""
    config: Any = model.config
    getter: Callable[..., Any] | None = getattr(config, "get_text_config", None)
    return config if getter is None else getter(decoder=True)


def _vocab_rows(model: PreTrainedModel) -> int:
    embeddings: Any = model.get_input_embeddings()
    rows = getattr(embeddings, "num_embeddings", None)
    return int(rows) if rows else int(getattr(text_config(model), "vocab_size", 4) or 4)
