"""How the server reads answers: which parsers, and why."""

from dataclasses import dataclass
from typing import Any

from headrace.base.decision import Decision
from headrace.serving.parsers import choose_reasoning_parser, choose_tool_parser
from headrace.serving.server_config import ServerConfig
from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """Settled when the model is known; shown in the log and by /explain.

    Attributes:
        tool_parser, reasoning_parser: names of the registries, or "none".
        stream_arguments: tool calls are shown while the model writes them.
    """

    tool_parser: Decision[str]
    reasoning_parser: Decision[str]
    stream_arguments: Decision[bool]

    @classmethod
    def of(
        cls, config: ServerConfig, tokenizer: Tokenizer | None = None, model_type: str = ""
    ) -> "Readers":
        """Those asked for, or those that the chat template shows.

        Raises:
            UnsupportedError: there is no parser of the name asked for.
        """
        template = None if tokenizer is None else tokenizer.template_text
        live = config.stream_tool_arguments
        return cls(
            tool_parser=choose_tool_parser(
                config.tool_call_parser, model_type=model_type, template=template
            ),
            reasoning_parser=choose_reasoning_parser(
                config.reasoning_parser, model_type=model_type, template=template
            ),
            stream_arguments=Decision(
                name="stream_tool_arguments",
                value=live,
                reason="calls are shown as they are written, also those that are cut off"
                if live
                else "a call is shown once it is complete and can be read",
                asked=live,
            ),
        )

    @property
    def decisions(self) -> tuple[Decision[Any], ...]:
        return self.tool_parser, self.reasoning_parser, self.stream_arguments
