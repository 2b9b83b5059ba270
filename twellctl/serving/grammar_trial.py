"""A process in which serve-local tries grammars: one that takes too long, or too much memory, ends
this process and not the server. Nothing of twellctl is imported.

It reads lines of JSON: first {"tokenizer", "vocab_size", "ends", "seconds", "bytes"}, then one
grammar a line. Each is answered by a line: the error in it, or "".
"""

import json
import math
import resource
import sys
import time

from llguidance import LLMatcher, LLTokenizer

_LONGEST = 10_000  # characters of an error


def main() -> None:
    """Try grammars until there is no other line."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    how = json.loads(sys.stdin.readline())
    known = LLTokenizer(how["tokenizer"], n_vocab=how["vocab_size"], eos_token=how["ends"])
    _answer("")
    _limit(resource.RLIMIT_AS, _size() + how["bytes"])
    for line in sys.stdin:
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + how["seconds"])
        matcher = LLMatcher(known, json.loads(line), log_level=0)
        matcher.compute_bitmask()
        _answer(matcher.get_error()[:_LONGEST])


def _answer(error: str) -> None:
    sys.stdout.write(json.dumps(error) + "\n")
    sys.stdout.flush()


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _size() -> int:
    """The address space that is taken by now, in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
