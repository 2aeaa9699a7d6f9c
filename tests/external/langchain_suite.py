"""langchain-tests: LangChain's OpenAI client does with our server what it does with OpenAI."""

import json
from pathlib import Path

from canitoolcall_suite import Call, hermes
from scripted_checkpoint import Answer, write_scripted
from served import serving
from suite import Case, Suite, Workplace, cases_of_junit

# LangChain keeps its connections for the life of the process.
ONE_LOOP = "asyncio_default_test_loop_scope = session"
OTHER_NAME = "another-name"
JOKE = {"setup": "What do cats drink at a mill?", "punchline": "Whatever is in the headrace."}
CHINESE = {"customer_name": "你好啊集团", "description": "A technology company"}
JAPANESE = {"customer_name": "こんにちは株式会社", "description": "A Japanese company"}
WEATHER = {"location": "San Francisco, CA"}
# A Jinja condition -> the call that a good model would make.
CALLS: dict[str, Call] = {
    "'magic_function(3)' in last": ("magic_function", {"input": 3}),
    "'magic_function_no_args()' in last": ("magic_function_no_args", {}),
    "'Pirate' in last": ("greeting_generator", {"answer_style": "pirate"}),
    "'Hello!' in last and tools": ("magic_function", {"input": 4}),
    "'3 + 4' in last": ("my_adder_tool", {"a": 3, "b": 4}),
    "'San Francisco' in last": ("get_weather", WEATHER),
    "'你好啊集团' in last": ("unicode_customer", CHINESE),
    "'こんにちは' in last": ("unicode_customer", JAPANESE),
}


def answers() -> list[Answer]:
    calls = [Answer(when=when, text=hermes([call])) for when, call in CALLS.items()]
    joke = Answer(when="'joke' in last", text=json.dumps(JOKE))
    plain = Answer(when="true", text="Hello! What would you like to know?")
    return [*calls, joke, plain]


def run(place: Workplace) -> list[Case]:
    model = write_scripted(place.folder / "scripted", answers())
    report = place.folder / "junit.xml"
    report.unlink(missing_ok=True)
    settings = place.folder / "pytest.ini"  # not those of our own tests
    settings.write_text(f"[pytest]\nasyncio_mode = auto\n{ONE_LOOP}\n")
    flags = ("--tool-call-parser", "hermes", "--served-model-name", f"scripted,{OTHER_NAME}")
    with serving(model, *flags, log=place.folder / "server.log") as url:
        place.environment.run(
            [
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                f"--config-file={settings}",
                f"--junitxml={report}",
                str(Path(__file__).with_name("langchain_chat.py")),
            ],
            log=place.folder / "output.log",
            seconds=600,
            cwd=place.folder,
            variables={"HEADRACE_URL": f"{url}/v1", "HEADRACE_OTHER_NAME": OTHER_NAME},
        )
    return cases_of_junit(report)


SUITE = Suite(
    name="langchain",
    what="LangChain's standard tests of chat models",
    requirements=("langchain-tests==1.1.9", "langchain-openai==1.7.4"),
    run=run,
    left_out={
        "images, PDFs, audio, recorded traffic": "skipped by the suite's own switches: text only"
    },
)
