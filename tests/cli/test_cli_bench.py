"""`headrace bench offline` from end to end, on dummy weights."""

import json

from headrace.cli.main import main


def test_offline(config_only, capsys) -> None:
    arguments = ["bench", "offline", config_only, "--load-format", "dummy", "--device", "cpu"]
    arguments += ["--num-prompts", "1,3", "--input-len", "6", "--output-len", "2", "--json"]
    arguments += ["--repeats", "2", "--shared-prefix-len", "4", "--first-token-len", "8"]
    assert main(arguments) == 0
    shown = capsys.readouterr()
    lines = [json.loads(line) for line in shown.out.splitlines()]
    assert [(line["what"], line["load"]["num_prompts"]) for line in lines] == [
        ("run", 1),
        ("run", 3),
        ("first token", 1),
        ("first token, cached", 1),
    ]
    for line in lines:
        assert line["engine"] == "headrace"
        assert len(line["seconds"]) == 2
        assert line["dtype"] == "float32"
        assert line["threads"] >= 1
    assert "medians of 2" in shown.err
    assert "tokens/s" in shown.err
