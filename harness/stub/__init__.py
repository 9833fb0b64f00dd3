"""A bundled OpenAI-compatible server without a model, to measure clients with."""
