"""Messages survive the wire, and errors come out as what they went in."""

import inspect
import math

import msgspec
import pytest

from headrace.base import errors
from headrace.base.errors import HeadraceError
from headrace.request.messages import (
    Abort,
    Control,
    ControlReply,
    Delta,
    Draining,
    EngineInfo,
    Failure,
    FromEngine,
    Hello,
    Load,
    Ready,
    Refused,
    StartFailed,
    Stop,
    Submit,
    SubmitHead,
    ToEngine,
    Turn,
)
from headrace.request.outcome import Finished, Logprob
from headrace.request.pooling_params import PoolingParams
from headrace.request.sampling_params import SamplingParams
from headrace.request.structured_output import StructuredOutput

ERRORS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, HeadraceError)
]
EVERYTHING = SamplingParams(
    max_tokens=7,
    seed=-(2**63),
    n=2,
    stop=["a", "ü"],
    stop_token_ids=[5],
    logit_bias={3: -1.5},
    allowed_token_ids=[1, 2, 3],
    bad_words="no",
    logprobs=2,
    prompt_logprobs=0,
    logprob_token_ids=[4],
    structured=StructuredOutput(json_schema={"type": "object"}),
)
CHOICE = SamplingParams(structured=StructuredOutput(choice=["a", "b"]))
INFO = EngineInfo(
    model="m",
    model_path="/models/m",
    summary="cpu",
    architecture="llama",
    device="cpu",
    dtype="float32",
    max_model_len=8,
    vocab_size=9,
    num_layers=2,
    hidden_size=4,
    eos_token_ids=[2],
    default_params=SamplingParams(),
    sampling_defaults="none",
    is_generation=True,
    has_tokenizer=False,
    kv_tokens=64,
    page_size=16,
    max_running_requests=4,
    start_seconds=0.5,
    pid=1,
)
DELTA = Delta(
    request_id="r",
    index=1,
    text="é",
    token_ids=[1, 2],
    logprobs=[{1: Logprob(-0.5, 1, "é")}, {2: Logprob(-math.inf, 9, None)}],
    prompt_logprobs=[None, {1: Logprob(-1.0, 2)}],
    finished=Finished("stop", stop_reason="ü"),
    prompt_tokens=2,
    cached_tokens=1,
    paths=[("eager", 3)],
)


def there_and_back(message: object, union: object) -> object:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=union)


@pytest.mark.parametrize(
    "message",
    [
        Submit(request_id="r", prompt_token_ids=[1, 2], params=EVERYTHING, prompt_text="p"),
        Submit(request_id="r", prompt_token_ids=[], params=CHOICE, default_max_tokens=3),
        Submit(
            request_id="r",
            prompt_token_ids=[1],
            pooling=PoolingParams(pooling="mean", normalize=False, dimensions=3),
        ),
        Abort(["a", "b"]),
        Control(3, "stats", {"a": None}),
        Stop(1.5),
    ],
)
def test_a_message_to_the_engine_survives(message: object) -> None:
    assert there_and_back(message, ToEngine) == message


@pytest.mark.parametrize(
    "message",
    [
        Hello(4),
        Ready(INFO),
        StartFailed(Failure("ConfigError", "w")),
        Turn([DELTA, Delta("s"), Delta("t", embedding=b"\0\0\x80?")], Load(1, 2, 3, 4, 5)),
        Refused("r", Failure("RequestError", "w", "y", "r")),
        ControlReply(3, {"a": [1, {"b": 2.5}]}),
        ControlReply(3, failure=Failure("RequestError", "w")),
        Draining(),
    ],
)
def test_a_message_from_the_engine_survives(message: object) -> None:
    assert there_and_back(message, FromEngine) == message


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_is_rebuilt_as_it_was(kind: type[HeadraceError]) -> None:
    error = kind("what it is", why="because", remedy="do this")
    failure = msgspec.msgpack.decode(msgspec.msgpack.encode(Failure.of(error)), type=Failure)
    rebuilt = failure.error()
    assert type(rebuilt) is kind
    assert (rebuilt.what, rebuilt.why, rebuilt.remedy) == ("what it is", "because", "do this")
    assert str(rebuilt) == str(error)


def test_who_sent_an_unreadable_request_can_be_told() -> None:
    params = SamplingParams(logit_bias={1: 1.0})
    assert isinstance(params.logit_bias, dict)
    params.logit_bias[1] = math.inf  # by its caller, after the check
    data = msgspec.msgpack.encode(Submit(request_id="r", prompt_token_ids=[1], params=params))
    with pytest.raises(msgspec.ValidationError, match="logit_bias"):
        msgspec.msgpack.decode(data, type=ToEngine)
    assert msgspec.msgpack.decode(data, type=SubmitHead).request_id == "r"
