"""One call of attention as a problem, the input of every backend."""
