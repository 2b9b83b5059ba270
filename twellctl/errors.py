"""What this tool cannot take, in one line: what is wrong, what was seen, what to do."""


class TwellError(Exception):
    """A failure the user can act on, in one line; the command line prints it and exits 1."""

    exit_code = 1


class UsageError(TwellError):
    """The call itself is wrong (a flag's value, two flags that exclude each other); exits 2."""

    exit_code = 2
