"""`generate_batch` and its relatives on tiny models: results, settings, and what is left as it was found."""

from __future__ import annotations

import copy
import logging
from typing import Any, ClassVar

import pytest
import torch
from transformers import ContinuousBatchingConfig

from aiocb.compat import transformers as compat
from aiocb.compat.transformers import RequestStatus
from aiocb.compat.transformers.hosting import engine_config, kept_manager
from aiocb.config import EngineConfig
from aiocb.errors import ConfigError, InvalidRequest
from tests.compat.conftest import make_gemma2
from tests.compat.helpers import generation

PROMPTS = [[1, 2, 3, 4, 5], [7, 8], [1, 2, 3, 4, 9, 10, 11], [30]]


def plain(model: Any, prompt: list[int], count: int, **options: Any) -> list[int]:
    """What the model's own `generate` produces."""
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=options.pop("eos_token_id", None),
            **options,
        )
    result: list[int] = ids[0, len(prompt) :].tolist()
    return result


def check(model: Any, outputs: dict[str, Any], count: int) -> None:
    assert [one.prompt_ids for one in outputs.values()] == PROMPTS
    assert [one.generated_tokens for one in outputs.values()] == [plain(model, one, count) for one in PROMPTS]


class TestResults:
    def test_equal_generate(self, model: Any) -> None:
        check(model, compat.generate_batch(model, PROMPTS, generation(max_new_tokens=12)), 12)

    def test_equal_generate_with_sliding_windows(self, vocab_size: int) -> None:
        model = make_gemma2(vocab_size)
        outputs = compat.generate_batch(model, PROMPTS, generation(max_new_tokens=24, eos_token_id=-1))
        check(model, outputs, 24)

    def test_equal_generate_with_penalties(self, model: Any) -> None:
        config = generation(max_new_tokens=12, repetition_penalty=1.3, no_repeat_ngram_size=2)
        outputs = compat.generate_batch(model, PROMPTS, config)
        want = [plain(model, one, 12, repetition_penalty=1.3, no_repeat_ngram_size=2) for one in PROMPTS]
        assert [one.generated_tokens for one in outputs.values()] == want

    def test_equal_generate_with_further_processors(self, model: Any) -> None:
        banned = plain(model, PROMPTS[0], 3)
        config = generation(
            max_new_tokens=10, suppress_tokens=banned, begin_suppress_tokens=[5], sequence_bias=[[[6], 2.0]]
        )
        outputs = compat.generate_batch(model, PROMPTS, config)
        want = [
            plain(model, one, 10, suppress_tokens=banned, begin_suppress_tokens=[5], sequence_bias=[[[6], 2.0]])
            for one in PROMPTS
        ]
        assert [one.generated_tokens for one in outputs.values()] == want

    def test_ends_with_the_eos_of_the_config(self, model: Any) -> None:
        tokens = plain(model, PROMPTS[0], 12)
        eos = tokens[5]
        outputs = compat.generate_batch(model, [PROMPTS[0]], generation(max_new_tokens=12, eos_token_id=eos))
        assert next(iter(outputs.values())).generated_tokens == tokens[: tokens.index(eos) + 1]

    def test_min_length(self, model: Any) -> None:
        eos = plain(model, PROMPTS[0], 2)[1]
        config = generation(max_new_tokens=12, eos_token_id=eos, min_length=len(PROMPTS[0]) + 6)
        output = next(iter(compat.generate_batch(model, [PROMPTS[0]], config).values()))
        assert len(output.generated_tokens) >= 6 and eos not in output.generated_tokens[:6]

    def test_without_a_config_the_models_own_counts(self, model: Any) -> None:
        model.generation_config = generation(max_new_tokens=7, eos_token_id=-1)
        outputs = compat.generate_batch(model, PROMPTS)
        check(model, outputs, 7)

    def test_a_given_config_stands_for_itself(self, model: Any) -> None:
        # The reference does not mix in what the model's own config says.
        model.generation_config = generation(do_sample=True, temperature=5.0, max_new_tokens=3)
        check(model, compat.generate_batch(model, PROMPTS, generation(max_new_tokens=7)), 7)

    def test_a_temperature_without_do_sample_is_greedy(self, model: Any) -> None:
        check(model, compat.generate_batch(model, PROMPTS, generation(max_new_tokens=7, temperature=5.0)), 7)

    def test_keywords_are_for_all(self, model: Any) -> None:
        config = generation(max_new_tokens=7, do_sample=True, temperature=9.0)
        check(model, compat.generate_batch(model, PROMPTS, config, temperature=0.0, max_new_tokens=4), 4)
        with pytest.raises(InvalidRequest, match="temprature"):
            compat.generate_batch(model, PROMPTS, config, temprature=0.0)

    def test_seeded_sampling_repeats(self, model: Any) -> None:
        config = generation(max_new_tokens=10, do_sample=True, temperature=1.5, num_return_sequences=2)
        runs = []
        for _ in range(2):
            state = torch.get_rng_state()
            outputs = compat.generate_batch(model, PROMPTS[:2], config, ContinuousBatchingConfig(seed=3))
            assert torch.equal(state, torch.get_rng_state())  # nobody else's random numbers are touched
            runs.append([one.generated_tokens for one in outputs.values()])
        assert runs[0] == runs[1]
        assert list(outputs) == ["req_0", "req_0__child#0", "req_1", "req_1__child#0"]
        assert len({tuple(tokens) for tokens in runs[0]}) == 4

    def test_one_bad_prompt_fails_alone(self, model: Any, caplog: pytest.LogCaptureFixture) -> None:
        outputs = list(compat.generate_batch(model, [[1], [10**6], []], generation(max_new_tokens=3)).values())
        assert [one.status for one in outputs] == [
            RequestStatus.FINISHED,
            RequestStatus.FAILED,
            RequestStatus.FAILED,
        ]
        assert "2 of 3 requests failed" in caplog.text

    def test_no_prompts(self, model: Any) -> None:
        assert compat.generate_batch(model, []) == {}

    @pytest.mark.parametrize("inputs", ["text", [1, 2, 3]])
    def test_not_a_batch(self, model: Any, inputs: Any) -> None:
        with pytest.raises(InvalidRequest):
            compat.generate_batch(model, inputs)

    def test_what_a_tokenizer_returns(self, model: Any) -> None:
        width = max(map(len, PROMPTS))
        ids = torch.tensor([[0] * (width - len(one)) + one for one in PROMPTS])
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in PROMPTS])
        config = generation(max_new_tokens=4)
        check(model, compat.generate_batch(model, {"input_ids": ids, "attention_mask": mask}, config), 4)
        check(model, compat.generate_batch(model, ids, config, attention_mask=mask), 4)
        with pytest.raises(InvalidRequest, match="rows"):
            compat.generate_batch(model, ids, config, attention_mask=mask[:1])

    def test_progress_bar_and_timestamps(self, model: Any, capsys: pytest.CaptureFixture[str]) -> None:
        outputs = compat.generate_batch(
            model, PROMPTS, generation(max_new_tokens=3), progress_bar=True, record_timestamps=True
        )
        assert "Solving 4 requests" in capsys.readouterr().err
        assert all(len(one.timestamps or ()) == 3 for one in outputs.values())


