"""The body of /generate."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from headrace.serving.openai.field_types import (
    IntegerLists,
    Integers,
    Objects,
    Switches,
    SwitchesOrTexts,
    Texts,
)


class GenerateRequest(BaseModel):
    """One prompt, or a batch; in a batch the fields that describe a prompt may be lists too."""

    model_config = ConfigDict(extra="allow", strict=True)

    text: str | Texts | None = None
    input_ids: Any = Field(None, description="token ids, or a list of lists of them")
    sampling_params: dict[str, Any] | Objects | None = None
    rid: str | Texts | None = None
    stream: bool | None = None
    return_logprob: bool | Switches | None = None
    logprob_start_len: int | Integers | None = None
    top_logprobs_num: int | Integers | None = None
    token_ids_logprob: Integers | IntegerLists | None = None
    return_text_in_logprobs: bool | None = None
    return_hidden_states: bool | str | SwitchesOrTexts | None = Field(
        None, description="true: of all positions; last: of output tokens"
    )
    hidden_state_layers: Integers | None = Field(
        None, description="which states, 0 the embedding; -1, the default, after the last norm"
    )
    return_routed_experts: bool | Switches | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    extra_key: str | Texts | None = Field(
        None, description="prefixes are shared only with requests that have the same"
    )
