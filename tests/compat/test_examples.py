"""The examples of the reference's documentation page run with nothing but their imports changed.

`transformers` becomes `aiocb.compat.transformers`, and the name of a model of the hub becomes a directory with a tiny
one. Code that an example leaves to its reader (submitting, inputs) comes from the namespace that it runs in.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from aiocb.compat.transformers import enable
from tests.compat.conftest import make_qwen3

PROMPTS = ["What's up?", "Name a cat breed.", "Write a detailed history of quantum mechanics."]


class Page:
    """Runs examples one after the other in one namespace, as a reader of the page would."""

    def __init__(self, folders: dict[str, Path], namespace: dict[str, Any]) -> None:
        self.folders = folders
        self.namespace = namespace

    def run(self, code: str) -> dict[str, Any]:
        code = re.sub(r"\bfrom transformers\b", "from aiocb.compat.transformers", code)
        for name, folder in self.folders.items():
            code = code.replace(name, str(folder))
        exec(compile(code, "example", "exec"), self.namespace)
        return self.namespace


@pytest.fixture
def page(saved: dict[str, Path], tokenizer: Any, vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    # `max_memory_percent=0.8` is meant: of a small machine, so that the tests do not take 80 % of this one.
    monkeypatch.setattr("aiocb.model.kv.free_memory", lambda *_: 64 << 20)
    model = enable(make_qwen3(vocab_size))
    generation_config: Any = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=8, eos_token_id=tokenizer.eos_token_id
    )
    inputs = [tokenizer.encode(prompt) for prompt in PROMPTS]
    namespace = {
        "torch": torch,
        "model": model,
        "tokenizer": tokenizer,
        "generation_config": generation_config,
        "inputs": inputs,
        "input_ids": inputs[0],
        "inputs_a": inputs[0],
        "inputs_b": inputs[1],
        "ContinuousBatchingConfig": ContinuousBatchingConfig,
        "num_prompts": len(PROMPTS),
    }
    yield Page(saved, namespace)
    manager = namespace.get("manager")
    if manager is not None:
        namespace["manager"].destroy()
    assert not [thread for thread in threading.enumerate() if thread.name == "aiocb worker"]


def check_batch(page: Page) -> None:
    outputs = page.namespace["outputs"]
    assert [one.prompt_ids for one in outputs.values()] == page.namespace["inputs"]
    assert all(one.error is None and len(one.generated_tokens) >= 1 for one in outputs.values())


def test_generate_batch(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    page.run(
        """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation import ContinuousBatchingConfig, GenerationConfig

model = AutoModelForCausalLM.from_pretrained(
    "Qwen/Qwen3-4B",
    attn_implementation="flash_attention_2",
    device_map="auto",
    dtype=torch.bfloat16,
)
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-4B")

prompts = [
    "What's up?",
    "Name a cat breed.",
    "Write a detailed history of quantum mechanics.",
]
inputs = [tokenizer.encode(p) for p in prompts]

generation_config = GenerationConfig(
    max_new_tokens=64,
    eos_token_id=tokenizer.eos_token_id,
)
outputs = model.generate_batch(inputs=inputs, generation_config=generation_config)
for request_id, output in outputs.items():
    text = tokenizer.decode(output.generated_tokens, skip_special_tokens=True)
    print(f"[{request_id}] {text}")
"""
    )
    check_batch(page)
    assert page.namespace["model"].dtype == torch.bfloat16
    assert capsys.readouterr().out.count("[req_") == 3


MANAGER = """
with model.continuous_batching_context_manager(generation_config=generation_config) as manager:
    manager.add_request(
        input_ids=tokenizer.encode("Write a detailed history of quantum mechanics."),
        request_id="long",
        max_new_tokens=512,
    )
    manager.add_request(
        input_ids=tokenizer.encode("What's up?"),
        request_id="short_0",
        max_new_tokens=32,
    )
    manager.add_request(
        input_ids=tokenizer.encode("Name a cat breed."),
        request_id="short_1",
        max_new_tokens=32,
    )

    for result in manager:
        text = tokenizer.decode(result.generated_tokens, skip_special_tokens=True)
        print(f"[{result.request_id}] {text}")
"""


def test_manager(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    page.run(MANAGER)
    out = capsys.readouterr().out
    assert all(f"[{name}]" in out for name in ("long", "short_0", "short_1"))


INIT = """
manager = model.init_continuous_batching(generation_config=generation_config)
manager.start()