class TestLogprobs:
    def distribution(self, model: Any, tokens: list[int], temperature: float, top_k: int | None) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(torch.tensor([tokens])).logits[0, -1].float() / temperature
        if top_k is not None:
            logits[logits < logits.topk(top_k).values[-1]] = float("-inf")
        return logits.log_softmax(-1)

    @pytest.mark.parametrize(("temperature", "top_k"), [(None, None), (0.7, None), (0.7, 5)])
    def test_are_those_of_the_processed_distribution(
        self, model: Any, temperature: float | None, top_k: int | None
    ) -> None:
        sampled = {} if temperature is None else {"do_sample": True, "temperature": temperature, "top_k": top_k}
        config = generation(max_new_tokens=5, **sampled)
        outputs = compat.generate_batch(model, PROMPTS, config, ContinuousBatchingConfig(return_logprobs=True, seed=1))
        for output in outputs.values():
            assert len(output.logprobs) == 5
            tokens = list(output.prompt_ids)
            for token, logprob in zip(output.generated_tokens, output.logprobs):
                want = self.distribution(model, tokens, temperature or 1.0, top_k)[token]
                assert logprob == pytest.approx(float(want), abs=1e-4)
                tokens.append(token)

    def test_off(self, model: Any) -> None:
        outputs = compat.generate_batch(model, PROMPTS, generation(max_new_tokens=2))
        assert all(one.logprobs == [] for one in outputs.values())


