"""The only file that knows the transformers seam.

A transformers model is run as it is. Its attention modules do two things with the outside: they hand new keys and
values to a cache (`cache.update(k, v, layer_idx)`), and they call the attention function that `config` names. Both
are answered here, by whatever *handler* is active: a `Recorder` in the dry run at load, a `PagedHandler` in each step.

The name `"aiocb"` is registered among the attention functions and *not* among the mask functions: so the models build
no mask (what their masks would hide is learned once at load, see `masks`). It stands in the configurations of a view
of the model only (see `view`); the owner's model is not touched.

Legend: T packed tokens, H query heads, K key/value heads, D head dim, N logit rows, V vocabulary.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from aiocb.attention.base import AttentionBackend, LayerSpec
from aiocb.errors import ConfigError
from aiocb.model.eager.batch import pack
from aiocb.model.eager.handlers import KEPT_KEYS, AttentionCall, Handler, PagedHandler, Recorder
from aiocb.model.eager.masks import NotPlainError
from aiocb.model.eager.own_attention import needs_masks, take_over
from aiocb.model.eager.positions import learn_tables, sequence_bound
from aiocb.model.eager.view import View, text_config
from aiocb.model.kv import PagedCache
from aiocb.model.parity import probe_ids
from aiocb.records import Record
from aiocb.step import StepEntry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ATTENTION_NAME", "ModelAdapter"]

ATTENTION_NAME = "aiocb"
MASKED_NAME = "aiocb-masked"
"""The same, for models that cannot do without a mask: known to the mask functions too, whose masks hide nothing."""

PROBE_NAME = "aiocb-probe"
"""Known to the mask functions too; used once at load, to learn what the model's masks hide (see `masks`)."""


class _Pass(NamedTuple):
    """What answers the model during one forward pass.

    Attributes:
        handler: of its attention.
        positions: of the packed tokens. [1, T]
        past: what it is told when it asks for the length of its cache.
    """

    handler: Handler
    positions: Tensor
    past: Any


_PASS: ContextVar[_Pass] = ContextVar("aiocb_pass")
_current = _PASS.get
"""Only a step, or a dry run, has one."""


def _attention_forward(*args: Any, **options: Any) -> tuple[Tensor, None]:
    return _current().handler.attend(AttentionCall(*args, **options)), None


def _probe_mask(
    q_length: int, kv_length: int, mask_function: Callable[..., Any], device: Any = "cpu", **_: Any
) -> Tensor:
    recorder: Any = _current().handler
    mask: Tensor = recorder.make_mask(mask_function, q_length, kv_length, torch.device(device))
    return mask


def _empty_mask(device: Any = "cpu", **_: Any) -> Tensor:
    return torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)


