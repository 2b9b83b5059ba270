"""Settings as options of a command: help, groups, defaults and completion from their fields."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from dataclasses import Field
from typing import Annotated, Any

import typer

from twellctl.settings import flag_of, kind_of


def options_of(kind: type) -> dict[str, inspect.Parameter]:
    """An option for each field of a dataclass of settings, by the field's name."""
    options, group = {}, None
    for field in dataclasses.fields(kind):
        group = field.metadata["group"] or group
        options[field.name] = _parameter(field, group)
    return options


def given_of(options: dict[str, inspect.Parameter], given: dict[str, Any]) -> dict[str, Any]:
    """Of what a command was `given` its `options`, by field, which are taken out of it.

    Those that were not given are left out; many values are a tuple.
    """
    values = {name: given.pop(option.name) for name, option in options.items()}
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return {name: value for name, value in values.items() if value not in (None, ())}


def _default(field: Field) -> str:
    """The default in words; none where there is none, or the help text says what it is."""
    value = field.default
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value is dataclasses.MISSING:
        return ""
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _parameter(field: Field, group: str | None) -> inspect.Parameter:
    flag, (kind, _, many) = flag_of(field), kind_of(field)
    choices, text = field.metadata["choices"], field.metadata["help"]
    if default := _default(field):
        text = f"{text} [default: {default}]"
    if flag.isupper():
        declared = typer.Argument(metavar=flag, help=text, show_default=False)
    else:
        declared = typer.Option(
            *((f"--{flag}/--no-{flag}",) if kind is bool else (f"--{flag}",)),
            help=text,
            show_default=False,
            rich_help_panel=group,
            metavar=field.metadata["metavar"] or None,
            autocompletion=_beginning(choices) if choices else None,
        )
    return inspect.Parameter(
        flag.replace("-", "_").lower(),
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[(list[kind] if many else kind) | None, declared],  # type: ignore[valid-type]
    )


def _beginning(choices: Iterable[str]) -> Callable[[str], list[str]]:
    """For a shell's completion: a function from what was typed to the choices that begin so."""
    return lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]