# submit and retrieve requests...
"""


def test_init(page: Page) -> None:
    page.run(INIT)
    assert page.namespace["manager"].is_running()


def test_stop(page: Page) -> None:
    page.run(INIT + 'manager.add_request(input_ids=input_ids, request_id="a")')
    page.run("manager.stop()")
    manager = page.namespace["manager"]
    assert not manager.is_running()
    assert manager.get_result("a").error is None


def test_hard_stop(page: Page) -> None:
    page.run(INIT + 'manager.add_request(input_ids=input_ids, request_id="a", max_new_tokens=900, eos_token_id=-1)')
    page.run("manager.stop(hard_stop=True)")
    result = page.namespace["manager"].get_result("a")
    assert isinstance(result.exception, RuntimeError)


def test_start_again_after_stop(page: Page, caplog: pytest.LogCaptureFixture) -> None:
    page.run(INIT)
    page.run("manager.stop()")
    with caplog.at_level(logging.WARNING, "aiocb"):
        page.run("dropped = manager.add_request(input_ids=input_ids), manager.add_requests(inputs=inputs)")
    assert page.namespace["dropped"] == (None, [])
    assert len(caplog.records) == 2
    page.run("manager.start()\nmanager.add_request(input_ids=input_ids)\nresults = list(manager)")
    assert len(page.namespace["results"]) == 1


def test_destroy(page: Page) -> None:
    page.run(INIT)
    page.run("manager.destroy()")
    with pytest.raises(RuntimeError):
        page.run("manager.start()")


def test_add_request(page: Page) -> None:
    page.run(INIT)
    page.run('manager.add_request(input_ids=input_ids, request_id="my_request")')
    assert page.namespace["manager"].get_result("my_request").request_id == "my_request"


def test_add_requests(page: Page) -> None:
    page.run(INIT)
    page.run("manager.add_requests(inputs=inputs)")
    assert len(list(page.namespace["manager"])) == len(PROMPTS)


def test_cancel_request(page: Page) -> None:
    page.run(INIT + 'manager.add_request(input_ids=input_ids, request_id="my_request", max_new_tokens=900)')
    page.run('manager.cancel_request(request_id="my_request")')
    assert page.namespace["manager"].get_result("my_request").is_finished()


def test_per_request_sampling(page: Page) -> None:
    page.run(
        """
cb_config = ContinuousBatchingConfig(per_request_processors=True)
manager = model.init_continuous_batching(
    generation_config=generation_config, continuous_batching_config=cb_config
)
manager.start()
"""
    )
    page.run(
        """
# each request gets its own sampling parameters
manager.add_request(input_ids=inputs_a, temperature=0.9, top_p=0.95)
manager.add_request(input_ids=inputs_b, temperature=0.1, top_k=10)
"""
    )
    assert all(one.error is None for one in page.namespace["manager"])


def test_iteration(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    page.run(INIT + "manager.add_requests(inputs=inputs)")
    page.run(
        """
for result in manager:
    print(tokenizer.decode(result.generated_tokens, skip_special_tokens=True))
"""
    )
    assert capsys.readouterr().out.count("\n") >= len(PROMPTS)


def test_get_result(page: Page) -> None:
    page.run(INIT + "manager.add_request(input_ids=input_ids)")
    page.run(
        """
# next available result
result = manager.get_result()
"""
    )
    assert page.namespace["result"] is not None
    page.run('manager.add_requests(inputs=inputs)\nmanager.add_request(input_ids=input_ids, request_id="my_request")')
    page.run(
        """
# filter for a specific request
result = manager.get_result(request_id="my_request")
"""
    )
    assert page.namespace["result"].request_id == "my_request"


def test_streaming(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    page.run(INIT)
    page.run(
        """
from transformers.generation.continuous_batching import RequestStatus

manager.add_request(input_ids=input_ids, request_id="streamed", streaming=True)

for chunk in manager.request_id_iter(request_id="streamed"):
    token = tokenizer.decode(chunk.generated_tokens[-1:], skip_special_tokens=True)
    print(token, end="", flush=True)
    if chunk.status == RequestStatus.FINISHED:
        break
