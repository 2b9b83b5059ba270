"""The settings of a recipe as options of a command: help, groups and completion from one table."""

import dataclasses
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from twellctl.training.recipe import Recipe, flag_name


def _beginning(choices: Iterable[str]) -> Callable[[str], list[str]]:
    """For completion: those that begin as what was typed."""
    return lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]


def takes_recipe(run: Callable[..., None]) -> Callable[..., None]:
    """Give `run(..., flags)` an option a field of `Recipe`; those given are in `flags`."""
    own = [p for p in inspect.signature(run).parameters.values() if p.name != "flags"]
    options, group = [], None
    for field in dataclasses.fields(Recipe):
        help_text = field.metadata["help"]
        if field.default is not dataclasses.MISSING and field.default is not None:
            help_text += f" [default: {field.default}]"
        kind = field.type if isinstance(field.type, types.UnionType) else field.type | None
        name = f"--{flag_name(field.name)}"
        is_switch = field.type in (bool, bool | None)
        flag = (f"{name}/--no-{flag_name(field.name)}",) if is_switch else (name,)
        choices = field.metadata["choices"]
        group = field.metadata["group"] or group
        option = typer.Option(
            *flag,
            help=help_text,
            show_default=False,
            rich_help_panel=group,
            metavar="|".join(choices) or None,
            autocompletion=_beginning(choices) if choices else None,
        )
        options.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[kind, option],
            )
        )
    names = {option.name for option in options}

    def with_options(**given: Any) -> None:
        flags = {name: given.pop(name) for name in names}
        run(**given, flags={k: v for k, v in flags.items() if v not in (None, [], ())})

    with_options.__name__, with_options.__doc__ = run.__name__, run.__doc__
    with_options.__signature__ = inspect.Signature([*own, *options])
    with_options.__annotations__ = {p.name: p.annotation for p in (*own, *options)}
    return with_options
