"""Files that others wrote, spoilt at random: `mutated(content, random)` is one of them."""

import json
import struct
from random import Random
from typing import Any

NUMBERS = [0, -1, 1, 3, 2**31, 2**63, 10**30, 1.5, 1e300]
STRINGS = ["", "a", "256", "../x", "\ud800", "\0", "x" * 5000]
ODD = [None, True, False, *NUMBERS, *STRINGS, [], [1], [[[]]], {}, {"a": 1}]
JSON_WORDS = [b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"[" * 3000, b'{"a":' * 3000]
STRING_WORDS = [b"\xff", b"\0", b'"\\ud800"', b"\\ud800", b"\xe2\x80\xa8"]
YAML_WORDS = [b"020", b"1:30", b"0x10", b"1e5", b".inf", b"2001-01-01", b"~"]
YAML_WORDS += [b"&a ", b"*a", b"!!int ", b"!!timestamp "]
YAML_WORDS += [b": ", b"- ", b"? ", b"| ", b"<<: ", b"---\n"]
MARKS = [bytes([mark]) for mark in b"\t\n\r%{}[],\"'#-"]
WORDS = JSON_WORDS + STRING_WORDS + YAML_WORDS + MARKS


def mutated(content: bytes, random: Random) -> bytes:
    """`content` with one to three changes: of a JSON value, of bytes, or of odd words put in."""
    for _ in range(random.choice((1, 1, 2, 3))):
        change = random.choice((_value, _value, _word, _bytes, _twice))
        content = change(content, random)
    return content


def in_a_safetensors_file(header: bytes, num_bytes: int) -> bytes:
    """A file with that header and so many bytes of zeros behind it."""
    return struct.pack("<Q", len(header)) + header + bytes(num_bytes)


def _value(content: bytes, random: Random) -> bytes:
    """Another value, or none, somewhere in a JSON document; other documents get a word."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return _word(content, random)
    places = list(_places(document))
    if not places:
        return _word(content, random)
    holder, key = random.choice(places)
    if random.random() < 0.15:
        del holder[key]
    elif isinstance(holder[key], int) and random.random() < 0.5:
        holder[key] += random.choice((-1, 1, 7, 1000))
    else:
        holder[key] = random.choice(ODD)
    return json.dumps(document).encode()


def _places(value: Any):
    """(container, key) of each value in it."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(pairs):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


def _word(content: bytes, random: Random) -> bytes:
    at = random.randint(0, len(content))
    return content[:at] + random.choice(WORDS) + content[at + random.choice((0, 0, 1, 4)) :]


def _bytes(content: bytes, random: Random) -> bytes:
    at, length = random.randint(0, len(content)), random.randint(1, 8)
    new = bytes(random.randrange(256) for _ in range(random.choice((0, 1, length))))
    return content[:at] + new + content[at + length :]


def _twice(content: bytes, random: Random) -> bytes:
    """A part of it, such as a key and its value, stands there twice."""
    parts = content.split(random.choice((b",", b"\n")))
    at = random.randrange(len(parts))
    separator = b"," if content.count(b",") > content.count(b"\n") else b"\n"
    return separator.join([*parts[: at + 1], *parts[at:]]) if parts[at] else content
