"""An engine in this process: objects are kept in memory, under the rules by which an API server keeps them."""
