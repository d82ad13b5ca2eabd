"""What tasks have in common: the interface, rewriting of symbols, grammars and data."""
