"""The body of /v1/score: SGLang's (query, items, label_token_ids) or vLLM's (text_1, text_2)."""

from headrace.serving.openai.field_types import Integers, PromptField, RequestFields, Texts


class ScoreRequest(RequestFields):
    """Either how likely each of some tokens comes behind the query and each item, or how alike
    two texts are.

    `items` and `query` are texts, or token ids both. `text_1` and `text_2` are texts or lists of
    them: one with each of many, or pair by pair.
    """

    query: str | Integers | None = None
    items: PromptField | None = None
    label_token_ids: Integers | None = None
    apply_softmax: bool = False
    item_first: bool = False
    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    user: str | None = None
