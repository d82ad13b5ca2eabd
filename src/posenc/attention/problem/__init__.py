"""One call of attention as a problem: what every engine is given."""