class TestLeftAsFound:
    def test_configs(self, model: Any) -> None:
        given = generation(max_new_tokens=3)
        settings = ContinuousBatchingConfig(max_batch_tokens=256)
        before = (
            given.to_dict(),
            copy.deepcopy(vars(settings)),
            model.config.to_dict(),
            model.generation_config.to_dict(),
        )
        compat.generate_batch(model, PROMPTS, given, settings)
        compat.generate_batch(model, PROMPTS, None, settings, max_new_tokens=2)
        after = given.to_dict(), vars(settings), model.config.to_dict(), model.generation_config.to_dict()
        assert before == after
        assert given.eos_token_id is None

    def test_attention_and_attributes(self, model: Any) -> None:
        names = set(vars(model))
        implementation = model.config._attn_implementation
        with compat.continuous_batching_context_manager(model, generation(max_new_tokens=3)) as manager:
            manager.add_requests(PROMPTS)
            assert len(list(manager)) == 4
            with manager.pause():
                assert model.config._attn_implementation == implementation
        assert model.config._attn_implementation == implementation
        assert set(vars(model)) == names
        model(torch.tensor([[1, 2]])).logits.sum().backward()

    def test_training_mode(self, model: Any) -> None:
        config = generation(max_new_tokens=3)
        wanted = compat.generate_batch(model, PROMPTS, config)
        model.config.attention_dropout = 0.5
        model.train()
        model.model.layers[0].eval()
        modes = {name: module.training for name, module in model.named_modules()}
        for settings in (EngineConfig(), EngineConfig(native=False)):
            with compat.ContinuousBatchingManager(model, config, settings) as manager:
                manager.add_requests(PROMPTS)
                outputs = {str(PROMPTS.index(one.prompt_ids)): one.generated_tokens for one in manager}
                assert [outputs[key] for key in sorted(outputs)] == [one.generated_tokens for one in wanted.values()]
                assert {name: module.training for name, module in model.named_modules()} == modes
            manager.destroy()
        assert {name: module.training for name, module in model.named_modules()} == modes

    def test_deep_copies_of_an_enabled_model_are_their_own(self, model: Any) -> None:
        compat.enable(model)
        compat.generate_batch(model, PROMPTS, generation(max_new_tokens=2), persistent_manager=True)
        other = copy.deepcopy(model)
        assert kept_manager(other) is None
        assert other.generate_batch.__self__ is other
        model.destroy_cached_continuous_batching_manager()


