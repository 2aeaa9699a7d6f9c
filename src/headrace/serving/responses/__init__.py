"""OpenAI's /v1/responses, on the way of a chat; nothing is stored."""
