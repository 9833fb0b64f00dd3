"""What load is sent to: OpenAI-compatible servers, prefill/decode pairs, a worker in process."""
