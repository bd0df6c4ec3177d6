"""Import lines of the reference, with this package in the place of `transformers`."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import pickle
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, assert_type

import pytest
import torch
import transformers
from transformers.generation import continuous_batching as reference

from aiocb.compat import transformers as compat
from aiocb.compat.transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, ContinuousMixin, mirror
from aiocb.compat.transformers.entry import generate_batch
from aiocb.compat.transformers.generation import ContinuousBatchingManager
from aiocb.compat.transformers.generation.continuous_batching import RequestStatus
from aiocb.compat.transformers.results import GenerationOutput
from tests.compat.helpers import generation

HOME = "generation.continuous_batching"
MODULES = ["generation", HOME, *(f"{HOME}.{one.name}" for one in pkgutil.iter_modules(reference.__path__))]


def load(name: str) -> tuple[ModuleType, ModuleType]:
    return importlib.import_module(f"transformers.{name}"), importlib.import_module(f"{mirror.PACKAGE}.{name}")


@pytest.mark.parametrize("name", MODULES)
def test_every_name_of_a_module_is_there_ours_first(name: str) -> None:
    theirs, ours = load(name)
    assert dir(ours) == sorted(dir(theirs))
    for attribute in [one for one in dir(theirs) if not one.startswith("__")]:
        value, wanted = getattr(ours, attribute), getattr(theirs, attribute)
        if attribute in mirror.OURS:
            assert value is getattr(compat, attribute) is not wanted
        elif isinstance(wanted, ModuleType) and wanted.__name__.startswith("transformers"):
            assert value.__name__ == f"aiocb.compat.{wanted.__name__}"
        else:
            assert value is wanted


@pytest.mark.parametrize(
    "line",
    [
        "from aiocb.compat.transformers.generation.continuous_batching.continuous_api import ContinuousMixin",
        "from aiocb.compat.transformers.generation.configuration_utils import ContinuousBatchingConfig",
        "from aiocb.compat.transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper",
        "from aiocb.compat.transformers.models.llama.modeling_llama import LlamaForCausalLM",
        "from aiocb.compat.transformers.models.llama import LlamaConfig; LlamaConfig()",
        "import aiocb.compat.transformers.models.llama",
        "import aiocb.compat.transformers.models.llama as llama; llama.LlamaConfig",
        "import aiocb.compat.transformers as transformers; assert transformers.__version__ >= '5'",
        "import aiocb.compat.transformers as transformers; transformers.models.qwen3.Qwen3Config",
        "import aiocb.compat.transformers as transformers; transformers.logging.get_verbosity()",
        "from aiocb.compat.transformers import generation; generation.continuous_batching.RequestStatus.FAILED",
        "from aiocb.compat.transformers.utils import logging; logging.get_logger('x')",
        "from aiocb.compat.transformers.utils import is_torch_available; assert is_torch_available()",
        "from aiocb.compat.transformers.cache_utils import DynamicCache",
        "from aiocb.compat.transformers.generation import *; GenerationConfig, ContinuousBatchingManager.describe",
        "from aiocb.compat.transformers.generation.continuous_batching import *; RequestState, RequestStatus",
    ],
)
def test_import_lines(line: str) -> None:
    exec(line, {})


def test_modules_of_theirs_are_never_handed_out() -> None:
    # One step further and a program would hold the reference's engine.
    from aiocb.compat.transformers import generation, models

    assert generation is sys.modules["aiocb.compat.transformers.generation"]
    assert generation.continuous_batching.ContinuousBatchingManager is compat.ContinuousBatchingManager
    assert models.auto.modeling_auto.AutoModelForCausalLM is compat.AutoModelForCausalLM
    assert compat.utils.logging.logging is __import__("logging")


@pytest.mark.parametrize("name", ["nothing", "generation.nothing", "generation.utils.nothing", "utils.logging.nothing"])
def test_what_is_not_there(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{mirror.PACKAGE}.{name}'"):
        importlib.import_module(f"{mirror.PACKAGE}.{name}")
    parent, _, last = f"{mirror.PACKAGE}.{name}".rpartition(".")
    with pytest.raises(ImportError, match=f"cannot import name '{last}'"):
        exec(f"from {parent} import {last}")
    assert not hasattr(importlib.import_module(parent), last)


@pytest.mark.parametrize("module", ["", ".generation", ".models.llama"])
def test_what_only_debuggers_ask_for_is_not_answered(module: str) -> None:
    with pytest.raises(AttributeError, match="no attribute '__wrapped__'"):
        getattr(importlib.import_module(mirror.PACKAGE + module), "__wrapped__")


def test_no_file_of_ours_hides_a_module_of_theirs() -> None:
    ours = {one.name for one in pkgutil.iter_modules(compat.__path__)}
    theirs = {one.name for one in pkgutil.iter_modules(transformers.__path__)} | set(dir(transformers))
    assert {"manager", "mirror"} <= ours and not ours & theirs


def test_the_names_that_are_ours_are_defined_once_in_the_reference() -> None:
    for name in mirror.OURS:
        assert getattr(transformers.generation.continuous_batching.continuous_api, name).__name__ == name
    assert {*mirror.ADDED, *mirror.OURS, "AutoModelForCausalLM", "LlamaConfig"} <= {*dir(compat)} | {*mirror.OURS}
    everything = vars(compat)["__getattr__"]("__all__")
    assert {*mirror.ADDED, *vars(transformers)["__all__"]} == {*everything}


CHEAP = """
import sys
import aiocb.compat.transformers
from aiocb.compat.transformers import GenerationOutput, RequestQueueFull, RequestStatus, ContinuousBatchingManager
from aiocb.compat.transformers import generate_batch, enable
from aiocb.compat.transformers.generation.continuous_batching import ContinuousBatchingManager, RequestStatus
from aiocb.compat.transformers.generation.continuous_batching.requests import GenerationOutput
from aiocb.compat.transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
assert not {"torch", "transformers"} & set(sys.modules)
import aiocb.compat.transformers.utils
assert "transformers" in sys.modules and "torch" not in sys.modules
"""


def test_ours_are_had_without_theirs() -> None:
    done = subprocess.run([sys.executable, "-c", CHEAP], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_reload() -> None:
    finders = list(sys.meta_path)
    for name in ("", ".generation", ".generation.continuous_batching.requests", ".models.llama"):
        module = importlib.import_module(mirror.PACKAGE + name)
        assert importlib.reload(module) is module
    assert sys.meta_path == finders
    from aiocb.compat.transformers.generation.continuous_batching.requests import RequestStatus as Again

    assert Again is RequestStatus


def test_what_changes_in_theirs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = load("generation.utils")
    monkeypatch.setattr(theirs, "something_new", 1, raising=False)
    assert ours.something_new == 1


def test_pickles_and_sources() -> None:
    output = GenerationOutput("a", generated_tokens=[1], status=RequestStatus.FINISHED)
    for value in (output, RequestStatus.FAILED, AutoModelForCausalLM, ContinuousMixin, generate_batch):
        assert pickle.loads(pickle.dumps(value)) == value
        assert copy.deepcopy(value) == value
    assert "def is_finished" in inspect.getsource(GenerationOutput)
    assert inspect.getmodule(transformers.GenerationConfig) is transformers.generation.configuration_utils
    assert "attn_implementation" in str(inspect.getdoc(AutoModelForCausalLM))


def test_types_that_a_checker_sees(model: Any) -> None:
    manager = compat.init_continuous_batching(model)
    assert_type(manager, ContinuousBatchingManager)
    assert_type(manager.get_result(timeout=0), GenerationOutput | None)
    assert_type(RequestStatus(4), RequestStatus)
    assert_type(compat.__version__, str)
    assert_type(compat.LlamaConfig, Any)
    manager.destroy()


@pytest.mark.parametrize("name", ["", ".generation", ".generation.continuous_batching"])
def test_what_the_stubs_promise_is_there(name: str) -> None:
    module = importlib.import_module(mirror.PACKAGE + name)
    stub = Path(mirror.__file__).parent.joinpath(*name.split(".")[1:], "__init__.pyi")
    tree = ast.parse(stub.read_text())
    promised = {one.name for one in tree.body if isinstance(one, ast.ClassDef)}
    for line in [one for one in tree.body if isinstance(one, ast.ImportFrom)]:
        promised |= {one.name for one in line.names if one.asname == one.name}
    assert len(promised) > 2 and all(hasattr(module, one) for one in promised)
    if not name:
        assert {*mirror.OURS, *mirror.ADDED} <= promised


class TestMixin:
    def make(self, first: type, second: type) -> Any:
        return type("Mine", (first, second), {})(transformers.LlamaConfig(**TINY))

    @pytest.mark.parametrize("is_first", [True, False])
    def test_gives_our_methods_in_any_order_of_the_bases(self, is_first: bool) -> None:
        bases = [ContinuousMixin, transformers.LlamaForCausalLM]
        mine = self.make(*bases if is_first else bases[::-1])
        assert mine.generate_batch.__func__ is generate_batch
        assert isinstance(mine, ContinuousMixin) and isinstance(mine, reference.ContinuousMixin)
        outputs = mine.generate_batch([[1, 2]], generation(max_new_tokens=2, eos_token_id=-1))
        assert [len(one.generated_tokens) for one in outputs.values()] == [2]

    def test_what_can_generate_is_an_instance(self, model: Any) -> None:
        class Mine(ContinuousMixin):
            pass

        assert isinstance(model, ContinuousMixin) and issubclass(type(model), ContinuousMixin)
        assert not isinstance(model, Mine) and not issubclass(type(model), Mine)
        assert isinstance(Mine(), ContinuousMixin) and issubclass(Mine, ContinuousMixin)
        assert not isinstance(torch.nn.Linear(1, 1), ContinuousMixin)


TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


class TestAutoClasses:
    def test_are_the_same_wherever_they_are_found(self) -> None:
        for path in ("", ".models.auto", ".models.auto.modeling_auto"):
            module = importlib.import_module(mirror.PACKAGE + path)
            assert module.AutoModelForCausalLM is AutoModelForCausalLM
        assert issubclass(AutoModelForCausalLM, transformers.AutoModelForCausalLM)
        assert AutoModelForCausalLM.__name__ == "AutoModelForCausalLM"

    @pytest.mark.parametrize("name", ["AutoModelForCausalLM", "AutoModelForSeq2SeqLM"])
    def test_models_that_can_generate_come_enabled(self, name: str) -> None:
        config: Any = transformers.T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=1, d_kv=8, vocab_size=16)
        if name != "AutoModelForSeq2SeqLM":
            config = transformers.LlamaConfig(**TINY)
        model = getattr(compat, name).from_config(config)
        assert model.generate_batch.__func__ is generate_batch

    def test_of_several_modalities(self) -> None:
        vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
                  "image_size": 8, "patch_size": 4}  # fmt: skip
        text = {**TINY, "head_dim": 8, "num_hidden_layers": 2, "vocab_size": 300}
        config = transformers.Gemma3Config(
            text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=290
        )
        settings = generation(max_new_tokens=3, eos_token_id=-1)
        for auto in (compat.AutoModelForImageTextToText, AutoModelForMultimodalLM):
            model = auto.from_config(config)
            assert model.generate_batch.__func__ is generate_batch
            [output] = model.generate_batch([[1, 2, 3]], settings).values()
            assert output.error is None and len(output.generated_tokens) == 3

    def test_others_are_as_they_were(self) -> None:
        config = transformers.LlamaConfig(**TINY)
        for auto in (compat.AutoModel, compat.AutoModelForSequenceClassification):
            model = auto.from_config(config)
            assert not hasattr(model, "generate_batch")
            # The engine does not run them: what attention they have is not for us to choose.
            with pytest.raises((ImportError, ValueError)):
                auto.from_config(config, attn_implementation="flash_attention_2")

    def test_more_than_a_model(self, tmp_path: Any, model: Any) -> None:
        model.save_pretrained(tmp_path)
        loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert loaded.generate_batch.__func__ is generate_batch and not info["missing_keys"]

    def test_what_a_program_registers_is_found(self) -> None:
        class MineConfig(transformers.LlamaConfig):  # type: ignore[no-untyped-call]
            model_type = "mine-of-a-test"

        class Mine(transformers.LlamaForCausalLM):  # type: ignore[no-untyped-call]
            config_class = MineConfig

        compat.AutoConfig.register("mine-of-a-test", MineConfig)
        AutoModelForCausalLM.register(MineConfig, Mine)
        model = AutoModelForCausalLM.from_config(MineConfig(**TINY))
        assert type(model) is Mine and vars(model)["generate_batch"].__func__ is generate_batch


def test_a_model_of_an_auto_class_runs_in_the_native_kernels() -> None:
    """Its methods are ours, and its forward is what it was."""
    model = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**TINY | {"hidden_size": 32})).eval()
    manager = model.init_continuous_batching(generation(max_new_tokens=2))
    manager.start()
    manager.stop(block=True)
    (runner,) = (choice for choice in manager.describe() if choice.name == "runner")
    assert runner.value == "native", runner
