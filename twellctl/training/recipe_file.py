"""The YAML of a recipe and of a pipeline: `key: value` lines."""

import re
from pathlib import Path
from typing import Any

import yaml

from twellctl.errors import TwellError, reason, shown
from twellctl.files.strict_json import read_file

_MOST_BYTES = 1 << 20
_AMBIGUOUS = re.compile(r"[-+]?(0[0-9_]+|[0-9_]+(:[0-9_.]+)+)")
# the last two: what PyYAML raises for a tag that does not fit, as in `!!bool x`
_WRONG = (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError)


class _Loader(yaml.SafeLoader):
    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """`ValueError` for what no message can show: YAML has integers of any size, in hex say."""
        _refuse_ambiguous(node)
        number = super().construct_yaml_int(node)
        str(number)
        return number

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        _refuse_ambiguous(node)
        return super().construct_yaml_float(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if (name := str(key.value)) in seen:
                line = key.start_mark.line + 1
                raise ValueError(f"line {line} gives {name} more than once: keep one")
            seen.add(name)
        return super().construct_mapping(node, deep)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)


def _refuse_ambiguous(node: yaml.ScalarNode) -> None:
    """`ValueError` for numbers that YAML 1.1 takes for others than they look: octal or base 60."""
    if _AMBIGUOUS.fullmatch(node.value):
        raise ValueError(
            f"line {node.start_mark.line + 1}: YAML takes {shown(node.value)} for another number: "
            "put it in quotes if it is text, else write it without 0 in front or colons"
        )


def read_settings(path: Path, name: str) -> dict[str, Any]:
    """The settings in a file, which `TwellError` calls by `name`."""
    try:
        text = read_file(path, _MOST_BYTES).decode("utf-8")
        content = yaml.load(text, _Loader)
    except _WRONG as error:
        raise TwellError(f"{name} is not valid YAML: {reason(error)}") from error
    if not isinstance(content, dict):
        raise TwellError(f"{name} must hold 'key: value' lines, got {shown(content)}")
    return content
