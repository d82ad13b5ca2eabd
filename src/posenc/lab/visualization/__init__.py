"""Pictures of encodings, colours, HTML templates and the gallery."""
