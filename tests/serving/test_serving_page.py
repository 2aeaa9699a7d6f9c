"""The status page in a headless Chromium, over a server whose engine does as it is told."""

import asyncio
import socket
import threading
from collections.abc import Iterator

import chromium
import msgspec
import pytest
import uvicorn
from chromium import Chromium

from headrace.base.decision import Decision, Refusal
from headrace.request.messages import Load
from headrace.request.outcome import Finished
from headrace.runner.report import _decision_dict
from headrace.serving.app import make_app
from headrace.serving.observability.history import History
from headrace.serving.service import Service

pytestmark = pytest.mark.skipif(
    chromium.PROGRAM is None, reason="there is no Chromium; apt-get install chromium"
)

DECISIONS = (
    Decision(name="device", value="cuda", reason="the first one", asked=True),
    Decision(
        name="decode_graph",
        value=list(range(1, 257)),
        reason="sizes that serve",
        refused=(Refusal(subject="<b>off</b>", reason="graphs pay", remedy="ask for it"),),
    ),
)
LOAD = Load(running=2, waiting=1, pages_total=10, pages_free=6, pages_cached=3, pages_evictable=2)
DESKTOP, PHONE = (1280, 800), (390, 844)


class Serving:
    """An app behind a port, in a thread of its own."""

    def __init__(self, service: Service) -> None:
        self.service, self._now = service, 0.0
        service.history = History(service.measures, clock=lambda: self._now)
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        config = uvicorn.Config(
            make_app(service), log_config=None, access_log=False, lifespan="off"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve(sockets=[listening])), daemon=True
        )
        self._thread.start()

    def second(self, **load: int) -> None:
        """A second goes by."""
        engine = self.service.engine
        engine.load = msgspec.structs.replace(engine.load, **load)
        self._now += 1.0
        self.service.history.take(engine)

    def stop(self) -> None:
        self._server.force_exit = self._server.should_exit = True
        self._thread.join()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture
def serving(make_service, engine, request) -> Iterator[Serving]:
    told = {
        "decisions": [_decision_dict(decision) for decision in DECISIONS],
        "measured": [],
        "paths": [],
    }
    engine.replies["explain"] = told
    engine.load = LOAD
    made = Serving(make_service(**getattr(request, "param", {})))
    yield made
    made.stop()


@pytest.fixture
def page(browser: Chromium, serving: Serving) -> Iterator[Chromium]:
    browser.complaints.clear()
    browser.size(*DESKTOP)
    browser.open(serving.url)
    yield browser
    browser.open("about:blank#done")


def news(page: Chromium, expression: str) -> None:
    """What must be so when the page has asked for news, which it does each second by itself."""
    page.value("poll()")
    page.until(expression)


def test_figures_lines_and_steps(page: Chromium, serving: Serving) -> None:
    page.until("status && document.querySelector('#state').dataset.state === 'ready'")
    serving.second()
    news(page, "samples.length === 1")
    assert "No first token" in page.text(".chart:nth-child(4)")
    serving.service.measures.first_token.observe(0.25)
    for tokens in (120, 400):
        serving.second(output_tokens=tokens)
    news(page, "samples.length === 3")
    rate, unit = page.text("#figures div:nth-child(1) dd").split()
    assert (rate, unit) == ("133", "tok/s")
    assert page.text("#figures div:nth-child(3) dd").split()[1] == "ms"
    assert page.text("#figures div:nth-child(5) dd").split() == ["2", "+", "1"]
    assert page.text("#figures div:nth-child(6) dd").split() == ["20", "%"]
    assert page.value("document.querySelector('.chart path.trace').getAttribute('d').length") > 20
    assert "eager" in page.text("#paths")
    assert "1 step" in page.text("#why")
    assert "the step holds prompt tokens" in page.text("#why")
    assert "<b>" not in page.value("document.title")
    assert page.complaints == []


def test_news_that_come_twice_count_once(page: Chromium, serving: Serving) -> None:
    serving.second()
    page.until("status")
    forget = "samples = []; steps = []; lastSample = lastStep = 0"
    page.value(f"{forget}; Promise.all([poll(), poll(), poll()]).then(() => 1)")
    assert page.value("[samples.length, steps.length]") == [1, 2]


def test_a_step_tells_its_path_and_why(page: Chromium, serving: Serving) -> None:
    page.until("steps.length === 2")
    page.point("#strip canvas", 0.004)  # two steps, 8 pixels each
    tip = page.text(".tip")
    assert "eager in 20 ms" in tip
    assert "2 sequences, 17 of prompts + 1 decoded tokens" in tip
    assert "not decode_graph: the step holds prompt tokens" in tip
    page.point("#strip canvas", 0.01)
    assert "3 decoded tokens, run as 4" in page.text(".tip")
    page.point("#figures")
    assert page.value("document.querySelector('.tip').hidden")
    # Its colours are those of the paths.
    colours = page.value(
        "(() => { const c = document.querySelector('#strip canvas'), r = devicePixelRatio;"
        "const at = (x) => [...c.getContext('2d').getImageData(x * r, c.height - 2, 1, 1).data];"
        "return [at(3), at(11), at(300)] })()"
    )
    assert len({tuple(each) for each in colours}) == 3
    assert colours[2][3] == 0


def test_a_moment_shows_in_all_lines(page: Chromium, serving: Serving) -> None:
    for tokens in (0, 100, 300, 600):
        serving.second(output_tokens=tokens)
    news(page, "samples.length === 4")
    assert page.value("document.querySelectorAll('.cursor').length") == 0
    page.point(".chart:nth-child(2) svg", 0.99)
    assert page.value("document.querySelectorAll('.cursor').length") == 6
    page.point("#figures")
    assert page.value("document.querySelectorAll('.cursor').length") == 0


