"""An engine beside the owner of its module: what was done to it is honoured, and nothing is done to it."""

from __future__ import annotations

import functools
import importlib
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from transformers import PreTrainedModel

from aiocb.config import EngineConfig
from aiocb.errors import ConfigError
from aiocb.model.eager.runner import TorchRunner
from aiocb.model.eager.view import View
from aiocb.model.native.families import describe

from .helpers import ManualScheduler, argmax_sampler, generate, prompt, tiny

pytestmark = pytest.mark.slow

LENGTHS = (5, 19, 7)
NUM_NEW = 8


def build(model: PreTrainedModel, **config: Any) -> TorchRunner:
    values = {"num_blocks": 64, **config}
    return TorchRunner(model, EngineConfig(**values), argmax_sampler, max_model_len=512)


def run(runner: TorchRunner, *lengths: int) -> list[list[int]]:
    scheduler = ManualScheduler(runner, chunk=6)
    for index, length in enumerate(lengths or LENGTHS):
        scheduler.add(prompt(length), NUM_NEW, start_step=index)
    return scheduler.run()


def expected(model: PreTrainedModel, *lengths: int) -> list[list[int]]:
    return [generate(model, prompt(length), NUM_NEW) for length in lengths or LENGTHS]


def layer(model: Any) -> Any:
    return model.model.layers[1]


