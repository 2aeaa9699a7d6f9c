"""Hidden states in answers: as numbers of JSON, and no more of them than an answer may hold."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.request.messages import EngineInfo, Submit
from headrace.request.packed_states import PackedStates
from headrace.serving.errors import invalid
from headrace.serving.service import Service

State = list[float | None]
"""Numbers of one position, the layers that were asked one behind the other; null stands for what is
no finite number."""

FIELD = "return_hidden_states"


def states_of(packed: PackedStates) -> list[State]:
    """One for each position."""
    return _told(_numbers(packed))


def last_state(packed: PackedStates | None) -> State | None:
    """Of the last position that there is; `None` without any."""
    if packed is None or not packed.rows:
        return None
    return _told(_numbers(packed)[-1:])[0]


def check_states(service: Service, submits: Sequence[Submit]) -> None:
    """Raise `ApiError` where the answer would hold too many numbers, or layers do not exist."""
    info, most = service.info, service.config.max_hidden_state_values
    values = 0
    for submit in submits:
        params = submit.params
        if not params.wants_hidden_states:
            continue
        layers = len(params.state_layers(info.num_layers))
        positions = most_new_tokens(submit, info)
        if params.return_hidden_states == "final":
            positions = 1
        elif params.return_hidden_states == "all":
            positions += len(submit.prompt_token_ids) - 1
        values += params.n * positions * layers * info.hidden_size
    if values > most:
        raise invalid(
            f"{FIELD} asks for up to {values:,} numbers; this server puts at most {most:,} into an "
            "answer (max_hidden_state_values). Ask for fewer positions or layers, or use the "
            "Python interface",
            FIELD,
        )


def most_new_tokens(submit: Submit, info: EngineInfo) -> int:
    """How many tokens each continuation of a request may have."""
    room = max(info.max_model_len - len(submit.prompt_token_ids), 0)
    return min(submit.params.max_tokens or submit.default_max_tokens or room, room)


def _numbers(packed: PackedStates) -> NDArray[np.float32]:
    """[rows, layers * H]"""
    if packed.dtype == "bfloat16":  # the upper half of a float32
        halves = np.frombuffer(packed.data, dtype="<u2").astype(np.uint32)
        flat = (halves << 16).view(np.float32)
    else:
        flat = np.frombuffer(packed.data, dtype=np.dtype(packed.dtype)).astype(np.float32)
    return flat.reshape(packed.rows, len(packed.layers) * packed.hidden_size)


def _told(numbers: NDArray[np.float32]) -> list[State]:
    told: list[State] = numbers.tolist()
    if not np.isfinite(numbers).all():
        told = [[x if np.isfinite(x) else None for x in row] for row in told]  # type: ignore[arg-type]
    return told
