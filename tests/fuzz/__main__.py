"""python -m tests.fuzz: read mutants of every kind of file that a stranger may bring; see `make fuzz`."""

from __future__ import annotations

import argparse
import secrets
import sys

from tests.fuzz.run import fuzz


def main() -> None:
    parser = argparse.ArgumentParser(description="Success or a documented error, within 2 s and 1 GB, for any mutant.")
    parser.add_argument("--seed", default=secrets.token_hex(4), help="of all mutants; drawn if not given")
    parser.add_argument("--mutants", type=int, default=20_000)
    parser.add_argument("--only", type=int, help="the number of the one mutant to read")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    only = arguments.only
    report = fuzz(arguments.seed, range(arguments.mutants) if only is None else range(only, only + 1))
    print(report)
    sys.exit(bool(report.faults))


if __name__ == "__main__":
    main()