class LowRank(nn.Module):
    """What adapters look like: the linear and a product beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)
        for part in (self.down, self.up):
            nn.init.normal_(part.weight, 0.0, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + self.up(self.down(x))
        return result


class Scaled:
    """A patched forward that is an object."""

    def __init__(self, module: nn.Module) -> None:
        self.own = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return changed(self.own(*args, **kwargs))


class Reversed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(-1)


def changed(x: torch.Tensor) -> torch.Tensor:
    return x * 1.3 + x.roll(1, -1)


def change_output(module: nn.Module, args: Any, output: Any) -> Any:
    return (changed(output[0]), *output[1:]) if isinstance(output, tuple) else changed(output)


def change_input(module: nn.Module, args: Any, kwargs: Any) -> Any:
    if args:
        return (changed(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": changed(kwargs["hidden_states"])}


def hook(path: str) -> Callable[[Any], None]:
    return lambda model: model.get_submodule(path).register_forward_hook(change_output)


def pre_hook(path: str) -> Callable[[Any], None]:
    return lambda model: model.get_submodule(path).register_forward_pre_hook(change_input, with_kwargs=True)


def patch_by_closure(model: Any) -> None:
    target = layer(model)
    own = target.forward

    def patched(*args: Any, **kwargs: Any) -> Any:
        return changed(own(*args, **kwargs))

    target.forward = patched


def patch_by_default(model: Any) -> None:
    mlp = layer(model).mlp
    mlp.forward = lambda x, own=mlp.forward: own(x) * 1.7


def patch_by_keyword(model: Any) -> None:
    norm = layer(model).input_layernorm

    def patched(x: torch.Tensor, *, own: Any = norm.forward) -> Any:
        return own(x) * 1.7

    norm.forward = patched


def patch_by_method(model: Any) -> None:
    mlp = layer(model).mlp
    mlp.forward = types.MethodType(lambda self, x: type(self).forward(self, x) * 1.7, mlp)


def patch_by_partial(model: Any) -> None:
    attention = layer(model).self_attn

    def patched(own: Any, *args: Any, **kwargs: Any) -> Any:
        return change_output(attention, args, own(*args, **kwargs))

    attention.forward = functools.update_wrapper(functools.partial(patched, attention.forward), attention.forward)


def patch_by_object(model: Any) -> None:
    layer(model).mlp.forward = Scaled(layer(model).mlp)


def patch_by_weak_reference(model: Any) -> None:
    mlp = layer(model).mlp
    reference: Any = weakref.ref(mlp)
    mlp.forward = lambda x: type(reference()).forward(reference(), x) * 1.7


def patch_by_container(model: Any) -> None:
    parts = {"first": [model.model.layers[0].mlp]}
    layer(model).mlp.forward = lambda x: parts["first"][0](x) * 1.7


def patch_by_recursion(model: Any) -> None:
    own = layer(model).mlp.forward

    def patched(x: torch.Tensor, depth: int = 2) -> Any:
        return own(x) * 0.8 if depth == 0 else patched(x, depth - 1) * 1.3

    layer(model).mlp.forward = patched


GLOBAL: Any = None


def globally(x: torch.Tensor, depth: int = 1) -> Any:
    return helper(x) * 1.7 if depth == 0 else globally(x, depth - 1)


def helper(x: torch.Tensor) -> Any:
    return globally(x) if GLOBAL is None else (lambda: type(GLOBAL).forward(GLOBAL, x))()


def patch_by_global(model: Any) -> None:
    global GLOBAL
    GLOBAL = layer(model).mlp
    GLOBAL.forward = globally


def patch_by_accelerate(model: Any) -> None:
    hooks = importlib.import_module("accelerate.hooks")

    class Double(hooks.ModelHook):  # type: ignore[misc, name-defined]
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return change_output(module, (), output)

    hooks.add_hook_to_module(layer(model).self_attn, Double())
    hooks.add_hook_to_module(layer(model).mlp.up_proj, Double())


def patch_an_owner_elsewhere(model: Any) -> None:
    """The modules are also reached by plain attributes, and one that is not registered is called."""
    extra = Reversed()
    target = layer(model)
    target.__dict__["friends"] = [target.mlp, extra]
    target.__dict__["root"] = (model,)
    own = target.forward
    target.forward = lambda *args, **kwargs: (
        target.friends[1](own(*args, **kwargs)) + target.root[0].model.norm(args[0])
    )


def parametrize(make: Callable[..., Any]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for linear in [module for module in model.model.layers.modules() if isinstance(module, nn.Linear)]:
            make(linear)
            for name, parameter in linear.named_parameters():
                if "original0" in name or name.endswith("_g"):
                    parameter.data.mul_(2.0)

    return change


def negate(model: Any) -> None:
    class Negated(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return -weight

    nn.utils.parametrize.register_parametrization(layer(model).self_attn.v_proj, "weight", Negated())


def pruned(model: Any) -> None:
    make: Any = prune.l1_unstructured
    make(layer(model).mlp.gate_proj, "weight", amount=0.7)


def adapt(model: Any) -> None:
    torch.manual_seed(3)
    attention, mlp = layer(model).self_attn, layer(model).mlp
    attention.q_proj, mlp.up_proj = LowRank(attention.q_proj), LowRank(mlp.up_proj)


def replace_a_norm(model: Any) -> None:
    layer(model).input_layernorm = nn.LayerNorm(64)


def replace_an_activation(model: Any) -> None:
    layer(model).mlp.act_fn = nn.ReLU6()


def change_a_class(model: Any) -> None:
    mlp = layer(model).mlp
    mlp.__class__ = type("Mine", (type(mlp),), {"forward": lambda self, x: self.down_proj(self.up_proj(x))})


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook on a layer": hook("model.layers.1"),
    "hook on attention": hook("model.layers.0.self_attn"),
    "hook on an MLP": hook("model.layers.1.mlp"),
    "hook on a linear": hook("model.layers.1.mlp.down_proj"),
    "hook on a norm": hook("model.layers.1.input_layernorm"),
    "hook on the last norm": hook("model.norm"),
    "hook on the embedding": hook("model.embed_tokens"),
    "hook on the rotation": lambda model: model.model.rotary_emb.register_forward_hook(
        lambda _, __, output: (output[0].roll(3, -1) * 3.0, output[1])
    ),
    "hook on the model": lambda model: model.register_forward_hook(
        lambda _, __, output: output.__setitem__("logits", output.logits.flip(-1))
    ),
    "hook on the head": lambda model: model.lm_head.register_forward_hook(lambda _, __, output: output.flip(-1)),
    "pre-hook on a layer": pre_hook("model.layers.1"),
    "pre-hook on attention": pre_hook("model.layers.1.self_attn"),
    "pre-hook on a linear": pre_hook("model.layers.1.mlp.down_proj"),
    "patched by closure": patch_by_closure,
    "patched by default": patch_by_default,
    "patched by keyword": patch_by_keyword,
    "patched by method": patch_by_method,
    "patched by partial": patch_by_partial,
    "patched by object": patch_by_object,
    "patched by weak reference": patch_by_weak_reference,
    "patched by container": patch_by_container,
    "patched by recursion": patch_by_recursion,
    "patched by global name": patch_by_global,
    "patched by accelerate": patch_by_accelerate,
    "reached by attributes": patch_an_owner_elsewhere,
    "weight norm": parametrize(parametrizations.weight_norm),
    "old weight norm": parametrize(lambda linear: weight_norm(linear)),
    "spectral norm": parametrize(parametrizations.spectral_norm),
    "old spectral norm": parametrize(lambda linear: spectral_norm(linear)),
    "parametrization": negate,
    "pruning": pruned,
    "adapters": adapt,
    "another norm": replace_a_norm,
    "another activation": replace_an_activation,
    "another class": change_a_class,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize("native", [None, False])
@pytest.mark.parametrize("name", CHANGES)
def test_what_was_done_to_the_module_is_honoured(name: str, native: bool | None) -> None:
    model = tiny("llama")
    plain = expected(model)
    CHANGES[name](model)
    model.train(False)
    model.requires_grad_(False)
    wanted = expected(model)
    assert wanted != plain, "the change has to matter"
    assert isinstance(describe(model), str), "the native step would drop it"
    runner = build(model, native=native)
    assert run(runner) == wanted
    runner.close()
    assert expected(model) == wanted


def test_observers_see_every_step() -> None:
    model: Any = tiny("llama")
    seen: dict[str, int] = {}

    def observe(name: str) -> Any:
        return lambda *_: seen.__setitem__(name, seen.get(name, 0) + 1)

    names = ["model.layers.0", "model.layers.1.self_attn", "model.norm", "model.embed_tokens", "lm_head"]
    for name in names:
        model.get_submodule(name).register_forward_hook(observe(name))
    model.get_submodule("model.layers.0").register_full_backward_hook(observe("backward"))
    assert "hooks" in str(describe(model))
    runner = build(model)
    seen.clear()
    assert run(runner, 5)[0] == expected(model, 5)[0]
    assert set(seen) == set(names)
    seen.clear()
    later = model.get_submodule("model.layers.1.mlp").register_forward_hook(observe("later"))
    run(runner, 5)
    assert seen["later"] == NUM_NEW
    later.remove()
    seen.clear()
    run(runner, 5)
    assert "later" not in seen


def test_a_patch_is_live() -> None:
    """What a patched forward reads and writes of its own is the owner's, also where it is beside a module."""

    class Steering:
        def __init__(self, module: Any) -> None:
            self.own, self.factor, self.calls = module.forward, 1.0, 0
            module.forward = self.forward

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return self.own(*args, **kwargs) * self.factor

    model: Any = tiny("llama")
    steering = Steering(layer(model).mlp)
    state = {"module": layer(model).self_attn, "factor": 1.0, "calls": 0}
    own = state["module"].forward

    def patched(*args: Any, **kwargs: Any) -> Any:
        state["calls"] += 1
        assert state["module"].training is False and len(state) == 3
        output = own(*args, **kwargs)
        return (output[0] * state["factor"], *output[1:])

    layer(model).self_attn.forward = patched
    runner = build(model)
    model.train()
    for factor in (1.0, 3.0):
        steering.factor = state["factor"] = factor
        steering.calls = state["calls"] = 0
        tokens = run(runner, 9)
        assert steering.calls == state["calls"] == NUM_NEW + 1  # two chunks
        assert tokens == expected(model.eval(), 9)
        model.train()