"""
    )
    assert page.namespace["chunk"].status == 3
    assert capsys.readouterr().out


CONFIGS = {
    "settings": """ContinuousBatchingConfig(
    max_memory_percent=0.8,
    page_size=256,              # KV cache page size in tokens
    scheduler_type="fifo",      # "fifo" or "prefill_first"
)""",
    "prefill_first": 'ContinuousBatchingConfig(scheduler_type="prefill_first")',
    "page_size": "ContinuousBatchingConfig(page_size=128)",
    "max_batch_tokens": "ContinuousBatchingConfig(max_batch_tokens=16384)",
    "max_requests_per_batch": "ContinuousBatchingConfig(max_requests_per_batch=256)",
    "safety_margin": "ContinuousBatchingConfig(safety_margin=0.15)",
    "cuda_graph": "ContinuousBatchingConfig(use_cuda_graph=True)",
    "padding": """ContinuousBatchingConfig(
    use_cuda_graph=True,
    q_padding_interval_size=64,
    kv_padding_interval_size=16384,
)""",
    "async_batching": """ContinuousBatchingConfig(
    use_cuda_graph=True,
    use_async_batching=True,
)""",
    "compile_level": "ContinuousBatchingConfig(default_compile_level=1)",
    "max_blocks_per_request": "ContinuousBatchingConfig(max_blocks_per_request=64)",
    "no_fast_path": "ContinuousBatchingConfig(max_blocks_per_request=0)",
    "cpu_offload": "ContinuousBatchingConfig(cpu_offload_space=8.0)",
    "cpu_group_timeout": "ContinuousBatchingConfig(cpu_group_timeout=600.0)",
    "block_sharing": """ContinuousBatchingConfig(
    allow_block_sharing=True,  # default
)""",
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config(page: Page, name: str) -> None:
    page.run(
        f"""
from transformers.generation import ContinuousBatchingConfig

cb_config = {CONFIGS[name]}

outputs = model.generate_batch(
    inputs=inputs,
    generation_config=generation_config,
    continuous_batching_config=cb_config,
)
"""
    )
    check_batch(page)


def test_page_size_below_four(page: Page) -> None:
    with pytest.raises(ValueError, match="page_size"):
        page.run("model.init_continuous_batching(continuous_batching_config=ContinuousBatchingConfig(page_size=3))")


def test_logprobs(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    page.run(
        """
cb_config = ContinuousBatchingConfig(return_logprobs=True)
# generate_batch()
outputs = model.generate_batch(
    inputs=inputs, generation_config=generation_config, continuous_batching_config=cb_config
)
for request_id, output in outputs.items():
    for token_id, log_prob in zip(output.generated_tokens, output.logprobs):
        token = tokenizer.decode([token_id])
        print(f"{token} | logprob: {log_prob}")
"""
    )
    check_batch(page)
    num_tokens = sum(len(one.generated_tokens) for one in page.namespace["outputs"].values())
    assert capsys.readouterr().out.count("| logprob: -") == num_tokens


@pytest.mark.parametrize("backend", ["flash_attention_2", "flash_attention_3", "sdpa", "eager", "paged|eager"])
def test_attention_backends(page: Page, backend: str) -> None:
    page.run(
        f"""
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(
    "Qwen/Qwen3-4B",
    attn_implementation="{backend}",
    device_map="auto",
    dtype=torch.bfloat16,
)
cb_config = ContinuousBatchingConfig(auto_switch_to_flash=False)
outputs = model.generate_batch(
    inputs=inputs, generation_config=generation_config, continuous_batching_config=cb_config
)
"""
    )
    check_batch(page)


def test_tensor_parallel_names(page: Page) -> None:
    # The example itself runs under torchrun on several GPUs.
    page.run(
        """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DistributedConfig
from transformers.generation import ContinuousBatchingConfig, GenerationConfig

distributed_config = DistributedConfig(tp_size=4)
"""
    )
    assert page.namespace["distributed_config"].tp_size == 4


def test_sliding_window(page: Page) -> None:
    page.run(
        """
from transformers import AutoConfig, AutoModelForCausalLM

config = AutoConfig.from_pretrained("google/gemma-2-2b")
config.sliding_window = 4096

model = AutoModelForCausalLM.from_pretrained(
    "google/gemma-2-2b",
    config=config,
    attn_implementation="sdpa",
    device_map="auto",
    dtype=torch.bfloat16,
)
outputs = model.generate_batch(inputs=inputs, generation_config=generation_config)
"""
    )
    check_batch(page)


def test_persistent_manager(page: Page) -> None:
    page.run(
        """
for _ in range(2):
    with model.continuous_batching_context_manager(
        generation_config=generation_config, persistent_manager=True
    ) as manager:
        manager.add_requests(inputs=inputs)
        results = list(manager)
model.destroy_cached_continuous_batching_manager()
"""
    )
    assert len(page.namespace["results"]) == 3