class TestPersistentManagers:
    def test_are_used_again_with_the_config_of_the_call(self, model: Any) -> None:
        compat.generate_batch(model, PROMPTS, generation(max_new_tokens=2), persistent_manager=True)
        manager = kept_manager(model)
        assert manager is not None and not manager.is_running()
        assert compat.init_continuous_batching(model) is manager
        check(model, compat.generate_batch(model, PROMPTS, generation(max_new_tokens=6), persistent_manager=True), 6)
        assert kept_manager(model) is manager
        compat.destroy_cached_continuous_batching_manager(model)
        compat.destroy_cached_continuous_batching_manager(model)
        assert kept_manager(model) is None

    def test_other_settings_replace_them(self, model: Any) -> None:
        settings = ContinuousBatchingConfig(max_batch_tokens=64)
        compat.generate_batch(model, PROMPTS, generation(max_new_tokens=2), settings, persistent_manager=True)
        manager = kept_manager(model)
        same = compat.init_continuous_batching(model, None, ContinuousBatchingConfig(max_batch_tokens=64))
        assert same is manager
        other = compat.init_continuous_batching(model, None, ContinuousBatchingConfig(max_batch_tokens=128))
        assert other is not manager and kept_manager(model) is None
        with pytest.raises(RuntimeError, match="destroyed"):
            assert manager is not None
            manager.start()
        other.destroy()

    def test_without_persistence_the_kept_one_goes(self, model: Any) -> None:
        compat.generate_batch(model, PROMPTS, generation(max_new_tokens=2), persistent_manager=True)
        compat.generate_batch(model, PROMPTS, generation(max_new_tokens=2))
        assert kept_manager(model) is None

    def test_see_new_weights(self, model: Any) -> None:
        config = generation(max_new_tokens=6)
        prompts = [list(range(1, 65))]
        compat.generate_batch(model, prompts, config, persistent_manager=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data.add_(torch.randn_like(parameter) * 0.3)
        output = next(iter(compat.generate_batch(model, prompts, config).values()))
        assert output.generated_tokens == plain(model, prompts[0], 6)

    def test_a_running_one_is_shared_and_left_running(self, model: Any) -> None:
        config = generation(max_new_tokens=3)
        compat.generate_batch(model, PROMPTS, config, persistent_manager=True)
        manager = compat.init_continuous_batching(model, config)
        manager.start()
        manager.add_request([1, 2], "mine")
        check(model, compat.generate_batch(model, PROMPTS, config), 3)
        assert manager.is_running()
        assert [one.request_id for one in manager] == ["mine"]
        manager.destroy()


class TestTwoOnOneModel:
    """Each has a runner of its own: nothing of the one is in the other, whichever goes first."""

    SAMPLED: ClassVar[dict[str, Any]] = {"do_sample": True, "temperature": 1.5}

    def test_one_after_the_other_with_other_configs(self, model: Any) -> None:
        settings = ContinuousBatchingConfig(seed=3)
        greedy, sampled = generation(max_new_tokens=8), generation(max_new_tokens=8, **self.SAMPLED)
        expected = [one.generated_tokens for one in compat.generate_batch(model, PROMPTS, sampled, settings).values()]
        for native in (None, False):
            first = compat.ContinuousBatchingManager(model, greedy, EngineConfig(native=native, seed=3))
            with first:
                first.add_requests(PROMPTS)
                assert len(list(first)) == 4
            check(model, compat.generate_batch(model, PROMPTS, greedy, EngineConfig(native=native)), 8)
            outputs = compat.generate_batch(model, PROMPTS, sampled, EngineConfig(native=native, seed=3))
            assert [one.generated_tokens for one in outputs.values()] == expected
            first.generation_config = sampled
            with first:  # its second life
                first.add_requests(PROMPTS)
                found = {tuple(one.prompt_ids): one.generated_tokens for one in first}
                assert [found[tuple(one)] for one in PROMPTS] == expected
            first.destroy()

    def test_at_the_same_time(self, model: Any) -> None:
        config = generation(max_new_tokens=30)
        settings = {"one": EngineConfig(native=False), "two": EngineConfig()}
        one, two = (compat.ContinuousBatchingManager(model, config, settings[name]) for name in ("one", "two"))
        one.start()
        two.start()
        two.add_requests(PROMPTS)
        one.add_requests(PROMPTS)
        one.destroy()
        check(model, {str(n): two.get_result(f"req_{n}") for n in range(4)}, 30)
        two.destroy()
        check(model, {str(n): one.get_result(f"req_{n}") for n in range(4)}, 30)


class TestPause:
    def test_weights_changed_inside_count_afterwards(self, model: Any) -> None:
        prompt = list(range(1, 65))
        with compat.continuous_batching_context_manager(model, generation(max_new_tokens=6)) as manager:
            manager.add_request(prompt)
            before = [one.generated_tokens for one in manager]
            with manager.pause() as held, torch.no_grad():
                assert held is model
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.3)
            manager.add_request(prompt)
            after = [one.generated_tokens for one in manager]
        assert before != after
        assert after == [plain(model, prompt, 6)]