def test_global_hooks_are_honoured() -> None:
    model = tiny("llama")
    plain = expected(model, 9)

    def change(module: nn.Module, args: Any, output: Any) -> Any:
        return output * 1.7 if type(module).__name__ == "LlamaMLP" else None

    handle = nn.modules.module.register_module_forward_hook(change)
    try:
        assert "global" in str(describe(model))
        wanted = expected(model, 9)
        assert run(build(model), 9) == wanted != plain
    finally:
        handle.remove()


class Slotted:
    __slots__ = ("module",)

    def __init__(self, module: Any) -> None:
        self.module = module


class Resource:
    def __init__(self, module: Any) -> None:
        self.module = module

    def __del__(self) -> None:
        pass


class TestWhatCannotBeCopied:
    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (Slotted, "Slotted"),
            (Resource, "Resource"),
            (lambda module: functools.lru_cache(lambda: module), "lru_cache"),
            (lambda module: (module for _ in range(1)), "generator"),
        ],
    )
    def test_is_refused_in_a_patch_and_left_out_elsewhere(self, make: Any, reason: str) -> None:
        model: Any = tiny("llama")
        mlp = layer(model).mlp
        wanted = expected(model, 9)
        mlp.holder = holder = make(mlp)
        model.manager = {"holders": [holder]}
        assert run(build(model), 9) == wanted
        mlp.forward = lambda x: (holder, type(mlp).forward(mlp, x))[1]
        with pytest.raises(ConfigError, match=rf"layers\.1\.mlp\.forward is patched .*{reason}"):
            build(model)

    def test_is_missed_at_load(self) -> None:
        model: Any = tiny("llama")
        mlp = layer(model).mlp
        kind = type(mlp)
        mlp.__class__ = type("Mine", (kind,), {"forward": lambda self, x: kind.forward(self.holder.module, x)})
        mlp.holder = Slotted(mlp)
        assert len(expected(model, 9)[0]) == NUM_NEW
        with pytest.raises(ConfigError, match="no attribute 'holder'"):
            build(model)

    def test_a_function_that_assigns_global_names(self) -> None:
        model: Any = tiny("llama")
        names = {"mlp": layer(model).mlp, "calls": 0}
        exec("def patched(x):\n    global calls\n    calls += 1\n    return type(mlp).forward(mlp, x)", names)
        layer(model).mlp.forward = names["patched"]
        with pytest.raises(ConfigError, match="assigns global names"):
            build(model)

    def test_an_engine_that_the_model_leads_to(self) -> None:
        model: Any = tiny("llama")
        model.first = build(model)
        second = build(model, native=False)
        assert run(second) == run(model.first) == expected(model)
        second.close()
        assert run(model.first) == expected(model)


