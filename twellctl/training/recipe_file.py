"""The YAML of a recipe: `key: value` lines, each value read as it is written.

YAML 1.1, which PyYAML reads, takes 020 for sixteen, 1:30 for ninety and 2001-01-01 for a date; its
aliases let 500 bytes stand for gigabytes, its tags name types. A recipe needs none of that: such
numbers are text here, which the setting then takes or refuses, and aliases and tags are refused.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from twellctl.errors import TwellError, reason, shown
from twellctl.files.strict_json import read_file

_MOST_BYTES = 1 << 20


class _Loader(yaml.SafeLoader):
    """The safe loader with its own idea of which plain words are not text."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _written, _first in (
    ("null", r"~|null|Null|NULL|", ("~", "n", "N", "")),
    (
        "bool",
        r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF",
        "yYnNtTfFoO",
    ),
    ("int", r"[-+]?(?:0|[1-9][0-9_]{0,999})", "-+0123456789"),
    ("float", r"[-+]?(?:[0-9][0-9_]*)?\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?[0-9][0-9_]*\.(?:[eE][-+][0-9]+)?", "-+0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_written})\Z"), list(_first)
    )


def read_settings(path: Path, name: str, depth: int = 2) -> dict[str, Any]:
    """The settings in a file, `depth` deep: a mapping of lists. `TwellError` calls it by `name`."""
    try:
        content, twice = _parsed(read_file(path, _MOST_BYTES).decode("utf-8"), depth)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise TwellError(f"{name} is not valid YAML: {reason(error)}") from error
    if not isinstance(content, dict):
        raise TwellError(f"{name} must hold 'key: value' lines, got {shown(content)}")
    if twice:
        raise TwellError(f"{name} gives {', '.join(twice)} more than once: keep one")
    return content


def _parsed(text: str, depth: int) -> tuple[Any, list[str]]:
    """(what `text` holds, the keys that it gives more than once); `yaml.YAMLError` if it cannot."""
    _refuse_what_no_recipe_needs(text, depth)
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        content = None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()
    if not isinstance(content, dict):
        return content, []
    keys = [str(key.value) for key, _ in node.value]
    return content, sorted({key for key in keys if keys.count(key) > 1})


def _refuse_what_no_recipe_needs(text: str, most: int) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.YAMLError(f"it uses an alias, *{event.anchor}: write the value out")
        if getattr(event, "tag", None):
            raise yaml.YAMLError(f"it uses a tag, {event.tag}: leave it out")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > most:
            raise yaml.YAMLError("it is nested too deep: a recipe is key: value lines")
