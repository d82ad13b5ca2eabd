"""The methods, a file each, in a folder a site."""
