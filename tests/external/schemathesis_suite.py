"""schemathesis: bodies made from /openapi.json, valid and broken; its checks of the replies."""

from served import serving
from suite import Case, Suite, Workplace, cases_of_junit
from tiny_checkpoint import write_tiny_llama

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
    "allow_header_conformance",
    "use_after_free",
    "ensure_resource_availability",
    "ignored_auth",
)


def run(place: Workplace) -> list[Case]:
    model = write_tiny_llama(place.folder / "tiny")
    report = place.folder / "junit.xml"
    with serving(model, "--enable-admin", log=place.folder / "server.log") as url:
        place.environment.run(
            [
                "schemathesis",
                "run",
                f"{url}/openapi.json",
                f"--checks={','.join(CHECKS)}",
                f"--max-examples={15 if place.fast else 100}",
                "--seed=1",
                "--exclude-path=/start_profile",
                "--request-timeout=30",
                "--continue-on-failure",
                "--no-color",
                "--warnings=off",
                "--report=junit",
                f"--report-junit-path={report}",
            ],
            log=place.folder / "output.log",
            seconds=900,
            cwd=place.folder,
        )
    return cases_of_junit(report)


SUITE = Suite(
    name="schemathesis",
    what="no 5xx, replies as /openapi.json says",
    requirements=("schemathesis==4.32.5",),
    run=run,
    left_out={
        "check positive_data_acceptance": (
            "what a body may hold also depends on the model (vocabulary, context) and on other "
            "fields of it, which a schema cannot say; such bodies get a 400 with the reason"
        ),
        "/start_profile": "writes traces into folders that the body names",
    },
)
