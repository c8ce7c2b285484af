"""Ranks working together: process groups, the mesh, layouts, gradients, tensor parallelism, and the links between them."""