def test_the_plan_shows_what_was_refused(page: Chromium) -> None:
    page.until("document.querySelectorAll('.decision').length === 2")
    assert page.text("#plan-note") == "2 decisions, 1 refusal"
    assert "1 … 256 (256 sizes)" in page.text("#decisions")
    assert page.text(".decision .tag") == "asked"
    assert not page.value("document.querySelector('.decision details').open")
    page.click(".decision details summary")
    assert "<b>off</b>: graphs pay" in page.text(".decision details")  # text, and no markup
    assert "ask for it" in page.text(".decision details")
    page.click("#plan > summary")
    assert not page.value("$('plan').open")


def test_chat(page: Chromium, serving: Serving, engine) -> None:
    page.until("!$('send').disabled")
    engine.words, engine.pause = ["Go", "od ", "<i>", "day"], 0.02
    engine.finished = Finished("length")
    page.write("#message", "Hello")
    page.write("#most", "7")
    page.click("#send")
    page.until("document.querySelector('.turn small')")
    page.until("document.querySelector('.turn small').textContent.includes('eager')")
    said = page.text(".turn.assistant")
    assert "Good <i>day" in said
    assert "11 tokens" in said
    assert "ended at most tokens" in said
    assert "eager \u00d7 4" in said
    assert engine.submits[-1].params.max_tokens == 7256  # typed before what stood there
    page.write("#message", "And you?")
    page.click("#send")
    page.until("document.querySelectorAll('.turn small').length === 2")
    assert "Good <i>day" in engine.submits[-1].prompt_text
    page.click("#clear")
    assert "Ask the model" in page.text("#talk")


def test_chat_can_be_stopped_and_tells_errors(page: Chromium, serving: Serving, engine) -> None:
    page.until("!$('send').disabled")
    engine.words, engine.pause = ["more "] * 500, 0.01
    page.write("#message", "Hello")
    page.click("#send")
    page.until("document.querySelector('.turn.assistant').textContent.length > 20")
    assert page.text("#send") == "Stop"
    page.click("#send")
    page.until("document.querySelector('.turn small')")
    assert "stopped by you" in page.text(".turn small")
    news(page, "status.in_flight === 0")
    assert len(engine.aborted) == 1
    engine.words, engine.fail_after = ["a", "b", "c"], 1
    page.write("#message", "Again")
    page.click("#send")
    page.until("document.querySelector('.turn.error')")
    assert "the step broke" in page.text(".turn.error")
    assert page.text("#send") == "Send"


@pytest.mark.parametrize("serving", [{"api_key": "schlüssel"}], indirect=True)
def test_the_key_is_asked_for_and_kept_in_memory(page: Chromium, serving: Serving) -> None:
    page.until("!$('keys').hidden")
    assert "asks for its API key" in page.text("#notice")
    assert page.text("#model").strip() == ""
    page.write("#key", "wrong")
    page.click("#keys button")
    page.until("$('notice').textContent.includes('not this server')")
    page.write("#key", "schlüssel")
    page.click("#keys button")
    page.until("$('notice').hidden && !$('send').disabled")
    assert page.text("#model") == "tiny"
    page.until("document.querySelectorAll('.decision').length === 2")
    page.click("#forget")
    page.until("!$('keys').hidden")
    assert page.value("localStorage.length + sessionStorage.length + document.cookie.length") == 0


def test_states_other_than_ready(page: Chromium, serving: Serving, engine) -> None:
    page.until("!$('send').disabled && steps.length === 2")
    engine.state = "starting"
    news(page, "$('notice').textContent.includes('starting again')")
    engine.state, engine.death, engine.load = "dead", "it was ended by SIGKILL", Load()
    news(page, "$('notice').textContent.includes('ended by SIGKILL')")
    assert page.text("#state span") == "Engine dead"
    assert page.value("$('send').disabled && steps.length === 2")
    assert page.value("document.title").startswith("Engine dead")
    serving.service.is_draining = True
    news(page, "$('notice').textContent.includes('stopping')")
    serving.stop()
    news(page, "$('notice').textContent.includes('does not answer')")


def test_before_the_model_is_loaded(browser: Chromium, make_service) -> None:
    service = make_service()
    service.engine = service.tokenizer = None
    made = Serving(service)
    try:
        browser.size(*DESKTOP)
        browser.open(made.url)
        browser.until("$('notice').textContent.includes('The model is loading')")
        assert "No step yet" in browser.text("#strip")
        assert browser.value("$('send').disabled")
    finally:
        browser.open("about:blank#done")
        made.stop()


CONTRAST = """
(() => {
  const bright = (text) => {
    const c = document.createElement('canvas').getContext('2d');
    c.fillStyle = text; c.fillRect(0, 0, 1, 1);
    const part = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = [...c.getImageData(0, 0, 1, 1).data].map(part);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const of = (name) => bright(getComputedStyle(document.documentElement).getPropertyValue(name));
  const against = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  return ['--ink', '--soft', '--faint', '--accent', '--bad'].map((name) =>
    Math.min(against(of(name), of('--surface')), against(of(name), of('--bg'))));
})()
"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_nothing_sticks_out_and_all_can_be_read(
    page: Chromium, size: tuple[int, int], dark: bool
) -> None:
    page.size(*size, dark=dark)
    page.until("document.querySelectorAll('.decision').length === 2")
    assert page.value("document.documentElement.scrollWidth") <= size[0]
    assert page.value("document.querySelector('.chart svg').clientWidth") > 200
    assert min(page.value(CONTRAST)) >= 4.5  # WCAG AA
    background = page.value("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(16, 19, 22)") is dark