class TestContextManager:
    def test_an_exception_does_not_wait_for_the_rest(self, model: Any) -> None:
        with (
            pytest.raises(KeyError),
            compat.continuous_batching_context_manager(model, generation(max_new_tokens=900)) as manager,
        ):
            manager.add_request([1, 2], "a", eos_token_id=-1)
            raise KeyError
        output = manager.get_result("a")
        assert output is not None and output.status is RequestStatus.FAILED

    def test_without_blocking_the_requests_still_finish(self, model: Any) -> None:
        with compat.continuous_batching_context_manager(model, generation(max_new_tokens=20), block=False) as manager:
            manager.add_request([1, 2], "a")
        output = manager.get_result("a")
        assert output is not None and output.generated_tokens == plain(model, [1, 2], 20)
        manager.destroy()


class TestEnable:
    def test_puts_the_methods_on_a_model(self, model: Any) -> None:
        assert compat.enable(model) is model
        check(model, model.generate_batch(PROMPTS, generation(max_new_tokens=3)), 3)
        manager = model.init_continuous_batching(generation(max_new_tokens=3))
        assert isinstance(manager, compat.ContinuousBatchingManager)

    def test_auto_class(self, model: Any) -> None:
        built = compat.AutoModelForCausalLM.from_config(model.config, attn_implementation="flash_attention_2")
        assert built.generate_batch.__func__ is compat.generate_batch

    def test_other_names_are_those_of_transformers(self) -> None:
        import transformers

        import aiocb.compat.transformers.generation as theirs

        assert compat.LlamaConfig is transformers.LlamaConfig
        assert theirs.GenerationConfig is transformers.GenerationConfig
        assert theirs.LogitsProcessor is transformers.LogitsProcessor
        assert theirs.ContinuousBatchingManager is compat.ContinuousBatchingManager
        assert "generate_batch" in dir(compat)
        with pytest.raises(AttributeError):
            compat.__nothing__
        with pytest.raises(AttributeError):
            theirs.__nothing__


