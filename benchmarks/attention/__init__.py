"""Cost of attention with encodings beside plain SDPA and other implementations, with limits."""
