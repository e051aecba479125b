"""The command `lockstep`, also as `python -m lockstep`; Ctrl-C ends it without a traceback from its first import on."""


def run_command() -> int:
    """Run the command line of this process; returns the exit code."""
    try:
        from lockstep.cli import main as cli

        return cli.main()
    except KeyboardInterrupt:  # before the command, or after it
        return 130


if __name__ == "__main__":
    code = run_command()
    # Where Ctrl-C broke off an `exec` of a string, as each dataclass makes one, `python -m` would die of SIGINT though
    # it was handled: CPython forgets this at the next string.
    exec("")
    raise SystemExit(code)
