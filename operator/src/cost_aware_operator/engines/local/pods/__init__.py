"""Pods as processes of this host: what they are started with, who keeps them, and what is known of their ends."""
