"""Other libraries' models and files. None of these libraries is imported."""
