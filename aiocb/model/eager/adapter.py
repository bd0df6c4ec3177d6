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

import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from aiocb.attention.base import AttentionBackend, LayerSpec
from aiocb.config import Choice
from aiocb.errors import ConfigError
from aiocb.errors import explain as explain_error
from aiocb.model.eager.batch import pack
from aiocb.model.eager.cache import cache_for
from aiocb.model.eager.handlers import KEPT_KEYS, AttentionCall, Handler, PagedHandler, Recorder
from aiocb.model.eager.layers import check_layers
from aiocb.model.eager.lora import adapted_rows
from aiocb.model.eager.masks import NotPlainError
from aiocb.model.eager.mixers import Mixer, Watch, attend_outside, explain, learn_mixers, split
from aiocb.model.eager.own_attention import needs_masks, take_over
from aiocb.model.eager.own_states import keep_states
from aiocb.model.eager.packed import PackedStates, scan_packed
from aiocb.model.eager.parts import make_parts
from aiocb.model.eager.passes import Pass, current, entered
from aiocb.model.eager.positions import learn_tables, sequence_bound
from aiocb.model.eager.recurrence import Scans
from aiocb.model.eager.rotary import Lengths, follow_lengths, learn_switch
from aiocb.model.eager.states import StateKey, StateSpec, StateStorage
from aiocb.model.eager.view import View, text_config
from aiocb.model.kv import PagedCache
from aiocb.model.parity import probe_ids
from aiocb.records import Record
from aiocb.step import LengthSwitch, StepEntry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ATTENTION_NAME", "ModelAdapter"]

ATTENTION_NAME = "aiocb"
MASKED_NAME = "aiocb-masked"
"""The same, for models that cannot do without a mask: known to the mask functions too, whose masks hide nothing."""

SPLIT_NAME = "aiocb-split"
"""The same, for models with modules that attend in parts (see `mixers`): what stands for a mask becomes one there."""

PROBE_NAME = "aiocb-probe"
"""Known to the mask functions too; used once at load, to learn what the model's masks hide (see `masks`)."""

SCAN_CHUNK = 64
"""Of mixers that do not say how many tokens they scan at once: the default of the gated delta rule."""


def _attention_forward(*args: Any, **options: Any) -> tuple[Tensor, None]:
    return current().handler.attend(AttentionCall(*args, **options)), None


def _make_mask(
    q_length: int, kv_length: int, mask_function: Callable[..., Any], device: Any = "cpu", **_: Any
) -> Tensor:
    return current().handler.make_mask(mask_function, q_length, kv_length, torch.device(device))


def _empty_mask(device: Any = "cpu", **_: Any) -> Tensor:
    return torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)