class TestBesideTheOwner:
    def test_nothing_is_left_behind(self) -> None:
        model = tiny("gemma3_text")
        attributes = [dict(vars(module)) for module in model.modules()]
        contents = [
            {name: dict(value) for name, value in vars(module).items() if isinstance(value, dict)}
            for module in model.modules()
        ]
        configuration, implementation = model.config.to_dict(), model.config._attn_implementation
        first, second = build(model), build(model, native=False)
        wanted = expected(model)
        for close in (second, first):
            assert run(first) == run(second) == wanted
            break
        assert model.config._attn_implementation == implementation
        first.close()
        assert run(second) == wanted
        second.close()
        for module, before, inner in zip(model.modules(), attributes, contents):
            after = vars(module)
            assert after.keys() == before.keys()
            assert all(after[name] is value for name, value in before.items())
            assert all(after[name] == value for name, value in inner.items() if name not in ("_parameters", "_buffers"))
            for name in ("_parameters", "_buffers"):
                assert all(after[name][key] is value for key, value in inner[name].items())
        assert model.config.to_dict() == configuration
        assert model.config._attn_implementation == implementation

    def test_the_owner_runs_in_the_middle_of_a_step(self) -> None:
        model: Any = tiny("gemma2", attn_implementation="eager")
        ids = torch.tensor([prompt(23)])
        wanted, answer = expected(model), model(ids).logits
        owner = threading.local()
        found = []

        def call_the_owner() -> None:
            owner.calls = True
            found.append(torch.equal(model(ids).logits, answer))

        def interrupt(*_: Any) -> None:
            if not getattr(owner, "calls", False):
                thread = threading.Thread(target=call_the_owner)
                thread.start()
                thread.join()

        runner = build(model)
        model.model.layers[1].register_forward_pre_hook(interrupt)
        assert run(runner) == wanted
        assert found and all(found)

    def test_two_runners_in_two_threads(self) -> None:
        model = tiny("llama", num_hidden_layers=4)
        wanted = expected(model)
        results: list[list[list[int]]] = []

        def live() -> None:
            with torch.inference_mode(False):
                runner = build(model, native=False)
                results.extend(run(runner) for _ in range(3))
                runner.close()

        threads = [threading.Thread(target=live) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [wanted] * 6

    def test_the_owner_trains(self) -> None:
        model: Any = tiny("llama", attention_dropout=0.5)
        wanted = expected(model)
        model.train()
        model.requires_grad_(True)
        runner = build(model, native=False)
        assert run(runner) == wanted
        model(torch.tensor([prompt(9)]), labels=torch.tensor([prompt(9)])).loss.backward()
        torch.optim.SGD(model.parameters(), 0.5).step()
        assert run(runner, 9) == expected(model.eval(), 9)
        assert all(module.training for module in model.train().modules())

    def test_tables_that_a_forward_writes_to_are_not_shared(self) -> None:
        factors = [1.0 + index / 8 for index in range(8)]
        rope = {
            "rope_type": "longrope", "short_factor": factors, "long_factor": factors[::-1], "rope_theta": 1e4,
            "original_max_position_embeddings": 64,
        }  # fmt: skip
        model: Any = tiny("phi3", rope_parameters=rope, original_max_position_embeddings=64)
        wanted = expected(model)
        runner = build(model)
        model(torch.tensor([prompt(100)]))  # the owner's table is another one now
        assert run(runner) == wanted


class TestReload:
    def test_weights_that_were_assigned(self) -> None:
        model: Any = tiny("llama")
        for native in (None, False):
            runner = build(model, native=native)
            layer(model).mlp.down_proj.weight = nn.Parameter(torch.randn(64, 96) * 0.2, requires_grad=False)
            runner.reload_weights()
            assert run(runner) == expected(model)
        layer(model).mlp.down_proj.weight = nn.Parameter(torch.randn(64, 96) * 0.2, requires_grad=False)
        assert run(runner) == expected(model), "plain torch sees it at once"

    def test_whatever_else_has_changed(self) -> None:
        model: Any = tiny("llama")
        runner = build(model)
        before = run(runner)
        model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.3
        layer(model).mlp = Reversed()
        patch_by_closure(model)
        assert run(runner) == before
        runner.reload_weights()
        assert run(runner) == expected(model) != before

    def test_other_layers_are_refused(self) -> None:
        model: Any = tiny("llama")
        runner = build(model)
        before = run(runner)
        model.model.layers = model.model.layers[:1]
        with pytest.raises(ConfigError):
            runner.reload_weights()
        assert run(runner) == before

    def test_another_switch_of_the_rotation_is_refused(self) -> None:
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        model: Any = tiny("llama", rope_parameters=rope)
        runner = build(model)
        runner.reload_weights()
        model.model.rotary_emb.original_max_seq_len //= 2
        with pytest.raises(ConfigError, match="build a new engine"):
            runner.reload_weights()

    def test_fewer_positions_are_refused(self) -> None:
        model: Any = tiny("gpt2")
        runner = build(model, native=False)
        runner.reload_weights()
        model.config.max_position_embeddings = 32
        with pytest.raises(ConfigError, match="32 tokens now"):
            runner.reload_weights()


def test_what_has_failed_on_the_way_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from aiocb.model.eager import adapter

    run_dry = adapter.ModelAdapter._dry_run

    def fails(self: Any, positions: Any = None, attention: Any = None, *arguments: Any, **options: Any) -> Any:
        if attention is None:
            raise KeyError("an odd layer")
        return run_dry(self, positions, attention, *arguments, **options)

    monkeypatch.setattr(adapter.ModelAdapter, "_dry_run", fails)
    with pytest.raises(ConfigError, match="an odd layer"):
        adapter.ModelAdapter(tiny("llama"))


def test_a_view_shares_weights_and_little_else() -> None:
    model: Any = tiny("llama")
    view = View(model).model
    for module, twin in zip(model.modules(), view.modules(), strict=True):
        assert twin is not module and type(twin) is type(module)
        assert twin._parameters is module._parameters and not twin.training
    assert view.config is view.model.config is not model.config
    assert view.model.rotary_emb.inv_freq is not model.model.rotary_emb.inv_freq
    assert torch.equal(view(torch.tensor([prompt(9)])).logits, model(torch.tensor([prompt(9)])).logits)


def test_a_compiled_part_runs_uncompiled() -> None:
    model: Any = tiny("llama")
    wanted = expected(model, 9)
    compiled: Any = torch.compile
    layer(model).mlp = compiled(layer(model).mlp)
    layer(model).self_attn.compile()
    assert run(build(model), 9) == wanted
