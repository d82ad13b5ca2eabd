"""Training of a T5-bias decoder on sequences that are spread over ranks."""
