"""Each method of extension, named as its key in the registry."""
