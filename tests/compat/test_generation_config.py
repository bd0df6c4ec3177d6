"""The generation config of a manager: whose it is, when it is read, and what it says that cannot be had."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig

from aiocb.compat import transformers as compat
from aiocb.config import EngineConfig
from aiocb.errors import ConfigError, InvalidRequest
from tests.compat.helpers import EOS, MAX_LEN, VOCAB, Setup, expected, generation, running

PROMPT = [1, 2, 3, 4, 5]


def lengths(setup: Setup, **options: Any) -> list[int]:
    setup.manager.add_request([1], **options)
    return [len(one.generated_tokens) for one in setup.manager]


class TestWhoseItIs:
    def test_it_is_the_callers_own_object(self, model: Any) -> None:
        config = generation(max_new_tokens=4, eos_token_id=EOS)
        assert Setup(generation=config).manager.generation_config is config
        assert compat.init_continuous_batching(model).generation_config is model.generation_config

    def test_it_is_never_changed_by_us(self, model: Any) -> None:
        config = generation(max_new_tokens=4, do_sample=True, num_return_sequences=2, suppress_tokens=[3])
        before = copy.deepcopy(vars(config))
        manager = compat.init_continuous_batching(model, config)
        manager.num_return_sequences = 3
        manager.logit_processor.clear()
        manager.generation_config = generation(max_new_tokens=2)
        manager.generation_config = config
        with manager:
            manager.add_request(PROMPT, temperature=0.3, max_new_tokens=3, eos_token_id=5)
            assert len(list(manager)) == 2
        assert vars(config) == before
        manager.destroy()


class TestWhatIsWritten:
    def test_what_is_changed_in_it_counts_for_requests_to_come(self) -> None:
        config = generation(max_new_tokens=4, eos_token_id=EOS)
        setup = Setup(generation=config)
        with running(setup) as manager:
            assert lengths(setup) == [4] and manager.generation_config is not None
            manager.generation_config.max_new_tokens = 6
            assert lengths(setup) == [6]
            config.max_new_tokens = 2  # it is the same object
            assert lengths(setup) == [2]
            manager.generation_config.eos_token_id = [next_one := expected([1], 1)[0], EOS]
            manager.generation_config.max_new_tokens = 9
            assert lengths(setup) == [1]
            config.eos_token_id[0] = VOCAB - 1  # in place
            assert next_one != VOCAB - 1 and lengths(setup) == [9]

    def test_what_is_assigned_counts_for_requests_to_come(self) -> None:
        setup = Setup(generation=generation(max_new_tokens=4, eos_token_id=EOS))
        setup.manager.add_request([1], "before")
        setup.manager.generation_config = generation(
            max_new_tokens=2, do_sample=True, num_return_sequences=2, eos_token_id=EOS
        )
        setup.manager.add_request([1], "after")
        with running(setup) as manager:
            found = {one.request_id: len(one.generated_tokens) for one in manager}
            assert found == {"before": 4, "after": 2, "after__child#0": 2}
            manager.generation_config = None
            assert manager.generation_config is None and lengths(setup) == [MAX_LEN - 1]

    def test_sampling_parameters(self, model: Any) -> None:
        config = generation(max_new_tokens=12, do_sample=True, temperature=5.0)
        with compat.continuous_batching_context_manager(
            model, config, continuous_batching_config=ContinuousBatchingConfig(seed=1)
        ) as manager:
            results = []
            for temperature in (5.0, 1e-6, 5.0):
                assert manager.generation_config is not None
                manager.generation_config.temperature = temperature
                manager.add_request(PROMPT, seed=3)
                results += [one.generated_tokens for one in manager]
            manager.add_request(PROMPT, temperature=0)
            [greedy] = [one.generated_tokens for one in manager]
        assert results[0] == results[2] != results[1] == greedy

    def test_what_cannot_be_had_is_refused_where_it_is_written_or_used(self) -> None:
        config = generation(max_new_tokens=2, eos_token_id=EOS)
        setup = Setup(generation=config)
        with running(setup) as manager:
            with pytest.raises(ConfigError, match="num_beams"):
                manager.generation_config = generation(num_beams=2)
            wrong: Any = {"max_new_tokens": 3}
            with pytest.raises(ConfigError, match="must be a transformers GenerationConfig, not dict"):
                manager.generation_config = wrong
            assert manager.generation_config is config and lengths(setup) == [2]
            config.num_beams = 3
            with pytest.raises(ConfigError, match="num_beams"):
                manager.add_request([1])
            config.num_beams = None
            assert lengths(setup) == [2]

    def test_a_value_without_truth_is_read_every_time(self) -> None:
        config = generation(max_new_tokens=2, eos_token_id=torch.tensor([EOS, 8]))
        setup = Setup(generation=config)
        with running(setup) as manager:
            assert lengths(setup) == [2]
            assert manager.generation_config is config
            config.max_new_tokens = 3
            assert lengths(setup) == [3]

    def test_of_a_batch_in_somebody_elses_session(self, model: Any) -> None:
        theirs = generation(max_new_tokens=9, eos_token_id=-1)
        compat.generate_batch(model, [PROMPT], theirs, persistent_manager=True)
        with compat.continuous_batching_context_manager(model, theirs) as manager:
            outputs = compat.generate_batch(
                model, [PROMPT], generation(max_new_tokens=2, do_sample=True, num_return_sequences=2)
            )
            assert [len(one.generated_tokens) for one in outputs.values()] == [2, 2]
            assert manager.generation_config is theirs and manager.is_running()
        assert [len(one.generated_tokens) for one in compat.generate_batch(model, [PROMPT], theirs).values()] == [9]

    def test_what_a_running_manager_does_not_take_is_said(self, model: Any, caplog: pytest.LogCaptureFixture) -> None:
        compat.generate_batch(model, [PROMPT], generation(max_new_tokens=1), persistent_manager=True)
        with compat.init_continuous_batching(model) as manager:
            caplog.clear()
            assert compat.init_continuous_batching(model) is manager and not caplog.records
            assert compat.init_continuous_batching(model, generation(max_new_tokens=3), EngineConfig()) is manager
            assert "without generation_config and continuous_batching_config" in caplog.text
        manager.destroy()


class TestNumReturnSequences:
    def test_what_was_written_last_counts(self) -> None:
        config = generation(max_new_tokens=2, do_sample=True, num_return_sequences=3, eos_token_id=EOS)
        setup = Setup(generation=config)
        with running(setup) as manager:
            assert manager.num_return_sequences == 3 and len(lengths(setup)) == 3
            manager.num_return_sequences = 2
            assert manager.num_return_sequences == 2 and len(lengths(setup)) == 2
            config.max_new_tokens = 1  # something else
            assert lengths(setup) == [1, 1]
            config.num_return_sequences = 4
            assert manager.num_return_sequences == 4 and len(lengths(setup)) == 4
            assert len(lengths(setup, n=1)) == 1

    @pytest.mark.parametrize("count", [0, -1, 4097, 1.5, "2", True, None])
    def test_others_are_refused(self, count: Any) -> None:
        manager = Setup().manager
        with pytest.raises(InvalidRequest, match="num_return_sequences must be"):
            manager.num_return_sequences = count
        assert manager.num_return_sequences == 1


class TestLogits:
    """`manager.logit_processor`, and sampling that is switched off later: only the choice is greedy then."""

    SETTINGS = ContinuousBatchingConfig(return_logprobs=True, per_request_processors=True)

    def own(self, model: Any, tokens: list[int], count: int, **options: Any) -> tuple[list[int], list[float]]:
        """What `generate` takes, and the log-probabilities of what its processors leave, computed with theirs."""
        config = generation(do_sample=True, **options)
        config._eos_token_tensor = None
        processors = model._get_logits_processor(config, input_ids_seq_length=len(tokens))
        tokens, values = list(tokens), []
        with torch.inference_mode():
            for _ in range(count):
                logits = model(torch.tensor([tokens])).logits[:, -1].float()
                logprobs = processors(torch.tensor([tokens]), logits).log_softmax(-1)[0]
                tokens.append(int(logprobs.argmax()))
                values.append(float(logprobs.max()))
        return tokens[-count:], values

    def test_sampling_switched_off_leaves_its_distribution(self, model: Any) -> None:
        config = generation(max_new_tokens=6, do_sample=True, temperature=3.0, top_k=51, top_p=0.89)
        manager = compat.init_continuous_batching(model, config, self.SETTINGS)
        assert manager.generation_config is not None
        manager.generation_config.do_sample = False
        wanted: dict[str, dict[str, Any]] = {
            "given": {"temperature": 2.0, "top_k": 10, "top_p": 0.9},
            "integer": {"temperature": 2},
            "off": {"temperature": 0, "top_k": -1},
            "own": {},
        }
        with manager:
            for name, options in wanted.items():
                manager.add_request(PROMPT, name, **options)
            manager.add_request(PROMPT, "bad", top_p=3.0)
            results = {one.request_id: one for one in manager}
        base: dict[str, Any] = {"temperature": 3.0, "top_k": 51, "top_p": 0.89}
        wanted["integer"] = {**base, "temperature": 2.0}
        wanted["off"] = {"top_p": 0.89}
        wanted["own"] = base
        for name, options in wanted.items():
            tokens, logprobs = self.own(model, PROMPT, 6, **options)
            assert results[name].generated_tokens == tokens
            assert results[name].logprobs == pytest.approx(logprobs, abs=1e-4)
        assert "top_p" in str(results["bad"].error)
        manager.destroy()

    def test_switched_on_again(self, model: Any) -> None:
        config = generation(max_new_tokens=20, do_sample=True, temperature=5.0)
        with compat.continuous_batching_context_manager(model, config) as manager:
            results = []
            for do_sample in (True, False, False, True):
                config.do_sample = do_sample
                manager.add_request(PROMPT, seed=3)
                results += [one.generated_tokens for one in manager]
        assert results[0] == results[3] != results[1] == results[2]

    def test_clear(self, model: Any) -> None:
        banned = self.own(model, PROMPT, 1)[0]
        config = generation(max_new_tokens=6, suppress_tokens=banned, repetition_penalty=3.0, eos_token_id=-1)
        with compat.continuous_batching_context_manager(model, config) as manager:
            manager.add_request(PROMPT)
            manager.logit_processor.clear()
            manager.add_request(PROMPT)
            before, after = (one.generated_tokens for one in manager)
            assert before[0] not in banned and after == self.own(model, PROMPT, 6)[0]
            manager.add_request(PROMPT, repetition_penalty=3.0)
            assert [one.generated_tokens for one in manager] != [after]

    def test_further_processors_are_for_all_requests_to_come(self, model: Any) -> None:
        def only(token: int) -> Any:
            return lambda _, logits: torch.full_like(logits, -torch.inf).index_fill(-1, torch.tensor([token]), 0.0)

        with compat.continuous_batching_context_manager(model, generation(max_new_tokens=2)) as manager:
            manager.logit_processor.logits_processor.append(only(7))
            manager.add_request(PROMPT, "ours")
            manager.add_request(PROMPT, "its own later", logits_processors=[only(9)])
            results = {one.request_id: one.generated_tokens for one in manager}
            manager.logit_processor.logits_processor.clear()
            manager.add_request(PROMPT, "none")
            results.update({one.request_id: one.generated_tokens for one in manager})
        assert results["ours"] == [7, 7] and results["its own later"] == [9, 9]
        assert results["none"] == self.own(model, PROMPT, 2)[0]


class TestWarnings:
    def test_a_bound_that_does_not_fit_is_said_once_for_each(self, caplog: pytest.LogCaptureFixture) -> None:
        config = generation(max_new_tokens=40, eos_token_id=EOS)
        with running(Setup(generation=config, num_blocks=9)) as manager:  # 8 blocks of 4 tokens
            for _ in range(3):
                manager.add_request([1] * 15)
            assert [len(one.generated_tokens) for one in manager] == [18] * 3
            [message] = [record.getMessage() for record in caplog.records]
            assert "max_new_tokens=40" in message and "leaves room for 18" in message and "num_blocks" in message
            config.max_new_tokens = 18
            manager.add_request([1] * 15)
            config.max_new_tokens = 41
            manager.add_request([1] * 15)
            assert len(list(manager)) == 2
            assert ["max_new_tokens=41" in one.getMessage() for one in caplog.records[1:]] == [True]
            # A bound of its own is refused instead, and what has no bound is not cut.
            manager.add_request([1] * 15, "own", max_new_tokens=42)
            assert "at most 18 fit" in str([one.error for one in manager])
            config.max_new_tokens = None
            manager.add_request([1] * 15)
            assert [len(one.generated_tokens) for one in manager] == [18] and len(caplog.records) == 2

    def test_of_the_models_limit(self, caplog: pytest.LogCaptureFixture) -> None:
        with running(Setup(generation=generation(max_new_tokens=500, eos_token_id=EOS))) as manager:
            manager.add_request([1])
            assert len(list(manager)) == 1
        assert "leaves room for 199 in the model's limit" in caplog.text

    def test_max_length(self, caplog: pytest.LogCaptureFixture) -> None:
        Setup(generation=generation(max_length=10, eos_token_id=EOS))
        assert "max_length" in caplog.text and "set max_new_tokens" in caplog.text
        caplog.clear()
        Setup(generation=generation(max_length=10, max_new_tokens=3, eos_token_id=EOS))
        assert not caplog.records

    def test_are_not_repeated_when_a_config_changes(self, caplog: pytest.LogCaptureFixture) -> None:
        config = generation(max_new_tokens=2, stop_strings=["x"])
        setup = Setup(generation=config)
        with running(setup), caplog.at_level(logging.WARNING, "aiocb"):
            for count in (3, 4, 5):
                config.max_new_tokens = count
                assert lengths(setup) == [count]
            assert len([one for one in caplog.records if "stop_strings" in one.getMessage()]) == 1
            config.guidance_scale = 2.0
            assert lengths(setup) == [5] and "guidance_scale, stop_strings" in caplog.text


class TestNumBlocks:
    @pytest.mark.parametrize("native", [False, None])
    def test_as_many_as_were_asked_for(self, model: Any, native: bool | None) -> None:
        config = EngineConfig(page_size=16, num_blocks=4, native=native)
        with compat.ContinuousBatchingManager(model, generation(max_new_tokens=60), config) as manager:
            assert {one.name: one.value for one in manager.describe()}[
                "max_request_tokens"
            ] == "65"  # the last needs no place
            manager.add_request(PROMPT)
            assert [len(one.generated_tokens) for one in manager] == [60]
        manager.destroy()

    def test_one(self, model: Any) -> None:
        settings = ContinuousBatchingConfig(page_size=16, num_blocks=1)
        [output] = compat.generate_batch(model, [PROMPT], generation(max_new_tokens=12), settings).values()
        assert output.error is None and len(output.generated_tokens) == 12
