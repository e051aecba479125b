"""`python -m lockstep` is the command `lockstep`."""

from lockstep.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
