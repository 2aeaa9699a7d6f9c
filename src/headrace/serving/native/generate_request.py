"""The body of /generate."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class GenerateRequest(BaseModel):
    """One prompt, or a batch; in a batch the fields that describe a prompt may be lists too."""

    model_config = ConfigDict(extra="allow", strict=True)

    text: str | list[str] | None = None
    input_ids: Any = Field(None, description="token ids, or a list of lists of them")
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    stream: bool = False
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int] | list[list[int]] | None = None
    return_text_in_logprobs: bool = False
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
