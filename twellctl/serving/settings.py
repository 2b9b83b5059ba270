"""The settings of `twellctl serve-local`: flags, help, defaults, bounds in one table. No torch."""

from dataclasses import dataclass

from twellctl.settings import setting


@dataclass(frozen=True)
class Serving:
    """Where a server listens, how much it takes on, and for how long."""

    host: str = setting(
        "127.0.0.1", "The address to listen on. Serving other machines requires a key."
    )
    port: int = setting(8000, "The port; 0 takes a free one.", at_least=0, at_most=65535)
    max_running: int = setting(64, "Most choices of a model that run concurrently.", at_least=1)
    max_waiting: int = setting(256, "Most choices that wait; others get 429.", at_least=1)
    timeout: float = setting(600, "Time limit for one answer, in seconds.", above=0)
    drain: float = setting(
        30, "Seconds that running answers have to finish after Ctrl-C or SIGTERM.", at_least=0
    )
    own_sampling: bool = setting(
        True,
        "Default to the temperature, top_p, top_k, min_p and repetition_penalty in "
        "generation_config.json, else to 1, 1, all, 0 and 1.",
    )
