"""The positional encodings: one file per method, one folder per site."""
