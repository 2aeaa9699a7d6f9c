"""A load generator for any OpenAI-compatible server: `headrace bench serve`. No torch here."""
