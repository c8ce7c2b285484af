"""From a manifest to degrees, nodes and micro-batch, or to a refusal that says what to write instead."""
