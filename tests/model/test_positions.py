"""How far positions go, and what is counted from them: lengths at which a batch would change, temperatures, tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiocb.config import EngineConfig
from aiocb.errors import ConfigError
from aiocb.model.eager.adapter import ModelAdapter
from aiocb.model.eager.positions import sequence_bound
from aiocb.model.eager.runner import TorchRunner
from aiocb.model.native.families import describe
from tests.steps import described

from .helpers import ManualScheduler, argmax_sampler, generate, prompt, tiny

FACTORS = [1.0 + index / 4 for index in range(8)]
LONG = {
    "rope_type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS[::-1], "rope_theta": 1e4,
    "original_max_position_embeddings": 64,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
TEMPERATURES: dict[str, Any] = {
    "no_rope_layers": [1, 0],
    "layer_types": ["chunked_attention", "full_attention"],
    "floor_scale": 16,
    "attn_scale": 8.0,
}


def run(model: Any, *lengths: int, num_new: int = 12, **config: Any) -> list[list[int]]:
    values = {"num_blocks": 64, "native": False, **config}
    runner = TorchRunner(model, EngineConfig(**values), argmax_sampler, max_model_len=512)
    scheduler = ManualScheduler(runner, chunk=9)
    for index, length in enumerate(lengths):
        scheduler.add(prompt(length), num_new, start_step=index)
    return scheduler.run()


class TestBounds:
    @pytest.mark.parametrize(("rope", "bound"), [(DYNAMIC, 512), (LONG, 64)])
    def test_one_type_of_layers_is_enough(self, rope: dict[str, Any], bound: int) -> None:
        model = tiny("gemma3_text", rope_parameters={"sliding_attention": DEFAULT, "full_attention": rope})
        length, reason = sequence_bound(model.config)
        assert length == bound and "rotation" in reason
        assert ModelAdapter(model).length_bound[0] == bound
        assert "rotary" in str(describe(model))
        assert run(model, 9, 30) == [generate(model, prompt(length), 12) for length in (9, 30)]

    def test_all_layers(self) -> None:
        assert sequence_bound(tiny("llama", rope_parameters=DYNAMIC).config)[0] == 512
        assert sequence_bound(tiny("llama").config) == (512, "max_position_embeddings of the model")
        phi = tiny("phi3", rope_parameters=LONG, original_max_position_embeddings=64)
        assert sequence_bound(phi.config)[0] == 64

    def test_rows_of_a_table(self) -> None:
        bound, reason = ModelAdapter(tiny("roberta", is_decoder=True, pad_token_id=3)).length_bound
        assert bound == 512 - 4 and "table" in reason
        model = tiny("whisper", max_target_positions=100, decoder_layers=2, d_model=64, decoder_attention_heads=4)
        assert ModelAdapter(model).length_bound[0] == 100

    def test_the_runner_says_so(self) -> None:
        runner = TorchRunner(
            tiny("doge", keep_window_size=32), EngineConfig(num_blocks=64), argmax_sampler, max_model_len=512
        )
        assert runner.max_model_len == 32
        assert "keep_window_size" in described(runner)["max_model_len"]


class TestTemperatures:
    """Llama 4 scales queries by positions that its layers count from the length of the cache."""

    def test_they_count_from_the_start_of_each_request(self) -> None:
        model = tiny("llama4_text", attention_chunk_size=256, **TEMPERATURES)
        flat = tiny("llama4_text", attention_chunk_size=256, **{**TEMPERATURES, "attn_scale": 0.0})
        wanted = [generate(model, prompt(length), 12) for length in (5, 19, 50)]
        assert wanted != [generate(flat, prompt(length), 12) for length in (5, 19, 50)]
        assert run(model, 5, 19, 50) == wanted
        assert run(model, 5, 19, 50, native=None) == wanted

    @pytest.mark.parametrize("chunk", [8, 12, 32])
    @pytest.mark.parametrize("backend", [None, "reference"])
    def test_far_beyond_the_chunk(self, chunk: int, backend: str | None) -> None:
        model = tiny("llama4_text", attention_chunk_size=chunk, **TEMPERATURES)
        lengths = (chunk - 1, chunk, chunk + 1, 5, 90)
        wanted = [generate(model, prompt(length), 2 * chunk) for length in lengths]
        assert run(model, *lengths, num_new=2 * chunk, attention=backend, num_blocks=128, page_size=4) == wanted

    def test_other_uses_of_the_length_are_refused(self) -> None:
        model: Any = tiny("llama")
        attention = model.model.layers[1].self_attn
        own = attention.forward

        def patched(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            cache = kwargs.get("cache")
            length = 0 if cache is None else cache.get_seq_length(1)
            return own(hidden_states * (1.0 if length < 100 else 2.0), *args, **kwargs)

        attention.forward = patched
        with pytest.raises(ConfigError, match="length of its cache|dry run failed"):
            ModelAdapter(model)


class TestDoge:
    """Adds a bias by key to its scores, and hides keys only beyond its window."""

    def model(self, **changes: Any) -> Any:
        values = {"sliding_window": None, "keep_window_size": 100, **changes}
        model = tiny("doge", **values)
        for name, parameter in model.named_parameters():
            if name.endswith(".A"):
                parameter.data.normal_(0.0, 1.0)
        return model

    @pytest.mark.parametrize("backend", [None, "eager", "reference"])
    def test_many_requests_within_the_window(self, backend: str | None) -> None:
        model = self.model()
        lengths = (30, 41, 19, 33)  # together more than the window
        assert run(model, *lengths, attention=backend) == [generate(model, prompt(length), 12) for length in lengths]

    def test_beyond_the_window(self) -> None:
        bound, reason = ModelAdapter(self.model()).length_bound
        assert bound == 100 and "keep_window_size" in reason

    def test_a_sliding_window_is_seen(self) -> None:
        model = self.model(sliding_window=8)
        assert {spec.window for spec in ModelAdapter(model).specs.values()} == {8}
        assert run(model, 30, 5) == [generate(model, prompt(length), 12) for length in (30, 5)]
