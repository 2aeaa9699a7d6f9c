"""Anthropic's /v1/messages, on the way of a chat."""
