"""Dated, sourced tables: hardware, prices, fees, hazards. What is missing is an error, never 0."""
