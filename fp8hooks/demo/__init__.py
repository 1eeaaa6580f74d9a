"""`fp8hooks demo`: a small language model trained on real text twice, exact and compressed."""