def _answering() -> Handler | None:
    answering = current(None)
    return None if answering is None else answering.handler


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention_forward)
ALL_ATTENTION_FUNCTIONS.register(MASKED_NAME, _attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(MASKED_NAME, _empty_mask)
for name in (PROBE_NAME, SPLIT_NAME):
    ALL_ATTENTION_FUNCTIONS.register(name, _attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, _make_mask)


class ModelAdapter:
    """Runs a transformers causal LM over packed rows, by way of a view of it.

    Attributes:
        view: what is run; the model itself is left alone.
        specs: each cache layer's attention, learned in the dry run.
        states: one request's part of each state, likewise.
        mixers: modules that are called in parts, likewise.
        scan_chunk: tokens that the mixers scan at once.
        scans: what mixers scan the rows of all requests with; None where they are called in parts.
        why_split: the reason for it.
        dtype: of keys and values.
        device: of the model's input.
        vocab_size: rows of the logits.
        switch: length beyond which keys are rotated in another way, if there is one.
        length_bound: longest sequence for which the layers are what `specs` says, and why.

    Raises:
        ConfigError: packed execution cannot run this model; the message names the reason.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.view = View(model)
        self._attention = MASKED_NAME if needs_masks(self.view.model) else ATTENTION_NAME
        self._stateful, gets_no_cache = keep_states(self.view.model)
        self._gets_cache = not gets_no_cache
        self._has_own_attention = take_over(self.view.model, _answering) > 0
        self.view.name_attention(self._attention)
        self.device: torch.device = model.device
        self._counts_by_cache = False
        self.length_bound = sequence_bound(text_config(model))
        self._failures: list[str] = []
        self.switch: LengthSwitch | None = None
        self._lengths: Lengths | None = None
        try:
            with torch.inference_mode():
                self._learn_arguments()
                self._learn_rotation()
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
        if not self._cache_argument and not self._has_own_attention and self._gets_cache:
            raise NotPlainError("its forward takes no cache")
        self._gets_cache &= bool(self._cache_argument)
        self._cache = cache_for(model)
        self._takes_positions = "position_ids" in parameters or takes_any
        self._takes_logit_rows = "logits_to_keep" in parameters

    def _learn_rotation(self) -> None:
        """Find out whether the rotation changes with the length, and let it change per request."""
        found = learn_switch(self.view.model, text_config(self.view.model))
        if isinstance(found, LengthSwitch):
            self.switch = found
            follow_lengths(self.view.model, found, lambda: self._lengths)
        elif found is not None:
            self._bound_length(*found)

    def _learn(self) -> None:
        """Find out what the layers ask for, what their masks hide, and where positions come from."""
        for module in self.view.model.modules():
            if hasattr(module, KEPT_KEYS):  # counts the keys of all requests: nothing may be hidden from any of them
                self._bound_length(getattr(module, KEPT_KEYS), f"{KEPT_KEYS} of its attention")
                setattr(module, KEPT_KEYS, sys.maxsize)
        self.mixers: list[Mixer] = []
        self._why_not_packed: dict[nn.Module, str] = {}
        self.scans: Scans | None = None
        self.why_split = ""
        try:
            tried = self._try_dry_run()
        except NotPlainError:
            if not self._split_attention():
                raise
            tried = self._try_dry_run()
        if tried is None and self._split_attention():
            tried = self._try_dry_run()
        if tried is None:
            self._dry_run(attention=PROBE_NAME)  # may say why
            raise NotPlainError(f"it works on its attention mask by itself{self._tries}")
        recorder, logits = tried
        self.dtype: torch.dtype = recorder.dtype or self.view.model.dtype
        self.states: dict[StateKey, StateSpec] = dict(sorted(recorder.states.items()))
        if self.states and not self.mixers:
            self._learn_mixers(self._watch())
        self._explain(recorder)
        self.vocab_size = int(logits.shape[-1])
        self.specs: dict[int, LayerSpec] = dict(sorted(recorder.specs.items()))
        self._learn_masks(recorder.unsure)
        check_layers(self.view.model, recorder.attending, [mixer.module for mixer in self.mixers], self.specs)
        self._learn_tables()
        self._learn_counting()

    def _watch(self) -> tuple[Watch, Watch]:
        """Watch two dry runs of different length."""
        watches = Watch(self.view.model, 3, self._stateful), Watch(self.view.model, 5, self._stateful)
        for watch in watches:
            with watch.watching():
                self._dry_run(num_tokens=watch.num_tokens, handler=watch.surveyor)
        return watches

    def _split_attention(self) -> bool:
        """Find modules that attend in a way of their own, and call them in parts; False where there are none."""
        if self.mixers:
            return False
        self._attention = SPLIT_NAME
        try:
            watches = self._watch()
        except Exception as error:  # another reason why it cannot be run, which others may name
            self._failures.append(f"in parts: {explain_error(error)}")
            watches = None
        if watches is None or watches[0].surveyor.has_own_code or not watches[0].surveyor.reasons:
            self._attention = ATTENTION_NAME
            return False
        self._learn_mixers(watches)
        return True

    def _learn_mixers(self, watches: tuple[Watch, Watch]) -> None:
        """Find the modules that keep states or attend in parts, and call them so from now on."""
        self.mixers = learn_mixers(*watches)
        for mixer in self.mixers:
            module, kinds = mixer.module, {key.kind for key in watches[0].recorder.owners.get(mixer.module, ())}
            own = module.forward
            split(mixer)
            why_not = scan_packed(module, own, kinds)
            if why_not:
                self._why_not_packed[module] = "" if mixer.attends else why_not
        for module in watches[0].surveyor.outside:
            attend_outside(module)

    def _explain(self, recorder: Recorder) -> None:
        chunks = (getattr(mixer.module, "chunk_size", SCAN_CHUNK) for mixer in self.mixers)
        self.scan_chunk = math.lcm(*(chunk for chunk in chunks if isinstance(chunk, int)))
        self._attending = tuple(recorder.attending.values())

    @property
    def choices(self) -> list[Choice]:
        """How mixers are called, where not all only attend."""
        if not self.mixers:
            return []
        scanned = {} if self.scans is None else dict.fromkeys(self._scanned(), self.scans.name)
        reasons = self._why_not_packed if self.scans is not None else dict.fromkeys(self._scanned(), self.why_split)
        return [explain(self.mixers, self._attending, scanned, set(reasons.values()) - {""})]

    @property
    def is_split(self) -> bool:
        """True where mixers must be called in parts."""
        return bool(self._why_not_packed)

    def _scanned(self) -> list[nn.Module]:
        return [mixer.module for mixer in self.mixers if mixer.module not in self._why_not_packed]

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
            table.tell(lambda: current().positions)

    def _learn_counting(self) -> None:
        """Find out whether layers count positions from the length of the cache: far from 0, where that matters."""
        longest = self.length_bound[0]
        for far in (max(longest - 8, longest // 2), longest // 2, 0):
            positions = torch.arange(3, device=self.device) + far
            tried = self._try_dry_run(positions)
            if tried is not None:
                break
        else:
            raise NotPlainError(f"its dry run failed at every position but the first ones{self._tries}")
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
        except Exception as error:
            self._failures.append(f"a dry run: {explain_error(error)}")
            return None

    @property
    def _tries(self) -> str:
        """What has failed on the way, for a refusal: what was tried last says most."""
        return f" ({self._failures[-1][:300]})" if self._failures else ""

    def _dry_run(
        self,
        positions: Tensor | None = None,
        attention: str | None = None,
        past: int = 0,
        num_tokens: int = 3,
        handler: Handler | None = None,
    ) -> tuple[Recorder, Tensor]:
        """Run a few tokens of one request and write down what the layers ask for."""
        recorder = Recorder()
        ids = torch.tensor([probe_ids(self.view.model, num_tokens)], device=self.device)
        positions = torch.arange(num_tokens, device=self.device) if positions is None else positions
        self.view.name_attention(attention or self._attention)
        try:
            rows = torch.tensor([0, 2], device=self.device)
            logits = self.forward(ids, positions.unsqueeze(0), rows, handler or recorder, past)
        finally:
            self.view.name_attention(self._attention)
        if handler is None:
            recorder.check_finished()
        return recorder, logits

    def run(
        self,
        entries: Sequence[StepEntry],
        records: Sequence[Record],
        backend: AttentionBackend,
        cache: PagedCache,
        storage: StateStorage | None = None,
        *,
        has_adapters: bool = False,
    ) -> Tensor:
        """Pack the entries of a plan, and run the model over pages and slots: logits [N, V]."""
        packed = pack(entries, records, cache.layout, self.device, self.dtype)
        handler = PagedHandler(backend, cache, self.specs, packed.batch)
        parts = single_parts = whole = None
        if self.scans is not None and storage is not None:
            whole = Pass(PackedStates(storage, packed.rows, self.scans), packed.positions, 0)
        if self.mixers and (whole is None or self.is_split):
            make = functools.partial(make_parts, packed, backend, cache, storage, self.view.model.dtype)
            parts = make()
            single_parts = make(one_by_one=True) if any(mixer.is_single for mixer in self.mixers) else None
        adapted = adapted_rows(packed, [records[index] for index in packed.order]) if has_adapters else ()
        answering = Pass(handler, packed.positions, 0, parts, single_parts, whole, adapted)
        self._lengths = packed.lengths
        try:
            return self._answered(packed.input_ids, packed.logit_rows, answering)
        finally:
            self._lengths = None

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        handler: Handler,
        past: Any = 0,
        call: Callable[..., Any] | None = None,
    ) -> Tensor:
        """Run the view once, or what is called in its place. input_ids, positions [1, T], logit_rows [N] -> [N, V]."""
        return self._answered(input_ids, logit_rows, Pass(handler, positions, past), call)

    def _answered(
        self, input_ids: Tensor, logit_rows: Tensor, answering: Pass, call: Callable[..., Any] | None = None
    ) -> Tensor:
        positions = answering.positions
        values: dict[str, Any] = {"use_cache": self._gets_cache}
        if self._gets_cache:
            values[self._cache_argument] = self._cache
        if self._takes_positions:
            values["position_ids"] = positions
        if self._takes_logit_rows:
            values["logits_to_keep"] = logit_rows
        if self._counts_by_cache:
            # Such models add the length to 0, 1, 2, ...: what is added here makes the packed positions of it.
            past = positions[0] - torch.arange(positions.shape[1], device=positions.device)
            answering = answering._replace(past=past)
        with entered(answering):
            logits: Tensor = (self.view.model if call is None else call)(
                input_ids=input_ids, **values
            ).logits  # [1, N, V]
        if not self._takes_logit_rows:
            logits = logits.index_select(1, logit_rows)
        return logits[0]


def _refusal(model: PreTrainedModel, reason: str) -> str:
    return (
        f"{type(model).__name__} cannot be run in packed batches: {reason.rstrip('.')}. "
        "The model's own generate() runs it, one batch at a time"
    )
