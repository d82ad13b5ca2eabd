"""The kernels themselves. Importing them imports Triton."""
