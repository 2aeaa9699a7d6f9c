"""`headrace diff DUMP_A DUMP_B`: exit status 0 where they agree, 1 where they differ."""

import argparse
import json

DIFFER = 1


def run(arguments: argparse.Namespace) -> int:
    # imports torch, so only after the arguments were checked
    from headrace.observers.dump_diff import diff_dumps
    from headrace.observers.dump_files import open_dump

    found = diff_dumps(open_dump(arguments.ours), open_dump(arguments.theirs))
    print(json.dumps(found.as_dict(), indent=2, allow_nan=False) if arguments.json else found)
    return 0 if found.agrees else DIFFER
