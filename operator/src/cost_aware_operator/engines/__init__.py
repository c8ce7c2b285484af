"""Engines that jobs run on: one protocol, and an implementation for each kind of place."""
