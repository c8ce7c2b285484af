"""Analysers that answer one question each: networks, compression, failures, data parallelism."""
