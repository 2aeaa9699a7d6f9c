"""The tests that the OpenAI client's makers run their client with, against our routes."""

import tarfile
from pathlib import Path

from environment import Unavailable, pip
from served import serving
from suite import Case, Suite, Workplace, cases_of_junit
from tiny_checkpoint import write_tiny_llama

VERSION = "3.57.0"
FILES = (
    "test_completions.py",
    "chat/test_completions.py",
    "test_models.py",
    "test_embeddings.py",
)
# The files also test other routes, and what no server can do; see `left_out`.
SELECTED = (
    "(create and not Embeddings) or (Models and (list or retrieve)) or "
    "(Embeddings and (loose or all_params))"
)


def fetch_tests(place: Workplace) -> Path:
    """The source distribution holds the tests; the wheel does not."""
    source = place.folder / f"openai-{VERSION}"
    archive = place.folder / f"openai-{VERSION}.tar.gz"
    if not archive.exists():
        wanted = ("--no-deps", "--no-binary", "openai", f"openai=={VERSION}")
        pip(place.environment, "download", *wanted, "--dest", str(place.folder))
    if not source.exists():
        with tarfile.open(archive) as packed:
            packed.extractall(place.folder, filter="data")
    if not (source / "tests" / "api_resources").is_dir():
        raise Unavailable(f"the source distribution openai {VERSION} holds no tests")
    return source


def run(place: Workplace) -> list[Case]:
    source = fetch_tests(place)
    model = write_tiny_llama(place.folder / "tiny", reasons=True)
    report = place.folder / "junit.xml"
    flags = ("--no-check-model-name", "--no-refuse-unsupported")
    with serving(model, *flags, log=place.folder / "server.log") as url:
        place.environment.run(
            [
                "pytest",
                "-n0",
                "-q",
                f"-k={SELECTED}",
                f"--junitxml={report}",
                *(f"tests/api_resources/{name}" for name in FILES),
            ],
            log=place.folder / "output.log",
            seconds=600,
            cwd=source,
            variables={"TEST_API_BASE_URL": f"{url}/v1"},
        )
    return cases_of_junit(report)


SUITE = Suite(
    name="openai",
    what="openai-python's tests/api_resources",
    requirements=(
        f"openai[aiohttp]=={VERSION}",
        "pytest==9.*",
        "pytest-asyncio>=1.4",
        "pytest-xdist>=3.6.1",
        "rich>=13.7.1",
        "inline-snapshot>=0.28",
    ),
    run=run,
    expected_failures={
        "api_resources.test_completions.*.test_method_create_with_all_params_overload_1*": (
            "asks for echo with logprobs, and the client's types have no place for the null that "
            "stands for the first token's logprob, in OpenAI's replies too"
        )
    },
    left_out={
        "stored chats (chat list, retrieve, update, delete) and deletion of models": (
            "routes that are not served"
        ),
        "embeddings of strict clients without an encoding_format": (
            "the client asks for base64 of its own accord, and its strict mode refuses the base64 "
            "that comes, from any server; with an encoding_format, or not strict, they run"
        ),
    },
)
