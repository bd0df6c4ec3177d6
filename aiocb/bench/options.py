"""Options that several commands have: a dataclass says them once, `spread` shows them to typer."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import typer

__all__ = ["Dtype", "Model", "Quantization", "complete_model", "spread"]

T = TypeVar("T")


def complete_model(incomplete: str) -> list[str]:
    """The models on this machine whose names begin so, for a shell; files it completes itself."""
    from aiocb.errors import ConfigError
    from aiocb.model.load.kept import read_shelf

    try:
        return [kept.name for kept in read_shelf().models if kept.name.startswith(incomplete)]
    except ConfigError:
        return []


Model = Annotated[
    str,
    typer.Argument(
        help="owner/repo, owner/repo:Q4_K_M, a directory, a GGUF file, or smollm2.", autocompletion=complete_model
    ),
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, or as stored.", rich_help_panel="Model")]
Quantization = Annotated[
    Literal["int8", "int4"] | None,
    typer.Option("--quantization", help="Weights of 8 or 4 bits in the CPU kernels.", rich_help_panel="Model"),
]


def spread(command: Callable[..., T]) -> Callable[..., T]:
    """Make a command of one that takes dataclasses: every field of theirs is an argument or option of its own."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {}
    shown: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        group = parameter.annotation
        if dataclasses.is_dataclass(group):
            groups[name] = group
            hints = get_type_hints(group, include_extras=True)
            fields = inspect.signature(groups[name]).parameters.values()
            shown += [field.replace(annotation=hints[field.name]) for field in fields]
        else:
            shown.append(parameter)

    @functools.wraps(command)
    def call(**values: Any) -> T:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        return command(**values)

    # By keyword, so that a required one may come after an optional one.
    by_keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in shown]
    call.__signature__ = signature.replace(parameters=by_keyword)  # type: ignore[attr-defined]
    return call
