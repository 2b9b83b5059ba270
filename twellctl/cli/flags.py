"""Settings as options of a command: help, groups, defaults and completion from their fields."""

import dataclasses
import decimal
import inspect
from collections.abc import Callable, Iterable
from dataclasses import Field
from typing import Annotated, Any

import typer

from twellctl.settings import flag_of, kind_of

_MOST_DIGITS = 27  # of a whole number: as many as a decimal number holds exactly


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
            metavar=field.metadata["metavar"] or ("<int>" if kind is int else None),
            autocompletion=_beginning(choices) if choices else None,
            parser=whole_number if kind is int else None,
        )
    return inspect.Parameter(
        flag.replace("-", "_").lower(),
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[(list[kind] if many else kind) | None, declared],  # type: ignore[valid-type]
    )


def whole_number(text: Any) -> int:
    """`text` as a whole number, written out or as 2e6 is; `ValueError` for anything else."""
    try:
        number = decimal.Decimal(str(text))
    except decimal.InvalidOperation:
        number = decimal.Decimal("nan")
    is_whole = number.is_finite() and abs(number.adjusted()) <= _MOST_DIGITS and number % 1 == 0
    if not is_whole or not str(text).isascii():
        raise ValueError("must be a whole number, such as 2000000 or 2e6")
    return int(number)


def _beginning(choices: Iterable[str]) -> Callable[[str], list[str]]:
    """For a shell's completion: a function from what was typed to the choices that begin so."""
    return lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]
