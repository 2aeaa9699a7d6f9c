"""What OpenAI's API asks for: request models, replies, and the way between them and the engine."""