def _answering() -> Handler | None:
    answering = _PASS.get(None)
    return None if answering is None else answering.handler


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention_forward)
ALL_ATTENTION_FUNCTIONS.register(MASKED_NAME, _attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(MASKED_NAME, _empty_mask)
ALL_ATTENTION_FUNCTIONS.register(PROBE_NAME, _attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE_NAME, _probe_mask)


class _Unanswered(NotPlainError, AttributeError):
    """Asked of the cache, which has no such thing: `hasattr` says no, and a model that goes on is refused."""


class _NoLayers(list[Any]):
    """Of the cache: there are none to look at, and who wants a certain one is refused."""

    def __getitem__(self, index: Any) -> Any:
        raise NotPlainError("it works on its cache by itself, layer by layer")


def _refuses(reason: str) -> Callable[..., Any]:
    """Make a method of the cache that ends the dry run."""

    def method(self: StepCache, *_: Any, **__: Any) -> Any:
        raise NotPlainError(reason)

    return method


class StepCache(Cache):
    """What the model takes for its cache: hands everything to the active handler and holds nothing itself."""

    has_previous_state = get_recurrent_state = update_recurrent_state = _refuses("it keeps a recurrent state")
    get_conv_state = update_conv_state = _refuses("it keeps a convolution state")
    update_indexer = _refuses("it selects keys with an indexer")

    def __init__(self) -> None:
        super().__init__(layers=_NoLayers())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _Unanswered(f"it works on its cache by itself ({name})")

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Hand new keys and values [1, K, T, D] to the active handler."""
        return _current().handler.update(key_states, value_states, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return 0, as positions are passed explicitly, unless the model counts positions from it."""
        return _current().past

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: no bound of its own."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the sizes of a mask over this step's tokens alone."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return 0: positions are passed explicitly."""
        return 0


class ModelAdapter:
    """Runs a transformers causal LM over packed rows, by way of a view of it.

    Attributes:
        view: what is run; the model itself is left alone.
        specs: each cache layer's attention, learned in the dry run.
        dtype: of keys and values.
        device: of the model's input.
        vocab_size: rows of the logits.
        length_bound: longest sequence for which the layers are what `specs` says, and why.

    Raises:
        ConfigError: packed execution cannot run this model; the message names the reason.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.view = View(model)
        self._attention = MASKED_NAME if needs_masks(self.view.model) else ATTENTION_NAME
        self._has_own_attention = take_over(self.view.model, _answering) > 0
        self.view.name_attention(self._attention)
        self.device: torch.device = model.device
        self._counts_by_cache = False
        self.length_bound = sequence_bound(text_config(model))
        try:
            with torch.inference_mode():
                self._learn_arguments()
                self._learn()
        except NotPlainError as error:
            raise ConfigError(_refusal(model, str(error))) from error
        except Exception as error:
            reason = f"its dry run failed with {type(error).__name__}: {error}"
            raise ConfigError(_refusal(model, reason)) from error

    def _learn_arguments(self) -> None:
        """Find out how this model's forward wants its arguments."""
        model = self.view.model
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        # What passes any keyword on has its parameters from a module within.
        modules = model.modules() if takes_any else [model]
        names = (name for module in modules for name in inspect.signature(module.forward).parameters)
        # transformers 5.2x renamed past_key_values to cache.
        self._cache_argument = next((name for name in names if name in ("cache", "past_key_values")), "")
        if not self._cache_argument and not self._has_own_attention:
            raise NotPlainError("its forward takes no cache")
        self._takes_positions = "position_ids" in parameters or takes_any
        self._takes_logit_rows = "logits_to_keep" in parameters

    def _learn(self) -> None:
        """Find out what the layers ask for, what their masks hide, and where positions come from."""
        for module in self.view.model.modules():
            if hasattr(module, KEPT_KEYS):  # counts the keys of all requests: nothing may be hidden from any of them
                self._bound_length(getattr(module, KEPT_KEYS), f"{KEPT_KEYS} of its attention")
                setattr(module, KEPT_KEYS, sys.maxsize)
        tried = self._try_dry_run()
        if tried is None:
            self._dry_run(attention=PROBE_NAME)  # may say why
            raise NotPlainError("it works on its attention mask by itself")
        recorder, logits = tried
        self.dtype: torch.dtype = recorder.dtype
        self.vocab_size = int(logits.shape[-1])
        self.specs: dict[int, LayerSpec] = dict(sorted(recorder.specs.items()))
        self._learn_masks(recorder.unsure)
        self._check_layers(len(recorder.attending))
        self._learn_tables()
        self._learn_counting()

    def _learn_masks(self, unsure: Mapping[int, str]) -> None:
        """Let the model build its masks once: take windows and chunks from them."""
        tried = self._try_dry_run(attention=PROBE_NAME)
        # A model may be unable to work with such a mask: then, what its modules say has to do.
        masks = {} if tried is None else tried[0].masks
        for layer, name in unsure.items():
            if layer not in masks:
                raise NotPlainError(f"{name} is not causal")
        for layer, kind in masks.items():
            self.specs[layer] = self.specs[layer]._replace(window=kind.window, chunk=kind.chunk)

    def _bound_length(self, length: int, reason: str) -> None:
        if length < self.length_bound[0]:
            self.length_bound = length, reason

    def _learn_tables(self) -> None:
        """Find tables of positions, and tell them the packed ones."""
        model = self.view.model
        ids = torch.tensor([probe_ids(model, 3)], device=self.device)

        def run_own() -> None:
            self.view.name_attention("eager")  # which every model has
            model(input_ids=ids, use_cache=False)

        learned, bound = learn_tables(model, run_own)
        self._bound_length(bound, "rows of its table of positions")
        for table in learned:
            table.tell(lambda: _current().positions)

    def _learn_counting(self) -> None:
        """Find out whether layers count positions from the length of the cache: far from 0, where that matters."""
        longest = self.length_bound[0]
        for far in (max(longest - 8, longest // 2), longest // 2, 0):
            positions = torch.arange(3, device=self.device) + far
            tried = self._try_dry_run(positions)
            if tried is not None:
                break
        else:
            raise NotPlainError("its dry run failed at every position but the first ones")
        counted = self._dry_run(positions, past=far)[1]
        if torch.allclose(tried[1], counted, rtol=0.0, atol=0.0, equal_nan=True):
            return
        self._counts_by_cache = True
        if not torch.equal(self._dry_run(positions)[1], counted):
            raise NotPlainError("it computes with the length of its cache")

    def _try_dry_run(
        self, positions: Tensor | None = None, attention: str | None = None
    ) -> tuple[Recorder, Tensor] | None:
        """Return None where the model fails, unless it asks for something that is not there."""
        try:
            return self._dry_run(positions, attention)
        except NotPlainError:
            raise
        except Exception:
            return None

    def _dry_run(
        self, positions: Tensor | None = None, attention: str | None = None, past: int = 0
    ) -> tuple[Recorder, Tensor]:
        """Run three tokens of one request and write down what the layers ask for."""
        recorder = Recorder()
        ids = torch.tensor([probe_ids(self.view.model, 3)], device=self.device)
        positions = torch.arange(3, device=self.device) if positions is None else positions
        self.view.name_attention(attention or self._attention)
        try:
            rows = torch.tensor([0, 2], device=self.device)
            logits = self.forward(ids, positions.unsqueeze(0), rows, recorder, past)
        finally:
            self.view.name_attention(self._attention)
        recorder.check_finished()
        return recorder, logits

    def _check_layers(self, num_attending: int) -> None:
        """Every decoder layer must have attended, and with the window or in the chunks that its configuration names."""
        config = text_config(self.view.model)
        # In the bart family num_hidden_layers counts the encoder's.
        num_layers = getattr(config, "decoder_layers", None) or getattr(config, "num_hidden_layers", None)
        if isinstance(num_layers, int):
            # Those attend to pictures, of which there are none.
            num_layers -= len(getattr(config, "cross_attention_layers", None) or ())
        if isinstance(num_layers, int) and num_attending < num_layers:
            raise NotPlainError(f"only {num_attending} of its {num_layers} layers use the attention interface")
        types = getattr(config, "layer_types", None) or ()
        if len(types) != len(self.specs):
            return
        hidden = {
            "full_attention": (False, False),
            "sliding_attention": (True, False),
            "chunked_attention": (False, True),
        }
        for kind, spec in zip(types, self.specs.values(), strict=True):
            if (spec.window is not None, spec.chunk is not None) != hidden.get(kind, (False, False)) and kind in hidden:
                raise NotPlainError(
                    f"layer {spec.layer} is {kind} in its configuration but asks its attention for a window of "
                    f"{spec.window} and chunks of {spec.chunk}"
                )

    def run(
        self, entries: Sequence[StepEntry], records: Sequence[Record], backend: AttentionBackend, cache: PagedCache
    ) -> Tensor:
        """Pack the entries of a plan, and run the model over the pages: logits [N, V]."""
        packed = pack(entries, records, cache.layout, self.device, self.dtype)
        handler = PagedHandler(backend, cache, self.specs, packed.batch)
        return self.forward(packed.input_ids, packed.positions, packed.logit_rows, handler)

    def forward(
        self, input_ids: Tensor, positions: Tensor, logit_rows: Tensor, handler: Handler, past: Any = 0
    ) -> Tensor:
        """Run the view once. input_ids and positions [1, T], logit_rows [N] -> logits [N, V]."""
        values: dict[str, Any] = {self._cache_argument: StepCache(), "use_cache": True} if self._cache_argument else {}
        if self._takes_positions:
            values["position_ids"] = positions
        if self._takes_logit_rows:
            values["logits_to_keep"] = logit_rows
        if self._counts_by_cache:
            # Such models add the length to 0, 1, 2, ...: what is added here makes the packed positions of it.
            past = positions[0] - torch.arange(positions.shape[1], device=positions.device)
        token = _PASS.set(_Pass(handler, positions, past))
        try:
            logits: Tensor = self.view.model(input_ids=input_ids, **values).logits  # [1, N, V]
        finally:
            _PASS.reset(token)
        if not self._takes_logit_rows:
            logits = logits.index_select(1, logit_rows)
        return logits[0]


def _refusal(model: PreTrainedModel, reason: str) -> str:
    return (
        f"{type(model).__name__} cannot be run in packed batches: {reason.rstrip('.')}. "
        "The model's own generate() runs it, one batch at a time"
    )
