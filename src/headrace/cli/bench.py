"""`headrace bench offline MODEL`."""

import argparse
import json
import sys

from headrace.cli.start import start


def offline(arguments: argparse.Namespace) -> int:
    from headrace.bench.load import Load

    loads = [
        Load(
            num_prompts=count,
            input_len=arguments.input_len,
            output_len=arguments.output_len,
            shared_prefix_len=arguments.shared_prefix_len,
            batch=arguments.batch,
            seed=arguments.load_seed,
        )
        for count in arguments.num_prompts
    ]
    from headrace.bench.offline import measure, table
    from headrace.bench.setting import Setting, engines_of, use_threads

    threads = use_threads(arguments.threads)
    with start(arguments) as llm:
        setting = Setting.of(llm, threads=threads, repeats=arguments.repeats)
        engines = engines_of(llm, arguments.against)
        found = []
        for measurement in measure(
            engines,
            loads,
            vocab_size=setting.vocab_size,
            repeats=arguments.repeats,
            first_token_len=arguments.first_token_len,
        ):
            found.append(measurement)
            if arguments.json:
                print(json.dumps(setting.as_dict() | measurement.as_dict()), flush=True)
    print(f"{setting}\n{table(found)}", file=sys.stderr if arguments.json else sys.stdout)
    return 0
