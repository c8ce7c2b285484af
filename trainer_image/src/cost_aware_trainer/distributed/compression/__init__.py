"""Gradients in fewer bits: quantisation, compressed sums and compressed reduce-scatter."""
