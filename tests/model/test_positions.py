"""How far positions go, and what is counted from them: lengths at which a batch would change, temperatures, tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiocb import Engine
from aiocb.config import EngineConfig
from aiocb.errors import ConfigError
from aiocb.model.eager.adapter import ModelAdapter
from aiocb.model.eager.positions import sequence_bound
from aiocb.model.eager.runner import TorchRunner
from aiocb.model.native.families import describe
from aiocb.step import LengthSwitch
from tests.steps import described

from .helpers import ManualScheduler, argmax_sampler, generate, prompt, tiny

pytestmark = pytest.mark.slow

FACTORS = [1.0 + index / 4 for index in range(8)]
LONG = {
    "rope_type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS[::-1], "rope_theta": 1e4,
    "original_max_position_embeddings": 64,
}  # fmt: skip
SHORT: dict[str, Any] = {"rope_parameters": LONG}
PHI: dict[str, Any] = {"rope_parameters": LONG, "original_max_position_embeddings": 64}
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
    def test_of_the_configuration(self) -> None:
        assert sequence_bound(tiny("llama").config) == (512, "max_position_embeddings of the model")
        assert sequence_bound(tiny("phi3", **PHI).config)[0] == 512
        length, reason = sequence_bound(tiny("llama", rope_parameters=DYNAMIC).config)
        assert length == 2048 and "stretched" in reason

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


class TestRotation:
    """It changes with the length: per request, and as `generate` has it."""

    MIXED: tuple[tuple[str, dict[str, Any]], ...] = (
        ("llama", SHORT),
        ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 64}),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": DEFAULT, "full_attention": LONG}}),
    )

    @pytest.mark.parametrize("native", [False, None])
    @pytest.mark.parametrize(("name", "values"), MIXED)
    def test_keys_stay_what_they_are(self, name: str, values: dict[str, Any], native: bool | None) -> None:
        model = tiny(name, **values)
        assert "rotary" in str(describe(model))
        wanted = []
        lengths = (57, 64, 65, 90)
        for length in lengths:
            generate(model, prompt(3), 1)  # takes a dynamic rotation back to where it began
            wanted.append(generate(model, prompt(length), 14))
        assert run(model, *lengths, num_new=14, native=native) == wanted

    def test_keys_of_a_request_are_computed_anew(self) -> None:
        switch = ModelAdapter(tiny("phi3", **PHI)).switch
        assert switch == LengthSwitch(64, is_recomputed=True)
        model = tiny("phi3", **PHI)
        assert run(model, 64, 65, 90, num_new=1) == [generate(model, prompt(length), 1) for length in (64, 65, 90)]
        assert run(model, 30, 50, num_new=14) == [generate(model, prompt(length), 14) for length in (30, 50)]

    def test_two_lengths_bound(self) -> None:
        phi: Any = tiny("phi3", **PHI)
        phi.config.original_max_position_embeddings = 100
        bound, reason = ModelAdapter(phi).length_bound
        assert bound == 64 and "starts over" in reason
        other = {**LONG, "original_max_position_embeddings": 100}
        model = tiny("gemma3_text", rope_parameters={"sliding_attention": LONG, "full_attention": other})
        bound, reason = ModelAdapter(model).length_bound
        assert bound == 64 and "some layers" in reason
        assert run(model, 9, 30) == [generate(model, prompt(length), 12) for length in (9, 30)]

    def test_the_view_is_left_as_it_was(self) -> None:
        model = tiny("llama", rope_parameters=DYNAMIC, max_position_embeddings=64)
        model(torch.tensor([prompt(200)]))  # the owner's has grown
        runner = TorchRunner(model, EngineConfig(num_blocks=64, native=False), argmax_sampler, max_model_len=256)
        for length in (64, 100, 64, 30, 80):
            scheduler = ManualScheduler(runner)
            scheduler.add(prompt(length), 5)
            generate(model, prompt(3), 1)
            assert scheduler.run() == [generate(model, prompt(length), 5)]

    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        ("name", "values", "settings"),
        [("phi3", PHI, {}), ("phi3", PHI, {"num_blocks": 16}), (*MIXED[0], {}), (*MIXED[1], {"max_prefill_chunk": 16})],
    )
    async def test_through_an_engine(self, name: str, values: dict[str, Any], settings: dict[str, Any]) -> None:
        """Prompts of both kinds share prefixes, and requests get longer than the length while others run."""
        model, base = tiny(name, **values), prompt(100)
        prompts = [base[:length] for length in (63, 65, 100, 60, 98, 65)]
        wanted = []
        for tokens in prompts:
            generate(model, prompt(3), 1)
            wanted.append(generate(model, tokens, 8))
        options: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 8}
        async with Engine(model, config=EngineConfig(debug_checks=True, **settings)) as engine:
            for tokens, expected in zip(prompts, wanted, strict=True):
                assert list((await engine.generate(tokens, **options)).token_ids) == expected
            completions = await engine.generate_batch(prompts, **options)
            assert [list(completion.token_ids) for completion in completions] == wanted
            assert engine.stats().prefix_cache_hits > 0


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
