"""posenc's rules of other engines, held to the engines as they run: ``make engines``."""
