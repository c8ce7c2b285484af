"""Dollars: accrued pod by pod, second by second, by cause, and adding up."""
