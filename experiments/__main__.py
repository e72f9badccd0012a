"""``python -m experiments VERB ...``: hand the rest of the command line to the verb.

Each verb's module is imported only when it is asked for: importing Lightning costs seconds that ``scan`` need not pay.
"""

import importlib
import sys

TRAINER_VERBS = ("fit", "validate", "test", "predict")
# verb -> (module with ``main(argv: list[str]) -> int``, what it does)
VERBS = {
    "figure": ("experiments.figure", "draw the figure: bits on codebook 0 over steps, for any number of runs"),
    "scan": ("experiments.scan", "find the loss spikes in finished runs' logs"),
    "replay": ("experiments.replay", "rebuild an episode's batches from the shards and recompute their loss"),
    "tokenize": ("experiments.tokenize", "turn a folder of audio into a shard set of codec tokens"),
    "shards": ("experiments.shard_sets", "info, verify, merge, split or import shard sets"),
    "bench": ("experiments.bench.run", "run a benchmark: bench NAME"),
}

USAGE = """usage: python -m experiments VERB ...

training (LightningCLI; `python -m experiments fit --help` lists every option):
  fit, validate, test, predict

other verbs:
{verbs}"""


def usage() -> str:
    """Return the top-level help text."""
    return USAGE.format(verbs="\n".join(f"  {name:<9} {what}" for name, (_, what) in VERBS.items()))


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return its exit status."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0 if args else 2
    verb = args[0]
    if verb in TRAINER_VERBS:
        from experiments.cli import main as trainer_main

        return trainer_main(args)
    if verb not in VERBS:
        print(
            f"{usage()}\n\nerror: unknown verb '{verb}'; choose from {', '.join([*TRAINER_VERBS, *VERBS])}",
            file=sys.stderr,
        )
        return 2
    module = importlib.import_module(VERBS[verb][0])
    return int(module.main(args[1:]))


if __name__ == "__main__":
    sys.exit(main())
