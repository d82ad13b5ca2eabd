"""Reading and writing of other libraries' models, without importing these libraries."""