class TestSettings:
    def test_every_field_of_the_reference_that_exists_here(self) -> None:
        settings = ContinuousBatchingConfig(
            page_size=32,
            num_blocks=10,
            max_batch_tokens=512,
            max_queue_size=5,
            scheduler_type="prefill_first",
            cpu_offload_space=None,
            cpu_group_timeout=None,
            seed=7,
        )
        config = EngineConfig.from_transformers(settings)
        assert (config.page_size, config.num_blocks, config.max_batch_tokens) == (32, 10, 512)
        assert (config.max_queue_size, config.scheduler_type, config.seed) == (5, "prefill_first", 7)
        # None is a choice of its own for these two.
        assert config.cpu_offload_space is None and config.cpu_group_timeout is None

    def test_defaults_of_the_reference_are_no_choices(self) -> None:
        assert EngineConfig.from_transformers(ContinuousBatchingConfig()) == EngineConfig()

    def test_what_has_no_effect_is_warned_of_by_name(self, model: Any, caplog: pytest.LogCaptureFixture) -> None:
        settings = ContinuousBatchingConfig(use_cuda_graph=True, cpu_group_timeout=8.0, max_batch_tokens=64)
        manager = compat.init_continuous_batching(model, None, settings)
        assert [record.args[0] for record in caplog.records] == ["use_cuda_graph"]  # type: ignore[index]
        assert manager.config == EngineConfig(cpu_group_timeout=8.0, max_batch_tokens=64)
        with pytest.raises(ConfigError, match="use_cuda_graph"):
            compat.init_continuous_batching(model, None, EngineConfig(use_cuda_graph=True))

    def test_an_engine_config_is_taken_as_it_is(self, model: Any) -> None:
        config = EngineConfig(max_prefill_chunk=4)
        assert compat.init_continuous_batching(model, None, config).config is config

    @pytest.mark.parametrize(("implementation", "attention"), [("eager", "eager"), ("sdpa", "sdpa")])
    def test_attention_is_kept_when_asked(self, model: Any, implementation: str, attention: str) -> None:
        model.set_attn_implementation(implementation)
        assert engine_config(model, None, ContinuousBatchingConfig(auto_switch_to_flash=False)).attention == attention
        assert engine_config(model, None, ContinuousBatchingConfig()).attention is None

    def test_an_unknown_scheduler_is_refused(self, model: Any) -> None:
        with pytest.raises(ConfigError, match="scheduler_type"):
            compat.init_continuous_batching(model, None, ContinuousBatchingConfig(scheduler_type="lifo"))

    def test_settings_on_a_generation_config(self, model: Any) -> None:
        config = generation(max_new_tokens=2)
        config.continuous_batching_config = ContinuousBatchingConfig(max_batch_tokens=64)
        with pytest.warns(FutureWarning, match="deprecated"):
            manager = compat.init_continuous_batching(model, config)
        assert manager.config.max_batch_tokens == 64

    def test_beams_are_refused(self, model: Any) -> None:
        with pytest.raises(ConfigError, match="num_beams"):
            compat.init_continuous_batching(model, generation(num_beams=2))

    def test_what_cannot_be_honoured(self, model: Any, caplog: pytest.LogCaptureFixture) -> None:
        config = generation(max_new_tokens=2, guidance_scale=2.0, stop_strings=["x"])
        with caplog.at_level(logging.WARNING, "aiocb"):
            compat.init_continuous_batching(model, config)
        assert "stop_strings" in caplog.text and "guidance_scale" in caplog.text
        with pytest.raises(ConfigError, match="stop_strings"):
            compat.init_continuous_batching(model, config, ContinuousBatchingConfig(drop_unsupported_processors=False))


class TestPerRequestSampling:
    def test_greedy_and_sampled_in_one_batch(self, model: Any) -> None:
        with compat.continuous_batching_context_manager(model, generation(max_new_tokens=8)) as manager:
            for n in range(3):
                manager.add_request(PROMPTS[0], f"hot{n}", temperature=2.0, seed=n)
            manager.add_request(PROMPTS[0], "zero", temperature=0)  # a division by zero in the reference
            manager.add_request(PROMPTS[0], "int", temperature=1, top_k=1)  # a type error in the reference
            manager.add_request(PROMPTS[0], "off", temperature=2.0, top_k=0, seed=0)  # greedy in the reference
            results = {one.request_id: one.generated_tokens for one in manager}
        want = plain(model, PROMPTS[0], 8)
        assert results["zero"] == results["int"] == want
        assert results["off"] == results["hot0"]
        assert len({tuple(results[f"hot{n}"]) for n in range(3)}) == 3

    def test_a_request_may_sample_where_the_config_says_greedy(self, model: Any) -> None:
        config = generation(max_new_tokens=8, do_sample=False)
        with compat.continuous_batching_context_manager(model, config) as manager:
            manager.add_request(PROMPTS[0], "greedy")
            manager.add_request(PROMPTS[0], "hot", temperature=5.0, seed=1)
            results = {one.request_id: one.generated_tokens for one in manager}
        assert results["greedy"] == plain(model, PROMPTS[0], 8) != results["hot"]
