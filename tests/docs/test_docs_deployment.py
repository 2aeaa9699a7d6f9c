"""The Dockerfile and the dashboard name what there is."""

import json
import re
import tomllib
from dataclasses import fields
from pathlib import Path

from headrace.serving.server_config import ServerConfig

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
DASHBOARD = ROOT / "docs" / "grafana" / "headrace.json"
OBSERVABILITY = (ROOT / "docs" / "observability.md").read_text()
_OF_HISTOGRAM = ("_bucket", "_sum", "_count")


def test_the_dockerfile_installs_extras_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = re.findall(r"EXTRAS=([\w,]+)", DOCKERFILE)
    assert len(asked) == 2  # for CPUs and for CUDA
    for extras in asked:
        assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert project["name"] == "headrace"
    assert re.search(r'ENTRYPOINT \["headrace", "serve"\]', DOCKERFILE)


def test_the_dockerfile_copies_and_sets_what_there_is() -> None:
    for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE):
        for name in line.split():
            assert (ROOT / name).exists(), name
    known = {f"HEADRACE_{entry.name.upper()}" for entry in fields(ServerConfig)}
    assert set(re.findall(r"(HEADRACE_\w+)=", DOCKERFILE)) <= known


def metrics_of(expression: str) -> set[str]:
    return set(re.findall(r"headrace:(\w+)", expression))


def test_every_metric_of_the_dashboard_exists() -> None:
    rows = re.findall(r"^\| `headrace:(\w+)` \| (\w+)", OBSERVABILITY, re.MULTILINE)
    kinds = dict(rows)  # a test of the server holds this list against its metrics
    assert kinds
    dashboard = json.loads(DASHBOARD.read_text())
    targets = [each for panel in dashboard["panels"] for each in panel["targets"]]
    names = {name for target in targets for name in metrics_of(target["expr"])}
    assert len(names) > 15
    for name in names:
        base = re.sub(f"({'|'.join(_OF_HISTOGRAM)})$", "", name)
        assert (kinds.get(base) == "histogram") if base != name else (name in kinds), name
    for variable in dashboard["templating"]["list"]:
        assert metrics_of(str(variable.get("query"))) <= set(kinds)


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
