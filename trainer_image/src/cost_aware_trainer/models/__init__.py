"""Bundled models."""
