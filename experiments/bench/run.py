"""``python -m experiments bench NAME``: run one benchmark module of this folder."""

import importlib
import sys

NAMES = ("detector", "stream", "guard", "encoder", "norms", "natural")


def main(argv: list[str]) -> int:
    """Run the benchmark named first, with the rest of the arguments."""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: python -m experiments bench NAME ...\n\nNAME is one of {', '.join(NAMES)}")
        return 0 if argv else 2
    if argv[0] not in NAMES:
        print(f"error: unknown benchmark '{argv[0]}'; choose from {', '.join(NAMES)}", file=sys.stderr)
        return 2
    return int(importlib.import_module(f"experiments.bench.{argv[0]}").main(argv[1:]))
