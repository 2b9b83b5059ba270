"""Settings declared once: a field of a dataclass is a flag, its help, default and checks."""

import dataclasses
import math
import operator
import types
import typing
from collections.abc import Sequence
from dataclasses import Field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from twellctl.errors import UsageError, shown

Kind = TypeVar("Kind")
_MOST = 1e30  # of any float: it is computed with in float32
Bounds: TypeAlias = Sequence[tuple[str, float]]  # (a sign of `_SIGNS`, a number)
_SIGNS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}


def setting(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    choices: tuple[str, ...] = (),
    flag: str = "",
    metavar: str = "",
    group: str = "",
) -> Any:
    """A field of a dataclass of settings: its default, its help text and what it may be.

    The checks hold for each value of a tuple. `flag` is its name on the command line where that is
    not the field's; a name in capitals is a positional argument. `group` begins a group of options,
    which the fields below belong to as well.
    """
    signed = ((">=", at_least), (">", above), ("<=", at_most), ("<", below))
    bounds = tuple((sign, bound) for sign, bound in signed if bound is not None)
    metadata: dict[str, Any] = {"help": help, "choices": choices, "bounds": bounds}
    metadata |= {"flag": flag, "metavar": metavar or "|".join(choices), "group": group}
    if isinstance(default, list):
        return dataclasses.field(default_factory=list, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flag_name(name: str) -> str:
    """`max_tokens` as flag and recipe key: "max-tokens"."""
    return name.replace("_", "-")


def flag_of(field: Field) -> str:
    """What the command line calls a setting, without dashes before it."""
    return field.metadata["flag"] or flag_name(field.name)


def kind_of(field: Field) -> tuple[type, bool, bool]:
    """(type of one value, whether it may be None, whether there are many)."""
    kind: Any = field.type
    optional = isinstance(kind, types.UnionType)
    if optional:
        kind = typing.get_args(kind)[0]
    many = typing.get_origin(kind) in (list, tuple)
    return (typing.get_args(kind)[0] if many else kind), optional, many


def chosen(kind: type[Kind], values: dict[str, Any]) -> Kind:
    """The settings of a Python call. Paths may be `Path`s, and one may stand for a list of one.

    `TypeError` names a setting that does not exist, and all that do; `UsageError` one whose value
    is not allowed.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            raise TypeError(f"there is no argument {name!r}, but {', '.join(fields)}")
    made = kind(**{name: _plain(value, fields[name]) for name, value in values.items()})
    refuse_wrong(made)
    return made


def _plain(value: Any, field: Field) -> Any:
    kind, _, many = kind_of(field)
    if many and not isinstance(value, list | tuple):
        value = [value]
    if many:
        return type(value)(str(item) if isinstance(item, Path) else item for item in value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return str(value) if isinstance(value, Path) else value


def refuse_wrong(settings: Any) -> None:
    """`UsageError` for the first field of `settings` whose value is not allowed."""
    for field in dataclasses.fields(settings):
        value, many = getattr(settings, field.name), kind_of(field)[2]
        for one in value if many else (value,):
            try:
                if coerce_one(one, field) != one:
                    raise ValueError("must be a number")
            except ValueError as error:
                raise UsageError(f"{flag_of(field)} {error}, got {shown(one)}") from None


def coerce(value: Any, field: Field) -> Any:
    """`value` in the type of the field, one text being a list of one; `ValueError` says why not."""
    if not kind_of(field)[2]:
        return coerce_one(value, field)
    items = [value] if isinstance(value, str | Path) else value
    if not isinstance(items, list | tuple) or not all(isinstance(i, str | Path) for i in items):
        raise ValueError("must be one path or a list of paths")
    return [str(item) for item in items]


def coerce_one(value: Any, field: Field) -> Any:
    """One value in the type of the field; `ValueError` says what it must be."""
    kind, optional, _ = kind_of(field)
    if value is None and optional:
        return None
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
        return value
    if kind is str:
        return _checked_choice(value, field.metadata["choices"])
    bounds = field.metadata["bounds"]
    return _checked_whole(value, bounds) if kind is int else _checked_number(value, bounds)


def _checked_choice(value: Any, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str):
        raise ValueError("must be text")
    if choices and value not in choices:
        *others, last = choices
        first = f"{', '.join(others)} or " if others else ""
        raise ValueError(f"must be {first}{last}")
    return value


def _checked_whole(value: Any, bounds: Bounds) -> int:
    number = _finite(value)
    if number != int(number):
        raise ValueError("must be a whole number")
    whole = value if isinstance(value, int) else int(number)
    _check_bounds(whole, bounds)
    return whole


def _checked_number(value: Any, bounds: Bounds) -> float:
    number = _finite(value)
    _check_bounds(number, bounds)
    if number > _MOST:
        raise ValueError(f"must be <= {_MOST:g}")
    return number


def _finite(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError("must be a number")
    try:
        number = float(value)  # YAML 1.1 reads 2e-5 as text
    except (TypeError, ValueError):
        raise ValueError("must be a number") from None
    except OverflowError:
        raise ValueError("must be finite") from None
    if not math.isfinite(number):
        raise ValueError("must be finite")
    return number


def _check_bounds(number: float, bounds: Bounds) -> None:
    if all(_SIGNS[sign](number, bound) for sign, bound in bounds):
        return
    is_percent = bounds[-1][1] == 1 < number <= 100  # of a share
    as_share = f" ({number:g} % is {number / 100:g})" if is_percent else ""
    only = {bound for _, bound in bounds} if len(bounds) > 1 else set()
    wanted = " and ".join(f"{sign} {bound}" for sign, bound in bounds)
    wanted = str(bounds[0][1]) if len(only) == 1 else wanted
    raise ValueError(f"must be {wanted}{as_share}")
